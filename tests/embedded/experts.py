"""The experts that a plain forward pass chooses, found by a loop of its own."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from transformers import AutoModelForCausalLM


class PlainChoice:
    """A checkpoint in plain transformers; the highest scores of each token are looked for one by one."""

    def __init__(self, folder: Path) -> None:
        self._model = AutoModelForCausalLM.from_pretrained(folder, attn_implementation="eager").eval()
        self._scores: dict[int, torch.Tensor] = {}
        for at, layer in enumerate(self._model.model.layers):
            if getattr(layer.mlp, "experts", None) is not None:
                layer.mlp.register_forward_pre_hook(partial(self._see, at))

    def _see(self, layer: int, block: Any, args: tuple[torch.Tensor, ...]) -> None:
        logits = args[0].flatten(0, -2) @ block.gate.weight.T
        bias = getattr(block.gate, "e_score_correction_bias", None)
        self._scores[layer] = logits if bias is None else logits.sigmoid() + bias

    @torch.inference_mode()
    def __call__(self, token_ids: list[int], *, top_k: int = 2) -> NDArray[np.int32]:
        """The experts of every token, in ascending order; zeros for layers without experts."""
        self._model(torch.tensor([token_ids]), use_cache=False)
        chosen = np.zeros((len(token_ids), len(self._model.model.layers), top_k), np.int32)
        for layer, scores in self._scores.items():
            for token, row in enumerate(scores.tolist()):
                best = sorted(range(len(row)), key=row.__getitem__)[-top_k:]
                chosen[token, layer] = sorted(best)
        return chosen
