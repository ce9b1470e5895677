"""The choice of experts that an engine made for each token, and what a model's choices look like.

A mixture-of-experts model sends each token to `top_k` of its experts in each layer that has experts. Engine and trainer
compute the scores with other rounding, and so choose differently now and then; the trainer can repeat what the engine
chose (R3, arXiv 2510.11370). Arrays of experts are [rows, layers, top_k]: a row for each token that the model read,
only the layers with experts, ids in the order in which the engine gave them, which has no meaning.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import msgspec
import numpy as np
from numpy.typing import NDArray

#: Ids of experts: uint8, or uint16 if there are more than 256.
Experts = NDArray[np.uint8] | NDArray[np.uint16]


class RoutingShape(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What a model chooses for each token."""

    num_layers: int  # layers of the model, with and without experts
    layers: tuple[int, ...]  # those with experts, ascending
    num_experts: int  # of each of them, without shared ones
    top_k: int

    @property
    def dtype(self) -> np.dtype[Any]:
        """Return the smallest type that holds an id."""
        return np.dtype(np.uint8 if self.num_experts <= 256 else np.uint16)

    @property
    def row_bytes(self) -> int:
        """Return the size of one token's choices."""
        return len(self.layers) * self.top_k * self.dtype.itemsize

    def empty(self, rows: int = 0) -> Experts:
        """Return zeros for this many tokens."""
        return np.zeros((rows, len(self.layers), self.top_k), self.dtype)

    def fault(self, experts: Experts) -> str:
        """Return what is wrong with choices, "" if nothing: ids of a token and layer are distinct and in range."""
        if experts.shape[1:] != (len(self.layers), self.top_k):
            return f"shape {experts.shape}, expected (tokens, {len(self.layers)}, {self.top_k})"
        if not experts.size:
            return ""
        if int(experts.max()) >= self.num_experts:
            return f"expert {experts.max()} of {self.num_experts}"
        ids = experts.reshape(-1)
        place = np.tile(np.arange(self.top_k, dtype=np.uint8), ids.size // self.top_k)
        for gap in range(1, self.top_k):  # much faster than sorting so few ids at a time
            twice = (ids[gap:] == ids[:-gap]) & (place[gap:] >= gap)
            if twice.any():
                row, layer = divmod(int(twice.argmax()) // self.top_k, len(self.layers))
                return f"token {row} has an expert twice in layer {self.layers[layer]}"
        return ""


class Chosen(NamedTuple):
    """What an engine chose during a request."""

    start: int  # position of the first row's token in prompt + answer of the request
    experts: Experts  # of the tokens from there to the last but one: the last token was not read
