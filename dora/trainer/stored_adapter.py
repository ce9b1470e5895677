"""The matrices of an adapter in a folder, by peft's names; each rank reads its own rows."""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Final

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from dora.adapter_files import FIELD, WEIGHTS, require_adapter
from dora.errors import ConfigError
from dora.transport.messages import LoraSettings

_TYPES: Final = ("F64", "F32", "BF16", "F16")


class StoredAdapter:
    """The open file."""

    def __init__(self, folder: Path, settings: LoraSettings, shapes: Mapping[str, torch.Size]) -> None:
        """`shapes`: of all its matrices, by name. ConfigError if the folder has another adapter, or other matrices."""
        self._folder = folder
        require_adapter(
            self._folder, rank=settings.rank, alpha=settings.alpha, rslora=settings.rslora, targets=settings.targets
        )
        try:
            self._file = safe_open(self._folder / WEIGHTS, framework="pt")
        except (SafetensorError, OSError) as err:
            raise ConfigError(f"{FIELD}: {self._folder / WEIGHTS} cannot be read: {err}") from err
        found = set(self._file.keys())
        if missing := sorted(shapes.keys() - found):
            raise ConfigError(f"{FIELD}: {self._folder} lacks {missing[0]}{_others(missing)}")
        if extra := sorted(found - shapes.keys()):
            raise ConfigError(f"{FIELD}: {self._folder} has {extra[0][:200]!r}{_others(extra)}, for no target's weight")
        for name, shape in shapes.items():
            stored = self._file.get_slice(name)
            if stored.get_shape() != [*shape] or stored.get_dtype() not in _TYPES:
                raise ConfigError(
                    f"{FIELD}: {name} in {self._folder} has type {stored.get_dtype()} and shape {stored.get_shape()}, "
                    f"expected {' or '.join(_TYPES)} and {[*shape]}"
                )

    def rows(self, name: str, rows: range) -> Tensor:
        """Return rows of a matrix, as they are stored; ConfigError if a value is not finite."""
        if not rows:
            return torch.empty(0, *self._file.get_slice(name).get_shape()[1:])
        found = self._file.get_slice(name)[rows.start : rows.stop]
        if not math.isfinite(found.float().abs().amax()):  # NaN too
            raise ConfigError(f"{FIELD}: {name} in {self._folder} has values that are infinite or not numbers")
        return found


def _others(names: list[str]) -> str:
    return f" and {len(names) - 1} other tensors" if len(names) > 1 else ""
