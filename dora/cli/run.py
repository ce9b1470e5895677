"""`dora run`: checks the options, and runs a job or trains from disk."""

from __future__ import annotations

import os
from collections.abc import Sequence
from contextlib import ExitStack, suppress
from pathlib import Path

import uvloop

from dora.cli.output import say, tell
from dora.config.changes import changes
from dora.config.load import load
from dora.config.recorded import unknown_keys
from dora.config.schema import Config
from dora.controller.loop import Outcome
from dora.errors import ConfigError, RunEnded
from dora.journal.reader import Journal
from dora.journal.run_folder import RunFolder
from dora.node.holder import hold_run

#: Exit code of an interrupted run: 128 + SIGINT, as in shells.
INTERRUPTED = 130
#: Exit code if an audit found a violation of C1, C2 or C3 that is not by design of the strategy.
VIOLATED = 3
#: Largest number of unknown keys that one line names.
MAX_NAMED = 4


def run(
    config_path: Path | None,
    overrides: Sequence[str],
    *,
    resume: Path | None,
    or_continue: bool,
    accept_changes: bool,
    trust_folder: bool,
    rollout_only: bool,
    train_only: Path | None,
    into: Path | None,
) -> None:
    for option, is_given in (("--accept-changes", accept_changes), ("--trust-folder", trust_folder)):
        if is_given and resume is None and not or_continue:
            raise ConfigError(f"{option}: is only valid with --resume or --continue")
    if sum([resume is not None, or_continue, rollout_only, train_only is not None]) > 1:
        raise ConfigError("--resume, --continue, --rollout-only and --train-only exclude each other; choose one")
    if into is not None and (resume is not None or or_continue or train_only is not None):
        raise ConfigError("--into: is only valid for a new run")
    given = load(config_path, overrides, environ=os.environ) if or_continue else None
    if given is not None and (resume := RunFolder.newest(given.run.folder, name=given.run.name)) is not None:
        config_path = None
    earlier = RunFolder.open(resume) if resume is not None else None
    reserved = RunFolder.reserved(into) if into is not None else None
    if earlier is not None and config_path is not None:
        if config_path.is_dir():
            two = f"{earlier.root} and {config_path}"
            raise ConfigError(f"--resume: {two} are two folders; give one: did a pattern match both?")
        raise ConfigError(f"--resume: a run keeps its own configuration ({earlier.config}); omit {config_path}")
    with ExitStack() as held:
        if or_continue:
            held.enter_context(suppress(RunEnded))
        if (own := earlier or reserved) is not None:
            held.enter_context(hold_run(own.lock))  # before reading, so that no other process can change what is read
        if earlier is not None:
            config = config_to_resume(earlier, overrides)
            if given is not None and (ignored := _ignored(config, given)):
                tell(
                    f"--continue: {earlier.root} keeps its own configuration; not used: {ignored}; --set changes a key"
                )
        else:
            config = load(config_path, overrides, environ=os.environ)
        if train_only is not None:
            from dora.cli.train_only import train_only as train

            train(require_steps(config), train_only)
            return
        from dora.app.job import run_job
        from dora.cli.terminal import Terminal

        job = run_job(
            config,
            Terminal(),
            earlier=earlier,
            reserved=reserved,
            rollout_only=rollout_only,
            accept_changes=accept_changes,
            trust_folder=trust_folder,
        )
        try:
            end(uvloop.run(job))
        except RunEnded as err:
            if or_continue:
                say(str(err))
            raise


def require_steps(config: Config) -> Config:
    """Return the configuration; ConfigError if it trains nothing."""
    if not config.run.steps:
        raise ConfigError("run.steps: 0 steps train nothing; raise it, or use dora eval")
    return config


def _ignored(own: Config, given: Config) -> str:
    """Name what a configuration says that a run does not follow, as it has its own. A revision that it leaves open, the
    run has found."""
    found = [one for one in changes(own, given) if not (one.key.endswith("revision") and one.after == '""')]
    named = [f"{one.key} = {one.after} (the run has {one.before})" for one in found[:MAX_NAMED]]
    return ", ".join(named) + (f" and {len(found) - MAX_NAMED} more" if len(found) > MAX_NAMED else "")


def config_to_resume(folder: RunFolder, overrides: Sequence[str]) -> Config:
    """Return the configuration with which a run continues; ConfigError if it has keys that this version does not."""
    if keys := unknown_keys(folder.config):
        header = Journal(folder.journal).header
        more = f" and {len(keys) - MAX_NAMED} more" if len(keys) > MAX_NAMED else ""
        raise ConfigError(
            f"--resume: {folder.config}: this version of DORA has no {', '.join(keys[:MAX_NAMED])}{more}; continue the "
            f"run with the version that wrote it ({header.dora_version}, {header.created[:10]}), or start a new one "
            "from its newest version (dora export, then model.path)"
        )
    return load(folder.config, overrides, environ=os.environ)


def end(outcome: Outcome) -> None:
    """Exit with the code for the outcome; return if the run succeeded."""
    if not outcome.finished:
        raise SystemExit(INTERRUPTED)
    if outcome.violations:
        raise SystemExit(VIOLATED)
