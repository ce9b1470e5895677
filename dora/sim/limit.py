"""The limit: a lower bound of the step time of any scheduler, from the workload and its lengths (docs/SIMULATION.md).

For `dora` it is T >= max(T_train, W / C, (L + tau) / (K + 1)); strategies with barriers have other limits. Every term
is a bound: T_train assumes a perfectly balanced trainer; W / C assumes that every instance always has the batch that
fills its KV or its slots, and reads each prompt once per group; L is the time of the slowest answer alone, without a
queue, with its tool calls and the reading of their results. Results are read, not decoded; a call holds a slot and no
KV. tau is the time from the slowest answer to the next version: its micro-batch, one update, and writing the version.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from statistics import mean
from typing import Final

import msgspec
import numpy as np

from dora.sim.answers import Answers, Floats, SimulatedGroup
from dora.sim.server import SimulatedServer
from dora.sim.workload import Workload

#: Maximum number of steps to average over; a step is a block of consecutive groups.
MAX_BLOCKS: Final = 40
#: Assumed share of groups that are not filtered, if none in the sample is kept; such a job fails with too many top-ups.
_KEPT_AT_LEAST: Final = 0.01


class Limit(msgspec.Struct, frozen=True):
    """Seconds per step, term by term."""

    train_s: float  #: T_train
    decode_s: float  #: W / C
    slowest_s: float  #: L
    last_s: float  #: tau
    step_s: float  #: the limit of the strategy
    rule: str  #: the largest term: train, decode or slowest


def limit(workload: Workload, *, seed: int) -> Limit:
    """Return the limit of a workload under its strategy."""
    answers, n = workload.answers(seed=seed), _num_asked(workload)
    blocks = [_trained(workload, answers, first=block * n) for block in range(min(MAX_BLOCKS, workload.job.steps))]
    terms = [_terms(workload, groups) for groups in blocks]
    train_s, decode_s, slowest_s, last_s, first_s = np.mean(terms, axis=0).tolist()
    if workload.job.filter_zero_variance:
        decode_s /= max(_KEPT_AT_LEAST, mean(len(set(g.rewards)) > 1 for groups in blocks for g in groups))
    bounds = _bounds(workload, train_s=train_s, decode_s=decode_s, slowest_s=slowest_s, last_s=last_s, first_s=first_s)
    rule = max(bounds, key=lambda name: bounds[name])
    return Limit(train_s, decode_s, slowest_s, last_s, bounds[rule], rule)


def _bounds(
    workload: Workload, *, train_s: float, decode_s: float, slowest_s: float, last_s: float, first_s: float
) -> dict[str, float]:
    rules = workload.rules
    if workload.is_shared:
        after = train_s + workload.publish_s
        carried = {} if rules.in_flight else {"slowest": slowest_s + after}
        return {"decode": decode_s + after, **carried}
    bounds = {"train": train_s, "decode": decode_s, "slowest": (slowest_s + last_s) / (rules.max_staleness + 1)}
    if not rules.bounded:
        del bounds["slowest"]  # a long answer may be trained in any later step
    if rules.batched:
        bounds["slowest"] = slowest_s
    elif rules.max_staleness == 0:
        bounds["train"] = first_s + train_s
    return bounds


def _terms(workload: Workload, groups: Sequence[SimulatedGroup]) -> tuple[float, float, float, float, float]:
    """Return T_train, W / C, L, tau and the time of the first complete group, for one block of N groups."""
    block = _Block(groups)
    prompts, lengths = block.prompts, block.lengths
    train, server = workload.train, workload.fleet.server
    tokens = float(lengths.sum() + prompts.sum() * workload.job.group_size)
    train_s = tokens / (workload.rank_tokens_s * workload.num_ranks) + train.updates * train.update_s
    alone = _alone_s(block, server=server)
    row, column = np.unravel_index(int(alone.argmax()), alone.shape)
    around_s = workload.push_s + workload.grade.median_s
    last_s = (prompts[row] + lengths[row, column]) / workload.rank_tokens_s + train.update_s + workload.publish_s
    read_s = float(sum(server.prefill_s(g.prompt_tokens) for g in groups) + block.results_s(server).sum())
    held_s = float(block.waited_s.sum()) if workload.orchestration.calls == "keep" else 0.0
    decode_s = (_decode_s(block, server=server, called_s=held_s) + read_s) / _speed(workload)
    first_s = around_s + float(alone.max(axis=1).min())
    return train_s, decode_s, around_s + float(alone.max()), float(last_s), first_s


class _Block:
    """N groups as arrays: rows are groups, columns siblings."""

    def __init__(self, groups: Sequence[SimulatedGroup]) -> None:
        self.prompts: Floats = np.array([g.prompt_tokens for g in groups], dtype=np.float64)
        self.lengths: Floats = np.array([g.lengths for g in groups], dtype=np.float64)
        self.decoded = self.lengths.copy()  #: tokens, without those of results
        self.before = self.lengths * (self.lengths - 1) / 2  #: answer tokens before each decoded one, summed over these
        self.waited_s = np.zeros_like(self.lengths)  #: for tools
        made = ((row, sibling, g.calls_of(sibling)) for row, g in enumerate(groups) for sibling in range(len(g.calls)))
        self._calls = [(row, sibling, call) for row, sibling, calls in made for call in calls]
        for row, sibling, call in self._calls:
            self.decoded[row, sibling] -= call.num_tokens
            self.before[row, sibling] -= call.num_tokens * (call.at + (call.num_tokens - 1) / 2)
            self.waited_s[row, sibling] += call.latency_s

    def results_s(self, server: SimulatedServer) -> Floats:
        """Return the seconds that each answer's server takes to read its tool results."""
        seconds = np.zeros_like(self.lengths)
        for row, sibling, call in self._calls:
            seconds[row, sibling] += server.prefill_s(call.num_tokens, cached=int(self.prompts[row]) + call.at)
        return seconds


def _num_asked(workload: Workload) -> int:
    """Return the number of groups generated for one step, discarded ones included."""
    n, rules = workload.job.groups_per_step, workload.rules
    return math.ceil(rules.oversample * n) if rules.discards else n


def _trained(workload: Workload, answers: Answers, *, first: int) -> list[SimulatedGroup]:
    """Return N groups; with over-sampling, the N that would complete first if each had the fleet to itself."""
    n = workload.job.groups_per_step
    groups = [answers.group(first + i) for i in range(_num_asked(workload))]
    if len(groups) > n:
        slowest = _alone_s(_Block(groups), server=workload.fleet.server).max(axis=1)
        groups = [groups[i] for i in np.argsort(slowest, kind="stable")]
    return groups[:n]


def _alone_s(block: _Block, *, server: SimulatedServer) -> Floats:
    """Return the seconds of prefill, decoding and tool calls of each answer at batch 1."""
    prompts, decode = block.prompts, server.decode
    read_s = prompts * (server.prefill_s_per_token + server.prefill_s_per_token2 * prompts / 2)
    context = block.decoded * prompts[:, None] + block.before
    decode_s = block.decoded * (decode.base_s + decode.per_request_s) + decode.per_token_s * context
    return np.asarray(read_s[:, None] + decode_s + block.results_s(server) + block.waited_s)


def _decode_s(block: _Block, *, server: SimulatedServer, called_s: float) -> float:
    """Return the instance-seconds of decoding, if the batch always fills the KV, or the slots that calls leave, which
    hold some for `called_s`."""
    grown, decoded, prompts = float(block.before.sum()), block.decoded, block.prompts
    shared = float((decoded.max(axis=1) * prompts).sum())  # a prompt is in KV once, until its slowest sibling ends
    read = grown + float((decoded.sum(axis=1) * prompts).sum())
    tokens = float(decoded.sum())
    steps = max((grown + shared) / server.kv_tokens, tokens / server.slots)
    decode = server.decode
    rest_s = tokens * decode.per_request_s + read * decode.per_token_s
    slots_s = tokens * decode.base_s + rest_s + called_s  # the least that the answers hold
    return max(steps * decode.base_s + rest_s, slots_s / server.slots)


def _speed(workload: Workload) -> float:
    """Return the number of instances, with slow ones weighted by their speed."""
    slow = min(workload.fleet.slow_instances, workload.num_instances)
    return workload.num_instances - slow * (1 - workload.fleet.slow_speed)
