"""Tool calls of answers: how many, how long they take, and how much they return (docs/SIMULATION.md).

An answer with n calls has n + 1 turns. After each turn but the last it calls a tool, waits for it and reads the result.
The tokens of results count towards the answer's context, its length and the trained tokens; they are not decoded.

Invariant: every turn has at least one decoded token, and the answer keeps to its token budget.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

import msgspec
import numpy as np
from numpy.typing import NDArray

from dora.sim.portable import exp


class Call(NamedTuple):
    """One call of an answer."""

    at: int  #: tokens of the answer before the call, earlier results included
    latency_s: float
    num_tokens: int  #: of its result


class Tools(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The distribution of tool calls. Latencies are log-normal and truncated at `latency_max_s`."""

    calls: tuple[float, ...] = ()  #: weights of answers with 0, 1, 2, ... calls; empty: no calls
    latency_median_s: float = 0.17
    latency_sigma: float = 1.35
    latency_max_s: float = 4.0
    result_tokens: int = 567
    stuck_share: float = 0.0  #: share of calls that hang until they are killed; their result is empty
    stuck_s: float = 60.0  #: time after which a stuck call is killed

    @property
    def max_turns(self) -> int:
        """The largest number of turns in one answer."""
        return max(1, len(self.calls))

    @property
    def longest_s(self) -> float:
        """The longest time that a call can take."""
        if self.max_turns == 1:
            return 0.0
        return max(self.latency_max_s, self.stuck_s if self.stuck_share else 0.0)

    def draw(
        self, turns: NDArray[np.int64], *, random: np.random.Generator, cap: int
    ) -> tuple[list[list[int]], list[list[tuple[Call, ...]]]]:
        """Return lengths and calls by group and sibling. `turns`: lengths of `max_turns` turns per answer."""
        groups, siblings, most = turns.shape
        weights = np.asarray(self.calls) / sum(self.calls)
        num_calls = random.choice(most, size=(groups, siblings), p=weights)
        shape = (groups, siblings, most - 1)
        latency = self.latency_median_s * exp(self.latency_sigma * random.standard_normal(shape))
        stuck = random.random(shape) < self.stuck_share
        latency = np.where(stuck, self.stuck_s, np.minimum(latency, self.latency_max_s))
        results = np.where(stuck, 0, self.result_tokens)
        lengths, calls = [], []
        for rows in zip(turns.tolist(), num_calls.tolist(), latency.tolist(), results.tolist(), strict=True):
            made = [
                lay_out(turn[: n + 1], called=zip(wait[:n], size[:n], strict=True), cap=cap)
                for turn, n, wait, size in zip(*rows, strict=True)
            ]
            lengths.append([tokens for tokens, _ in made])
            calls.append([found for _, found in made])
        return lengths, calls


def lay_out(turns: Sequence[int], *, called: Iterable[tuple[float, int]], cap: int) -> tuple[int, tuple[Call, ...]]:
    """Return the length and the calls of one answer, cut at `cap`. A result is cut so that one token can follow."""
    tokens, calls = turns[0], []
    for turn, (latency_s, result) in zip(turns[1:], called, strict=True):
        if tokens >= cap:
            break
        calls.append(Call(tokens, latency_s, min(result, cap - tokens - 1)))
        tokens += calls[-1].num_tokens + turn
    return min(tokens, cap), tuple(calls)
