"""Prepares a job: every invalid input that can be found early is refused before a folder or a process exists."""

from __future__ import annotations

from dataclasses import dataclass

from msgspec.structs import replace

from dora.app import resume as resuming
from dora.app.inputs import Inputs
from dora.app.settings import evaluation_settings, rollout_only_settings, settings_of
from dora.app.trust import write_config
from dora.config.schema import Config
from dora.core.state import State
from dora.core.strategies import Settings
from dora.errors import ConfigError
from dora.journal.run_folder import RunFolder
from dora.trackers.kinds import require_installed

#: What a paced run takes from its workload, which has settings that a configuration does not have.
_OF_WORKLOADS = ("rules", "orchestration", "decode_time", "prefill_s_per_token")


@dataclass(frozen=True)
class Pacing:
    """What a paced run has besides a configuration."""

    time_scale: float  # seconds of the run per second of the wall clock
    settings: Settings  # of the simulation of the same workload


@dataclass(frozen=True)
class Job:
    """A checked job, before anything starts."""

    config: Config
    inputs: Inputs
    settings: Settings
    state: State
    recorded: resuming.Recorded | None  # the journaled run; None unless this is a resume
    changes: tuple[str, ...]  # changes of the configuration since the previous epoch
    rollout_only: bool  # without a trainer; true as well if nothing is trained (run.steps = 0)
    time_scale: float  # seconds of the run per second of the wall clock; 1 unless the run is paced

    @property
    def epoch(self) -> int:
        """Number of this controller process within the run; 0 for the first."""
        return self.recorded.next_epoch if self.recorded is not None else 0

    @property
    def started_at(self) -> float:
        """Start of this epoch, in seconds since the run began; above 0 only in a resume."""
        return self.recorded.last_at if self.recorded is not None else 0.0


def prepare(
    config: Config,
    inputs: Inputs,
    *,
    recorded: resuming.Recorded | None = None,
    rollout_only: bool = False,
    accept_changes: bool = False,
    pacing: Pacing | None = None,
) -> Job:
    """Prepare a new job or, with `recorded`, the rest of one; ConfigError if a resume does not allow the changes."""
    require_installed(config.tracking.trackers)
    rollout_only = (recorded.rollout_only if recorded is not None else rollout_only) or not config.run.steps
    if rollout_only and inputs.adapter is not None:
        raise ConfigError(
            "model.adapter: without a trainer, nothing adds it to the weights; give the model with the adapter merged "
            "into it as model.path"
        )
    settings = settings_of(config, eval_prompt_tokens=inputs.evaluations.prompt_tokens)
    if pacing is not None:
        settings = replace(settings, **{name: getattr(pacing.settings, name) for name in _OF_WORKLOADS})
    if not config.run.steps:
        _require_samples(inputs)
        settings = evaluation_settings(settings)
    elif rollout_only:
        settings = rollout_only_settings(settings)
    if recorded is not None:  # waves keep their size; if the setting is lower now, ranks split them into passes
        settings = replace(settings, micro_batch_tokens=recorded.settings.micro_batch_tokens)
        if config.trainer.device == recorded.configuration.trainer.device:  # min_ranks may change (journal/audit.py)
            settings = replace(settings, deterministic=recorded.settings.deterministic)
    return Job(
        config=config,
        inputs=inputs,
        settings=settings,
        state=recorded.state if recorded is not None else State(settings),
        recorded=recorded,
        changes=resuming.accept(recorded, config, settings, is_accepted=accept_changes) if recorded is not None else (),
        rollout_only=rollout_only,
        time_scale=pacing.time_scale if pacing is not None else 1.0,
    )


def _require_samples(inputs: Inputs) -> None:
    if not inputs.evaluations.prompt_tokens:
        raise ConfigError("eval.sets: there is no prompt to evaluate the model on; add a set, or raise run.steps")


def new_folder(config: Config, reserved: RunFolder | None = None) -> RunFolder:
    """Create a run folder, or fill the reserved one, and write the configuration into it, signed."""
    folder = reserved or RunFolder.reserve(config.run.folder, name=config.run.name)
    folder.fill(group=config.run.group)
    write_config(folder, config, run_id=folder.run_id)
    return folder
