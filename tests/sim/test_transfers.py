"""Transfers share the store in equal parts, and none exceeds its link."""

from __future__ import annotations

import random
from fractions import Fraction

import pytest

from dora.core.ids import InstanceId
from dora.sim.transfers import Transfers


def ends(transfers: Transfers, begins: list[tuple[float, int]]) -> dict[int, float]:
    """Begin transfers at their times; return when each has ended."""
    found: dict[int, float] = {}
    left = sorted(begins)
    while True:
        at = transfers.next_at()
        if left and (at is None or left[0][0] < at):
            begin, id = left.pop(0)
            transfers.reach(begin)
            transfers.begin(InstanceId(id))
        elif at is not None:
            transfers.reach(at)
            found[transfers.ended()] = at
        else:
            return found


def test_a_transfer_alone_has_its_link() -> None:
    transfers = Transfers(num_bytes=80.0, link_bytes_s=8.0, store_bytes_s=200.0)
    assert ends(transfers, [(5.0, 0)]) == {0: pytest.approx(15.0)}


def test_as_many_as_the_store_carries_are_not_slower() -> None:
    transfers = Transfers(num_bytes=80.0, link_bytes_s=8.0, store_bytes_s=32.0)
    assert set(ends(transfers, [(0.0, i) for i in range(4)]).values()) == {10.0}


def test_more_share_it() -> None:
    transfers = Transfers(num_bytes=80.0, link_bytes_s=8.0, store_bytes_s=32.0)
    assert ends(transfers, [(0.0, i) for i in range(8)]) == {i: pytest.approx(20.0) for i in range(8)}


def test_a_transfer_that_stops_leaves_its_share_to_the_others() -> None:
    transfers = Transfers(num_bytes=80.0, link_bytes_s=8.0, store_bytes_s=8.0)
    for i in range(2):
        transfers.begin(InstanceId(i))
    transfers.reach(10.0)  # 40 bytes each
    transfers.stop(InstanceId(0))
    assert transfers.next_at() == pytest.approx(15.0)
    transfers.reach(15.0)
    assert transfers.ended() == 1
    assert transfers.next_at() is None


def test_what_servers_pass_on_is_not_shared() -> None:
    transfers = Transfers(num_bytes=80.0, link_bytes_s=8.0, store_bytes_s=4.0, relay=True)
    assert set(ends(transfers, [(0.0, i) for i in range(4)]).values()) == {20.0}


@pytest.mark.parametrize("seed", range(20))
def test_every_byte_is_counted_as_in_exact_steps(seed: int) -> None:
    draw = random.Random(seed)
    size, link, store = draw.randint(50, 200), draw.randint(5, 20), draw.randint(10, 40)
    begins = [(float(draw.randint(0, 40)), i) for i in range(draw.randint(1, 8))]
    found = ends(Transfers(num_bytes=size, link_bytes_s=link, store_bytes_s=store), begins)
    assert found == {id: pytest.approx(float(at)) for id, at in exact(begins, size, link, store).items()}


def exact(begins: list[tuple[float, int]], size: int, link: int, store: int) -> dict[int, Fraction]:
    """The same by the definition: every transfer's bytes, from change to change, in fractions."""
    waiting = sorted((Fraction(at), id) for at, id in begins)
    left: dict[int, Fraction] = {}
    found: dict[int, Fraction] = {}
    now = Fraction(0)
    while waiting or left:
        rate = min(Fraction(link), Fraction(store, max(1, len(left))))
        changes = [now + min(left.values()) / rate] if left else []
        changes += [waiting[0][0]] if waiting else []
        following = min(changes)
        left = {id: bytes - (following - now) * rate for id, bytes in left.items()}
        now = following
        for id in [id for id, rest in left.items() if rest == 0]:
            found[id] = now
            del left[id]
        while waiting and waiting[0][0] == now:
            left[waiting.pop(0)[1]] = Fraction(size)
    return found
