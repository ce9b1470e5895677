"""Attention over rows of sequences: every sequence attends to itself only, and no mask of [T, T] is built.

A row is either packed, [1, T] with several segments one after another, or each batch row of [B, L] is one sequence,
padded at the end: under a causal mask no real query sees the padding. `within(segments)` says which of the two forms
the model runs on. The functions of this file are registered with transformers as "dora_segments", as attention and as
the maker of masks. In place of a mask a layer gets a `Pattern`: what transformers would have masked, and in which
segments. The pattern takes the place of the mask because every layer passes its mask on to its attention, and because
a layer that runs again for its backward pass is given the same mask again.
Legend: B batch rows, L their length (T of a packed row), H heads, H_kv heads of keys, D head size, D_v that of values.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, Final

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask
from transformers import AttentionInterface, AttentionMaskInterface, AutoModelForCausalLM

from dora.errors import ConfigError
from dora.trainer import attention_gpu as gpu
from dora.trainer import attention_kernels as kernels
from dora.trainer.attention_kernels import Rule
from dora.trainer.context import Context

NAME: Final = "dora_segments"
#: Arguments that some models pass to their attention and that have no effect: the positions were applied before.
POSITIONS: Final = frozenset({"position_ids", "cache_position"})


class Segments:
    """The segments of a packed row, made once per micro-batch for all layers: sequences, or prompts and responses.

    A response sees its prompt, which is another segment, as if it stood right before it. It is not a dataclass, because
    FSDP copies each dataclass among the arguments of each layer.
    """

    def __init__(
        self,
        lengths: tuple[int, ...],
        device: torch.device,
        prompts: tuple[int, ...] = (),
        *,
        context: Context | None = None,
    ) -> None:
        self.lengths = lengths
        self.context = context  # the ranks of which each has a slice of the row; None: this one has all of it
        self.prompts = prompts or (-1,) * len(lengths)  # the index of each segment's prompt; -1: none
        self.longest = max(lengths)
        self.device = device
        self.has_prompts = any(prompt >= 0 for prompt in prompts)
        # int32: the number of tokens before each segment, and of all; copied before any layer runs
        self.ends = F.pad(torch.tensor(lengths).cumsum(0, dtype=torch.int32), (1, 0)).to(device)
        self.prompts_N = torch.tensor(self.prompts, dtype=torch.int32).to(device)
        self._chunked: dict[int, Segments] = {}

    def chunked(self, size: int) -> Segments:
        """Return each segment cut where chunks of `size` tokens of its sequence end.

        Llama 4's chunked attention is ordinary attention within these pieces: a response begins in the chunk in which
        its prompt ended.
        """
        if size not in self._chunked:
            pieces: list[int] = []
            prompts: list[int] = []
            last_piece: list[int] = []  # index of the last piece of each segment
            for length, prompt in zip(self.lengths, self.prompts, strict=True):
                begun = self.lengths[prompt] % size if prompt >= 0 else 0
                first = min(length, size - begun)
                cut = [first, *(min(size, length - start) for start in range(first, length, size))]
                pieces += cut
                prompts += [last_piece[prompt] if begun else -1, *[-1] * (len(cut) - 1)]
                last_piece.append(len(pieces) - 1)
            self._chunked[size] = Segments(tuple(pieces), self.device, tuple(prompts))
        return self._chunked[size]


class Pattern:
    """What a layer gets in place of a mask: causal attention within the segments. Like `Segments`, not a dataclass."""

    def __init__(self, segments: Segments | None, *, window: int | None = None, chunk: int | None = None) -> None:
        self.segments = segments  # None: every batch row is one sequence, padded at the end
        self.window = window  # a query sees this many keys, its own included
        self.chunk = chunk  # a query sees the keys of its chunk; chunks start at multiples of it
        self._block_masks: dict[int, BlockMask] = {}

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        raise ConfigError("model.path: a layer of this model computes with its attention mask; not supported")

    def __getitem__(self, index: Any) -> Any:
        return self.shape[index]  # refused likewise

    def block_mask(self, segments: Segments | None, *, length: int, device: torch.device) -> BlockMask:
        """FlexAttention's mask of a row of `length` tokens, built for the first layer."""
        if length not in self._block_masks:
            ends, prompts_N = (None, None) if segments is None else (segments.ends, segments.prompts_N)
            self._block_masks[length] = gpu.block_mask(
                ends, prompts_N, length=length, window=self.window, device=device
            )
        return self._block_masks[length]


_segments: ContextVar[Segments | None] = ContextVar("segments", default=None)


@contextmanager
def within(segments: Segments | None) -> Iterator[None]:
    """In this context, models run on a packed row of these segments; None: every batch row is one sequence."""
    token = _segments.set(segments)
    try:
        yield
    finally:
        _segments.reset(token)


def require_interface(config: Any) -> None:
    """Raise ConfigError if this family computes attention with its own code, as families with ALiBi do (Bloom, MPT)."""
    family = AutoModelForCausalLM._model_mapping.get(type(config), None)
    if family is not None and not family._can_set_attn_implementation():
        raise ConfigError(f"model.path: {family.__name__} has an attention of its own; not supported")


def pattern_of(*, mask_function: Callable[..., Any], attention_mask: Tensor | None = None, **_: Any) -> Pattern:
    """Transformers' mask interface: find out which parts the mask would have, instead of building the mask.

    The parts are the functions of `transformers.masking_utils`, recognised by name; a part without an equivalent here
    (bidirectional, prefixes, blocks of an image) is a ConfigError.
    """
    segments, window, chunk, causal = _segments.get(), None, None, False
    if attention_mask is not None and bool((attention_mask[:, 1:] > attention_mask[:, :-1]).any()):
        raise ValueError("rows are padded at the end, but the attention mask has padding before a token")
    parts = [mask_function]
    while parts:
        part = parts.pop()
        name, bound = part.__qualname__.partition(".")[0], inspect.getclosurevars(part).nonlocals
        match name:
            case "and_masks":
                parts.extend(bound["mask_functions"])
            case "causal_mask_function":
                causal = True
            case "sliding_window_overlay":
                window = bound["sliding_window"]
            case "chunked_overlay":
                chunk = bound["chunk_size"]
            case "packed_sequence_mask_function":
                if segments is None:
                    raise ValueError("positions start again within a row, but the row has no segments")
            case _:
                raise ConfigError(f"model.path: attention with {name} of transformers is not supported")
    if not causal:
        raise ConfigError("model.path: attention that is not causal is not supported")
    return Pattern(segments, window=window, chunk=chunk)


def attend(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Pattern | Tensor | None,
    *,
    scaling: float | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    is_causal: bool | None = None,
    **others: Any,
) -> tuple[Tensor, None]:
    """Transformers' attention interface: query [B, H, L, D], key and value [B, H_kv, L, D or D_v] -> [B, L, H, D_v].

    `softcap` c replaces a score s by c tanh(s / c) (Gemma 2, arXiv:2408.00118, section 2). `s_aux` [H] adds one key per
    head with this score and no value (gpt-oss, "attention sinks", arXiv:2309.17453). `sliding_window` is not read: the
    pattern has the window that transformers' own mask would have had.
    """
    name = type(module).__name__
    if not isinstance(attention_mask, Pattern):
        raise ConfigError(f"model.path: {name} attends with a mask of its own; not supported")
    if not (getattr(module, "is_causal", True) if is_causal is None else is_causal):
        raise ConfigError(f"model.path: {name} is not causal; not supported")
    for other, given in others.items():
        if isinstance(given, Tensor) and other not in POSITIONS:
            raise ConfigError(f"model.path: {name} attends with {other}; not supported")
    rule = Rule(
        scale=query.shape[3] ** -0.5 if scaling is None else scaling, window=attention_mask.window, softcap=softcap
    )
    context = None if attention_mask.segments is None else attention_mask.segments.context
    if context is None:
        return _attend(query, key, value, s_aux, rule, attention_mask), None
    if query.shape[1] % context.size:
        raise ConfigError(
            f"trainer.parallel.context: {context.size} ranks cannot divide the {query.shape[1]} heads of {name} equally"
        )
    query, key, value = context.to_heads(query, key, value)
    own_sinks = None if s_aux is None else context.own_heads(s_aux)
    return context.to_tokens(_attend(query, key, value, own_sinks, rule, attention_mask)), None


def _attend(query: Tensor, key: Tensor, value: Tensor, sink_H: Tensor | None, rule: Rule, pattern: Pattern) -> Tensor:
    """Choose the kernel; chunks of padded rows become rows of their own."""
    segments, (batch, _, length, _) = pattern.segments, query.shape
    if segments is None and pattern.chunk is not None and length > pattern.chunk:
        # [B, heads, L, D] -> [B x chunks, heads, chunk, D]
        query, key, value = (
            F.pad(t, (0, 0, 0, -length % pattern.chunk)).unflatten(2, (-1, pattern.chunk)).transpose(1, 2).flatten(0, 1)
            for t in (query, key, value)
        )
        out = _attend(query, key, value, sink_H, rule, Pattern(None, window=pattern.window))
        return out.unflatten(0, (batch, -1)).flatten(1, 2)[:, :length]
    if segments is not None and pattern.chunk is not None:
        segments = segments.chunked(pattern.chunk)
    match gpu.choose(query, rule, sink_H, shares=segments is not None and segments.has_prompts):
        case "flash":
            if segments is not None:
                return gpu.attend_flash(query, key, value, rule, ends=segments.ends, longest=segments.longest)
            ends = torch.arange(0, batch * length + 1, length, dtype=torch.int32, device=query.device)
            return gpu.attend_flash(query, key, value, rule, ends=ends, longest=length)
        case "flex":
            mask = pattern.block_mask(segments, length=length, device=query.device)
            return gpu.attend_flex(query, key, value, sink_H, rule, mask=mask)
    lengths, prompts = (None, ()) if segments is None else (segments.lengths, segments.prompts)
    return kernels.attend(query, key, value, sink_H, rule, lengths=lengths, prompts=prompts)


AttentionInterface.register(NAME, attend)
AttentionMaskInterface.register(NAME, pattern_of)
