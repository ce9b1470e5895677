"""From whom nodes receive a version: properties of the choice alone, and of a spread that follows it step by step."""

from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dora.node.sources import MAX_OTHERS, Stock, choose

ALL, SOME, NOTHING, GONE = Stock.ALL, Stock.SOME, Stock.NOTHING, Stock.GONE
CHAINS = st.lists(st.sampled_from(Stock), max_size=12)
#: Pieces of the version in a simulated spread.
PIECES = 4


@pytest.mark.parametrize(
    ("chain", "chosen"),
    [
        pytest.param([NOTHING, NOTHING, NOTHING, ALL], [[3], [], [], []], id="the first one takes it from the maker"),
        pytest.param([SOME, NOTHING, NOTHING, ALL], [[3], [0, 3], [], []], id="the next one takes it from the first"),
        pytest.param([ALL, SOME, SOME, ALL], [[], [0, 3], [1, 0, 3], []], id="complete ones are named as well"),
        pytest.param([SOME, GONE, SOME, ALL], [[3], [0, 3], [0, 3], []], id="one that is gone is passed over"),
        pytest.param([GONE, SOME, ALL], [[2], [2], []], id="behind one that is gone is the first"),
        pytest.param([NOTHING, ALL, GONE], [[1], [], [1]], id="a later one that has it, after the maker is gone"),
        pytest.param([SOME, NOTHING, GONE], [[], [0], []], id="nobody has it"),
        pytest.param([], [], id="nobody"),
    ],
)
def test_sources(chain: list[Stock], chosen: list[list[int]]) -> None:
    assert choose(chain) == chosen


@given(chain=CHAINS)
def test_a_source_is_complete_or_earlier_in_the_chain_so_that_nobody_waits_in_a_circle(chain: list[Stock]) -> None:
    for position, sources in enumerate(choose(chain)):
        assert position not in sources
        assert len(sources) == len(set(sources)) <= MAX_OTHERS + 1
        for source in sources:
            assert chain[source] is ALL or (source < position and chain[source] is SOME)


@given(chain=CHAINS)
def test_the_maker_and_whoever_receives_pass_the_version_on_to_one_that_is_alive(chain: list[Stock]) -> None:
    """So that no link carries it twice, but that of a complete one behind the front of the chain."""
    preferred = [sources[0] for i, sources in enumerate(choose(chain)) if sources and chain[i] is not GONE]
    for source in preferred:
        is_in_between = chain[source] is ALL and source < len(chain) - 1
        assert preferred.count(source) <= 1 + is_in_between


@given(chain=CHAINS)
def test_one_that_lacks_the_version_waits_only_for_a_predecessor_that_has_not_begun_or_for_a_maker(
    chain: list[Stock],
) -> None:
    for position, sources in enumerate(choose(chain)):
        alive = [held for held in chain[:position] if held is not GONE]
        if not sources and chain[position] is not ALL:
            assert ALL not in chain if not alive else alive[-1] is NOTHING


class Spread:
    """A version on its way to nodes, some of which vanish; the maker, at the end of the chain, stays."""

    def __init__(self, receivers: int) -> None:
        self.pieces = [0] * receivers + [PIECES]
        self.chain = [NOTHING] * receivers + [ALL]
        self.from_maker: set[int] = set()  # who has taken a piece from the maker

    def step(self, position: int) -> None:
        """Let a receiver take one piece from the first of its sources that can give it."""
        if self.chain[position] in (ALL, GONE) or not (sources := choose(self.chain)[position]):
            return
        self.chain[position] = SOME
        able = [source for source in sources if self.pieces[source] > self.pieces[position]]
        if not able:
            return
        if able[0] == len(self.chain) - 1:
            self.from_maker.add(position)
        self.pieces[position] += 1
        if self.pieces[position] == PIECES:
            self.chain[position] = ALL

    def vanish(self, position: int) -> None:
        self.chain[position], self.pieces[position] = GONE, 0

    @property
    def is_done(self) -> bool:
        return all(held in (ALL, GONE) for held in self.chain)


@given(receivers=st.integers(0, 8), seed=st.integers(0, 2**32), vanishing=st.sets(st.integers(0, 7)))
def test_all_that_stay_receive_the_version_whoever_vanishes(receivers: int, seed: int, vanishing: set[int]) -> None:
    rng, spread = random.Random(seed), Spread(receivers)
    leaving = [position for position in vanishing if position < receivers]
    for _ in range(receivers + 2 * PIECES + len(leaving) * (PIECES + 1)):  # rounds, in each of which all go on
        if leaving and rng.random() < 0.3:
            spread.vanish(leaving.pop())
        for position in rng.sample(range(receivers), receivers):
            spread.step(position)
    assert spread.is_done
    assert [held for held in spread.chain if held is not GONE] == [ALL] * spread.chain.count(ALL)
