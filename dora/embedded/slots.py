"""The caches of all rows of the embedded engine: keys and values by position, recurrent states by row, and attention.

The layout is taken from the cache that transformers itself fills in a forward pass of two tokens, so every family that
uses transformers' standard cache layers is served. Linear attention, state-space and convolution layers have states
instead of keys and values. A state belongs to a fixed number of tokens: it can be moved and restored, but not cut.

Legend: L layers with keys and values, S positions, W width of keys or values (heads x head size), the widest of all.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention
from transformers import cache_utils
from transformers.cache_utils import Cache, DynamicCache
from transformers.integrations.sdpa_attention import repeat_kv
from transformers.modeling_utils import AttentionInterface

from dora.errors import ConfigError
from dora.routing import RoutingShape

ATTENTION = "dora_slots"
FEW = 16  # new tokens of a row up to which repeating the mask takes less than repeating the keys
LAYERS = (
    cache_utils.DynamicLayer,
    cache_utils.DynamicSlidingWindowLayer,
    cache_utils.LinearAttentionLayer,
    cache_utils.LinearAttentionAndFullAttentionLayer,
    cache_utils.LinearAttentionAndSlidingWindowAttentionLayer,
)


def _attend(
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """Attention over slot views. In a decode step, the query heads of a KV head form one block: no key is repeated."""
    softcap, sinks = kwargs.get("softcap"), kwargs.get("s_aux")
    rows, heads, new, size = query.shape
    kv_heads = key.shape[1]
    if new == 1 or (new <= FEW and softcap is None and sinks is None):
        query = query.reshape(rows, kv_heads, heads // kv_heads * new, size)
        if new > 1 and attention_mask is not None:
            attention_mask = attention_mask.repeat(1, 1, heads // kv_heads, 1)
    else:
        key, value = repeat_kv(key, heads // kv_heads), repeat_kv(value, heads // kv_heads)
    if softcap is None and sinks is None:
        out = scaled_dot_product_attention(query, key, value, attn_mask=attention_mask, scale=scaling)
    else:
        scores = query @ key.transpose(2, 3) * (size**-0.5 if scaling is None else scaling)
        if softcap is not None:
            scores = softcap * (scores / softcap).tanh()
        scores = scores if attention_mask is None else scores + attention_mask
        if sinks is not None:  # an extra score of each head, which takes probability but has no value
            scores = torch.cat((scores, sinks.view(1, query.shape[1], -1, 1).expand(*scores.shape[:3], 1)), dim=3)
        out = scores.softmax(dim=3, dtype=torch.float32)[..., : key.shape[2]].to(value.dtype) @ value
    return out.reshape(rows, heads, new, -1).transpose(1, 2), None


AttentionInterface.register(ATTENTION, _attend)


@dataclass(frozen=True, slots=True)
class Saved:
    """A copy of a row."""

    kv: Tensor  # (L, 2, S, W)
    states: list[Tensor]  # after the last of the S tokens
    experts: Tensor | None = None  # (S, layers with experts, top_k), if they are kept

    @property
    def length(self) -> int:
        return self.kv.shape[2]


class SlotCache(Cache):  # type: ignore[misc]  # transformers is untyped
    """All rows, and the view that one forward writes to (`write_at`) and reads (`rows`, `positions`)."""

    def __init__(self, filled: DynamicCache, *, slots: int, routing: RoutingShape | None = None) -> None:
        """`filled`: the cache of the model after a forward pass of one row; this object takes over its layers.
        `routing`: the choice of experts is kept beside it."""
        super().__init__(layers=filled.layers)
        self.capacity = 0
        held = [(at, layer.keys, layer.values) for at, layer in enumerate(self.layers) if _has_kv(layer)]
        self._shapes = [tuple((one.shape[1], one.shape[3]) for one in (keys, values)) for _, keys, values in held]
        self._place = {at: place for place, (at, _, _) in enumerate(held)}  # layer -> place among layers with KV
        width = max((heads * size for pair in self._shapes for heads, size in pair), default=0)
        like = held[0][1] if held else torch.zeros(0)
        self.kv = torch.zeros(len(held), 2, slots + 1, 0, width, dtype=like.dtype, device=like.device)
        self._experts: Tensor | None = None  # (slots + 1, capacity, layers with experts, top_k)
        if routing is not None:
            dtype = torch.uint8 if routing.num_experts <= 256 else torch.int16
            self._experts = torch.zeros(
                slots + 1, 0, len(routing.layers), routing.top_k, dtype=dtype, device=self.kv.device
            )
        self._linear = [layer for layer in self.layers if isinstance(layer, cache_utils.LinearAttentionLayer)]
        self._states = [
            (states, index, state.new_zeros(slots, *state.shape[1:]))
            for layer in self._linear
            for states in (layer.conv_states, layer.recurrent_states)
            for index, state in states.items()
            if state is not None
        ]

    @property
    def stateful(self) -> bool:
        """Whether some layers have states; a state belongs to exactly the tokens that were computed."""
        return bool(self._states)

    def grow(self, capacity: int) -> None:
        layers, two, rows, old, width = self.kv.shape
        kv = self.kv.new_zeros(layers, two, rows, capacity, width)
        kv[:, :, :, :old] = self.kv
        self.kv, self.capacity = kv, capacity
        if self._experts is not None:
            experts = self._experts.new_zeros(rows, capacity, *self._experts.shape[2:])
            experts[:, :old] = self._experts
            self._experts = experts
        flat = kv.view(layers, 2, rows * capacity, width)
        self._flat = [
            [half[:, : heads * size] for half, (heads, size) in zip(layer, pair, strict=True)]
            for layer, pair in zip(flat, self._shapes, strict=True)
        ]
        self._aimed: tuple[slice, int, bool] | None = None

    def aim(self, write_at: Tensor, *, rows: slice, positions: int, first: bool = False) -> None:
        """Choose the view for the next forward pass. `write_at`: flat (row, position) index of every new token;
        `first`: the new tokens are the first ones of their rows."""
        self.write_at = write_at
        if self._aimed == (rows, positions, first):
            return
        self._aimed = (rows, positions, first)
        self._read = [
            [
                half[rows, :positions, : heads * size].unflatten(-1, (heads, size)).transpose(1, 2)
                for half, (heads, size) in zip(layer, pair, strict=True)
            ]
            for layer, pair in zip(self.kv, self._shapes, strict=True)
        ]
        for states, index, all_rows in self._states:
            states[index] = all_rows[rows]  # transformers writes to this view
        for layer in self._linear:
            layer.has_previous_state = dict.fromkeys(layer.has_previous_state, not first)

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        place = self._place[layer_idx]
        for flat, new in zip(self._flat[place], (key_states, value_states), strict=True):
            flat.index_copy_(0, self.write_at, new.transpose(1, 2).reshape(-1, flat.shape[-1]))
        keys, values = self._read[place]
        return keys, values

    def keep_experts(self, experts_TLk: Tensor) -> None:
        """Keep the experts that were chosen for the new tokens of a forward pass."""
        assert self._experts is not None
        self._experts.flatten(0, 1).index_copy_(0, self.write_at, experts_TLk.to(self._experts.dtype))

    def get_seq_length(self, layer_idx: int = 0) -> int:
        return 0

    def get_mask_sizes(self, query_length: int, layer_idx: int) -> tuple[int, int]:
        return query_length, 0

    # --- rows

    def move(self, source: int, target: int, *, length: int) -> None:
        self.kv[:, :, target, :length] = self.kv[:, :, source, :length]
        if self._experts is not None:
            self._experts[target, :length] = self._experts[source, :length]
        for _, _, all_rows in self._states:
            all_rows[target] = all_rows[source]

    def forget(self, row: int, *, length: int) -> None:
        """Make sure that a row of `length` tokens which is no longer used is finite: a masked position adds 0 x its
        contents, and 0 x NaN is NaN."""
        used = self.kv[:, :, row, :length]
        if not math.isfinite(used.sum()):
            used.zero_()

    def clear(self, row: int, *, begin: int, end: int) -> None:
        self.kv[:, :, row, begin:end].zero_()

    def save(self, row: int, *, length: int) -> Saved:
        """Copy a row of `length` tokens; its states must belong to exactly this number of tokens."""
        states = [all_rows[row].clone() for _, _, all_rows in self._states]
        experts = None if self._experts is None else self._experts[row, :length].clone()
        return Saved(self.kv[:, :, row, :length].clone(), states, experts)

    def restore(self, row: int, saved: Saved | None, *, length: int) -> None:
        """Set up a row with the first `length` tokens of `saved`. Where layers have states, that is all tokens or
        none."""
        if saved is not None:
            self.kv[:, :, row, :length] = saved.kv[:, :, :length]
            if self._experts is not None and saved.experts is not None:
                self._experts[row, :length] = saved.experts[:length]
        for at, (_, _, all_rows) in enumerate(self._states):
            all_rows[row] = saved.states[at] if saved is not None and length else 0

    def experts(self, row: int, *, begin: int, end: int) -> Tensor:
        """Return the experts kept for these tokens of a row."""
        assert self._experts is not None
        return self._experts[row, begin:end]


def filled_cache(model: Any) -> DynamicCache:
    """Return the cache of a forward pass of two tokens. ConfigError if it is not made of standard layers."""
    token_BT = torch.zeros(1, 2, dtype=torch.int64, device=model.device)
    cache: Any = getattr(model(input_ids=token_BT, use_cache=True), "past_key_values", None)
    if type(cache) is not DynamicCache:
        raise ConfigError(f"{type(model).__name__} is not served by the embedded engine: it has a cache of its own")
    for layer in cache.layers:
        if type(layer) not in LAYERS:
            kind = type(layer).__name__
            raise ConfigError(f"{type(model).__name__} is not served by the embedded engine: it caches in {kind}")
    return cache


def _has_kv(layer: Any) -> bool:
    return getattr(layer, "keys", None) is not None
