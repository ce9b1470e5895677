"""Adapters as peft itself writes them, and the log-probs of peft's own model, whose matrices DORA does not touch."""

from __future__ import annotations

import json
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

import torch
from peft import LoraConfig, PeftModel, get_peft_model
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from dora.adapter_files import CONFIG, WEIGHTS
from dora.embedded.scheduler import AdapterRoom
from tests.embedded.conftest import Reference

ATTENTION: Final = ("q_proj", "k_proj", "v_proj", "o_proj")
DENSE: Final = (*ATTENTION, "gate_proj", "up_proj", "down_proj")
RANK: Final = 4


def room(targets: Sequence[str] = DENSE, *, count: int = 3, rank: int = RANK) -> AdapterRoom:
    return AdapterRoom(count, rank, tuple(targets))


def write_adapter(
    folder: Path, model: Path, *, targets: Sequence[str] = DENSE, rank: int = RANK, seed: int, alpha: float = 8.0
) -> Path:
    """Have peft write an adapter whose effect is large."""
    config = LoraConfig(r=rank, lora_alpha=alpha, target_modules=list(targets), init_lora_weights=False)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # about weights that are stored transposed
        adapted = get_peft_model(AutoModelForCausalLM.from_pretrained(model), config)
    generator = torch.Generator().manual_seed(seed)
    for name, parameter in adapted.named_parameters():
        if "lora_" in name:
            parameter.data.normal_(std=0.2, generator=generator)
    adapted.save_pretrained(folder, save_embedding_layers=False)
    return folder


def alter(folder: Path, **changes: Any) -> Path:
    """Change the configuration of an adapter."""
    path = folder / CONFIG
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))
    return folder


def refill(folder: Path, **tensors: torch.Tensor | None) -> Path:
    """Replace tensors of an adapter, by the last parts of their names with _ for dots; None: remove them all."""
    found = load_file(folder / WEIGHTS)
    for end, tensor in tensors.items():
        for name in [name for name in found if name.replace(".", "_").endswith(end)]:
            del found[name]
            if tensor is not None:
                found[name] = tensor.clone()
    save_file(found, folder / WEIGHTS)
    return folder


class AdaptedReference(Reference):
    """A model with one adapter, computed by peft."""

    def __init__(self, model: Path, adapter: Path) -> None:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            base = AutoModelForCausalLM.from_pretrained(model, attn_implementation="eager")
            self._model = PeftModel.from_pretrained(base, adapter).eval()
