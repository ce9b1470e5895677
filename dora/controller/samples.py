"""Samples in full, for people to read: trajectories.jsonl, with trained and dropped answers and evaluation samples.

Invariant: a line is about a step or an evaluation that the journal has, and no trajectory is there twice. Samples of
dropped groups are written with the next step. Once the file is full, a problem is reported and nothing more is kept.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from typing import TypeVar

import msgspec
import numpy as np
from msgspec.structs import replace
from numpy.typing import NDArray

from dora import foreign
from dora.controller.evaluations import Evaluations
from dora.controller.trajectories import Trajectories, TrajectoryRecord
from dora.core import commands as cmd
from dora.core.ids import GroupId, InstanceId, StepId, TrajectoryId, VersionId
from dora.core.tables import Group
from dora.environments.renderer import Renderer
from dora.files import MAX_TRAJECTORY_BYTES, LineFile
from dora.journal.deep import EVALUATION, NO_GROUP, KeptPart, KeptTrajectory, encode_kept
from dora.observe.episodes import TimedEpisodes
from dora.tasks.tokenizer import Tokenizer
from dora.transport.messages import TrainerLogprobs

T = TypeVar("T")


class _Kept(msgspec.Struct):
    trajectory: int = 0


class SampleFile:
    """trajectories.jsonl, with a maximum size."""

    def __init__(self, file: LineFile, *, max_bytes: int) -> None:
        self.file = file
        self.is_full = False
        self._room = max_bytes - file.path.stat().st_size
        self._earlier = {  # lines from before a resume; steps trained again may offer them again
            msgspec.json.decode(line, type=_Kept).trajectory
            for line in foreign.read_lines(file.path, max_bytes=MAX_TRAJECTORY_BYTES)
        }

    def lines(self, kept: Iterable[KeptTrajectory]) -> list[bytes]:
        """Return the lines to be appended. The first line that does not fit, and all later lines, are left out."""
        lines: list[bytes] = []
        for line in [encode_kept(one) for one in kept if one.trajectory not in self._earlier]:
            self.is_full = self.is_full or len(line) > self._room
            if not self.is_full:
                self._room -= len(line)
                lines.append(line)
        return lines


class Samples:
    """Chooses trajectories, and describes them."""

    def __init__(
        self,
        trajectories: Trajectories,
        *,
        evaluations: Evaluations,
        tokenizer: Tokenizer,
        episodes: TimedEpisodes,
        tags: dict[GroupId, VersionId],
        keep: int,
        renderer: Renderer | None = None,
    ) -> None:
        """`tags`: versions of the groups that may still be dropped. `keep`: number of trained trajectories per step, of
        dropped ones per step, and of samples per evaluation. `renderer`: of episodes, if the run has any.
        """
        self._trajectories = trajectories
        self._evaluations = evaluations
        self._tokenizer = tokenizer
        self._episodes = episodes
        self._tags = tags
        self._keep = keep
        self._renderer = renderer
        self._dropped: list[KeptTrajectory] = []  # since the last step
        self._trainer_logprobs: dict[TrajectoryId, NDArray[np.float64]] = {}
        self._instances: dict[TrajectoryId, InstanceId] = {}  # of the last request of each answer in training
        self._pieces: dict[int, str] = {}  # text by token: decoding takes 10 us

    def on_logprobs(self, message: TrainerLogprobs) -> None:
        """Note the log-probs of an answer in the pass that trained it."""
        self._trainer_logprobs[message.trajectory] = message.logprobs.astype(np.float64).round(6)

    def on_commands(self, commands: Iterable[cmd.Command]) -> None:
        """Keep a sibling of each group that is dropped, before its tokens are forgotten."""
        for command in commands:
            if isinstance(command, cmd.Generate):
                if command.trajectory >= 0:
                    self._instances[command.trajectory] = command.instance
            elif isinstance(command, cmd.AdmitGroup):
                self._tags[command.group] = command.version
            elif isinstance(command, cmd.CommitGroup):
                self._tags.pop(command.group, None)
            elif isinstance(command, cmd.DropGroup):
                self._drop(command, self._tags.pop(command.group))
                self._forget_instances(command.group)
            elif isinstance(command, cmd.ForgetGroups):
                for group in command.groups:
                    self._forget_instances(group)

    def _forget_instances(self, group: GroupId) -> None:
        for trajectory in self._trajectories.siblings(group):
            self._instances.pop(trajectory, None)

    def _drop(self, order: cmd.DropGroup, version: VersionId) -> None:
        """Keep the first sibling that has tokens."""
        if len(self._dropped) >= self._keep:
            return
        for trajectory, reward in zip(self._trajectories.siblings(order.group), order.rewards, strict=True):
            record = self._trajectories.records.get(trajectory)
            if record is not None and record.tokens:
                kept = self._describe(trajectory, record, step=StepId(-1), version=version, outcome=order.why)
                self._dropped.append(replace(kept, group=order.group, reward=reward))
                return

    def mismatches(self, groups: Sequence[Group], *, step: StepId) -> dict[InstanceId, float]:
        """Return the mean k3 between each server and the trainer, over the fresh answers of a step whose log-probs the
        trainer has sent. A wrong adapter, or other weights, would show here first."""
        found: dict[InstanceId, list[NDArray[np.float64]]] = defaultdict(list)
        for trajectory in [t for group in groups for t in group.trajectories]:
            instance = self._instances.get(trajectory.id)
            is_fresh = int(trajectory.version) == int(step)
            if is_fresh and instance is not None and trajectory.id in self._trainer_logprobs:
                record = self._trajectories.records[trajectory.id]
                sampled = np.ones(len(record.tokens), dtype=bool)
                for start, end in record.observed:
                    sampled[start:end] = False
                behavior = np.asarray(record.logprobs, dtype=np.float64)[sampled]
                trained = self._trainer_logprobs[trajectory.id]
                if len(behavior) == len(trained):
                    log_ratio = trained - behavior
                    found[instance].append(np.expm1(log_ratio) - log_ratio)
        return {instance: float(np.mean(np.concatenate(values))) for instance, values in found.items()}

    def of_step(self, groups: Sequence[Group], *, step: StepId) -> Iterator[KeptTrajectory]:
        """Yield the trajectories kept of a trained step, and those of groups dropped since the step before.

        Some groups are chosen, evenly spread; groups with log-probs from the trainer come first. Of each chosen group,
        one graded sibling is kept.
        """
        sent, others = list[Group](), list[Group]()
        for group in groups:
            (sent if any(t.id in self._trainer_logprobs for t in group.trajectories) else others).append(group)
        chosen = self._spread(sent)
        for group in [*chosen, *self._spread(others)[: self._keep - len(chosen)]]:
            graded = [t for t in group.trajectories if t.reward is not None]
            trajectory = next((t for t in graded if t.id in self._trainer_logprobs), graded[0])
            record = self._trajectories.records[trajectory.id]
            kept = self._describe(trajectory.id, record, step=step, version=group.version, outcome="trained")
            sent_logprobs = self._trainer_logprobs.get(trajectory.id)
            logprobs = () if sent_logprobs is None else tuple(sent_logprobs.tolist())
            yield replace(kept, group=group.id, reward=trajectory.reward, trainer_logprobs=logprobs)
        for kept in self._dropped:
            yield replace(kept, step=step)
        self._dropped, self._trainer_logprobs = [], {}

    def of_evaluation(self, version: VersionId, *, trained: StepId) -> Iterator[KeptTrajectory]:
        """Yield the samples kept of an evaluation, evenly spread. `trained`: steps trained so far."""
        for trajectory in self._spread(self._evaluations.ids(version)):
            record = self._trajectories.records[trajectory]
            step = StepId(trained - 1)
            yield self._describe(trajectory, record, step=step, version=version, outcome=EVALUATION)

    def _spread(self, of: Sequence[T]) -> Sequence[T]:
        """Return `keep` elements, evenly spread, or all if there are fewer."""
        return of[:: max(1, len(of) // self._keep)][: self._keep] if self._keep else []

    def _piece(self, token: int) -> str:
        if token not in self._pieces:
            self._pieces[token] = self._tokenizer.decode([token], special_tokens=True)
        return self._pieces[token]

    def _describe(
        self, trajectory: TrajectoryId, record: TrajectoryRecord, *, step: StepId, version: VersionId, outcome: str
    ) -> KeptTrajectory:
        return KeptTrajectory(
            step=step,
            group=NO_GROUP,
            trajectory=trajectory,
            version=version,
            reward=record.reward,
            truncated=record.truncated,
            prompt=record.prompt.text,
            text=self._tokenizer.decode(record.tokens.tolist()),
            prompt_tokens=record.prompt.tokens,
            tokens=tuple(record.tokens),
            logprobs=tuple(record.logprobs),
            observed=tuple(record.observed),
            forks=tuple(record.forks),
            turn_rewards=tuple(record.turn_rewards),
            calls_s=self._episodes.calls_s(trajectory),
            outcome=outcome,
            answer=record.prompt.answer,
            terms=record.terms,
            metrics=record.metrics,
            verdicts=record.verdicts,
            pieces=tuple(map(self._piece, record.tokens)),
            parts=tuple(self._parts(record)) if self._renderer is not None else (),
        )

    def _parts(self, record: TrajectoryRecord) -> Iterator[KeptPart]:
        """Yield the turns and observations of an episode in order."""
        for role, start, end in record.parts():
            calls = self._calls(record, start, end) if role == "policy" else ()
            yield KeptPart(role, self._text(record, start, end), end, calls)

    def _text(self, record: TrajectoryRecord, start: int, end: int) -> str:
        return self._tokenizer.decode(record.tokens[start:end].tolist(), special_tokens=True)

    def _calls(self, record: TrajectoryRecord, start: int, end: int) -> tuple[tuple[str, str], ...]:
        """Return the calls of a turn. After a fork `prompt` is not that of the row, but parsing needs only its end."""
        assert self._renderer is not None
        turn = self._renderer.parse(record.tokens[start:end], prompt=[*record.prompt.tokens, *record.tokens[:start]])
        return tuple(
            ("", call.text) if call.arguments is None else (call.name, msgspec.json.encode(call.arguments).decode())
            for call in turn.calls
        )
