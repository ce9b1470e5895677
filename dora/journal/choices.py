"""What engines chose for the tokens of one trajectory: which experts each token was sent to (dora/routing.py).

Tokens are counted through prompt and answer, so that rows which repeat earlier tokens (rows.py) share what was chosen.
Invariant: what was chosen for a token is kept as it first arrived; nothing is known of the last token, which no engine
has read, until another request continues it.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

#: What is known of a token.
UNKNOWN, SAMPLED, READ_AGAIN = 0, 1, 2


class Choices:
    """The choices of one trajectory, as bytes."""

    __slots__ = ("_experts", "_marks", "row_bytes")

    def __init__(self, row_bytes: int) -> None:
        """`row_bytes`: of the choices of one token."""
        self.row_bytes = row_bytes
        self._experts = bytearray()
        self._marks = bytearray()

    def __len__(self) -> int:
        """Return the number of tokens up to the last one that something is known of."""
        return len(self._marks)

    def put(self, start: int, experts: bytes, marks: bytes) -> None:
        """Add the choices of consecutive tokens from `start` on. What was known is kept."""
        end, width = start + len(marks), self.row_bytes
        if len(experts) != len(marks) * width:
            raise ValueError(f"{len(experts)} bytes for {len(marks)} tokens of {width} bytes")
        missing = end - len(self._marks)
        if missing > 0:
            self._marks += bytes(missing)
            self._experts += bytes(missing * width)
        known = np.frombuffer(bytes(self._marks[start:end]), np.uint8)
        if not known.any():
            self._marks[start:end], self._experts[start * width : end * width] = marks, experts
            return
        for at in np.flatnonzero(known == UNKNOWN).tolist():
            place = start + at
            self._marks[place] = marks[at]
            self._experts[place * width : (place + 1) * width] = experts[at * width : (at + 1) * width]

    def cut(self, end: int) -> None:
        """Forget the tokens from `end` on."""
        del self._marks[end:], self._experts[end * self.row_bytes :]

    def first_unknown(self, positions: NDArray[np.int64]) -> int:
        """Return the index of the first of `positions` that nothing is known of; their number if there is none."""
        unknown = np.flatnonzero(self.marks(positions) == UNKNOWN)
        return int(unknown[0]) if len(unknown) else len(positions)

    def marks(self, positions: NDArray[np.int64]) -> NDArray[np.uint8]:
        """Return what is known of the tokens at `positions`."""
        found = np.zeros(len(positions), np.uint8)
        inside = positions < len(self._marks)
        found[inside] = np.frombuffer(bytes(self._marks), np.uint8)[positions[inside]]
        return found

    def experts(self, positions: NDArray[np.int64]) -> NDArray[np.uint8]:
        """Return [len(positions), row_bytes] the choices for the tokens at `positions`; zeros for unknown ones."""
        found = np.zeros((len(positions), self.row_bytes), np.uint8)
        inside = positions < len(self._marks)
        table = np.frombuffer(bytes(self._experts), np.uint8).reshape(-1, self.row_bytes)
        found[inside] = table[positions[inside]]
        return found


def runs(positions: NDArray[np.int64]) -> Sequence[tuple[int, int]]:
    """Return start and end index of each run of consecutive positions."""
    edges = [0, *(np.flatnonzero(np.diff(positions) != 1) + 1).tolist(), len(positions)]
    return [(start, end) for start, end in pairwise(edges) if start < end]
