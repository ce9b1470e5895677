"""AdamW whose two moments take 8 bits each, in blocks with a scale of their own (block-wise, as arXiv 2110.02861).

The second moment v is stored as a float of 5 exponent and 3 mantissa bits, relative to the largest one of its block.
The smallest code is 2^-32 and not 0, so that a second moment cannot vanish while the first one stays. The first moment
m is stored as the ratio m / sqrt(v), in 255 equal steps. By the inequality of Cauchy and Schwarz it never exceeds
`_bound`, so it needs no scale, and a parameter never moves further than AdamW could move it.

A moment changes by less than the distance of two codes per step, so rounding to the nearest would freeze it. Instead
it is rounded up or down with a frequency in proportion to its distance from the two codes. Low-discrepancy sequences
over steps and positions decide, not random numbers. So errors cancel over steps, and an update is a function of the
stored state alone.

A block never spans two rows of a matrix, so that the result does not depend on the number of ranks. Parameters of
less than two dimensions are for `torch.optim.AdamW`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

import torch
from torch import Tensor

#: Elements of a block, if that divides a row; otherwise the largest divisor, or the row if that is below MIN_BLOCK.
BLOCK: Final = 256
MIN_BLOCK: Final = 32
#: Elements that are updated at a time, so that their moments in float32 stay small (in a CPU's cache).
CHUNK: Final = {"cpu": 2**15, "cuda": 2**24}
EPS: Final = 1e-8
_MANTISSA: Final = 20  # bits of a float32 that are dropped
_ONE: Final = 127 << 3  # the float32 1.0 without these bits
_STEPS: Final = 127.0  # steps of a ratio, in either direction
_TINY: Final = 1e-30  # below the smallest scale and sqrt(v) that matter beside EPS
#: Irrational increments per step and per position, for the ratio and for v (the plane sequence of the plastic number).
_DITHER: Final = ((0.7548776662466927, 0.6180339887498949), (0.5698402909980532, 0.4142135623730951))


@dataclass(frozen=True, slots=True)
class Moments:
    """Both moments of one parameter, as blocks."""

    step: Tensor  # [] number of updates, on the CPU
    ratio: Tensor  # [blocks, size] int8, m / sqrt(v)
    square: Tensor  # [blocks, size] uint8, v relative to the scale
    scale: Tensor  # [blocks, 1] float32, largest v


class AdamW8bit:
    """Updates matrices, and higher dimensions, in place."""

    def __init__(
        self, parameters: Mapping[str, Tensor], *, betas: tuple[float, float], weight_decay: Mapping[str, float]
    ) -> None:
        """`betas` must satisfy beta1² < beta2, otherwise ratios have no bound; config/rules.py checks it."""
        self._parameters = parameters
        self._betas = beta1, beta2 = betas
        self._weight_decay = weight_decay
        self._bound = (1 - beta1) / math.sqrt((1 - beta2) * (1 - beta1**2 / beta2))
        self._moments = {name: _zero_moments(parameter) for name, parameter in parameters.items()}

    def update(self, gradients: Mapping[str, Tensor], *, learning_rate: float) -> None:
        """Make one update."""
        for name, parameter in self._parameters.items():
            moments = self._moments[name]
            moments.step.add_(1)
            parameter.mul_(1 - learning_rate * self._weight_decay[name])
            size = moments.ratio.shape[1]
            blocks = max(1, CHUNK[parameter.device.type] // size)
            step = int(moments.step)
            dither = _dither(step, size, device=parameter.device)
            whole = (parameter.view(-1, size), gradients[name].reshape(-1, size),
                     moments.ratio, moments.square, moments.scale)  # fmt: skip
            for part in zip(*(tensor.split(blocks) for tensor in whole), strict=True):
                self._update(part, dither, step=step, learning_rate=learning_rate)

    def _update(
        self, part: tuple[Tensor, ...], dither: tuple[Tensor, Tensor], *, step: int, learning_rate: float
    ) -> None:
        """Update some blocks of a parameter."""
        parameter, gradient, ratio, square, scale = part
        beta1, beta2 = self._betas
        second = _decoded(square).mul_(scale)
        first = ratio.float().mul_(second.sqrt()).mul_(beta1 * self._bound / _STEPS).add_(gradient, alpha=1 - beta1)
        second.mul_(beta2).addcmul_(gradient, gradient, value=1 - beta2)
        scale.copy_(second.amax(1, keepdim=True))
        root = second.sqrt()
        torch.div(first, root.clamp(min=_TINY), out=first)  # now the ratio
        ratio.copy_(first.mul(_STEPS / self._bound).add_(dither[0]).floor_().clamp_(-_STEPS, _STEPS))
        square.copy_(_encoded(second.div_(scale.clamp(min=_TINY)), dither[1]))
        correction = math.sqrt(1 - beta2**step)
        first.mul_(root).div_(root.add_(EPS * correction))
        parameter.add_(first, alpha=-learning_rate * correction / (1 - beta1**step))

    def second_moments(self, name: str) -> Tensor:
        """Return v of a parameter as [blocks, size], in float32."""
        return _decoded(self._moments[name].square).mul_(self._moments[name].scale)

    def state(self) -> dict[str, Tensor]:
        """Return the stored tensors themselves, not copies, by name: KIND/PARAMETER."""
        return {
            f"{kind}/{name}": getattr(moments, kind)
            for name, moments in self._moments.items()
            for kind in Moments.__slots__
        }


def _zero_moments(parameter: Tensor) -> Moments:
    size = block_size(math.prod(parameter.shape[1:]))
    blocks = parameter.numel() // size
    return Moments(
        step=torch.zeros(()),
        ratio=torch.zeros(blocks, size, dtype=torch.int8, device=parameter.device),
        square=torch.zeros(blocks, size, dtype=torch.uint8, device=parameter.device),
        scale=torch.zeros(blocks, 1, device=parameter.device),
    )


def block_size(row: int) -> int:
    """Return the number of elements of a block in rows of `row` elements."""
    return next((size for size in range(min(BLOCK, row), MIN_BLOCK - 1, -1) if row % size == 0), max(row, 1))


def _dither(step: int, size: int, *, device: torch.device) -> tuple[Tensor, Tensor]:
    """Return two numbers in [0, 1) for each position in a block: one to round the ratio, and one to round the second
    moment, as an integer multiple of 2^-_MANTISSA."""
    position = torch.arange(size, dtype=torch.float64)
    first, second = ((position * along + step * over).frac().float() for over, along in _DITHER)
    return first.to(device), (second * 2**_MANTISSA).int().to(device)


def _decoded(code: Tensor) -> Tensor:
    """Return the numbers of codes, in [2^-32, 1]."""
    return code.int().add_(_ONE - 255).bitwise_left_shift_(_MANTISSA).view(torch.float32)


def _encoded(value: Tensor, dither: Tensor) -> Tensor:
    """Return the codes of numbers in [0, 1]; a number is rounded up if its dropped bits plus the dither carry over."""
    return value.view(torch.int32).add(dither).bitwise_right_shift_(_MANTISSA).sub_(_ONE - 255).clamp_(min=0)
