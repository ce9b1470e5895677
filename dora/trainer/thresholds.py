"""The lengths beyond which a decoder computes in another way, read from transformers' configuration object.

Windows, chunks, blocks and original contexts, wherever a family keeps them: at the top, in the configuration of the
text model, in the parameters of one rotary embedding or of one for each kind of layer.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

#: Parts of the names of settings that are such lengths, unless the name ends with one of `_OTHERS`.
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
_ORIGINAL: Final = "original_max_position_embeddings"


def ropes(config: Any) -> dict[str, Mapping[str, Any]]:
    """Return the parameters of each rotary embedding of the decoder, by their place in its configuration."""
    found = getattr(config.get_text_config(decoder=True), "rope_parameters", None) or {}
    if nested := {f"rope_parameters.{kind}": one for kind, one in found.items() if isinstance(one, Mapping)}:
        return nested
    return {"rope_parameters": found} if found else {}


def original_context(rope: Mapping[str, Any], config: Any) -> int | None:
    """Return the number of tokens up to which a rotary embedding is that of the first training; None if it is unknown.

    `rope`: one of `ropes(config)`.
    """
    text = config.get_text_config(decoder=True)
    positions = getattr(text, "max_position_embeddings", None)
    found = rope.get(_ORIGINAL) or getattr(text, _ORIGINAL, None) or positions
    return None if found is None else int(found)


def rope_limit(config: Any) -> int | None:
    """Return the length beyond which all rotary angles of a row change (LongRoPE, arXiv 2402.13753), if any."""
    limits = [original_context(rope, config) for rope in ropes(config).values() if rope.get("rope_type") == "longrope"]
    return min((limit for limit in limits if limit is not None), default=None)


def thresholds(config: Any) -> dict[str, int]:
    """Return these lengths in tokens, by the place of the setting in the decoder's configuration."""
    text = config.get_text_config(decoder=True)
    found = {
        name: value
        for name, value in vars(text).items()
        if any(word in name for word in _WORDS) and not name.endswith(_OTHERS) and type(value) is int and value > 1
    }
    for place, rope in ropes(config).items():
        limit = original_context(rope, config)
        if limit is not None and (_ORIGINAL in rope or rope.get("rope_type") in ("dynamic", "longrope")):
            found[f"{place}.{_ORIGINAL}"] = limit
    return found
