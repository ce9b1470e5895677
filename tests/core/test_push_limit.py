"""The number of pushes at once follows what store and links carry."""

from __future__ import annotations

import pytest

from dora.core.push_limit import PATIENCE, PushLimit

LINK_S = 8.0


def waves(limit: PushLimit, *, store: float, instances: int, count: int) -> list[int]:
    """Push to a fleet `count` times, as many at once as the limit says; a store carries `store` pushes at full speed.

    Return the limit after each time.
    """
    found, now = [], limit._since + 1.0
    for _ in range(count):
        left = instances
        while left:
            among = min(left, limit.limit)
            took_s = LINK_S * max(1.0, among / store)
            limit.reach(now + took_s, under_way=among)
            for _ in range(among):
                limit.learn(now, now + took_s, among=among)
            now += took_s + 0.1
            left -= among
        found.append(limit.limit)
    return found


@pytest.mark.parametrize(("store", "found"), [(0.2, 1), (1.5, 2), (4.0, 4), (6.0, 8), (25.0, 32), (1000.0, 128)])
def test_it_finds_what_the_store_carries(store: float, found: int) -> None:
    reached = waves(PushLimit(), store=store, instances=64, count=60)
    usual = max(set(reached), key=reached.count)
    assert usual == found
    assert max(reached[10:]) <= 2 * found


def test_it_grows_again_when_the_store_carries_more() -> None:
    limit = PushLimit()
    waves(limit, store=4, instances=64, count=20)
    assert limit.limit <= 8
    assert waves(limit, store=1000, instances=64, count=2 * PATIENCE)[-1] >= 64


def test_a_fleet_that_is_too_small_to_try_more_teaches_nothing() -> None:
    limit = PushLimit()
    assert waves(limit, store=1000, instances=2, count=10)[-1] == 4
    assert waves(limit, store=0.1, instances=2, count=10)[-1] == 4


def test_pushes_that_fail_together_halve_it() -> None:
    limit = PushLimit(limit=8)
    limit.failed(among=5)
    assert limit.limit == 8
    for left in (4, 2, 1, 1):
        limit.failed(among=limit.limit)
        assert limit.limit == left
