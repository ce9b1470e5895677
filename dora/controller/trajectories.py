"""Tokens and log-probs of everything in flight: the data that the decision core never sees.

Invariant: a trajectory's tokens only ever grow, each with its log-prob, under one attempt at a time; what an older
attempt still delivers after a newer one began is refused (a server that was given up may go on talking).
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Sequence
from typing import Protocol

from dora.core.ids import GroupId, TrajectoryId, group_of
from dora.tasks.prompts import Prompt


class TokenLog(Protocol):
    """Where tokens are kept for a resume and the audit."""

    def prompt(self, group: int, tokens: Sequence[int], *, digest: bytes, group_size: int) -> None: ...

    def append(
        self, trajectory: int, attempt: int, tokens: Sequence[int], logprobs: Sequence[float], *, start: int
    ) -> None: ...


class TrajectoryRecord:
    """One trajectory as the shell keeps it."""

    __slots__ = ("attempt", "length_capped", "logprobs", "prompt", "reward", "tokens")

    def __init__(self, prompt: Prompt) -> None:
        self.prompt = prompt
        self.tokens = array("i")  #: sampled so far
        self.logprobs = array("f")  #: behavior log-probs, one per token
        self.attempt = -1  #: the attempt that may append
        self.reward: float | None = None
        self.length_capped = False


class Trajectories:
    """All records, by trajectory id."""

    def __init__(self, log: TokenLog, *, group_size: int) -> None:
        self._log = log
        self._group_size = group_size
        self.records: dict[TrajectoryId, TrajectoryRecord] = {}
        self.prompts: dict[GroupId, Prompt] = {}  #: fetched, and of groups that are not forgotten
        self.num_tokens = 0  #: sampled since the start, for the throughput
        self.refused_tokens = 0  #: of attempts that were given up

    def admit(self, group: GroupId) -> None:
        """Make the records of a group's siblings."""
        prompt = self.prompts[group]
        self._log.prompt(group, prompt.tokens, digest=prompt.digest, group_size=self._group_size)
        for sibling in range(self._group_size):
            self.records[TrajectoryId(group * self._group_size + sibling)] = TrajectoryRecord(prompt)

    def open(self, trajectory: TrajectoryId, prompt: Prompt) -> None:
        """Make a record if there is none: an evaluation's sample, or one restored at a resume."""
        self.records.setdefault(trajectory, TrajectoryRecord(prompt))

    def begin(self, trajectory: TrajectoryId, attempt: int) -> TrajectoryRecord:
        """A new attempt: it alone may append from now on."""
        record = self.records[trajectory]
        record.attempt = attempt
        return record

    def append(self, trajectory: TrajectoryId, attempt: int, tokens: Sequence[int], logprobs: Sequence[float]) -> None:
        """Tokens as they arrive; those of an attempt that was given up are refused."""
        record = self.records.get(trajectory)
        if record is None or record.attempt != attempt:
            self.refused_tokens += len(tokens)
            return
        start = len(record.tokens)
        record.tokens.extend(tokens)
        record.logprobs.extend(logprobs)
        self.num_tokens += len(tokens)
        self._log.append(trajectory, attempt, tokens, logprobs, start=start)

    def fence(self, trajectories: Iterable[TrajectoryId]) -> dict[TrajectoryId, int]:
        """Refuse everything further of the current attempts; returns how many tokens each trajectory has."""
        counts = {}
        for trajectory in trajectories:
            record = self.records.get(trajectory)
            if record is not None:
                record.attempt = -1
                counts[trajectory] = len(record.tokens)
        return counts

    def forget(self, groups: Iterable[GroupId]) -> None:
        """These groups are trained or dropped."""
        for group in groups:
            self.prompts.pop(group, None)
            for sibling in range(self._group_size):
                self.records.pop(TrajectoryId(group * self._group_size + sibling), None)

    def prompt_of(self, trajectory: TrajectoryId) -> Prompt:
        """The prompt of a training trajectory."""
        return self.prompts[group_of(trajectory, group_size=self._group_size)]
