"""Loading of a model folder: each rank reads only its own rows of the safetensors."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from dora.errors import ConfigError


def load_shards(model: Any, model_path: Path, *, rank: int, world_size: int) -> None:
    """Fill this rank's rows (dim 0, in chunks of ceil(rows / world size)) and all persistent buffers."""
    files = _files_by_name(model_path)
    buffers = dict(model.named_buffers())
    wanted = dict(model.named_parameters()) | {name: buffers[name] for name in model.state_dict() if name in buffers}
    missing = sorted(wanted.keys() - files.keys())
    if missing:
        raise ConfigError(f"model.path: {model_path} lacks {missing[0]} and {len(missing) - 1} other tensors")
    for path in sorted({files[name] for name in wanted}):
        with safe_open(path, framework="pt") as opened, torch.no_grad():
            for name in (name for name in wanted if files[name] == path):
                stored, target = opened.get_slice(name), wanted[name]
                if tuple(stored.get_shape()) != tuple(target.shape):
                    raise ConfigError(f"{path}: {name} has shape {stored.get_shape()}, expected {tuple(target.shape)}")
                if name in buffers:
                    target.copy_(opened.get_tensor(name))
                    continue
                rows = -(-target.shape[0] // world_size)
                start, stop = (min(rows * r, target.shape[0]) for r in (rank, rank + 1))
                if start < stop:
                    target.to_local().copy_(stored[start:stop])


def _files_by_name(model_path: Path) -> dict[str, Path]:
    """Map each tensor name to the safetensors file that contains it."""
    index = model_path / "model.safetensors.index.json"
    if index.is_file():
        return {name: model_path / file for name, file in json.loads(index.read_text())["weight_map"].items()}
    found: dict[str, Path] = {}
    for path in sorted(model_path.glob("*.safetensors")):
        try:
            with safe_open(path, framework="pt") as opened:
                found |= dict.fromkeys(opened.keys(), path)
        except SafetensorError as err:
            raise ConfigError(f"model.path: {path} is not a readable safetensors file: {err}") from err
    if not found:
        raise ConfigError(f"model.path: {model_path} has no safetensors file; give a Hugging Face model folder")
    return found
