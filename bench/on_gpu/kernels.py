"""The kernels that attention uses on this device, against the definition of attention in float64.

Each figure is the largest error of an output or a gradient, relative to the largest value of the same tensor, over all
rules of a kernel: windows, chunks, soft caps, sinks. Rows are sequences one after the other, the same sequences padded,
and answers that share their prompts. The ratio compares with the definition itself in the data type of the inputs.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from result import Row, number
from torch import Tensor

from dora.trainer import attention_gpu
from dora.trainer.attention import Pattern, Segments, attend
from dora.trainer.attention_kernels import Rule
from on_gpu.cases import Case, Place
from tests.trainer.attention_definition import dense

HEADS = (4, 2, 2)  # of queries, keys, values
LIMIT = {torch.bfloat16: 2e-2, torch.float16: 5e-3, torch.float32: 1e-5}


class Sizes(NamedTuple):
    """The lengths of rows, and the rules, in which they are longer than a block and shorter than a sequence."""

    lengths: tuple[int, ...]
    shared: tuple[int, ...]  # prompts and answers
    prompts: tuple[int, ...]  # of `shared`: the index of each one's prompt
    window: int
    chunk: int

    @property
    def rules(self) -> list[dict[str, Any]]:
        window, chunk = {"window": self.window}, {"chunk": self.chunk}
        cap, sinks = {"softcap": 0.7}, {"sinks": True}
        return [{}, window, {"window": 1}, chunk, cap, sinks, window | sinks, window | cap | sinks | chunk]


PROMPTS = (-1, 0, 0, 0, -1, -1, 5, 5, -1, 8)
SIZES = Sizes((5, 700, 317, 61, 1, 900), (300, 333, 4, 170, 90, 1, 60, 2, 160, 400), PROMPTS, window=200, chunk=256)
TINY = Sizes((5, 40, 17, 61, 1, 9), (20, 33, 4, 17, 9, 1, 6, 2, 16, 40), PROMPTS, window=7, chunk=16)


def cases(part: str, *, tiny: bool) -> list[Case]:
    heads = [(8, 6)] if tiny else [(64, 64), (128, 128), (192, 128), (256, 256)]
    chosen = [(size, torch.bfloat16) for size in heads] + [(heads[0], torch.float16), (heads[0], torch.float32)]
    return [
        Case(f"heads of {size} and {size_v}, {name_of(dtype)}", partial(compare, size, size_v, dtype), limit_s=120.0)
        for (size, size_v), dtype in chosen
    ]


def name_of(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def compare(size: int, size_v: int, dtype: torch.dtype, place: Place) -> Iterator[Row]:
    """Yield a row for each kernel and kind of row: its largest error over all rules."""
    sizes = SIZES if place.device == "cuda" else TINY
    worst: dict[str, tuple[float, float, str]] = {}  # error, that of the definition in this data type, rule
    for rule in sizes.rules:
        for kind in ("packed", "padded", "shared prompts"):
            lengths, prompts = (sizes.shared, sizes.prompts) if kind == "shared prompts" else (sizes.lengths, ())
            inputs = draw(sum(lengths), size, size_v, dtype=dtype, device=place.device, sinks="sinks" in rule)
            capped, sink_H = Rule(1.0, softcap=rule.get("softcap")), inputs[3] if "sinks" in rule else None
            kernel = attention_gpu.choose(inputs[0], capped, sink_H, shares=bool(prompts))
            key = f"{kernel or 'blocks'}, {kind}"
            exact = run(inputs, rule, lengths, prompts, kind="definition", dtype=torch.float64)
            found = error(run(inputs, rule, lengths, prompts, kind=kind, dtype=dtype), exact)
            beside = error(run(inputs, rule, lengths, prompts, kind="definition", dtype=dtype), exact)
            name = " and ".join(f"{name} {value}" for name, value in rule.items()) or "no rule"
            worst[key] = max(worst.get(key, (0.0, 0.0, "")), (found, beside, name))
    for key, (found, beside, name) in worst.items():
        yield Row(
            f"heads of {size} and {size_v}, {name_of(dtype)}: {key}",
            found,
            "of the largest value",
            f"the definition in {name_of(dtype)}, {number(beside)} ({name})",
            found / beside,
            f"figure <= {LIMIT[dtype]}",
        )


def draw(tokens: int, size: int, size_v: int, *, dtype: torch.dtype, device: str, sinks: bool) -> list[Tensor]:
    """Return query, key, value and, if asked for, the sinks' scores."""
    generator = torch.Generator().manual_seed(0)
    shapes = [(1, heads, tokens, width) for heads, width in zip(HEADS, (size, size, size_v), strict=True)]
    chosen = [*shapes, (HEADS[0],)] if sinks else shapes
    return [torch.randn(*shape, generator=generator).to(device, dtype) for shape in chosen]


def run(
    inputs: Sequence[Tensor],
    rule: dict[str, Any],
    lengths: tuple[int, ...],
    prompts: tuple[int, ...],
    *,
    kind: str,
    dtype: torch.dtype,
) -> list[Tensor]:
    """Return the output [T, H, D_v] and the gradients of the inputs."""
    given = [tensor.to(dtype).requires_grad_() for tensor in inputs]
    query, key, value, *sinks = given
    sink_H = sinks[0] if sinks else None
    scale, changes = query.shape[3] ** -0.5, {name: value for name, value in rule.items() if name != "sinks"}
    if kind == "definition":
        out = dense(query, key, value, sink_H, lengths=lengths, prompts=prompts, scale=scale, **changes)[0]
    else:
        softcap = changes.pop("softcap", None)
        rows = pad(given[:3], lengths) if kind == "padded" else given[:3]
        pattern = Pattern(None if kind == "padded" else Segments(lengths, query.device, prompts), **changes)
        query, key, value = rows
        out, _ = attend(torch.nn.Identity(), query, key, value, pattern, softcap=softcap, s_aux=sink_H)
        out = torch.cat([row[:n] for row, n in zip(out, lengths, strict=True)]) if kind == "padded" else out[0]
    weight = torch.linspace(-1, 1, out.numel(), device=out.device, dtype=dtype).view_as(out)
    return [tensor.detach().double() for tensor in (out, *torch.autograd.grad(out, given, weight))]


def pad(tensors: Sequence[Tensor], lengths: tuple[int, ...]) -> list[Tensor]:
    """[1, heads, T, D] -> [sequences, heads, L, D]"""
    sequences = [torch.split(t[0].transpose(0, 1), list(lengths)) for t in tensors]
    return [torch.nn.utils.rnn.pad_sequence(list(each), batch_first=True).transpose(1, 2) for each in sequences]


def error(found: Sequence[Tensor], exact: Sequence[Tensor]) -> float:
    """Return the largest difference, relative to the largest value of its tensor; NaN counts as a million."""
    each = []
    for tensor, expected in zip(found, exact, strict=True):
        largest = float(expected.abs().max())  # 0: a query that sees one key has no gradient
        each.append(float((tensor - expected).abs().max().nan_to_num(nan=1e6)) / (largest or 1.0))
    return max(each)
