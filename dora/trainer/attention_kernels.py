"""Causal attention of each sequence of a row, in memory that grows with the length of the row, not with its square.

Kept for the backward pass: query, key, value (as given: not repeated to all heads, not padded), the output and one
number per query and head, the log-sum-exp of its scores. Scores are computed again, block by block: by torch's kernel
for CPUs, or, with windows and soft caps, here (FlashAttention-2, arXiv:2307.08691, algorithms 1 and 2).

Each sequence has its own calls. Forward and backward of one layer, 64 segments of 15-130 tokens, 8 heads of 64, 4 of
keys, on one CPU core: 76 ms, against 153 ms for segments of similar length padded to one call, and 2,860 ms for a dense
block mask; with 50 as soft cap 167 ms, with sinks 81 ms. Responses to a prompt that is in the row once are computed in
two calls, over themselves and over the prompt, whose results are joined.
Legend: b sequences of equal length L, H query heads, K key heads, G = H / K, R = G x n rows, D head size, n queries and
m keys of a block.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any, Final

import torch
import torch.nn.functional as F
from torch import Tensor

# Scores of a block: at most this many, 4 MiB in float32, unless that leaves fewer queries than LEAST. Measured on one
# core: 4 to 64 MiB cost up to 1.5 times as much with 2 heads and 4,096 tokens, and blocks of a whole window 1.4 times.
BLOCK_SCORES: Final = 2**20
LEAST: Final = 16


@dataclass(frozen=True, slots=True)
class Rule:
    """How scores are computed. A query sees itself and the keys before it; with a `window`, that many keys in all."""

    scale: float
    window: int | None = None
    softcap: float | None = None


# Compiled code would be compiled again for each micro-batch, whose lengths are constants to it.
@torch.compiler.disable  # type: ignore[untyped-decorator]
def attend(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    sink_H: Tensor | None,
    rule: Rule,
    *,
    lengths: tuple[int, ...] | None,
    prompts: tuple[int, ...] = (),
) -> Tensor:
    """Attention of b sequences: query [b, H, L, D], key [b, K, L, D], value [b, K, L, D_v] -> [b, L, H, D_v].

    With `lengths`, each row is cut into segments of these lengths instead. `prompts` has for each segment the index of
    its prompt's segment (-1: none), which it sees as if the prompt stood right before it.
    """
    calls = _calls(lengths or (query.shape[2],), prompts, window=rule.window)
    out: Tensor = _Attention.apply(query, key, value, sink_H, rule, calls)
    return out


@dataclass(frozen=True, slots=True)
class AttentionCall:
    """Part of the attention of a row: some queries over some keys.

    Without an offset, a segment attends to itself. Otherwise responses attend to their prompt, and the position of the
    first query is `offset` more than that of the first key.
    """

    queries: slice
    keys: slice
    offset: int = 0


def _calls(lengths: Sequence[int], prompts: Sequence[int], *, window: int | None) -> list[AttentionCall]:
    """Return a call of each segment over itself, then calls of responses over the part of their prompt that they see.

    Without a window, responses that follow each other see their prompt in a single call. Forward and backward of 8
    responses of 240 tokens, 8 heads of 64 and 4 of keys, to prompts of 100, 1,000, 4,000 tokens: 77, 288, 1,938 ms,
    against 76, 331, 2,250 ms with a masked call for each [prompt; response], and 106, 852, 8,560 ms without sharing.
    """
    spans = [slice(end - length, end) for end, length in zip(accumulate(lengths), lengths, strict=True)]
    calls = [AttentionCall(span, span) for span in spans]
    for rows, prompt in zip(spans, prompts or [-1] * len(spans), strict=True):
        if prompt < 0:
            continue
        keys, last = spans[prompt], calls[-1]
        if window is not None:
            keys = slice(max(keys.start, keys.stop - window + 1), keys.stop)
            rows = slice(rows.start, min(rows.stop, rows.start + window - 1))
        elif last.offset and last.keys == keys and last.queries.stop == rows.start:
            rows = slice(calls.pop().queries.start, rows.stop)
        if rows.start < rows.stop:
            calls.append(AttentionCall(rows, keys, offset=keys.stop - keys.start))
    return calls


class _Attention(torch.autograd.Function):
    """Attention that is computed in several calls, with sinks.

    With z and z' as the log-sum-exp of the scores of two calls, the output over the keys of both calls is the mean of
    the two outputs with weights exp(z) and exp(z'). A sink s is one more key of score s and value 0. The gradients of a
    call's keys are those of an ordinary backward pass that is given the joined output and the joined log-sum-exp.
    """

    @staticmethod
    def forward(
        ctx: Any,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        sink_H: Tensor | None,
        rule: Rule,
        calls: Sequence[AttentionCall],
    ) -> Tensor:
        (batch, heads, length, _), size_v = query.shape, value.shape[3]
        out_bLHD = query.new_empty(batch, length, heads, size_v)  # the order of dimensions that layers expect
        lse_bHL = query.new_empty(batch, heads, length, dtype=torch.promote_types(query.dtype, torch.float32))
        for call in calls:
            rows, keys = call.queries, call.keys
            part, lse = _forward(query[:, :, rows], key[:, :, keys], value[:, :, keys], call.offset, rule)
            part, before, lse_before = part.transpose(1, 2), out_bLHD[:, rows], lse_bHL[:, :, rows]
            if call.offset:
                part = torch.lerp(before, part, _as_weight((lse - lse_before).sigmoid(), part))
                lse = torch.logaddexp(lse_before, lse)
            before.copy_(part)
            lse_before.copy_(lse)
        if sink_H is not None:
            total = torch.logaddexp(lse_bHL, sink_H[:, None].to(lse_bHL.dtype))
            out_bLHD *= _as_weight((lse_bHL - total).exp(), out_bLHD)
            lse_bHL = total
        ctx.save_for_backward(query, key, value, sink_H, out_bLHD, lse_bHL)
        ctx.rule, ctx.calls = rule, calls
        return out_bLHD

    @staticmethod
    def backward(ctx: Any, grad_bLHD: Tensor) -> tuple[Tensor | None, ...]:
        query, key, value, sink_H, out_bLHD, lse_bHL = ctx.saved_tensors
        is_joined = any(call.offset for call in ctx.calls)
        wide = torch.promote_types(query.dtype, torch.float32) if is_joined else query.dtype
        grads = [torch.empty_like(t.transpose(1, 2), dtype=wide) for t in (query, key, value)]
        grad, out = grad_bLHD.transpose(1, 2), out_bLHD.transpose(1, 2)
        for call in ctx.calls:
            rows, keys = call.queries, call.keys
            grad_out, q, attended, lse = (t[:, :, rows] for t in (grad, query, out, lse_bHL))
            k, v = key[:, :, keys], value[:, :, keys]
            parts = _backward(grad_out, q, k, v, attended, lse, offset=call.offset, rule=ctx.rule)
            for whole, part, at in zip(grads, parts, (rows, keys, keys), strict=True):
                if call.offset:
                    whole[:, at] += part.transpose(1, 2)
                else:
                    whole[:, at] = part.transpose(1, 2)
        grad_sink_H = None
        if sink_H is not None:
            weight_bLH = (sink_H[:, None] - lse_bHL).exp().transpose(1, 2)
            grad_sink_H = -(weight_bLH * (grad_bLHD * out_bLHD).sum(-1)).sum((0, 1)).to(sink_H.dtype)
        return *(g.transpose(1, 2).to(query.dtype) for g in grads), grad_sink_H, None, None


def _as_weight(weight_bHL: Tensor, out_bLHD: Tensor) -> Tensor:
    """Return [b, L, H, 1], a factor of the output."""
    return weight_bHL.transpose(1, 2)[..., None].to(out_bLHD.dtype)


# -- one call ---------------------------------------------------------------------------------------------------------


def _forward(q: Tensor, k: Tensor, v: Tensor, offset: int, rule: Rule) -> tuple[Tensor, Tensor]:
    """Return the output [b, H, L, D_v] and the log-sum-exp of the scores [b, H, L]."""
    if not _is_plain(q, offset, rule):
        return _blocked_forward(q, k, v, offset, rule)
    size = max(q.shape[3], v.shape[3])  # the kernel requires equal head sizes
    q, k, w = (widened(tensor, size) for tensor in (q, k, v))
    out, lse_bHL = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
        q, k, w, is_causal=not offset, scale=rule.scale
    )
    return out[..., : v.shape[3]], lse_bHL


def _backward(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse_bHL: Tensor, *, offset: int, rule: Rule
) -> tuple[Tensor, Tensor, Tensor]:
    if not _is_plain(q, offset, rule):
        return _blocked_backward(grad, q, k, v, out, lse_bHL, offset, rule)
    sizes = q.shape[3], k.shape[3], v.shape[3]
    size = max(sizes)
    grad, q, k, v, out = (widened(tensor, size) for tensor in (grad, q, k, v, out))
    grads = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward(
        grad, q, k, v, out, lse_bHL, 0.0, not offset, scale=rule.scale
    )
    grad_q, grad_k, grad_v = (g[..., :size] for g, size in zip(grads, sizes, strict=True))
    return grad_q, grad_k, grad_v


def widened(tensor: Tensor, size: int) -> Tensor:
    """Pad the last dimension with zeros, which change no score and no gradient; no copy if it has this size already."""
    missing = size - tensor.shape[-1]
    return F.pad(tensor, (0, missing)) if missing else tensor


def _is_plain(q: Tensor, offset: int, rule: Rule) -> bool:
    """Return whether torch's own kernel can compute this call."""
    covered = rule.window is None or offset + q.shape[2] <= rule.window
    return covered and rule.softcap is None and q.device.type == "cpu"


@dataclass(frozen=True, slots=True)
class _Tile:
    """Queries from `start` to `stop`, and the keys from `first` to `last` that they may see."""

    start: int
    stop: int
    first: int
    last: int


def _blocks(q: Tensor, k: Tensor, offset: int, rule: Rule) -> Iterator[_Tile]:
    """Cut the queries so that the scores of a block are at most BLOCK_SCORES."""
    sequences, heads, length, _ = q.shape
    keys = k.shape[2]
    reach = keys if rule.window is None else min(rule.window, keys)
    step = max(LEAST, min(BLOCK_SCORES // (sequences * heads * reach), max(64, reach // 4)))
    for start in range(0, length, step):
        stop = min(start + step, length)
        first = 0 if rule.window is None else max(0, start + offset - rule.window + 1)
        yield _Tile(start, stop, first, min(stop + offset, keys))


def _scores(q_bKRD: Tensor, k_bKmD: Tensor, block: _Tile, offset: int, rule: Rule) -> tuple[Tensor, Tensor]:
    """Return the scores [b, K, G x n, m], and a mask [n, m] that is true where a query does not see a key."""
    scores = (q_bKRD * rule.scale) @ k_bKmD.transpose(2, 3)
    if rule.softcap is not None:
        scores = scores.div_(rule.softcap).tanh_().mul_(rule.softcap)
    position_n = torch.arange(block.start, block.stop, device=q_bKRD.device)[:, None] + offset
    position_m = torch.arange(block.first, block.last, device=q_bKRD.device)
    hidden_nm = position_m > position_n
    if rule.window is not None:
        hidden_nm |= position_m <= position_n - rule.window
    return scores, hidden_nm


def _blocked_forward(q: Tensor, k: Tensor, v: Tensor, offset: int, rule: Rule) -> tuple[Tensor, Tensor]:
    heads, key_heads = q.shape[1], k.shape[1]
    wide = torch.promote_types(q.dtype, torch.float32)
    out, lse_bHL = q.new_empty((*q.shape[:3], v.shape[3])), q.new_empty(q.shape[:3], dtype=wide)
    for block in _blocks(q, k, offset, rule):
        rows, keys = slice(block.start, block.stop), slice(block.first, block.last)
        q_bKRD = _fold(q[:, :, rows], key_heads).to(wide)
        scores, hidden_nm = _scores(q_bKRD, k[:, :, keys].to(wide), block, offset, rule)
        _grouped(scores, hidden_nm).masked_fill_(hidden_nm, -torch.inf)
        lse = scores.logsumexp(-1, keepdim=True)
        part = scores.sub_(lse).exp_() @ v[:, :, keys].to(wide)
        out[:, :, rows] = _unfold(part, heads)
        lse_bHL[:, :, rows] = _unfold(lse, heads)[..., 0]
    return out, lse_bHL


def _blocked_backward(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse_bHL: Tensor, offset: int, rule: Rule
) -> tuple[Tensor, Tensor, Tensor]:
    heads, key_heads = q.shape[1], k.shape[1]
    wide = torch.promote_types(q.dtype, torch.float32)
    grad_q, grad_k, grad_v = torch.empty_like(q), torch.zeros_like(k, dtype=wide), torch.zeros_like(v, dtype=wide)
    for block in _blocks(q, k, offset, rule):
        rows, keys = slice(block.start, block.stop), slice(block.first, block.last)
        q_bKRD, grad_bKRD, out_bKRD, lse_bKR1 = (
            _fold(t[:, :, rows], key_heads).to(wide) for t in (q, grad, out, lse_bHL[..., None])
        )
        k_bKmD, v_bKmD = k[:, :, keys].to(wide), v[:, :, keys].to(wide)
        scores, hidden_nm = _scores(q_bKRD, k_bKmD, block, offset, rule)
        weights = (scores - lse_bKR1).exp_()
        _grouped(weights, hidden_nm).masked_fill_(hidden_nm, 0.0)
        grad_v[:, :, keys] += weights.transpose(2, 3) @ grad_bKRD
        slope = grad_bKRD @ v_bKmD.transpose(2, 3)
        slope = slope.sub_((grad_bKRD * out_bKRD).sum(-1, keepdim=True)).mul_(weights).mul_(rule.scale)
        if rule.softcap is not None:  # the derivative of c tanh(s / c) is 1 - tanh²
            slope *= 1 - (scores / rule.softcap).square_()
        grad_q[:, :, rows] = _unfold(slope @ k_bKmD, heads)
        grad_k[:, :, keys] += slope.transpose(2, 3) @ q_bKRD
    return grad_q, grad_k.to(k.dtype), grad_v.to(v.dtype)


def _fold(tensor: Tensor, key_heads: int) -> Tensor:
    """[b, H, n, D] -> [b, K, G x n, D]: join the queries of the heads that share a key head, so no key is repeated."""
    return tensor.unflatten(1, (key_heads, -1)).flatten(2, 3)


def _unfold(tensor: Tensor, heads: int) -> Tensor:
    """[b, K, G x n, D] -> [b, H, n, D]."""
    return tensor.unflatten(2, (heads // tensor.shape[1], -1)).flatten(1, 2)


def _grouped(scores: Tensor, hidden_nm: Tensor) -> Tensor:
    """[b, K, G x n, m] -> [b, K, G, n, m], a view."""
    return scores.unflatten(2, (-1, len(hidden_nm)))
