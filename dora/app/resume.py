"""What `--resume` finds in a run folder, and how much of it can be trusted.

Invariant: the journal decides. A resume changes nothing that was decided; it continues the fold of events with
ControllerRestarted. Whatever else lies in the folder is compared with the journal first: tokens and prompts must be
those it speaks of, versions and checkpoints of which it knows nothing are set aside, damaged ones are passed over.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from pathlib import Path

from dora.app.inputs import Inputs
from dora.app.settings import lineage_settings
from dora.config.changes import changes
from dora.config.load import parse
from dora.config.schema import Config
from dora.controller.evaluations import Evaluations
from dora.controller.trajectories import Trajectories
from dora.core.commands import FailRun, FinishRun
from dora.core.events import CheckpointSaved, StepTrained, VersionPublished
from dora.core.ids import GroupId, StepId, TrajectoryId, VersionId
from dora.core.phases import TrajectoryPhase
from dora.core.state import State
from dora.core.strategies import Settings
from dora.core.tables import Trajectory
from dora.errors import ConfigError, RunFailed
from dora.journal.codec import Epoch, Handled, Note
from dora.journal.reader import Journal
from dora.journal.replay import replay
from dora.journal.run_folder import RunFolder
from dora.journal.tokens import TokenStore, read_tokens
from dora.weights import checkpoints
from dora.weights.store import StoreError, VersionStore

#: The note that holds the digest of the held-out prompts.
HELD_OUT = "held-out"


@dataclass(frozen=True)
class Recorded:
    """A run as its journal tells it."""

    settings: Settings  # with the steps of the latest epoch
    state: State
    last_at: float  # of the last event
    next_epoch: int
    config: str  # of the latest epoch, as TOML
    rollout_only: bool
    files: Mapping[VersionId, Mapping[str, str]]  # of every version, as first published
    chains: Mapping[StepId, str]  # of every trained step
    base_chain: str | None  # that of version 0; None: it was not published
    held_out: str | None  # digest of the held-out prompts; None: not recorded
    saved: Collection[str]  # names of all checkpoint folders that were ever reported
    end: FinishRun | FailRun | None

    def chain_of(self, version: VersionId) -> str:
        """Lineage of a version's weights."""
        return (self.chains.get(StepId(version - 1)) if version else self.base_chain) or ""


def read_run(folder: RunFolder) -> Recorded:
    """Replay the journal."""
    journal = Journal(folder.journal)
    found = replay(journal.header.settings, journal)
    if found.difference is not None:
        raise RunFailed(f"{folder.root}: the journal cannot be continued: {found.difference}")
    epochs: list[Epoch] = []
    last_at, end = 0.0, None
    files: dict[VersionId, Mapping[str, str]] = {}
    chains: dict[StepId, str] = {}
    saved = set()
    base_chain = held_out = None
    for record in journal.records():
        if isinstance(record, Epoch):
            epochs.append(record)
        if isinstance(record, Note) and record.name == HELD_OUT:
            held_out = str(record.values["digest"])
        if not isinstance(record, Handled):
            continue
        event = record.event
        last_at = event.at
        end = next((order for order in record.commands if isinstance(order, FinishRun | FailRun)), end)
        match event:
            case StepTrained():
                chains.setdefault(event.step, event.chain)
            case VersionPublished():
                files.setdefault(event.version, event.files)
                base_chain = event.chain if event.version == 0 else base_chain
            case CheckpointSaved():
                saved.add(Path(event.folder).name)
    return Recorded(
        settings=found.state.settings,
        state=found.state,
        last_at=last_at,
        next_epoch=max((record.epoch for record in epochs), default=-1) + 1,
        config=epochs[-1].config if epochs else "",
        rollout_only=journal.header.rollout_only,
        files=files,
        chains=chains,
        base_chain=base_chain,
        held_out=held_out,
        saved=saved,
        end=end if found.state.finished else None,
    )


def take_up(folder: RunFolder, config: Config) -> Recorded:
    """What there is to go on with; ConfigError if the run has ended."""
    recorded = read_run(folder)
    require_unfinished(folder, recorded, steps=config.run.steps)
    folder.restrict(group=config.run.group)
    return recorded


def require_unfinished(folder: RunFolder, recorded: Recorded, *, steps: int) -> None:
    """ConfigError if there is nothing to go on with; a finished run can be given more steps."""
    end = recorded.end
    if isinstance(end, FinishRun) and (recorded.rollout_only or steps <= recorded.settings.steps):
        more = "" if recorded.rollout_only else " (--set run.steps=N adds steps)"
        raise ConfigError(f"{folder.root}: the run has ended: {end.reason}; there is nothing to resume{more}")
    if isinstance(end, FailRun) and not recorded.state.stalled:
        raise ConfigError(
            f"{folder.root}: the run has failed and cannot go on: {end.reason}; start a new one, from its newest "
            "version if you like (dora export, then model.path)"
        )


def accept(recorded: Recorded, config: Config, settings: Settings, *, is_accepted: bool) -> tuple[str, ...]:
    """What differs from the configuration of the epoch before, a line each. ConfigError for what cannot change within a
    run, and, unless `is_accepted`, for what alters the experiment."""
    fixed = [n for n in settings.__struct_fields__ if getattr(settings, n) != getattr(recorded.settings, n)]
    if "steps" in fixed and not recorded.rollout_only and settings.steps > recorded.settings.steps:
        fixed.remove("steps")
    if "steps" in fixed:
        raise ConfigError(f"run.steps: the run has {recorded.settings.steps} steps, of which none can be taken back")
    if fixed:
        raise ConfigError(f"--resume: {', '.join(fixed)} cannot change within a run; start a new one for that")
    found = changes(parse(recorded.config), config)
    if altering := [str(change) for change in found if change.alters_experiment and not is_accepted]:
        raise ConfigError(
            *(f"--resume: {line}: alters the experiment; --accept-changes goes on with it" for line in altering)
        )
    return tuple(str(change) for change in found)


def require_same_held_out(recorded: Recorded, evaluations: Evaluations) -> None:
    """RunFailed if later versions would be asked other questions than earlier ones."""
    if recorded.held_out not in (None, evaluations.digest):
        raise RunFailed(
            "eval.sets: the held-out prompts or answers are not what they were, and scores could not be compared; "
            "restore the data that the run began with"
        )


# -- tokens and prompts -----------------------------------------------------------------------------------------------


def restore(folder: RunFolder, state: State, *, trajectories: Trajectories, inputs: Inputs) -> dict[TrajectoryId, int]:
    """Fill `trajectories` with what the run had in flight, and with what the trainer may have to be fed again.

    Returns the token counts of what is in flight. RunFailed if tokens or prompts are not those that the journal knows.
    """
    needed = _needed(state)
    stored = read_tokens(folder.tokens, wanted=needed)
    for id, trajectory in needed.items():
        _require_tokens(folder, state, trajectory, stored)
        if id >= 0:
            group = GroupId(id // state.settings.group_size)
            if group not in trajectories.prompts:
                _restore_prompt(folder, group, stored, trajectories=trajectories, inputs=inputs)
            trajectories.open(id, trajectories.prompts[group])
        else:
            eval_set, place = inputs.evaluations.locate(id)
            trajectories.open(id, eval_set.prompts[place])
        record = trajectories.records[id]
        record.reward = trajectory.reward
        answer = stored.answers.get(id)
        if answer is not None and len(answer.tokens):
            record.tokens = array("i", answer.tokens.tobytes())
            record.logprobs = array("f", answer.logprobs.tobytes())
            record.length_capped = record.tokens[-1] not in inputs.tokenizer.eos_ids
    return {id: len(trajectories.records[id].tokens) for id in state.trajectories}


def _needed(state: State) -> dict[TrajectoryId, Trajectory]:
    """Unfinished and ungraded ones, the siblings that wait for these, evaluations, and what may be trained again."""
    groups = [*state.ledger.groups.values(), *(g for feed in state.feed.steps.values() for g in feed.groups)]
    siblings = {t.id: t for group in groups for t in group.trajectories}
    return {**state.trajectories, **state.evaluation.trajectories, **siblings}


def _require_tokens(folder: RunFolder, state: State, trajectory: Trajectory, stored: TokenStore) -> None:
    """The token store holds what the journal says: all of a finished answer, and no less than is known of others."""
    found = stored.counts.get(trajectory.id, 0)
    known = trajectory.num_tokens
    if trajectory.instance is not None:
        known = max(known, trajectory.instance.reported.get(trajectory.id, 0))
    is_finished = trajectory.phase in (TrajectoryPhase.GRADING, TrajectoryPhase.GRADED)
    if found < known or (is_finished and trajectory.id >= 0 and found != known):
        raise RunFailed(
            f"{folder.tokens}: holds {found} tokens of trajectory {trajectory.id}, the journal knows {known}; the file "
            "is damaged or was replaced: restore it from a backup"
        )


def _restore_prompt(
    folder: RunFolder, group: GroupId, stored: TokenStore, *, trajectories: Trajectories, inputs: Inputs
) -> None:
    """The prompt of a group, from the data, compared with what it was when the group was admitted."""
    prompt = inputs.stream.at(group)
    known = stored.prompts.get(group)
    if known is None:
        raise RunFailed(f"{folder.tokens}: holds no prompt of group {group}, which the journal knows; it is damaged")
    if prompt is None or prompt.digest != known.digest:
        what = "is gone" if prompt is None else f"is not what it was (source {prompt.source})"
        raise RunFailed(
            f"task.sources: the prompt of group {group} {what}; the run can only go on with the data, reward columns "
            "and tokenizer that it began with: restore them"
        )
    trajectories.prompts[group] = prompt


# -- versions ---------------------------------------------------------------------------------------------------------


def recover_versions(store: VersionStore, recorded: Recorded, *, tell: Callable[[str], None]) -> list[VersionId]:
    """Set aside what the journal does not know, and read what is needed against its checksums.

    Returns the versions that unfinished work needs and no folder holds: the trainer has to make them again.
    """
    store.sweep()
    known = {version: (files, recorded.chain_of(version)) for version, files in recorded.files.items()}
    if aside := store.set_aside(known):
        tell(f"set aside, since the journal does not know it: {', '.join(aside)}")
    needed = list(recorded.state.window.entries)
    for version in needed:
        for path in store.damaged(version):
            tell(f"{path} does not match its checksum; this copy of version {version} is deleted")
    return [version for version in needed if not _holds(store, version)]


def _holds(store: VersionStore, version: VersionId) -> bool:
    try:
        store.folder(version)
    except StoreError:
        return False
    return True


# -- checkpoints ------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Start:
    """Where the trainer may start."""

    folders: tuple[Path, ...]  # checkpoints, newest first
    may_start_over: bool  # from the model, at step 0
    step: int  # of the best of them


def choose_start(
    folder: RunFolder, recorded: Recorded, *, missing: Collection[int], tell: Callable[[str], None]
) -> Start:
    """Checkpoints that the journal knows, whole and of its history. `missing` versions have to be made again: a start
    behind one of them would not."""
    kept = recorded.state.feed.checkpoints
    checkpoints.sweep(folder.checkpoints)
    _clear(folder, recorded, tell=tell)
    latest = min(missing, default=recorded.state.feed.trained)
    usable = []
    for step in sorted(kept, reverse=True):
        path = folder.checkpoints / Path(kept[step]).name
        if not kept[step] or step > latest:
            continue
        manifest = checkpoints.read_manifest(path)
        chain = recorded.chain_of(VersionId(step))
        if manifest is None:
            tell(f"{path} is gone or incomplete; an older checkpoint is used")
        elif (manifest.step, manifest.chain) != (step, chain):
            aside = checkpoints.set_aside(path, why="aside")
            tell(f"{path} belongs to another history; it is in {aside} now, and an older checkpoint is used")
        else:
            usable.append((step, path))
    may_start_over = 0 in kept
    if not usable and not may_start_over:
        lost = f"version {min(missing)}, which unfinished answers need, and " if missing else ""
        raise RunFailed(f"{folder.checkpoints}: {lost}no usable checkpoint: the run cannot go on")
    step = usable[0][0] if usable else StepId(0)
    return Start(tuple(path for _, path in usable), may_start_over, step)


def require_same_history(recorded: Recorded, start: Start, *, settings: bytes, config: Config) -> None:
    """ConfigError if steps have to be trained again, but under other settings than the first time."""
    if start.step < recorded.state.feed.trained and settings != lineage_settings(parse(recorded.config)):
        altered = ", ".join(c.key for c in changes(parse(recorded.config), config) if c.key.startswith("trainer."))
        raise ConfigError(
            f"--resume: {altered}: cannot change now: steps {start.step} to {recorded.state.feed.trained - 1} are to "
            "be trained again, as they were; resume without the change, stop with Ctrl-C, which writes a checkpoint, "
            "and change it then"
        )


def _clear(folder: RunFolder, recorded: Recorded, *, tell: Callable[[str], None]) -> None:
    """Checkpoints that were to be deleted go; those that the journal has never heard of are set aside."""
    kept = {Path(path).name for path in recorded.state.feed.checkpoints.values()}
    aside = []
    for path in checkpoints.checkpoints_in(folder.checkpoints):
        if path.name in recorded.saved and path.name not in kept:
            checkpoints.drop(path)
        elif path.name not in kept:
            aside.append(str(checkpoints.set_aside(path, why="aside")))
    if aside:
        tell(f"set aside, since the journal does not know it: {', '.join(aside)}")
