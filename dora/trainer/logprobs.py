"""Log-probs of the trained tokens of a row under the model, without its [tokens x vocabulary] logits.

During one call the model's output head computes log-probs in place of logits, tile by tile, and computes every tile
again in the backward pass. The head is replaced, and not called from outside, because FSDP2 gathers its weight only in
the forward pass of the root module; a hook hands the log-probs out as the root's output, because FSDP2 prepares the
backward pass where a gradient reaches that output.

Many families scale or cap the logits after the head. The scale and the cap are measured once for each model: the head
returns known values in place of logits, and the model's own code changes them.

Legend: P trained tokens, V vocabulary, H hidden size, n tokens and v words of a tile.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from functools import partial
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from dora.errors import ConfigError
from dora.trainer import attention
from dora.trainer.packing import Row

#: Maximum number of tokens, and of words, in a tile, which then takes 16 MiB in float32. Up to three tiles exist at a
#: time. On a CPU, 64 MiB would be slower.
TILE = (2_048, 2_048)

Span = tuple[int, int]
_most_tiles: ContextVar[int | None] = ContextVar("most_tiles", default=None)


@contextmanager
def few_tiles() -> Iterator[None]:
    """In this context, compute at most two tiles along each dimension. The results are wrong, but the peak memory is
    the same as with all tiles, so a forecast of memory is faster."""
    token = _most_tiles.set(2)
    try:
        yield
    finally:
        _most_tiles.reset(token)


def logprobs(
    model: nn.Module, row: Row, *, temperature: float, fp32_head: bool = False, entropy_gradient: bool = False
) -> tuple[Tensor, Tensor]:
    """Return [P] log-probs of the targets under softmax(logits / temperature), and [P] entropies.

    Both are in float32 (float64 if the model is). `fp32_head`: logits are never rounded to 16 bits, as in MiniMax-M1
    (arXiv 2506.13585). Entropies have a gradient with `entropy_gradient` only.
    """
    if model not in _FINISHES:
        _FINISHES[model] = _measure_finish(model, row)
    finish = _FINISHES[model]
    found: list[tuple[Tensor, Tensor]] = []

    def select(head: nn.Linear, hidden: Tensor) -> Tensor:
        predictors_P, targets_P, context, own_p = row.predictors_P, row.targets_P, row.context, row.own_p
        if context is not None:  # those of this rank's slice
            predictors_P, targets_P = predictors_P[own_p] - context.rank * hidden.shape[1], targets_P[own_p]
        hidden_PH = hidden.flatten(0, -2).index_select(0, predictors_P)
        arguments = (hidden_PH, head.weight, head.bias, targets_P, finish, temperature, fp32_head, entropy_gradient)
        values: tuple[Tensor, Tensor] = TiledLogProbs.apply(*arguments)
        if context is not None and own_p is not None:
            current_p, entropy_p = values
            whole = partial(context.whole, own_p=own_p, size=len(row.targets_P))
            values = whole(current_p), whole(entropy_p)
        found.append(values)
        return hidden.new_zeros(1, 1, 1)  # the model scales and caps this value, and the hook drops it

    hook = model.register_forward_hook(lambda *_: found[0], prepend=True)  # before FSDP2's hook
    try:
        output: tuple[Tensor, Tensor] = _run(model, row, select)
    finally:
        hook.remove()
    return output


def _run(model: Any, row: Row, forward: Callable[[nn.Linear, Tensor], Tensor]) -> Any:
    """Run the model on a row, with `forward` in place of the output head's own forward method."""
    head: Any = model.get_output_embeddings()
    kind = type(head)
    if kind is not nn.Linear:
        raise ConfigError(
            f"model.path: the output head of {type(model).__name__} is {kind.__name__}, not Linear; not supported"
        )
    head.forward = lambda hidden: forward(head, hidden)
    tokens_BT, positions_BT = row.tokens_BT, row.positions_BT
    if row.context is not None:
        tokens_BT, positions_BT = row.context.own(tokens_BT), row.context.own(positions_BT)
    try:
        with attention.within(_segments(row)):
            return model(input_ids=tokens_BT, position_ids=positions_BT, use_cache=False)
    finally:
        del head.forward


def _segments(row: Row) -> attention.Segments | None:
    """Return the segments of a packed row, of which the padding at its end is one."""
    if row.padded:
        return None
    padding = (row.num_padding,) if row.num_padding else ()
    lengths, prompts = (*row.lengths, *padding), (*row.prompts, *(-1 for _ in padding))
    return attention.Segments(lengths, row.tokens_BT.device, prompts, context=row.context)


# ---- what follows the head ------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Finish:
    """What the model does to the logits after its head: x -> cap tanh(scale x / cap); without a cap, scale x."""

    scale: float
    cap: float  # inf: none

    def __call__(self, logits: Tensor) -> Tensor:
        """Apply it in place."""
        logits.mul_(self.scale)
        return logits if math.isinf(self.cap) else logits.div_(self.cap).tanh_().mul_(self.cap)


_FINISHES: WeakKeyDictionary[nn.Module, Finish] = WeakKeyDictionary()
_TINY, _HUGE = 2.0**-40, 1e30  # so small that the cap has no effect, so large that the scale has none
_PROBES = (0.0, _TINY, _HUGE, -_HUGE, 1.0, -3.0, 10.0, 100.0)


def _measure_finish(model: nn.Module, row: Row) -> Finish:
    """Return what the model does after its head; ConfigError unless that is one scale and one cap for all words."""
    sent: list[Tensor] = []

    def send(head: nn.Linear, hidden: Tensor) -> Tensor:
        wide = torch.promote_types(hidden.dtype, torch.float32)
        probes = torch.tensor(_PROBES, dtype=wide, device=hidden.device)
        sent.append(probes[None, :, None].expand(1, -1, head.out_features))
        return sent[0].clone()

    with torch.no_grad():
        got = _run(model, row, send).logits
    if len(sent) == 1 and got.shape == sent[0].shape:
        scale, most = float(got[0, 1, 0]) / _TINY, float(got[0, 2, 0])
        finish = Finish(scale, most if most < 0.5 * scale * _HUGE else math.inf)
        if scale > 0 and torch.allclose(got.to(sent[0].dtype), finish(sent[0].clone()), rtol=1e-5, atol=0.0):
            return finish
    raise ConfigError(
        f"model.path: {type(model).__name__} changes the logits of its head by more than a scale and a cap, "
        "or calls it more than once; not supported"
    )


# ---- tiles ----------------------------------------------------------------------------------------------------------


class TiledLogProbs(torch.autograd.Function):
    """(hidden [P, H], weight [V, H], bias [V] or None, targets [P], ...) -> log-probs [P], entropies [P].

    Kept for the backward pass: the inputs, and a float32 number for each token. The gradient of the weight is summed
    over tokens in float32, one block of words after the other, so that no float32 copy of the whole gradient of a
    16-bit weight exists. The gradient of the hidden states is summed in float32 as a whole: it is small compared with
    what the layers keep.
    """

    @staticmethod
    def forward(
        ctx: Any,
        hidden_PH: Tensor,
        weight_VH: Tensor,
        bias_V: Tensor | None,
        targets_P: Tensor,
        finish: Finish,
        temperature: float,
        fp32_head: bool,
        entropy_gradient: bool = False,
    ) -> tuple[Tensor, Tensor]:
        wide = torch.promote_types(hidden_PH.dtype, torch.float32)
        chosen_P, lse_P, entropy_P = (hidden_PH.new_zeros(len(hidden_PH), dtype=wide) for _ in range(3))
        tokens, words = _spans(len(hidden_PH), len(weight_VH))
        for at in tokens:
            target_n = targets_P[slice(*at)]
            # of the words so far: the largest logit; Σ w and Σ w d, where d = logit - largest and w = exp d
            most_n = torch.full_like(target_n, torch.finfo(wide).min, dtype=wide)
            sum_n, moment_n, chosen_n = most_n.new_zeros(3, len(target_n))
            for block in words:
                tile_nv = _head(hidden_PH, weight_VH, bias_V, at=at, block=block, fp32=fp32_head)
                tile_nv = finish(tile_nv).div_(temperature)
                inside_n, index_n = _locate(target_n, block)
                chosen_n = torch.where(inside_n, tile_nv.gather(1, index_n[:, None])[:, 0], chosen_n)
                before_n, most_n = most_n, torch.maximum(most_n, tile_nv.amax(-1))
                shift_n = before_n - most_n
                moment_n = (moment_n + sum_n * shift_n) * shift_n.exp()
                sum_n = sum_n * shift_n.exp()
                weight_nv = tile_nv.sub_(most_n[:, None]).exp()
                sum_n = sum_n + weight_nv.sum(-1)
                moment_n = moment_n + weight_nv.mul_(tile_nv).sum(-1)
            chosen_P[slice(*at)] = (chosen_n - most_n) - sum_n.log()
            lse_P[slice(*at)] = most_n + sum_n.log()
            entropy_P[slice(*at)] = sum_n.log() - moment_n / sum_n
        ctx.save_for_backward(hidden_PH, weight_VH, bias_V, targets_P, lse_P, entropy_P if entropy_gradient else None)
        ctx.settings = finish, temperature, fp32_head
        if not entropy_gradient:
            ctx.mark_non_differentiable(entropy_P)
        return chosen_P, entropy_P

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_P: Tensor, grad_entropy_P: Tensor) -> tuple[Tensor | None, ...]:
        hidden_PH, weight_VH, bias_V, targets_P, lse_P, entropy_P = ctx.saved_tensors
        finish, temperature, fp32_head = ctx.settings
        wants_hidden, wants_weight, wants_bias = ctx.needs_input_grad[:3]
        wide = lse_P.dtype
        grad_hidden_PH = torch.zeros_like(hidden_PH, dtype=wide) if wants_hidden else None
        grad_weight_VH = torch.zeros_like(weight_VH) if wants_weight else None
        grad_bias_V = torch.zeros_like(bias_V) if wants_bias else None
        slope_P, slope_entropy_P = (grad * (finish.scale / temperature) for grad in (grad_P, grad_entropy_P))
        tokens, words = _spans(len(hidden_PH), len(weight_VH))
        for block in words:
            sum_vH = weight_VH.new_zeros(block[1] - block[0], weight_VH.shape[1], dtype=wide) if wants_weight else None
            for at in tokens:
                tile_nv = finish(_head(hidden_PH, weight_VH, bias_V, at=at, block=block, fp32=fp32_head))
                slope_n = slope_P[slice(*at)]
                inside_n, index_n = _locate(targets_P[slice(*at)], block)
                # d logprob / d logit = [word is target] - p, d entropy / d logit = -p (log p + entropy), and the cap's
                # derivative is 1 - (capped / cap)²
                grad_nv = tile_nv.div(temperature).sub_(lse_P[slice(*at), None])
                if entropy_P is None:
                    grad_nv.exp_().mul_(-slope_n[:, None])
                else:
                    slopes_nv = (grad_nv + entropy_P[slice(*at), None]).mul_(slope_entropy_P[slice(*at), None])
                    grad_nv.exp_().mul_(slopes_nv.add_(slope_n[:, None]).neg_())
                    del slopes_nv
                grad_nv.scatter_add_(1, index_n[:, None], torch.where(inside_n, slope_n, 0.0)[:, None])
                if not math.isinf(finish.cap):
                    grad_nv.mul_(tile_nv.div_(finish.cap).square_().neg_().add_(1.0))
                del tile_nv
                narrow_nv = grad_nv.to(weight_VH.dtype)
                if grad_hidden_PH is not None:
                    _add_product(grad_hidden_PH[slice(*at)], narrow_nv, weight_VH[slice(*block)])
                if sum_vH is not None:
                    _add_product(sum_vH, narrow_nv.T, hidden_PH[slice(*at)])
                if grad_bias_V is not None:
                    grad_bias_V[slice(*block)] += grad_nv.sum(0)
            if grad_weight_VH is not None and sum_vH is not None:
                grad_weight_VH[slice(*block)] = sum_vH
        grad_hidden_PH = grad_hidden_PH.to(hidden_PH.dtype) if grad_hidden_PH is not None else None
        return grad_hidden_PH, grad_weight_VH, grad_bias_V, None, None, None, None, None


def _spans(tokens: int, words: int) -> tuple[list[Span], list[Span]]:
    """Return the borders of the tiles along both dimensions."""
    return _cut(tokens, TILE[0]), _cut(words, TILE[1])


def _cut(total: int, size: int) -> list[Span]:
    return [(start, min(start + size, total)) for start in range(0, total, size)][: _most_tiles.get()]


def _head(hidden_PH: Tensor, weight_VH: Tensor, bias_V: Tensor | None, *, at: Span, block: Span, fp32: bool) -> Tensor:
    """Return a tile of the head's output, in at least float32."""
    hidden_nH, weight_vH = hidden_PH[slice(*at)], weight_VH[slice(*block)]
    wide = torch.promote_types(hidden_PH.dtype, torch.float32)
    if fp32:
        hidden_nH, weight_vH = hidden_nH.to(wide), weight_vH.to(wide)
    tile_nv = (hidden_nH @ weight_vH.T).to(wide)
    return tile_nv if bias_V is None else tile_nv.add_(bias_V[slice(*block)])


def _locate(target_n: Tensor, block: Span) -> tuple[Tensor, Tensor]:
    """Return whether each target is a word of the block, and its index there (arbitrary if it is not)."""
    start, stop = block
    return (target_n >= start) & (target_n < stop), (target_n - start).clamp(0, stop - start - 1)


def _add_product(total: Tensor, left: Tensor, right: Tensor) -> None:
    """Add left @ right to `total` in place. The product of 16-bit factors has 16 bits, and is added in float32."""
    if total.dtype == left.dtype:
        total.addmm_(left, right)
    else:
        total.add_(left @ right)
