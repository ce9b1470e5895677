"""What is asked for, checked: everything that can be refused is, before a folder or a process exists."""

from __future__ import annotations

from dataclasses import dataclass

from dora import files
from dora.app import resume as resuming
from dora.app.inputs import Inputs
from dora.app.settings import rollout_only_settings, settings_of
from dora.config.load import dump
from dora.config.schema import Config
from dora.core.state import State
from dora.core.strategies import Settings
from dora.journal.run_folder import RunFolder


@dataclass(frozen=True)
class Job:
    """What is known before anything starts."""

    config: Config
    inputs: Inputs
    settings: Settings
    state: State
    recorded: resuming.Recorded | None  # of a run that is resumed
    changes: tuple[str, ...]  # of the configuration, since the epoch before
    rollout_only: bool
    time_scale: float  # seconds of the run in one of the wall clock; only paced runs have another than 1

    @property
    def epoch(self) -> int:
        """Number of this controller in the life of the run; 0 for the first."""
        return self.recorded.next_epoch if self.recorded is not None else 0

    @property
    def started_at(self) -> float:
        """Seconds since the run began; above 0 when it is resumed."""
        return self.recorded.last_at if self.recorded is not None else 0.0


def prepare(
    config: Config,
    inputs: Inputs,
    *,
    recorded: resuming.Recorded | None = None,
    rollout_only: bool = False,
    accept_changes: bool = False,
    time_scale: float = 1.0,
) -> Job:
    """A new job, or with `recorded` the rest of one; ConfigError if a resume must not change what has changed."""
    rollout_only = recorded.rollout_only if recorded is not None else rollout_only
    settings = settings_of(config, eval_prompt_tokens=inputs.evaluations.prompt_tokens)
    if rollout_only:
        settings = rollout_only_settings(settings)
    return Job(
        config=config,
        inputs=inputs,
        settings=settings,
        state=recorded.state if recorded is not None else State(settings),
        recorded=recorded,
        changes=resuming.accept(recorded, config, settings, is_accepted=accept_changes) if recorded is not None else (),
        rollout_only=rollout_only,
        time_scale=time_scale,
    )


def new_folder(config: Config) -> RunFolder:
    """The folder of a new run, with its configuration in it."""
    folder = RunFolder.create(config.run.folder, name=config.run.name, group=config.run.group)
    files.replace(folder.config, dump(config).encode())
    return folder
