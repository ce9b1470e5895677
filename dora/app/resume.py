"""Reads a run folder for `--resume` and checks it against the journal.

Invariant: the journal is authoritative. A resume replays its events and continues with ControllerRestarted. Tokens and
prompts must match the journal; versions and checkpoints that it does not know are set aside, damaged ones are skipped.
"""

from __future__ import annotations

import asyncio
from array import array
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from msgspec.structs import asdict, replace

from dora.app.inputs import Inputs
from dora.app.settings import lineage_settings, settings_of
from dora.app.trust import executed, require_trust
from dora.config.changes import changes
from dora.config.load import parse
from dora.config.schema import Config, LoraConfig
from dora.controller.evaluations import Evaluations
from dora.controller.trajectories import Trajectories, TrajectoryRecord
from dora.core.commands import FailRun, FinishRun, ReportEvaluation
from dora.core.events import CheckpointSaved, StepTrained, TimeLimits, VersionPublished
from dora.core.excerpt import Entry
from dora.core.ids import GroupId, StepId, TrajectoryId, VersionId
from dora.core.phases import TrajectoryPhase
from dora.core.state import State
from dora.core.strategies import Settings
from dora.core.tables import Trajectory
from dora.errors import ConfigError, RunEnded, RunFailed
from dora.journal.codec import Epoch, Handled, Note
from dora.journal.reader import Journal
from dora.journal.replay import replay
from dora.journal.run_folder import RunFolder
from dora.journal.tokens import TokenStore, read_tokens
from dora.observe.observed import Folded
from dora.observe.visits import Visits
from dora.tasks.prompts import Conversation, Prompt, begun
from dora.weights import checkpoints
from dora.weights.store import Manifest, StoreError, VersionStore

#: The note that holds the digest of the held-out prompts.
HELD_OUT = "held-out"
#: The phases of an answer that is complete.
_SAMPLED: Final = (TrajectoryPhase.GRADING, TrajectoryPhase.GRADED)
#: Settings of the core that may change, with a value by which two settings are compared without them.
_FREE: Final = {"num_ranks": 1, "max_episodes": 0, **asdict(TimeLimits(0.0, 0.0, 0.0))}


@dataclass(frozen=True)
class Recorded:
    """A run, as recorded in its journal."""

    run_id: str  # the folder may have another name by now
    settings: Settings  # with the steps and limits of the latest epoch
    state: State
    last_at: float  # time of the last event
    next_epoch: int
    config: str  # configuration of the latest epoch, as TOML
    rollout_only: bool
    files: Mapping[VersionId, Mapping[str, str]]  # of every version, as first published
    num_bytes: Mapping[VersionId, int]  # of every version
    chains: Mapping[StepId, str]  # of every trained step
    configs: Mapping[StepId, str]  # under which each step was first trained, as TOML
    base_chain: str | None  # of version 0; None if it was not published
    held_out: str | None  # digest of the held-out prompts; None if it was not recorded
    saved: Collection[str]  # names of all checkpoint folders ever reported
    evaluated: Collection[VersionId]  # versions whose scores were reported, or whose evaluation was skipped
    folded: Folded  # what is observed of its events; counts of tokens come with the tokens
    end: FinishRun | FailRun | None  # None unless the run has ended

    @property
    def configuration(self) -> Config:
        """The configuration of the latest epoch; ConfigError if this version of DORA cannot read it."""
        return _parse(self.config)

    def manifest_of(self, version: VersionId) -> Manifest:
        """Return the manifest of a version, as first published."""
        return Manifest(version, self.files[version], self.num_bytes[version], self.chain_of(version))

    def chain_of(self, version: VersionId) -> str:
        """Return the chain of a version's weights; "" if it is unknown."""
        return (self.chains.get(StepId(version - 1)) if version else self.base_chain) or ""


def _parse(config: str) -> Config:
    """Return a configuration in the journal; ConfigError if this version of DORA cannot read it."""
    try:
        return parse(config)
    except (ValueError, RecursionError):
        raise ConfigError(
            "--resume: another version of DORA wrote the configuration in the journal; continue the run with that"
        ) from None


class _History:
    """Facts of a journal that the replayed state does not have. They are collected while its entries are iterated."""

    def __init__(self, journal: Journal) -> None:
        self._journal = journal
        self.epochs: list[Epoch] = []
        self.last_at = 0.0
        self.end: FinishRun | FailRun | None = None
        self.files: dict[VersionId, Mapping[str, str]] = {}
        self.num_bytes: dict[VersionId, int] = {}
        self.chains: dict[StepId, str] = {}
        self.configs: dict[StepId, str] = {}
        self.saved: set[str] = set()
        self.evaluated: set[VersionId] = set()
        self.base_chain: str | None = None
        self.held_out: str | None = None

    @property
    def config(self) -> str:
        """The configuration of the latest epoch."""
        return self.epochs[-1].config if self.epochs else ""

    def __iter__(self) -> Iterator[Entry]:
        for record in self._journal.records():
            if isinstance(record, Epoch):
                self.epochs.append(record)
            elif isinstance(record, Note) and record.name == HELD_OUT:
                self.held_out = str(record.values["digest"])
            elif isinstance(record, Handled):
                self._note(record)
                yield record.event, record.commands

    def _note(self, record: Handled) -> None:
        event = record.event
        self.last_at = event.at
        for order in record.commands:
            if isinstance(order, ReportEvaluation):
                self.evaluated.add(order.version)
        self.end = next((order for order in record.commands if isinstance(order, FinishRun | FailRun)), self.end)
        match event:
            case StepTrained():
                self.chains.setdefault(event.step, event.chain)
                self.configs.setdefault(event.step, self.config)
            case VersionPublished():
                self.files.setdefault(event.version, event.files)
                self.num_bytes.setdefault(event.version, event.num_bytes)
                self.base_chain = event.chain if event.version == 0 else self.base_chain
            case CheckpointSaved():
                self.saved.add(Path(event.folder).name)


def read_run(folder: RunFolder) -> Recorded:
    """Replay the journal; RunFailed if the decision core decides differently now."""
    journal = Journal(folder.journal)
    told = _History(journal)
    folded = Folded.new(journal.header.settings.group_size, is_replay=True)
    found = replay(journal.header.settings, told, projection=folded)
    if found.difference is not None:
        raise RunFailed(f"{folder.root}: the journal cannot be continued: {found.difference}")
    return Recorded(
        run_id=journal.header.run_id,
        settings=found.state.settings,
        state=found.state,
        last_at=told.last_at,
        next_epoch=max((record.epoch for record in told.epochs), default=-1) + 1,
        config=told.config,
        rollout_only=journal.header.rollout_only,
        files=told.files,
        num_bytes=told.num_bytes,
        chains=told.chains,
        configs=told.configs,
        base_chain=told.base_chain,
        held_out=told.held_out,
        saved=told.saved,
        evaluated=told.evaluated | {*found.state.evaluation.overtaken},
        folded=folded,
        end=told.end if found.state.finished else None,
    )


def take_up(folder: RunFolder, config: Config, *, trust_folder: bool = False) -> Recorded:
    """Read a run to continue it, and restrict access to its folder; ConfigError if it has ended.

    Unless `trust_folder` is true, it is also a ConfigError if no earlier start of this user signed the configuration:
    nothing that an unsigned configuration names may be executed.
    """
    folder.require_plain()
    if not trust_folder:
        require_trust(folder, config, named=executed(config), to="a resume")
    recorded = read_run(folder)
    require_unfinished(folder, recorded, steps=config.run.steps)
    folder.restrict(group=config.run.group)
    return recorded


def require_unfinished(folder: RunFolder, recorded: Recorded, *, steps: int) -> None:
    """Raise RunEnded or ConfigError if the run has ended; a finished run may continue with more steps."""
    end = recorded.end
    if isinstance(end, FinishRun) and (recorded.rollout_only or steps <= recorded.settings.steps):
        more = "" if recorded.rollout_only else " (--set run.steps=N adds steps)"
        raise RunEnded(f"{folder.root}: the run has ended: {end.reason}; there is nothing to resume{more}")
    if isinstance(end, FailRun) and not recorded.state.stalled:
        raise ConfigError(
            f"{folder.root}: the run has failed and cannot be resumed: {end.reason}; start a new one, for example "
            "from its newest version (dora export, then model.path)"
        )


def accept(recorded: Recorded, config: Config, settings: Settings, *, is_accepted: bool) -> tuple[str, ...]:
    """Return the changes since the previous epoch's configuration, one line each.

    ConfigError for settings that cannot change within a run and, unless `is_accepted`, for changes that alter the
    experiment.
    """
    names = [name for name in settings.__struct_fields__ if name not in _FREE]
    fixed = [n for n in names if getattr(settings, n) != getattr(recorded.settings, n)]
    if "steps" in fixed and not recorded.rollout_only and settings.steps > recorded.settings.steps:
        fixed.remove("steps")
    if "steps" in fixed and not recorded.settings.steps:
        raise ConfigError("run.steps: an evaluation trains nothing; start a run for that (dora run)")
    if "steps" in fixed:
        raise ConfigError(f"run.steps: the run has {recorded.settings.steps} steps; the number can only be raised")
    before = recorded.configuration
    if fixed:
        told = "run.steps" if "groups_per_step" in fixed else "eval.sets"  # a rollout alone has one step, of all groups
        keys = _keys_that_change(_decisions, before, config) or [told]
        raise ConfigError(f"--resume: {', '.join(keys)} cannot change within a run; start a new one for that")
    found = changes(before, config)
    kept = {"task.revisit_share"} | ({"run.seed"} if before.task.revisit_share < 1 else set())
    if kept_changes := [str(change) for change in found if change.key in kept]:
        raise ConfigError(f"--resume: {kept_changes[0]}: cannot change within a run; start a new one for that")
    if _format(before) != _format(config):
        raise ConfigError(
            *(
                f"--resume: {change}: the checkpoints of the run hold a state that would not fit; start a new run for "
                "that"
                for change in found
                if change.key.startswith(("trainer.optimizer", "trainer.lora."))
            )
        )
    if altering := [str(change) for change in found if change.alters_experiment and not is_accepted]:
        raise ConfigError(
            *(f"--resume: {line}: alters the experiment; --accept-changes allows it" for line in altering)
        )
    return tuple(str(change) for change in found)


def _decisions(config: Config) -> Settings:
    """Return the settings of the decision core that cannot change; held-out prompts are not known here."""
    deterministic = config.trainer.device == "cpu"  # whatever `trainer.min_ranks` is, which may change
    found = settings_of(config, eval_prompt_tokens=())
    return replace(found, **_FREE, steps=0, micro_batch_tokens=0, deterministic=deterministic)


def _keys_that_change(derived: Callable[[Config], object], before: Config, after: Config) -> list[str]:
    """Return the keys whose new value, by itself, changes what is derived from the configuration."""
    found = []
    for section in Config.model_fields:
        old, new = getattr(before, section), getattr(after, section)
        for name in type(old).model_fields:
            mixed = before.model_copy(update={section: old.model_copy(update={name: getattr(new, name)})})
            if derived(mixed) != derived(before):
                found.append(f"{section}.{name}")
    return found


def _format(config: Config) -> tuple[str, bool, LoraConfig]:
    """Return the settings that decide what the state in a checkpoint means. Where it is stored does not matter.

    With another scale, an adapter would be another policy than the version that servers have.
    """
    trainer = config.trainer
    return trainer.optimizer, trainer.optimizer_state == "8bit", trainer.lora


def require_same_held_out(recorded: Recorded, evaluations: Evaluations) -> None:
    """Raise RunFailed if the held-out questions have changed, so that scores of versions could not be compared."""
    if recorded.held_out not in (None, evaluations.digest):
        raise RunFailed(
            "eval.sets: the held-out prompts or answers have changed, so scores could not be compared; "
            "restore the data that the run began with"
        )


# -- tokens and prompts -----------------------------------------------------------------------------------------------


def restore(
    folder: RunFolder, state: State, *, trajectories: Trajectories, inputs: Inputs, visits: Visits
) -> dict[TrajectoryId, int]:
    """Fill `trajectories` with the trajectories in flight and the trajectories that the trainer may need again.

    Returns the token counts of trajectories in flight. RunFailed if tokens or prompts differ from the journal.
    """
    needed = _needed(state)
    stored = read_tokens(folder.tokens, wanted=needed)
    trajectories.ledger.restore(stored.sampled)
    unfinished = {id // state.settings.group_size for id, t in needed.items() if id >= 0 and t.phase not in _SAMPLED}
    for id, trajectory in needed.items():
        _require_tokens(folder, state, trajectory, stored)
        if id >= 0:
            group = GroupId(id // state.settings.group_size)
            if group not in trajectories.prompts:
                trajectories.prompts[group] = _read_prompt(
                    folder, group, stored, inputs, visits, is_sampled=group not in unfinished
                )
            trajectories.open(id, trajectories.prompts[group])
        else:
            eval_set, place = inputs.evaluations.locate(id)
            trajectories.open(id, eval_set.prompts[place])
        _fill(trajectories.records[id], trajectory, stored)
    return {id: len(trajectories.records[id].tokens) for id in state.trajectories}


async def recall(
    folder: RunFolder,
    state: State,
    step: StepId,
    *,
    offset_of: Callable[[GroupId], int],
    trajectories: Trajectories,
    inputs: Inputs,
    visits: Visits,
) -> None:
    """Fill `trajectories` with what was forgotten of the steps from `step` on, which ranks that were started again
    train again. `offset_of` returns where to begin to read for a group. RunFailed if tokens or prompts differ from the
    journal."""
    steps = [(number, feed.groups) for number, feed in state.feed.steps.items() if number >= step]
    forgotten = {g.id: (g, number) for number, groups in steps for g in groups if g.id not in trajectories.prompts}
    needed = {t.id: t for group, _ in forgotten.values() for t in group.trajectories}
    if not needed:
        return
    since = min(map(offset_of, forgotten))
    stored = await asyncio.to_thread(read_tokens, folder.tokens, wanted=needed, since=since)
    prompts = await asyncio.to_thread(
        lambda: {id: _read_prompt(folder, id, stored, inputs, visits, is_sampled=True) for id in forgotten}
    )
    for id, (group, number) in forgotten.items():
        trajectories.recall(id, prompts[id], step=number)
        for trajectory in group.trajectories:
            _require_tokens(folder, state, trajectory, stored)
            _fill(trajectories.records[trajectory.id], trajectory, stored)


def _fill(record: TrajectoryRecord, trajectory: Trajectory, stored: TokenStore) -> None:
    """Fill a record with what the journal and the token store have of it."""
    record.reward = trajectory.reward
    record.turn_rewards = [*trajectory.turn_rewards]
    record.turn_tokens = trajectory.turn_tokens
    record.truncated = trajectory.truncated
    answer = stored.answers.get(trajectory.id)
    if answer is not None and len(answer.tokens):
        has_unknown = _may_have_unknown_tokens(trajectory)
        end = trajectory.num_tokens if has_unknown else len(answer.tokens)
        record.tokens = array("i", answer.tokens[:end].tobytes())
        record.logprobs = array("f", answer.logprobs[:end].tobytes())
        record.observed = [span for span in answer.observed if span[1] <= end]
        record.forks = [fork for fork in answer.forks if fork.start < end or not has_unknown]
        if record.choices is not None and answer.choices is not None:
            if answer.choices.row_bytes != record.choices.row_bytes:
                raise RunFailed(
                    f"the token store has {answer.choices.row_bytes} bytes of chosen experts for each token, but the "
                    f"model chooses {record.choices.row_bytes}: one of them was replaced; restore it from a backup"
                )
            record.choices = answer.choices
            record.choices.cut(len(record.prompt.tokens) + end)


def _needed(state: State) -> dict[TrajectoryId, Trajectory]:
    """Return all trajectories of untrained groups, of evaluations, and of steps that may be trained again."""
    groups = [*state.ledger.groups.values(), *(g for feed in state.feed.steps.values() for g in feed.groups)]
    siblings = {t.id: t for group in groups for t in group.trajectories}
    return {**state.trajectories, **state.evaluation.trajectories, **siblings}


def _may_have_unknown_tokens(trajectory: Trajectory) -> bool:
    """Return whether the token store may have tokens of the trajectory that the journal does not know.

    An observation is on the disk before its CallFinished. So there may be unknown tokens if the trajectory was calling
    its environment when a controller ended. If it could not be replayed, it has failed and has no reward.
    """
    has_failed = trajectory.phase is TrajectoryPhase.GRADED and trajectory.reward is None
    return has_failed or trajectory.phase is TrajectoryPhase.CALLING


def _require_tokens(folder: RunFolder, state: State, trajectory: Trajectory, stored: TokenStore) -> None:
    """Check that the token store has all tokens of a finished answer, and at least the journaled tokens of others."""
    found = stored.counts.get(trajectory.id, 0)
    known = trajectory.num_tokens
    if trajectory.instance is not None:
        known = max(known, trajectory.instance.reported.get(trajectory.id, 0))
    is_finished = trajectory.phase in _SAMPLED
    is_exact = is_finished and trajectory.id >= 0 and not _may_have_unknown_tokens(trajectory)
    if found < known or (is_exact and found != known):
        raise RunFailed(
            f"{folder.tokens}: has {found} tokens of trajectory {trajectory.id}, but the journal counts {known}; the "
            "file is damaged or was replaced: restore it from a backup"
        )


def _read_prompt(
    folder: RunFolder, group: GroupId, stored: TokenStore, inputs: Inputs, visits: Visits, *, is_sampled: bool
) -> Prompt:
    """Read a group's prompt again; RunFailed unless it is the same as when the group was admitted.

    `is_sampled`: all of its answers are. Then, and if the prompt could not be made, its environment is not asked, which
    may fail.
    """
    key = visits.row_of(group)
    known = stored.prompts.get(group)
    if known is None:
        raise RunFailed(f"{folder.tokens}: has no prompt of group {group}, which was admitted; the file is damaged")

    def read(known: Conversation | None = None) -> Prompt | None:
        at = inputs.stream.at
        return at(group, known=known) if key is None else inputs.stream.of_visit(group, key, known=known)

    tokens = tuple(known.tokens.tolist())
    prompt = None
    if is_sampled or not tokens:
        prompt = read(Conversation(tokens=tokens, failed="" if tokens else "it had none"))
    if prompt is None or known.digest != prompt.digest:
        prompt = begun(read)
    if prompt is not None and prompt.may_begin_later:
        raise RunFailed(f"{prompt.skipped}, so its group, which is under way, cannot go on; repair the environment")
    if prompt is None or prompt.digest != known.digest:
        problem = "is missing" if prompt is None else f"has changed (source {prompt.source})"
        raise RunFailed(
            f"task.sources: the prompt of group {group} {problem}; a resume needs the data, reward columns and "
            "tokenizer that the run began with: restore them"
        )
    return prompt


# -- versions ---------------------------------------------------------------------------------------------------------


def recover_versions(store: VersionStore, recorded: Recorded, *, tell: Callable[[str], None]) -> list[VersionId]:
    """Set aside versions that the journal does not know, and verify the checksums of versions that are still needed.

    Returns the versions that unfinished work needs but no folder holds; the trainer must recompute them.
    """
    store.sweep()
    known = {version: (files, recorded.chain_of(version)) for version, files in recorded.files.items()}
    if aside := store.set_aside(known):
        tell(f"set aside, not in the journal: {', '.join(aside)}")
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
    """The states from which the trainer may start."""

    folders: tuple[Path, ...]  # checkpoints, newest first
    may_start_over: bool  # from the model, at step 0
    step: int  # step of the newest checkpoint; 0 if there is no checkpoint


def choose_start(
    folder: RunFolder, recorded: Recorded, *, missing: Collection[int], tell: Callable[[str], None]
) -> Start:
    """Choose the complete checkpoints that belong to the journal's history.

    The trainer must start early enough to recompute the `missing` versions. RunFailed if it cannot start at all.
    """
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
            tell(f"{path} is missing or incomplete; using an older checkpoint")
        elif (manifest.step, manifest.chain) != (step, chain):
            aside = checkpoints.set_aside(path, why="aside")
            tell(f"{path} belongs to another history and was moved to {aside}; using an older checkpoint")
        else:
            usable.append((step, path))
    may_start_over = 0 in kept
    if not usable and not may_start_over:
        needed = f" from which to recompute version {min(missing)}, which unfinished answers need" if missing else ""
        raise RunFailed(f"{folder.checkpoints}: no usable checkpoint{needed}; the run cannot be resumed")
    step = usable[0][0] if usable else StepId(0)
    return Start(tuple(path for _, path in usable), may_start_over, step)


def start_again(folder: RunFolder, state: State) -> Start:
    """Return where ranks of this controller that are started again begin; they skip damaged checkpoints themselves."""
    kept, latest = state.feed.checkpoints, min(state.missing, default=state.feed.trained)
    steps = [step for step in sorted(kept, reverse=True) if kept[step] and step <= latest]
    folders = tuple(folder.checkpoints / Path(kept[step]).name for step in steps)
    return Start(folders, may_start_over=0 in kept, step=steps[0] if steps else 0)


def require_same_history(recorded: Recorded, start: Start, *, settings: bytes, config: Config) -> None:
    """Raise ConfigError if steps must be trained again, but with other settings than the first time."""
    again = range(start.step, recorded.state.feed.trained)
    for text in dict.fromkeys(recorded.configs[step] for step in map(StepId, again) if step in recorded.configs):
        if lineage_settings(before := _parse(text)) != settings:
            altered = _keys_that_change(lineage_settings, before, config)
            had = [f"{one.key} = {one.before}" for one in changes(before, config) if _is_in(one.key, altered)]
            raise ConfigError(
                f"--resume: {', '.join(altered)}: cannot change now: steps {start.step + 1} to {again.stop} must be "
                f"trained again with the settings that they had ({', '.join(had)}); resume with these, stop with "
                "Ctrl-C, which writes a checkpoint, and change them then"
            )


def _is_in(key: str, tables: Collection[str]) -> bool:
    return any(f"{key}.".startswith(f"{table}.") for table in tables)


def _clear(folder: RunFolder, recorded: Recorded, *, tell: Callable[[str], None]) -> None:
    """Delete checkpoints that are no longer needed, and set aside those that the journal does not know."""
    kept = {Path(path).name for path in recorded.state.feed.checkpoints.values()}
    aside = []
    for path in checkpoints.checkpoints_in(folder.checkpoints):
        if path.name in recorded.saved and path.name not in kept:
            checkpoints.drop(path)
        elif path.name not in kept:
            aside.append(str(checkpoints.set_aside(path, why="aside")))
    if aside:
        tell(f"set aside, not in the journal: {', '.join(aside)}")
