"""The lengths beyond which a decoder computes in another way, read from transformers' configuration object.

They are windows, chunks, blocks and original context lengths. Families keep them in different places: at the top, in
the configuration of the text model, or in the parameters of a rotary embedding (one, or one for each kind of layer).
"""

from __future__ import annotations

from typing import Any, Final

from dora.model_config import ORIGINAL, original_context, ropes, text_config

#: A setting whose name contains one of these is such a length, unless its name ends with one of `_OTHERS`.
_WORDS: Final = (
    "window",
    "chunk",
    "block_size",
    "index_topk",
    "floor_scale",
    "context_length",
    "original_max_position",
)
_OTHERS: Final = ("_layers", "_pattern", "_blocks")


def thresholds(config: Any) -> dict[str, int]:
    """Return these lengths in tokens, by the place of the setting in the decoder's configuration."""
    text = text_config(config)
    found = {
        name: value
        for name, value in vars(text).items()
        if any(word in name for word in _WORDS) and not name.endswith(_OTHERS) and type(value) is int and value > 1
    }
    for place, rope in ropes(config).items():
        limit = original_context(rope, config)
        if limit is not None and (ORIGINAL in rope or rope.get("rope_type") in ("dynamic", "longrope")):
            found[f"{place}.{ORIGINAL}"] = limit
    return found
