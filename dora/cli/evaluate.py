"""`dora eval`: scores a model without training it, in a run that evaluates one version and ends."""

from __future__ import annotations

import os
from collections.abc import Sequence
from contextlib import ExitStack, suppress
from pathlib import Path

import uvloop

from dora.app.evaluate import evaluation_of, overrides_of, version_named
from dora.app.held_out import write_results
from dora.app.job import run_job
from dora.app.trust import executed, require_trust
from dora.cli.output import say
from dora.cli.run import config_to_resume, end
from dora.cli.scores import summary
from dora.cli.terminal import Terminal
from dora.config.load import load
from dora.config.schema import Config
from dora.errors import ConfigError, RunEnded
from dora.journal.run_folder import RunFolder
from dora.node.holder import hold_run


def evaluate(
    config_path: Path | None,
    overrides: Sequence[str],
    *,
    model: str | None,
    urls: Sequence[str],
    samples: int | None,
    prompts: int | None,
    of_task: bool,
    trust_folder: bool,
    into: Path | None,
) -> None:
    named = version_named(model) if model is not None else None
    run = named.run if named is not None and config_path is None else None
    path = run.config if run is not None else config_path

    def config_of(folder: str | Path | None) -> Config:
        settings = overrides_of(model=folder, urls=urls, of_task=of_task)
        return load(path, [*settings, *overrides, "run.steps=0"], environ=os.environ)

    config = config_of(model if named is None else named.folder)
    if run is not None and not trust_folder:
        require_trust(run, config, named=executed(config), to="an evaluation")
    if named is not None:
        config = config_of(named.with_weights())
    config = evaluation_of(config, samples=samples, prompts=prompts)
    with ExitStack() as held:
        reserved = RunFolder.reserved(into) if into is not None else None
        if reserved is not None:
            held.enter_context(hold_run(reserved.lock))
        end(uvloop.run(run_job(config, Terminal(), reserved=reserved)))


def resume(folder: Path, overrides: Sequence[str], *, trust_folder: bool) -> None:
    """Continue an evaluation; show its results if it has ended."""
    run = RunFolder.open(folder)
    with suppress(RunEnded), hold_run(run.lock):
        config = _config_of(run, overrides)
        try:
            end(uvloop.run(run_job(config, Terminal(), earlier=run, trust_folder=trust_folder)))
        except RunEnded:
            say(*summary(write_results(run), run))
            raise


def _config_of(run: RunFolder, overrides: Sequence[str]) -> Config:
    config = config_to_resume(run, overrides)
    if config.run.steps:
        raise ConfigError(f"--resume: {run.root} is a run that trains; continue it with dora run --resume {run.root}")
    return config
