"""Check that a server's model has the same tensors as the run's; other shapes would crash it or give wrong tokens.

The check reads `config.json` in the folder that the server was started with, if this host can see that folder.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path, PurePosixPath
from typing import Any, Final

from dora.errors import ConfigError
from dora.model_files import read_config

#: Config keys that determine the names, shapes and use of a causal LM's tensors.
SHAPE_KEYS: Final = (
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
    """ConfigError if the model of the server at `url` differs; `served` is its folder as the server sees it."""
    if differing := shape_differences(_local_path(served, path_map), model):
        raise ConfigError(
            f"{url}: serves {served}, whose shape differs from model.path ({differing}); start the server "
            "with the model of this run"
        )


def shape_differences(folder: Path, model: Path) -> str:
    """Return how the shapes of a folder's model differ from those of the run's model; "" if they are equal or a config
    is unreadable, as in a folder on another host. In that case the first push reveals a difference."""
    theirs, ours = _config(folder) or {}, _config(model) or {}
    return ", ".join(
        f"{key} {theirs[key]} instead of {ours[key]}"
        for key in SHAPE_KEYS
        if key in ours and key in theirs and ours[key] != theirs[key]
    )


def _local_path(served: str, path_map: Mapping[str, str]) -> Path:
    for ours, theirs in path_map.items():
        if PurePosixPath(served).is_relative_to(theirs):
            return Path(ours) / PurePosixPath(served).relative_to(theirs)
    return Path(served)


def _config(folder: Path) -> dict[str, Any] | None:
    try:
        found = read_config(folder)
    except ConfigError:
        return None
    nested = found.get("text_config")
    return {**found, **nested} if isinstance(nested, dict) else found
