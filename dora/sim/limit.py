"""The limit of system.md §3.2: what no scheduler can beat, from the workload and its own length table.

T >= max(T_train, W / C, (L + tau) / (K + 1)) for `dora`; the barrier strategies have limits of their own there. Every
term is a bound: a perfectly balanced trainer; every instance always at the batch that fills its KV or its slots, each
prompt read once per group; the slowest answer alone, without a queue. tau holds what stands between the slowest answer
and the next version: its own micro-batch, one update, and writing the version to the store.
"""

from __future__ import annotations

import math
from typing import Final

import msgspec
import numpy as np
from numpy.typing import NDArray

from dora.sim.answers import Answers, Group
from dora.sim.workload import Workload

#: Steps whose answers are averaged at most; blocks of consecutive groups in stream order.
MAX_BLOCKS: Final = 40


class Limit(msgspec.Struct, frozen=True):
    """Seconds per step, term by term."""

    train_s: float  #: T_train
    decode_s: float  #: W / C
    slowest_s: float  #: L
    last_s: float  #: tau
    step_s: float  #: what the strategy cannot beat
    rule: str  #: the term that rules: train, decode or slowest


def limit(workload: Workload, *, seed: int) -> Limit:
    """The limit of a workload under its strategy."""
    answers, n = workload.answers(seed=seed), math.ceil(workload.rules.oversample * workload.job.groups_per_step)
    terms = [_terms(workload, answers, first=block * n) for block in range(min(MAX_BLOCKS, workload.job.steps))]
    train_s, decode_s, slowest_s, last_s, first_s = np.mean(terms, axis=0).tolist()
    bounds = _bounds(workload, train_s=train_s, decode_s=decode_s, slowest_s=slowest_s, last_s=last_s, first_s=first_s)
    rule = max(bounds, key=lambda name: bounds[name])
    return Limit(train_s, decode_s, slowest_s, last_s, bounds[rule], rule)


def _bounds(
    workload: Workload, *, train_s: float, decode_s: float, slowest_s: float, last_s: float, first_s: float
) -> dict[str, float]:
    rules = workload.rules
    if workload.is_shared:
        after = train_s + workload.publish_s
        return {"decode": decode_s + after, "slowest": slowest_s + after}
    bounds = {"train": train_s, "decode": decode_s, "slowest": (slowest_s + last_s) / (rules.max_staleness + 1)}
    if not rules.bounded:
        del bounds["slowest"]  # a long answer may be trained in any later step
    if rules.batched:
        bounds["slowest"] = slowest_s
    elif rules.max_staleness == 0:
        bounds["train"] = first_s + train_s
    return bounds


def _terms(workload: Workload, answers: Answers, *, first: int) -> tuple[float, float, float, float, float]:
    """T_train, W / C, L, tau and the time of the first complete group, for one block of N groups."""
    groups = _trained(workload, answers, first=first)
    prompts = np.array([g.prompt_tokens for g in groups], dtype=np.float64)
    lengths = np.array([g.lengths for g in groups], dtype=np.float64)
    train, server = workload.train, workload.fleet.server
    tokens = float(lengths.sum() + prompts.sum() * workload.job.group_size)
    train_s = tokens / (workload.rank_tokens_s * workload.num_ranks) + train.updates * train.update_s
    alone = _alone_s(workload, prompts=prompts, lengths=lengths)
    row, column = np.unravel_index(int(alone.argmax()), alone.shape)
    around_s = workload.push_s + workload.grade.median_s
    last_s = (prompts[row] + lengths[row, column]) / workload.rank_tokens_s + train.update_s + workload.publish_s
    read_s = float(sum(server.prefill_s(g.prompt_tokens) for g in groups))
    decode_s = (_decode_s(workload, prompts=prompts, lengths=lengths) + read_s) / _speed(workload)
    if workload.job.filter_zero_variance:
        decode_s /= 1 - sum(len(set(g.rewards)) == 1 for g in groups) / len(groups)
    first_s = around_s + float(alone.max(axis=1).min())
    return train_s, decode_s, around_s + float(alone.max()), float(last_s), first_s


def _trained(workload: Workload, answers: Answers, *, first: int) -> list[Group]:
    """N groups; of those that are over-sampled, the N that would be complete first if each had a fleet of its own."""
    n, rules = workload.job.groups_per_step, workload.rules
    groups = [answers.group(first + i) for i in range(math.ceil(rules.oversample * n))]
    if len(groups) > n:
        groups.sort(key=lambda g: max(g.lengths))
    return groups[:n]


def _alone_s(workload: Workload, *, prompts: NDArray[np.float64], lengths: NDArray[np.float64]) -> NDArray[np.float64]:
    """Prefill and decode of each answer at batch 1."""
    server = workload.fleet.server
    context = prompts[:, None] + (lengths - 1) / 2
    per_step = server.decode.base_s + server.decode.per_request_s + server.decode.per_token_s * context
    read_s = prompts * (server.prefill_s_per_token + server.prefill_s_per_token2 * prompts / 2)
    return np.asarray(read_s[:, None] + lengths * per_step)


def _decode_s(workload: Workload, *, prompts: NDArray[np.float64], lengths: NDArray[np.float64]) -> float:
    """Instance-seconds of decoding, if every step's batch fills the KV or the slots."""
    server = workload.fleet.server
    grown = float((lengths * (lengths - 1)).sum() / 2)
    shared = float((lengths.max(axis=1) * prompts).sum())  # a prompt stays in KV once, as long as its slowest sibling
    read = grown + float((lengths.sum(axis=1) * prompts).sum())
    tokens = float(lengths.sum())
    steps = max((grown + shared) / server.kv_tokens, tokens / server.slots)
    decode = server.decode
    return steps * decode.base_s + tokens * decode.per_request_s + read * decode.per_token_s


def _speed(workload: Workload) -> float:
    """Instances, slow ones counted by their speed."""
    slow = min(workload.fleet.slow_instances, workload.num_instances)
    return workload.num_instances - slow * (1 - workload.fleet.slow_speed)
