"""For how many tokens the token store has what the engine chose (choices.py).

A byte for each token is kept, and not the choices themselves, which may be 400 times as large as the store without.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

import numpy as np

from dora.core.ids import TrajectoryId
from dora.journal.choices import READ_AGAIN, UNKNOWN


@dataclass(frozen=True, slots=True)
class ChoicesCount:
    """Tokens of finished answers that predict sampled ones."""

    known: int
    read_again: int  #: of the known ones
    missing: int  #: of answers whose server was lost after their last token; the trainer chooses for them


@dataclass(slots=True)
class _Tokens:
    """One trajectory, counted through prompt and answer."""

    num_prompt: int
    is_sampled: bytearray = field(default_factory=bytearray)  #: of the answer
    marks: bytearray = field(default_factory=bytearray)


class ChoicesAccount:
    """What is known, by trajectory, from the records of a token store in their order."""

    def __init__(self) -> None:
        self._tokens: dict[TrajectoryId, _Tokens] = {}

    def begin(self, trajectory: TrajectoryId, *, num_prompt: int) -> None:
        """Take in the prompt of a trajectory, and forget what was known of it."""
        self._tokens[trajectory] = _Tokens(num_prompt)

    def append(self, trajectory: TrajectoryId, mask: bytes, *, start: int) -> None:
        """Take in tokens of the answer from `start` on, which replace all from there on."""
        if (known := self._tokens.get(trajectory)) is not None:
            known.is_sampled[start:] = mask
            del known.marks[known.num_prompt + start :]

    def choose(self, trajectory: TrajectoryId, marks: bytes, *, start: int) -> None:
        """Take in the marks of tokens from `start` on, counted through prompt and answer."""
        if (known := self._tokens.get(trajectory)) is not None:
            known.marks += bytes(max(0, start + len(marks) - len(known.marks)))
            for place, mark in enumerate(marks, start):
                known.marks[place] = known.marks[place] or mark

    def count(self, trajectories: Iterable[TrajectoryId]) -> ChoicesCount:
        """Return the counts of these trajectories; those that are not stored are left out."""
        known, read_again, missing = 0, 0, 0
        for trajectory in trajectories:
            if (tokens := self._tokens.get(trajectory)) is None:
                continue
            sampled = np.flatnonzero(np.frombuffer(bytes(tokens.is_sampled), np.uint8))
            places = sampled + tokens.num_prompt - 1
            marks = np.zeros(tokens.num_prompt + len(tokens.is_sampled), np.uint8)
            marks[: len(tokens.marks)] = np.frombuffer(bytes(tokens.marks), np.uint8)
            found = marks[places]
            known += int((found != UNKNOWN).sum())
            read_again += int((found == READ_AGAIN).sum())
            missing += int((found == UNKNOWN).sum())
        return ChoicesCount(known, read_again, missing)
