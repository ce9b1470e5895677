"""The answers of the simulated policy: prompt sizes, answer lengths, tool calls and rewards, by group.

Invariant: an answer depends on (seed, group, sibling) alone, so every strategy, split and fleet gets the same answers.
Lengths come from a regime (docs/SIMULATION.md) or from a recorded run. A regime gives the length of a turn; an answer
without tool calls is one turn.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final, Protocol

import numpy as np

from dora.sim.portable import Floats, exp, normal_cdf, power
from dora.sim.tools import Call, Tools

#: Number of groups to draw at a time.
BLOCK: Final = 512
#: The hardest prompt is passed with probability 1 - HARDNESS.
HARDNESS: Final = 0.8


# -- length from a standard normal z -------------------------------------------------------------------------------


def _early_base_model(z: Floats) -> Floats:
    """A: log-normal body, Pareto tail above the ninetieth percentile."""
    above = np.maximum(normal_cdf(-z), 1e-12)  # 1 - u, exact where u is close to 1
    return np.where(above > 0.1, 465 * exp(0.629 * z), 1041 * power(0.1 / above, 1 / 2.7))


def _reasoner_at_a_cap(z: Floats) -> Floats:
    """B: nearly all variance is between prompts, and 15 % reach the cap."""
    return 9964 * exp(np.where(z < 0, 1.10, 0.457) * z)


def _headline(z: Floats) -> Floats:
    """D: the workload of arXiv 2604.26256, with a p99 above ten times the median."""
    return 1150 * exp(1.30 * z)


def _search_agent(z: Floats) -> Floats:
    """S: a turn of a search agent between two calls; mean 78, p99 358."""
    return 57.1 * exp(0.789 * z)


@dataclass(frozen=True, slots=True)
class Regime:
    """Lengths as a function of a normal variable z, part of which siblings share."""

    length: Callable[[Floats], Floats]
    shared: float  #: rho: share of the variance of z that siblings have in common
    cap: int


REGIMES: Final = {
    "A": Regime(_early_base_model, shared=0.22, cap=30_000),
    "B": Regime(_reasoner_at_a_cap, shared=0.95, cap=16_000),
    "D": Regime(_headline, shared=0.4, cap=30_000),
    "S": Regime(_search_agent, shared=0.22, cap=4096),  # share and cap are not published; these are our choice
}

#: C: normal components (not log-normal), one drawn per prompt: weights, means, deviations, and the cap.
MIXTURE: Final = (
    (0.359, 0.074, 0.373, 0.194),
    (4959.0, 12720.0, 9175.0, 17655.0),
    (2192.0, 6067.0, 3416.0, 5267.0),
    65_536,
)


@dataclass(frozen=True, slots=True)
class SimulatedGroup:
    """The answers to one prompt."""

    prompt_tokens: int
    lengths: list[int]  #: tokens decoded and tokens returned by tools
    rewards: list[float]
    calls: Sequence[tuple[Call, ...]] = ()  #: by sibling; empty if there are no tool calls

    def calls_of(self, sibling: int) -> tuple[Call, ...]:
        """Return the tool calls of one answer."""
        return self.calls[sibling] if self.calls else ()


class AnswerSource(Protocol):
    """What a world simulates: groups of answers by number."""

    def group(self, number: int) -> SimulatedGroup:
        """Return the answers of a group; before its admission, only its prompt has to be right."""

    def forget_before(self, number: int) -> None:
        """Drop groups below `number`, which are not requested again."""


class Answers:
    """Groups by number, drawn in blocks, and kept until `forget_before`."""

    def __init__(
        self,
        regime: str,
        *,
        seed: int,
        group_size: int,
        cap: int | None = None,
        prompt_tokens: int = 200,
        scale: float = 1.0,
        recorded: Sequence[SimulatedGroup] = (),
        tools: Tools | None = None,
    ) -> None:
        self.regime, self.seed, self.group_size = regime, seed, group_size
        self.prompt_tokens, self.scale, self.recorded = prompt_tokens, scale, recorded
        self.tools = tools or Tools()
        self.cap = cap if cap is not None else cap_of(regime)
        self._blocks: dict[int, list[SimulatedGroup]] = {}

    def group(self, number: int) -> SimulatedGroup:
        """Return the answers of group `number`."""
        if self.recorded:
            return self.recorded[number % len(self.recorded)]
        block, place = divmod(number, BLOCK)
        if block not in self._blocks:
            self._blocks[block] = self._draw(block)
        return self._blocks[block][place]

    def forget_before(self, number: int) -> None:
        """Drop groups below `number`, which must not be requested again."""
        for block in [b for b in self._blocks if (b + 1) * BLOCK <= number]:
            del self._blocks[block]

    def _draw(self, block: int) -> list[SimulatedGroup]:
        random = np.random.default_rng((self.seed, block))
        z_prompt = random.standard_normal((BLOCK, 1, 1))
        z_turn = random.standard_normal((BLOCK, self.group_size, self.tools.max_turns))
        component = random.random((BLOCK, 1, 1))
        turns = _mixture(z_turn, component) if self.regime == "C" else _regime(self.regime, z_prompt, z_turn)
        whole = np.clip(np.floor(turns * self.scale), 1, self.cap).astype(np.int64)
        passes = 1 - HARDNESS * normal_cdf(z_prompt[:, :, 0])
        rewards = (random.random((BLOCK, self.group_size)) < passes).astype(np.float64).tolist()
        if self.tools.max_turns == 1:
            return [
                SimulatedGroup(self.prompt_tokens, n, r) for n, r in zip(whole[:, :, 0].tolist(), rewards, strict=True)
            ]
        lengths, calls = self.tools.draw(whole, random=random, cap=self.cap)
        return [SimulatedGroup(self.prompt_tokens, *parts) for parts in zip(lengths, rewards, calls, strict=True)]


def _regime(name: str, z_prompt: Floats, z_turn: Floats) -> Floats:
    regime = REGIMES[name]
    return regime.length(math.sqrt(regime.shared) * z_prompt + math.sqrt(1 - regime.shared) * z_turn)


def _mixture(z_turn: Floats, component: Floats) -> Floats:
    weights, means, deviations, _ = MIXTURE
    which = np.searchsorted(np.cumsum(weights)[:-1], component)
    return np.asarray(means)[which] + np.asarray(deviations)[which] * z_turn


def cap_of(regime: str) -> int:
    """Return the longest answer of a regime."""
    return MIXTURE[3] if regime == "C" else REGIMES[regime].cap
