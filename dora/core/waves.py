"""Waves: how the trajectories of one wave are distributed over the ranks.

A rank's load is the number of tokens that it computes. If the trainer computes the prompt of siblings once, siblings on
one rank add their prompt once; so siblings stay together if this saves more tokens than it costs in balance.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from heapq import heapreplace
from itertools import groupby
from operator import attrgetter
from typing import Final, NamedTuple

from dora.core.ids import GroupId, TrajectoryId

#: Siblings share their prompt if that divides the tokens of their group by at least this: sharing has a cost, too.
MIN_SAVING: Final = 1.15
#: Siblings are kept together in pieces of at most these shares of a rank's load; smaller pieces balance better.
PIECES: Final = (1.0, 0.5, 0.25, 0.125)


class Answer(NamedTuple):
    """A trajectory to be trained."""

    trajectory: TrajectoryId
    num_tokens: int  #: computed for it alone: without the prompt, if that is shared
    group: GroupId
    shared: int = 0  #: tokens of the prompt, if the siblings on one rank share it

    @property
    def size(self) -> int:
        """Tokens that a rank computes for the answer if it has none of its siblings."""
        return self.num_tokens + self.shared


_group = attrgetter("group")


@dataclass(slots=True, eq=False, repr=False)
class Pending:
    """The answers of one update that are in no wave yet, in commit order, with siblings side by side."""

    answers: deque[Answer] = field(default_factory=deque)
    num_tokens: int = 0  #: that ranks compute for `answers`, if neighboring siblings share their prompt

    def add(self, answer: Answer) -> None:
        """Append an answer."""
        follows = bool(self.answers) and self.answers[-1].group == answer.group
        self.num_tokens += answer.num_tokens if follows else answer.size
        self.answers.append(answer)

    def cut(self, *, num_ranks: int, budget: int) -> list[list[Answer]]:
        """Remove and return the next wave: one micro-batch per rank, of the answers that came first."""
        ranks, left = split_wave(self._take(num_ranks * budget), num_ranks=num_ranks, budget=budget)
        for answer in sorted(left, reverse=True):
            precedes = bool(self.answers) and self.answers[0].group == answer.group
            self.num_tokens += answer.num_tokens if precedes else answer.size
            self.answers.appendleft(answer)
        return ranks

    def _take(self, capacity: int) -> list[Answer]:
        """Remove and return the first answers of at least `capacity` tokens, whole groups if they share a prompt."""
        taken: list[Answer] = []
        end = self.num_tokens - capacity
        while self.answers:
            answer = self.answers[0]
            if self.num_tokens <= end and not (answer.shared and taken[-1].group == answer.group):
                break
            self.answers.popleft()
            precedes = bool(self.answers) and self.answers[0].group == answer.group
            self.num_tokens -= answer.num_tokens if precedes else answer.size
            taken.append(answer)
        return taken


def answers_of(
    group: GroupId, lengths: Sequence[tuple[TrajectoryId, int]], *, prompt: int, shared_prompts: bool
) -> list[Answer]:
    """Return the answers of a group, which share their prompt if that saves enough.

    `lengths`: tokens of each answer; `prompt`: of the prompt.
    """
    own = sum(length for _, length in lengths)
    if shared_prompts and len(lengths) * prompt + own >= MIN_SAVING * (prompt + own):
        return [Answer(t, length, group, prompt) for t, length in lengths]
    return [Answer(t, prompt + length, group) for t, length in lengths]


def load_of(answers: Iterable[Answer]) -> int:
    """Return the tokens that a rank computes for these answers."""
    shared: dict[GroupId, int] = {}
    own = 0
    for answer in answers:
        own += answer.num_tokens
        shared[answer.group] = answer.shared
    return own + sum(shared.values())


def split_wave(answers: Iterable[Answer], *, num_ranks: int, budget: int) -> tuple[list[list[Answer]], list[Answer]]:
    """Return one micro-batch per rank, balanced by tokens, and the answers that did not fit.

    The largest piece comes first, onto the least loaded rank (LPT); a rank gets more than `budget` tokens only as a
    single trajectory. One plan places answers one by one, the others place siblings in pieces, a size of piece each.
    The plan with the least time per token is taken: the load of the fullest rank, divided by the tokens of the wave.
    """
    answers = list(answers)
    plans = [_place([[a] for a in answers], num_ranks=num_ranks, budget=budget, shared=False)]
    if any(a.shared for a in answers):
        even = min(budget, -(-load_of(answers) // num_ranks))
        for share in PIECES:
            pieces = _cut(answers, int(share * even))
            plans.append(_place(pieces, num_ranks=num_ranks, budget=budget, shared=True))
    return min(
        plans, key=lambda plan: max(map(load_of, plan[0])) / max(1, sum(a.size for rank in plan[0] for a in rank))
    )


def _cut(answers: Sequence[Answer], limit: int) -> list[list[Answer]]:
    """Return the siblings of each group in pieces of at most `limit` tokens, or of one answer."""
    pieces: list[list[Answer]] = []
    for _, siblings in groupby(sorted(answers), key=_group):
        room = 0
        for answer in siblings:
            if answer.num_tokens > room or not answer.shared:
                pieces.append([])
                room = limit - answer.shared
            pieces[-1].append(answer)
            room -= answer.num_tokens
    return pieces


def _place(
    pieces: Iterable[list[Answer]], *, num_ranks: int, budget: int, shared: bool
) -> tuple[list[list[Answer]], list[Answer]]:
    """Return the micro-batches and what did not fit. `shared`: loads count the prompt of siblings on one rank once."""
    ranks: list[list[Answer]] = [[] for _ in range(num_ranks)]
    groups: list[set[GroupId]] = [set() for _ in range(num_ranks)]
    loads = [(0, rank) for rank in range(num_ranks)]  # a heap
    left: list[Answer] = []
    sized = [(sum(a.num_tokens for a in piece), piece) for piece in pieces]
    for own, piece in sorted(sized, key=lambda item: (-item[0] - item[1][0].shared, item[1][0].trajectory)):
        load, rank = loads[0]
        first = piece[0]
        tokens = own if shared and first.group in groups[rank] else own + first.shared
        if load and load + tokens > budget:
            left += piece
            continue
        ranks[rank] += piece
        groups[rank].add(first.group)
        heapreplace(loads, (load + tokens, rank))
    return ranks, left
