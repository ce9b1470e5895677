"""What `--resume` finds in a run folder: the state as the journal tells it, tokens, and where the trainer stands.

Invariant: a resume changes nothing that was decided; it continues the fold of events with ControllerRestarted, whose
token counts are what the token store really holds. Called by `run`.
"""

from __future__ import annotations

from array import array
from dataclasses import dataclass
from pathlib import Path

from dora.cli.assemble import Inputs
from dora.controller.trajectories import Trajectories
from dora.core.commands import FailRun, FinishRun
from dora.core.events import ControllerRestarted
from dora.core.groups import Trajectory
from dora.core.ids import GroupId, TrajectoryId
from dora.core.state import ControllerState
from dora.core.strategies import Settings
from dora.errors import ConfigError, RunFailed
from dora.journal.codec import Epoch
from dora.journal.reader import Journal
from dora.journal.replay import replay
from dora.journal.run_folder import RunFolder
from dora.journal.tokens import read_tokens
from dora.weights.store import StoreError, VersionStore


@dataclass(frozen=True)
class Resumed:
    """Everything a new controller needs to go on."""

    state: ControllerState
    restarted: ControllerRestarted
    checkpoint: Path | None  #: None: the trainer starts from version 0 and is fed every step again


def read_run(folder: RunFolder) -> tuple[Settings, ControllerState, float, int]:
    """Settings, state, time of the last event and the next controller epoch, by replaying the journal."""
    journal = Journal(folder.journal)
    found = replay(journal.header.settings, journal)
    if found.difference is not None:
        raise RunFailed(f"{folder.root}: the journal cannot be continued: {found.difference}")
    epochs = [r.epoch for r in journal.records() if isinstance(r, Epoch)]
    last_at, end = 0.0, None
    for event, commands in journal:
        last_at = event.at
        end = next((order for order in commands if isinstance(order, FinishRun | FailRun)), end)
    if found.state.finished and isinstance(end, FinishRun):
        raise ConfigError(f"{folder.root}: the run has ended: {end.reason}; there is nothing to resume")
    if found.state.finished and not found.state.stalled and end is not None:
        raise ConfigError(
            f"{folder.root}: the run has failed and cannot go on: {end.reason}; start a new one, from its newest "
            "version if you like (dora export, then model.path)"
        )
    return journal.header.settings, found.state, last_at, max(epochs, default=-1) + 1


def restore(
    folder: RunFolder, state: ControllerState, *, at: float, epoch: int, trajectories: Trajectories, inputs: Inputs
) -> Resumed:
    """Fill `trajectories` with what the run had in flight, and with what the trainer may have to be fed again."""
    needed = _needed(state)
    stored = read_tokens(folder.tokens, wanted=needed)
    group_size = state.settings.group_size
    for id, trajectory in needed.items():
        if id >= 0:
            group = GroupId(id // group_size)
            if group not in trajectories.prompts:
                prompt = inputs.stream.at(group)
                if prompt is None:
                    raise RunFailed(f"{folder.root}: the prompt source has no prompt {group} any more")
                trajectories.prompts[group] = prompt
            trajectories.open(id, trajectories.prompts[group])
        else:
            eval_set, place = inputs.evaluations.locate(id)
            trajectories.open(id, eval_set.prompts[place])
        record = trajectories.records[id]
        record.reward = trajectory.reward
        answer = stored.answers.get(id)
        if answer is not None:
            record.tokens = array("i", answer.tokens.tobytes())
            record.logprobs = array("f", answer.logprobs.tobytes())
            record.length_capped = record.tokens[-1] not in inputs.tokenizer.eos_ids
    counts = {id: len(trajectories.records[id].tokens) for id in state.trajectories}
    return Resumed(state, ControllerRestarted(at, epoch, counts), latest_checkpoint(folder.checkpoints))


def _needed(state: ControllerState) -> dict[TrajectoryId, Trajectory]:
    """Unfinished and ungraded ones, the siblings that wait for these, evaluations, and what may be trained again."""
    groups = [*state.ledger.groups.values(), *(g for feed in state.feed.steps.values() for g in feed.groups)]
    siblings = {t.id: t for group in groups for t in group.trajectories}
    return {**state.trajectories, **state.evaluation.trajectories, **siblings}


def latest_checkpoint(folder: Path) -> Path | None:
    """The newest complete checkpoint: its manifest is written last."""
    complete = [path for path in sorted(folder.glob("step-*")) if (path / "manifest.json").is_file()]
    return complete[-1] if complete else None


def require_versions(state: ControllerState, store: VersionStore) -> None:
    """Every version that unfinished work needs must still be there."""
    for version in state.window.entries:
        try:
            store.folder(version)
        except StoreError as err:
            raise RunFailed(f"cannot resume: {err}") from err
