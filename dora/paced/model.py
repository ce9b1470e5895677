"""A model folder without a model: the seed's tokenizer, a config, and the version number instead of weights."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Final

import numpy as np
from safetensors.numpy import save_file

_COPIED: Final = ("tokenizer.json", "tokenizer_config.json", "generation_config.json")


def write_model(folder: Path, *, like: Path, version: int, positions: int | None = None) -> None:
    """Fill `folder` with files copied from `like`; `positions` replaces the context length."""
    for name in _COPIED:
        shutil.copyfile(like / name, folder / name)
    config = json.loads((like / "config.json").read_text(encoding="utf-8"))
    if positions is not None:
        config["max_position_embeddings"] = positions
    (folder / "config.json").write_text(json.dumps(config, indent=1), encoding="utf-8")
    save_file({"version": np.array([version], np.int64)}, folder / "model.safetensors")
