"""From whom a node receives a version: a pure function of who has it.

The receivers form a chain in the order of their places, with the controller last. Each takes the version from the one
before it, which passes on what it has received so far; so the maker's link, and every other one, carries it once.
Invariant: no two receivers name each other, because a receiver that is still incomplete is named only by later ones.
"""

from __future__ import annotations

from collections.abc import Sequence
from enum import Enum


class Holding(Enum):
    """What a node has of a version."""

    NOTHING = "nothing"  # it is to receive it, and has not begun
    SOME = "some"  # it receives it
    ALL = "all"
    GONE = "gone"  # the node is lost, or cannot receive it


def choose(chain: Sequence[Holding], receiver: int, *, makers: Sequence[Holding]) -> list[int]:
    """Return the sources of the receiver at this position: positions in `chain`, or -1 - i for `makers[i]`.

    Empty if it should wait for its predecessor to begin, or if nobody has the version.
    """
    complete = [i for i, held in enumerate(chain) if held is Holding.ALL and i != receiver]
    complete += [-1 - i for i, held in enumerate(makers) if held is Holding.ALL]
    for earlier in range(receiver - 1, -1, -1):
        if chain[earlier] is Holding.NOTHING:
            return []
        if chain[earlier] is not Holding.GONE:
            return [earlier, *(source for source in complete if source != earlier)]
    return complete
