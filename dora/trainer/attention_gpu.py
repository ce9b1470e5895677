"""Attention by the kernels of torch for GPUs: FlashAttention over rows of any lengths, and FlexAttention.

Unverified without a GPU: tests run FlexAttention's definition on the CPU, forward only, and FlashAttention for its
shapes. Neither repeats keys and values, nor waits for the GPU; block masks are built once per micro-batch.
Legend: as in `attention_kernels`; N segments, T tokens and C blocks of B tokens of a row.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from importlib.util import find_spec
from typing import Any, Final

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import AuxRequest, BlockMask, flex_attention
from torch.nn.attention.varlen import varlen_attn

from dora.trainer.attention_kernels import Rule, widened

BLOCK: Final = 128  # tokens in a block of FlexAttention's masks
LARGEST_HEAD: Final = 256  # the largest head size that FlashAttention supports


@cache
def kernels_present(device: str) -> dict[str, bool]:
    """Say which kernels torch has on this kind of device, by the names that the log shows."""
    on_gpu = device == "cuda" and torch.cuda.is_available()
    return {
        "flash": on_gpu and torch.backends.cuda.is_flash_attention_available() and _capability() >= (8, 0),
        "flex": on_gpu and find_spec("triton") is not None,
        "sdpa": True,
    }


def describe(device: str) -> str:
    """One line for the log: what computes attention."""
    present = kernels_present(device)
    if device != "cuda":
        return "attention: torch's SDPA on the CPU; windows and soft caps in blocks"
    ordinary = "FlashAttention (torch's varlen)" if present["flash"] else "blocks, slow"
    others = "FlexAttention" if present["flex"] else "blocks, slow"
    return f"attention in 16 bits: {ordinary}; soft caps and sinks: {others}; float32: blocks, slow"


def choose(query: Tensor, rule: Rule, sink_H: Tensor | None, *, shares: bool) -> str | None:
    """Return "flash" or "flex", or None for the blocks of `attention_kernels`. `shares`: sequences share prompts."""
    if query.device.type != "cuda" or query.dtype not in (torch.bfloat16, torch.float16):
        return None
    present = kernels_present("cuda")
    if present["flash"] and not shares and rule.softcap is None and sink_H is None and query.shape[3] <= LARGEST_HEAD:
        return "flash"
    return "flex" if present["flex"] else None


def attend_flash(query: Tensor, key: Tensor, value: Tensor, rule: Rule, *, ends: Tensor, longest: int) -> Tensor:
    """Attention of sequences that follow one another: [1 or b, ., L, .] -> [1 or b, L, H, D_v].

    `ends` [N + 1], int32 and on the device, counts the tokens before each sequence; `longest` is the longest's length.
    """
    batch, _, length, size_v = *query.shape[:3], value.shape[3]
    size = -(-max(query.shape[3], size_v) // 8) * 8  # the kernel requires equal head sizes, multiples of 8
    # [b, heads, L, D] -> [b x L, heads, D]
    q, k, v = (widened(t, size).transpose(1, 2).flatten(0, 1) for t in (query, key, value))
    window = -1 if rule.window is None or rule.window >= longest else rule.window - 1
    out = varlen_attn(
        q, k, v, ends, ends, longest, longest,
        scale=rule.scale, window_size=(window, 0), enable_gqa=True,
    )  # fmt: skip
    assert isinstance(out, Tensor)  # no auxiliary output was asked for
    return out.unflatten(0, (batch, length))[..., :size_v]


def attend_flex(
    query: Tensor, key: Tensor, value: Tensor, sink_H: Tensor | None, rule: Rule, *, mask: BlockMask
) -> Tensor:
    """Attention under a block mask: query [b, H, L, D], key [b, K, L, D], value [b, K, L, D_v] -> [b, L, H, D_v]."""
    out, aux = _flex(query.device.type)(
        query, key, value,
        score_mod=None if rule.softcap is None else _soft_cap(rule.softcap),
        block_mask=mask, scale=rule.scale, enable_gqa=True, return_aux=AuxRequest(lse=True),
    )  # fmt: skip
    if sink_H is not None:  # one more key of score s and value 0; z is the log-sum-exp of the other scores
        out = out * torch.sigmoid(aux.lse - sink_H[:, None])[..., None].to(out.dtype)
    return out.transpose(1, 2)


def block_mask(
    ends: Tensor | None, prompts_N: Tensor | None, *, length: int, window: int | None, device: torch.device
) -> BlockMask:
    """Return the mask of a row of `length` tokens; `ends` as in `attend_flash`, or None for a single sequence.

    A query sees the keys up to itself in its own segment, and all keys of its prompt's segment, whose index is in
    `prompts_N` (-1: none). A table [T, C] of how many keys each query sees in each block tells which blocks to compute.
    """
    position_T = torch.arange(-(-length // BLOCK) * BLOCK, device=device)
    own_T = stop_T = first_T = torch.zeros_like(position_T)  # a query sees keys from own to itself, and first to stop
    before_T = torch.zeros_like(position_T)  # tokens of its sequence that stand elsewhere: its prompt
    if ends is not None and prompts_N is not None:
        segment_T = torch.searchsorted(ends, position_T.clamp(max=length - 1), right=True) - 1
        prompt_T = prompts_N[segment_T].long()
        own_T = ends[segment_T].long()
        first_T, stop_T = (torch.where(prompt_T < 0, 0, ends[prompt_T + n].long()) for n in (0, 1))
        before_T = stop_T - first_T
    if window is not None:
        first_T = torch.maximum(first_T, first_T + (before_T + position_T - own_T) - (window - 1))
        own_T = torch.maximum(own_T, position_T - (window - 1))
    block_C = torch.arange(len(position_T) // BLOCK, device=device) * BLOCK

    def seen_of_block(start_T: Tensor, stop_T: Tensor) -> Tensor:
        stop_TC = torch.minimum(stop_T[:, None], block_C + BLOCK)
        return (stop_TC - torch.maximum(start_T[:, None], block_C)).clamp(min=0)

    seen_TC = seen_of_block(own_T, position_T + 1) + seen_of_block(first_T, stop_T)
    seen_TC[length:] = 0
    seen_CBC = seen_TC.unflatten(0, (-1, BLOCK))
    full_CC = (seen_CBC == BLOCK).all(1)
    partial_CC = (seen_CBC > 0).any(1) & ~full_CC

    def seen(_b: Tensor, _h: Tensor, q: Tensor, kv: Tensor) -> Tensor:
        return ((kv <= q) & (kv >= own_T[q])) | ((kv >= first_T[q]) & (kv < stop_T[q]))

    return BlockMask.from_kv_blocks(
        *_ordered(partial_CC), *_ordered(full_CC), BLOCK_SIZE=BLOCK, mask_mod=seen, seq_lengths=(length, length)
    )


def _ordered(blocks_CC: Tensor) -> tuple[Tensor, Tensor]:
    """Return the number of blocks of each row [1, 1, C], and all indices [1, 1, C, C], those of its blocks first."""
    order = blocks_CC.int().argsort(dim=-1, descending=True, stable=True)
    return blocks_CC.sum(-1, dtype=torch.int32)[None, None], order.int()[None, None]


@cache
def _flex(kind: str) -> Any:
    """FlexAttention, compiled where it computes gradients."""
    return torch.compile(flex_attention) if kind == "cuda" else flex_attention


@cache
def _soft_cap(cap: float) -> Callable[..., Tensor]:
    """Return the score function of a cap: always the same one for the same cap, so that it is compiled once."""

    def capped(score: Tensor, _b: Tensor, _h: Tensor, _q: Tensor, _kv: Tensor) -> Tensor:
        return cap * torch.tanh(score / cap)

    return capped


def _capability() -> tuple[int, int]:
    return torch.cuda.get_device_capability()
