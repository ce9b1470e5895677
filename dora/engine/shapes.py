"""Whether a server's model has the tensors of ours: a version of another shape would kill it, or decode nonsense.

Read from the `config.json` of the folder that the server was started with, where that folder can be seen from here.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path, PurePosixPath
from typing import Any, Final

from dora.errors import ConfigError

#: What decides the names and shapes of a causal LM's tensors, and how they are computed with.
SHAPES: Final = (
    "model_type",
    "vocab_size",
    "hidden_size",
    "intermediate_size",
    "moe_intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "num_experts",
    "tie_word_embeddings",
)


def require_same_shapes(url: str, served: str, *, model: Path, path_map: Mapping[str, str]) -> None:
    """ConfigError if the server at `url`, started with folder `served` as it sees it, holds another kind of model."""
    theirs = _config(_seen_from_here(served, path_map))
    ours = _config(model)
    if theirs is None or ours is None:
        return  # a folder on another host: the first push will tell
    differing = [
        f"{key} {theirs[key]} in place of {ours[key]}"
        for key in SHAPES
        if key in ours and key in theirs and ours[key] != theirs[key]
    ]
    if differing:
        raise ConfigError(
            f"{url}: serves {served}, a model of another shape than model.path ({', '.join(differing)}); start the "
            "server with the model of this run"
        )


def _seen_from_here(served: str, path_map: Mapping[str, str]) -> Path:
    for ours, theirs in path_map.items():
        if PurePosixPath(served).is_relative_to(theirs):
            return Path(ours) / PurePosixPath(served).relative_to(theirs)
    return Path(served)


def _config(folder: Path) -> dict[str, Any] | None:
    try:
        found = json.loads((folder / "config.json").read_bytes())
    except (OSError, ValueError, RecursionError):
        return None
    return found if isinstance(found, dict) else None
