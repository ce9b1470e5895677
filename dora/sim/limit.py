"""The limit: a lower bound of the step time of any scheduler, from the workload and its lengths (docs/SIMULATION.md).

For `dora` it is T >= max(T_train, W / C, (L + tau) / (K + 1)); strategies with barriers have other limits. Every term
is a bound: T_train assumes a perfectly balanced trainer; W / C assumes that every instance always has the batch that
fills its KV or its slots, and reads each prompt once per group; L is the time of the slowest answer alone, without a
queue, with its tool calls and the reading of their results. Results are read, not decoded; a call holds a slot and no
KV. tau is the time from the slowest answer to the next version: its micro-batch, one update, and writing the version.

The terms are means over the blocks of the measured steps: block s is groups s N to (s + 1) N - 1 of the prompt stream,
without those that are filtered. The floor is a sharper bound, for versions of N groups each that are published in
order; `dora` can get below it where two versions follow each other fast and one takes the groups of both.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from itertools import islice
from typing import NamedTuple

import msgspec
import numpy as np

from dora.sim.answers import SimulatedGroup
from dora.sim.portable import Floats
from dora.sim.server import SimulatedServer
from dora.sim.workload import Workload


class Limit(msgspec.Struct, frozen=True):
    """Seconds per step, term by term."""

    train_s: float  #: T_train
    decode_s: float  #: W / C
    slowest_s: float  #: L
    last_s: float  #: tau
    step_s: float  #: the limit of the strategy
    rule: str  #: the largest term: train, decode or slowest
    floor_s: float  #: lower bound if every version has N groups; never below `step_s`


class _Terms(NamedTuple):
    """Seconds of one block."""

    train_s: float
    decode_s: float
    slowest_s: float
    last_s: float
    first_s: float  #: until its first group is complete


def limit(workload: Workload, *, seed: int) -> Limit:
    """Return the limit of a workload under its strategy, over the blocks of the measured steps."""
    return limits([workload], seed=seed)[0]


def limits(workloads: Sequence[Workload], *, seed: int) -> list[Limit]:
    """Return the limits of workloads that differ in their split only."""
    first, last = window(workloads[0].job.steps, max_staleness=workloads[0].rules.max_staleness)
    read = islice(_blocks(workloads[0], seed=seed), last + 1)
    blocks = [(_Block(kept), _Block([*kept, *filtered])) for kept, filtered in read]
    return [_limit(workload, [_terms(workload, *block) for block in blocks], first=first) for workload in workloads]


def _limit(workload: Workload, blocks: Sequence[_Terms], *, first: int) -> Limit:
    terms = _Terms(*np.mean(blocks[first + 1 :], axis=0).tolist())
    bounds = _bounds(workload, terms)
    rule = max(bounds, key=lambda name: bounds[name])
    floor_s = max(bounds[rule], _floor_s(workload, blocks, first=first + 1))
    return Limit(terms.train_s, terms.decode_s, terms.slowest_s, terms.last_s, bounds[rule], rule, floor_s)


def window(steps: int, *, max_staleness: int) -> tuple[int, int]:
    """Return the steps (first, last] that are the steady state of a job of at least two steps: without the first
    2 (K + 1), the warm-up, and the last K + 1, whose deadlines are shortened by the end of the job."""
    margin = max_staleness + 1
    first = min(2 * margin - 1, (steps - 1) // 3)
    return first, max(first + 1, steps - 1 - margin)


def _bounds(workload: Workload, terms: _Terms) -> dict[str, float]:
    rules = workload.rules
    if workload.is_shared:
        after = terms.train_s + workload.publish_s
        carried = {} if rules.in_flight else {"slowest": terms.slowest_s + after}
        return {"decode": terms.decode_s + after, **carried}
    slowest_s = (terms.slowest_s + terms.last_s) / (rules.max_staleness + 1)
    bounds = {"train": terms.train_s, "decode": terms.decode_s, "slowest": slowest_s}
    if not rules.bounded:
        del bounds["slowest"]  # a long answer may be trained in any later step
    if rules.batched:
        bounds["slowest"] = terms.slowest_s
    elif rules.max_staleness == 0:
        bounds["train"] = terms.first_s + terms.train_s
    return bounds


def _floor_s(workload: Workload, blocks: Sequence[_Terms], *, first: int) -> float:
    """Return the seconds per step from block `first` on if every version has N groups; 0 if nothing is known.

    publish(v + K + 1) = max(publish(v + K) + T_train, publish(v) + L_v + tau), where L_v is of the block that step
    v + K trains.
    """
    rules = workload.rules
    if workload.is_shared or not (rules.streamed and rules.bounded):
        return 0.0
    published = [0.0]
    for step, block in enumerate(blocks):
        train_s = block.train_s if rules.max_staleness else block.first_s + block.train_s
        answered = published[max(0, step - rules.max_staleness)] + block.slowest_s
        published.append(max(published[-1] + train_s, answered + block.last_s))
    return (published[-1] - published[first]) / (len(blocks) - first)


def _terms(workload: Workload, block: _Block, everything: _Block) -> _Terms:
    """Return the terms of one block: of the N groups that are trained, and of those with the ones only decoded."""
    prompts, lengths = block.prompts, block.lengths
    train, server = workload.train, workload.server
    tokens = float(lengths.sum() + prompts.sum() * workload.job.group_size)
    train_s = tokens / (workload.rank_tokens_s * workload.num_ranks) + train.updates * train.update_s
    alone = block.alone_s(server)
    row, column = np.unravel_index(int(alone.argmax()), alone.shape)
    around_s = workload.push_s + workload.grade.median_s
    last_s = (prompts[row] + lengths[row, column]) / workload.rank_tokens_s + train.update_s + workload.publish_s
    read_s = float((everything.prompts * server.prefill_s_per_token).sum())
    read_s += float((everything.prompts**2 * server.prefill_s_per_token2 / 2).sum())
    read_s += float(everything.results_s(server).sum())
    held_s = float(everything.waited_s.sum()) if workload.orchestration.calls == "keep" else 0.0
    decode_s = (_decode_s(everything, server=server, called_s=held_s) + read_s) / _speed(workload)
    first_s = around_s + float(alone.max(axis=1).min())
    return _Terms(train_s, decode_s, around_s + float(alone.max()), float(last_s), first_s)


def alone_s(group: SimulatedGroup, sibling: int, *, server: SimulatedServer) -> float:
    """Return the seconds of one answer at batch 1, with its tool calls."""
    return float(_Block([group]).alone_s(server)[0, sibling])


class _Block:
    """N groups as arrays: rows are groups, columns siblings."""

    def __init__(self, groups: Sequence[SimulatedGroup]) -> None:
        self.prompts: Floats = np.array([g.prompt_tokens for g in groups], dtype=np.float64)
        self.lengths: Floats = np.array([g.lengths for g in groups], dtype=np.float64)
        self.decoded = self.lengths.copy()  #: tokens, without tokens of tool results
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

    def alone_s(self, server: SimulatedServer) -> Floats:
        """Return the seconds of prefill, decoding and tool calls of each answer at batch 1."""
        prompts, decode = self.prompts, server.decode
        read_s = prompts * (server.prefill_s_per_token + server.prefill_s_per_token2 * prompts / 2)
        context = self.decoded * prompts[:, None] + self.before
        decode_s = self.decoded * (decode.base_s + decode.per_request_s) + decode.per_token_s * context
        longer_s, tokens = server.drafting(1)
        decode_s = (decode_s + self.decoded * longer_s) / tokens
        return np.asarray(read_s[:, None] + decode_s + self.results_s(server) + self.waited_s)


def _blocks(workload: Workload, *, seed: int) -> Iterator[tuple[list[SimulatedGroup], list[SimulatedGroup]]]:
    """Yield, step by step, the groups that it trains and those that are filtered. With over-sampling a step trains the
    N groups that would complete first if each had the fleet to itself."""
    n, rules = workload.job.groups_per_step, workload.rules
    num_asked = math.ceil(rules.oversample * n) if rules.discards else n
    most = (1 + workload.job.max_top_up) * num_asked  # a step tops up with no more
    answers, number = workload.answers(seed=seed), 0
    while True:
        kept: list[SimulatedGroup] = []
        filtered: list[SimulatedGroup] = []
        while len(kept) < num_asked and len(kept) + len(filtered) < most:
            group = answers.group(number)
            given = {reward for reward in group.rewards if not math.isnan(reward)}
            is_filtered = workload.job.filter_zero_variance and len(given) == 1
            (filtered if is_filtered else kept).append(group)
            number += 1
        answers.forget_before(number)
        kept = kept or filtered  # the job fails: too many top-ups
        if num_asked > n:
            slowest = _Block(kept).alone_s(workload.server).max(axis=1)
            kept = [kept[i] for i in np.argsort(slowest, kind="stable")[:n]]
        yield kept, filtered


def _decode_s(block: _Block, *, server: SimulatedServer, called_s: float) -> float:
    """Return the instance-seconds of decoding, if the batch always fills the KV, or the slots that calls leave free.

    `called_s`: slot-seconds of calls.
    """
    grown, decoded, prompts = float(block.before.sum()), block.decoded, block.prompts
    shared = float((decoded.max(axis=1) * prompts).sum())  # a prompt is in KV once, until its slowest sibling ends
    read = grown + float((decoded.sum(axis=1) * prompts).sum())
    tokens = float(decoded.sum())
    steps = max((grown + shared) / server.kv_tokens, tokens / server.slots)
    decode = server.decode
    rest_s = tokens * decode.per_request_s + read * decode.per_token_s
    full_s = steps * decode.base_s + rest_s
    held_s = tokens * decode.base_s + rest_s  # of slots, the least that the answers need
    if (drafts := server.speculation) is not None:
        longer_s = steps * drafts.draft_s + tokens * drafts.draft_tokens * drafts.per_draft_s
        full_s = min(full_s, (full_s + longer_s) / drafts.tokens)
        held_s /= drafts.tokens
    return max(full_s, (held_s + called_s) / server.slots)


def _speed(workload: Workload) -> float:
    """Return the number of instances, with slow ones weighted by their speed."""
    slow = min(workload.fleet.slow_instances, workload.num_instances)
    return workload.num_instances - slow * (1 - workload.fleet.slow_speed)
