"""`dora run`: what is asked for, checked, and handed to the job or to training from disk."""

from __future__ import annotations

import os
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path

import uvloop

from dora.config.load import load
from dora.controller.loop import Outcome
from dora.errors import ConfigError
from dora.journal.run_folder import RunFolder
from dora.node.lease import hold

#: Exit code of a run that was interrupted: 128 + SIGINT, as shells have it.
INTERRUPTED = 130
#: Exit code of a run, or an audit, that found C1, C2 or C3 broken otherwise than by the strategy's design.
VIOLATED = 3


def run(
    config_path: Path | None,
    overrides: Sequence[str],
    *,
    resume: Path | None,
    accept_changes: bool,
    rollout_only: bool,
    train_only: Path | None,
) -> None:
    """The command."""
    if accept_changes and resume is None:
        raise ConfigError("--accept-changes: goes with --resume")
    if sum([resume is not None, rollout_only, train_only is not None]) > 1:
        raise ConfigError("--resume, --rollout-only and --train-only exclude each other; choose one")
    earlier = RunFolder.open(resume) if resume is not None else None
    if earlier is not None and config_path is not None:
        raise ConfigError(f"--resume: a run goes on under its own settings ({earlier.config}); leave the config out")
    with ExitStack() as held:
        if earlier is not None:  # before anything of the run is read: what another process goes on with is never stale
            held.enter_context(hold(earlier.lock))
        _run(
            config_path,
            overrides,
            earlier=earlier,
            accept_changes=accept_changes,
            rollout_only=rollout_only,
            train_only=train_only,
        )


def _run(
    config_path: Path | None,
    overrides: Sequence[str],
    *,
    earlier: RunFolder | None,
    accept_changes: bool,
    rollout_only: bool,
    train_only: Path | None,
) -> None:
    path = earlier.config if earlier is not None else config_path
    config = load(path, overrides, environ=os.environ, is_dump=earlier is not None)
    if train_only is not None:
        from dora.cli.train_only import train_only as train

        train(config, train_only)
        return
    from dora.app.job import run_job
    from dora.cli.terminal import Terminal

    job = run_job(config, Terminal(), earlier=earlier, rollout_only=rollout_only, accept_changes=accept_changes)
    end(uvloop.run(job))


def end(outcome: Outcome) -> None:
    """The exit code that tells how a job ended."""
    if not outcome.finished:
        raise SystemExit(INTERRUPTED)
    if outcome.violations:
        raise SystemExit(VIOLATED)
