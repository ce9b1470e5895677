"""`dora run`: what is asked for, checked, and handed to the job (job.py) or to training from disk (train_only.py)."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

import uvloop

from dora.config.load import load
from dora.errors import ConfigError
from dora.journal.run_folder import RunFolder
from dora.node.lease import hold_lease

#: Exit code of a run that was interrupted: 128 + SIGINT, as shells have it.
INTERRUPTED = 130


def run(
    config_path: Path | None,
    overrides: Sequence[str],
    *,
    resume: Path | None,
    rollout_only: bool,
    train_only: Path | None,
) -> None:
    """The command."""
    if sum([resume is not None, rollout_only, train_only is not None]) > 1:
        raise ConfigError("--resume, --rollout-only and --train-only exclude each other; choose one")
    earlier = RunFolder.open(resume) if resume is not None else None
    if earlier is not None and config_path is not None:
        raise ConfigError(f"--resume: a run goes on under its own settings ({earlier.config}); leave the config out")
    if earlier is not None:
        hold_lease(earlier.lease).close()  # a run that is alive is named before its ports are found taken
    config = load(earlier.config if earlier is not None else config_path, overrides, environ=os.environ)
    if train_only is not None:
        from dora.cli.train_only import train

        uvloop.run(train(config, train_only))
        return
    from dora.cli.job import run_job

    outcome = uvloop.run(run_job(config, earlier=earlier, rollout_only=rollout_only))
    if not outcome.finished:
        raise SystemExit(INTERRUPTED)
