"""Rows that several ranks compute together: DeepSpeed-Ulysses (arXiv 2309.14509).

Each of C consecutive ranks has a slice of the positions of a row. Attention alone needs other positions: before it, the
ranks exchange their slice of all heads for the whole row of some heads, and after it they do the reverse.

Invariant: all C ranks compute the same loss, each from the log-probs of all slices. Its gradient reaches a log-prob
once, on the rank that computed it, so that the gradient of the weights is the sum over the C ranks.
Legend: B batch rows, L tokens of a row, l = L / C of a slice, H heads, h = H / C of a rank, D head size, P trained
tokens of a row, p those that are predicted in a slice.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable

from dora.errors import ConfigError


@dataclass(frozen=True, slots=True)
class Context:
    """The ranks that divide each row."""

    group: dist.ProcessGroup
    rank: int  # of this one among them
    size: int  # C

    def own(self, row_BL: Tensor) -> Tensor:
        """Return this rank's slice [B, l] of a row [B, L]."""
        return row_BL.chunk(self.size, dim=1)[self.rank]

    def own_heads(self, values_H: Tensor) -> Tensor:
        """Return the values [h] of this rank's heads."""
        return values_H.chunk(self.size)[self.rank]

    # Compiled code would be compiled again for each length of a row.
    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def to_heads(self, query: Tensor, key: Tensor, value: Tensor) -> list[Tensor]:
        """[B, H, l, D] of a slice, keys and values of H_kv heads -> [B, h, L, D] of this rank's heads.

        Keys and values are repeated until their heads can be divided: H_kv and C both divide H, and so does their least
        common multiple. Head i of the queries keeps its keys, as both are divided in order.
        """
        repeats = math.lcm(key.shape[1], self.size) // key.shape[1]
        if repeats > 1:
            key, value = (heads.repeat_interleave(repeats, dim=1) for heads in (key, value))
        parts = [heads.unflatten(1, (self.size, -1)).movedim(1, 0) for heads in (query, key, value)]  # [C, B, h, l, D]
        received = self._exchange(torch.cat([part.flatten(1) for part in parts], dim=1))
        split = received.split([part[0].numel() for part in parts], dim=1)
        return [
            flat.unflatten(1, part.shape[1:]).movedim(0, 2).flatten(2, 3)
            for flat, part in zip(split, parts, strict=True)
        ]

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def to_tokens(self, out: Tensor) -> Tensor:
        """[B, L, h, D] of this rank's heads -> [B, l, H, D] of its slice."""
        received = self._exchange(out.unflatten(1, (self.size, -1)).movedim(1, 0))  # [C, B, l, h, D]
        return received.movedim(0, 2).flatten(2, 3)

    def _exchange(self, parts: Tensor) -> Tensor:
        exchanged: Tensor = _Exchange.apply(parts, self.group)
        return exchanged

    def whole(self, values_p: Tensor, *, own_p: Tensor, size: int) -> Tensor:
        """Return the values [P] of all slices, of which this rank's are at the indices `own_p`; `size`: P."""
        whole_P: Tensor = _Whole.apply(values_p, own_p, size, self.group)
        return whole_P


def make_context(ranks: int) -> Context | None:
    """Return the `ranks` consecutive ranks of which this is one; None if it is one alone. A collective."""
    if ranks == 1:
        return None
    if dist.get_world_size() % ranks:
        raise ConfigError(f"trainer.parallel.context: {dist.get_world_size()} ranks cannot be divided by {ranks}")
    group, _ = dist.new_subgroups(ranks)
    return Context(group, dist.get_rank(group), ranks)


class _Exchange(torch.autograd.Function):
    """parts [C, ...] -> [C, ...]: what each rank has for this one. Gradients go back the same way."""

    @staticmethod
    def forward(ctx: Any, parts: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group = group
        received = torch.empty_like(parts, memory_format=torch.contiguous_format)
        dist.all_to_all_single(received, parts.contiguous(), group=group)
        return received

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        returned: Tensor = _Exchange.apply(grad, ctx.group)
        return returned, None


class _Whole(torch.autograd.Function):
    """values [p] -> [P]. Each rank has the gradient of all P, as its loss is the same: it keeps that of its own p."""

    @staticmethod
    def forward(ctx: Any, values_p: Tensor, own_p: Tensor, size: int, group: dist.ProcessGroup) -> Tensor:
        ctx.save_for_backward(own_p)
        whole_P = values_p.new_zeros(size).index_copy_(0, own_p, values_p)
        dist.all_reduce(whole_P, group=group)  # one rank has a value, the others zero: the sum is exact
        return whole_P

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_P: Tensor) -> tuple[Tensor, None, None, None]:
        (own_p,) = ctx.saved_tensors
        return grad_P[own_p], None, None, None
