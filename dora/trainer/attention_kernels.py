"""Causal attention over sequences of equal length or in buckets, in memory that grows with their length only.

Kept for the backward pass: query, key, value (as given: not repeated to all heads, not padded), the output and one
number per query and head, the log-sum-exp of its scores. Scores are computed again, block by block
(FlashAttention-2, arXiv:2307.08691, algorithms 1 and 2).
Legend: b sequences, L their length, T tokens of a row, H query heads, K key heads, G = H / K, D head size, n queries
and m keys of a block.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
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
    """How scores are computed. A query sees itself and the keys before it, `window` in all if that is not None."""

    scale: float
    window: int | None = None
    softcap: float | None = None


@dataclass(frozen=True, slots=True)
class Bucket:
    """Sequences of one call."""

    gather_bL: Tensor  # int64 positions in the row; padded with a sequence's last position
    padding_bL: Tensor  # bool


@dataclass(frozen=True, slots=True)
class Buckets:
    """The buckets of a packed row."""

    buckets: tuple[Bucket, ...]
    restore_T: Tensor  # int64: index of each position of the row in the concatenated buckets, padding included


def attend_rows(query: Tensor, key: Tensor, value: Tensor, sink_H: Tensor | None, rule: Rule) -> Tensor:
    """Attention of b sequences: query [b, H, L, D], key [b, K, L, D], value [b, K, L, D_v] -> [b, L, H, D_v]."""
    return _Attention.apply(query, key, value, sink_H, rule, None)


def attend_packed(
    query: Tensor, key: Tensor, value: Tensor, sink_H: Tensor | None, rule: Rule, layout: Buckets
) -> Tensor:
    """Like `attend_rows`, for one row in which the sequences follow one another: [1, ., T, .] -> [1, T, H, D_v]."""
    return _Attention.apply(query, key, value, sink_H, rule, layout)


class _Attention(torch.autograd.Function):
    """Attention with sinks. A sink s is one more key of score s and value 0, so with the log-sum-exp z of the other
    scores the output shrinks by exp(z - z'), z' = logaddexp(z, s). The gradients of the other keys are those of an
    ordinary backward pass that is given the new output and z'."""

    @staticmethod
    def forward(
        ctx: Any, query: Tensor, key: Tensor, value: Tensor, sink_H: Tensor | None, rule: Rule, layout: Buckets | None
    ) -> Tensor:
        outs, lses = [], []
        split = (_split(tensor, layout) for tensor in (query, key, value))
        for i, (q, k, v) in enumerate(zip(*split, strict=True)):
            out, lse_bHL = _forward(q, k, v, rule)
            if sink_H is not None:
                total = torch.logaddexp(lse_bHL, sink_H[:, None].to(lse_bHL.dtype))
                out = out * (lse_bHL - total).exp()[..., None].to(out.dtype)
                lse_bHL = total
            if layout is not None:  # so that padding has no weight in the backward pass
                lse_bHL = lse_bHL.masked_fill(layout.buckets[i].padding_bL[:, None], torch.inf)
            outs.append(out)
            lses.append(lse_bHL)
        joined = _join(outs, layout)
        ctx.save_for_backward(query, key, value, sink_H, joined, *lses)
        ctx.rule, ctx.layout = rule, layout
        return joined.transpose(1, 2)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        query, key, value, sink_H, out, *lses = ctx.saved_tensors
        layout = ctx.layout
        grad = grad.transpose(1, 2)
        split = [_split(tensor, layout) for tensor in (grad, query, key, value, out)]
        parts = [_backward(*part, rule=ctx.rule) for part in zip(*split, lses, strict=True)]
        grads = [_join(tensors, layout) for tensors in zip(*parts, strict=True)]
        grad_sink_H = None
        if sink_H is not None:
            terms = [
                ((sink_H[:, None] - lse_bHL).exp() * (g * o).sum(-1)).sum((0, 2))
                for g, o, lse_bHL in zip(split[0], split[4], lses, strict=True)
            ]
            grad_sink_H = -torch.stack(terms).sum(0).to(sink_H.dtype)
        return *grads, grad_sink_H, None, None


def _split(tensor: Tensor, layout: Buckets | None) -> Sequence[Tensor]:
    """Return [b, heads, L, D] of each bucket of a packed row [1, heads, T, D]."""
    if layout is None:
        return [tensor]
    row_THD = tensor[0].transpose(0, 1)
    return [row_THD[bucket.gather_bL].transpose(1, 2) for bucket in layout.buckets]


def _join(tensors: Sequence[Tensor], layout: Buckets | None) -> Tensor:
    """The inverse of `_split`, without the padding."""
    if layout is None:
        return tensors[0]
    flat = torch.cat([tensor.transpose(1, 2).flatten(0, 1) for tensor in tensors])
    return flat[layout.restore_T].transpose(0, 1)[None]


# -- one bucket -------------------------------------------------------------------------------------------------------


def _forward(q: Tensor, k: Tensor, v: Tensor, rule: Rule) -> tuple[Tensor, Tensor]:
    """Return the output [b, H, L, D_v] and the log-sum-exp of the scores [b, H, L]."""
    if not _is_plain(q, rule):
        return _blocked_forward(q, k, v, rule)
    size = max(q.shape[3], v.shape[3])  # the kernel wants equal head sizes
    q, k, w = (widened(tensor, size) for tensor in (q, k, v))
    out, lse_bHL = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(q, k, w, is_causal=True, scale=rule.scale)
    return out[..., : v.shape[3]], lse_bHL


def _backward(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse_bHL: Tensor, *, rule: Rule
) -> tuple[Tensor, Tensor, Tensor]:
    if not _is_plain(q, rule):
        return _blocked_backward(grad, q, k, v, out, lse_bHL, rule)
    sizes = q.shape[3], k.shape[3], v.shape[3]
    size = max(sizes)
    grad, q, k, v, out = (widened(tensor, size) for tensor in (grad, q, k, v, out))
    grads = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward(
        grad, q, k, v, out, lse_bHL, 0.0, True, scale=rule.scale
    )
    grad_q, grad_k, grad_v = (g[..., :size] for g, size in zip(grads, sizes, strict=True))
    return grad_q, grad_k, grad_v


def widened(tensor: Tensor, size: int) -> Tensor:
    """Fill the last dimension up with zeros, which change no score and no gradient; no copy if it has this size."""
    missing = size - tensor.shape[-1]
    return F.pad(tensor, (0, missing)) if missing else tensor


def _is_plain(q: Tensor, rule: Rule) -> bool:
    """Whether torch's own kernel computes this."""
    covered = rule.window is None or q.shape[2] <= rule.window
    return covered and rule.softcap is None and q.device.type == "cpu"


@dataclass(frozen=True, slots=True)
class _Block:
    """Queries from `start` to `stop`, and the keys from `first` to `stop` that they may see."""

    start: int
    stop: int
    first: int


def _blocks(q: Tensor, rule: Rule) -> Iterator[_Block]:
    """Cut the queries so that the scores of a block are at most BLOCK_SCORES."""
    sequences, heads, length, _ = q.shape
    reach = length if rule.window is None else min(rule.window, length)
    step = max(LEAST, min(BLOCK_SCORES // (sequences * heads * reach), max(64, reach // 4)))
    for start in range(0, length, step):
        first = 0 if rule.window is None else max(0, start - rule.window + 1)
        yield _Block(start, min(start + step, length), first)


def _scores(q_bKRD: Tensor, k_bKmD: Tensor, block: _Block, rule: Rule) -> tuple[Tensor, Tensor]:
    """Return the scores [b, K, G x n, m], and whether [n, m] a query does not see a key."""
    scores = (q_bKRD * rule.scale) @ k_bKmD.transpose(2, 3)
    if rule.softcap is not None:
        scores = scores.div_(rule.softcap).tanh_().mul_(rule.softcap)
    position_n = torch.arange(block.start, block.stop, device=q_bKRD.device)[:, None]
    position_m = torch.arange(block.first, block.stop, device=q_bKRD.device)
    hidden_nm = position_m > position_n
    if rule.window is not None:
        hidden_nm |= position_m <= position_n - rule.window
    return scores, hidden_nm


def _blocked_forward(q: Tensor, k: Tensor, v: Tensor, rule: Rule) -> tuple[Tensor, Tensor]:
    heads, key_heads = q.shape[1], k.shape[1]
    wide = torch.promote_types(q.dtype, torch.float32)
    out, lse_bHL = q.new_empty((*q.shape[:3], v.shape[3])), q.new_empty(q.shape[:3], dtype=wide)
    for block in _blocks(q, rule):
        rows, keys = slice(block.start, block.stop), slice(block.first, block.stop)
        q_bKRD = _fold(q[:, :, rows], key_heads).to(wide)
        scores, hidden_nm = _scores(q_bKRD, k[:, :, keys].to(wide), block, rule)
        _grouped(scores, hidden_nm).masked_fill_(hidden_nm, -torch.inf)
        lse = scores.logsumexp(-1, keepdim=True)
        part = scores.sub_(lse).exp_() @ v[:, :, keys].to(wide)
        out[:, :, rows] = _unfold(part, heads)
        lse_bHL[:, :, rows] = _unfold(lse, heads)[..., 0]
    return out, lse_bHL


def _blocked_backward(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse_bHL: Tensor, rule: Rule
) -> tuple[Tensor, Tensor, Tensor]:
    heads, key_heads = q.shape[1], k.shape[1]
    wide = torch.promote_types(q.dtype, torch.float32)
    grad_q, grad_k, grad_v = torch.empty_like(q), torch.zeros_like(k, dtype=wide), torch.zeros_like(v, dtype=wide)
    for block in _blocks(q, rule):
        rows, keys = slice(block.start, block.stop), slice(block.first, block.stop)
        q_bKRD, grad_bKRD, out_bKRD, lse_bKR1 = (
            _fold(t[:, :, rows], key_heads).to(wide) for t in (q, grad, out, lse_bHL[..., None])
        )
        k_bKmD, v_bKmD = k[:, :, keys].to(wide), v[:, :, keys].to(wide)
        scores, hidden_nm = _scores(q_bKRD, k_bKmD, block, rule)
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
    """[b, H, n, D] -> [b, K, G x n, D]: the queries of all heads that share a key head, so that it is not repeated."""
    return tensor.unflatten(1, (key_heads, -1)).flatten(2, 3)


def _unfold(tensor: Tensor, heads: int) -> Tensor:
    """[b, K, G x n, D] -> [b, H, n, D]."""
    return tensor.unflatten(2, (heads // tensor.shape[1], -1)).flatten(1, 2)


def _grouped(scores: Tensor, hidden_nm: Tensor) -> Tensor:
    """[b, K, G x n, m] -> [b, K, G, n, m], a view."""
    return scores.unflatten(2, (-1, len(hidden_nm)))
