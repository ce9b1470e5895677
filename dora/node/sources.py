"""The sources from which a node receives a version: a pure function of which nodes have it.

The receivers form a chain in the order of their places, with the controller behind them, and then the maker, which may
have lost the version. Each takes it from the one before it, which passes on what it has received so far; so the maker's
link, and every other one, carries it once. Invariant: no two receivers name each other, because one that is incomplete
is named only by later ones.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from enum import Enum
from typing import Final

from dora.weights.source import VersionSource


class Stock(Enum):
    """What a node has of a version."""

    NOTHING = "nothing"  # it is to receive it, and has not begun
    SOME = "some"  # it receives it
    ALL = "all"
    GONE = "gone"  # the node is lost or silent, or cannot receive it


#: How many complete ones are named beside a predecessor, in case that it fails.
MAX_OTHERS: Final = 3


def choose(chain: Sequence[Stock]) -> list[list[int]]:
    """Return the sources of each receiver, as positions in the chain, whose last one may be the maker.

    Empty if it has the version, if it should wait for its predecessor to begin, or if no node has the version.
    """
    complete = [i for i, held in enumerate(chain) if held is Stock.ALL][:MAX_OTHERS]
    found: list[list[int]] = []
    earlier: int | None = None
    for position, held in enumerate(chain):
        if held is Stock.ALL or (earlier is not None and chain[earlier] is Stock.NOTHING):
            found.append([])
        elif earlier is None:
            found.append(complete)
        else:
            found.append([earlier, *(source for source in complete if source != earlier)])
        if held is not Stock.GONE:
            earlier = position
    return found


def last_known(sources: Callable[[], list[VersionSource]]) -> Callable[[], list[VersionSource]]:
    """Return the last sources that were known, for a version that is being received."""
    last: list[VersionSource] = []

    def current() -> list[VersionSource]:
        nonlocal last
        last = sources() or last
        return last

    return current
