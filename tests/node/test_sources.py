"""From whom each receiver of a version takes it."""

from __future__ import annotations

import pytest

from dora.node.sources import Holding, choose

_, S, A, X = Holding.NOTHING, Holding.SOME, Holding.ALL, Holding.GONE


@pytest.mark.parametrize(
    ("chain", "sources"),
    [
        pytest.param([_, _, _, A], [[3], [], [], []], id="the maker, the last one, gives it to the first"),
        pytest.param([S, _, _, A], [[3], [0, 3], [], []], id="who has begun passes it on"),
        pytest.param([A, S, _, A], [[], [0, 3], [1, 0, 3], []], id="a predecessor before all others"),
        pytest.param([X, _, _, A], [[3], [3], [], []], id="who is gone holds up nobody"),
        pytest.param([S, X, _, A], [[3], [0, 3], [0, 3], []], id="the nearest that is not gone"),
        pytest.param([_, A, A, _], [[1, 2], [], [], [2, 1]], id="a maker that has lost it is the last to receive it"),
        pytest.param([_, _, X], [[], [], []], id="nobody has it"),
        pytest.param([A, A, A, A, _], [[], [], [], [], [3, 0, 1, 2]], id="at most three others"),
    ],
)
def test_each_takes_it_from_the_one_before_it(chain: list[Holding], sources: list[list[int]]) -> None:
    assert choose(chain) == sources
