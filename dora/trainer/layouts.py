"""The layout of rows that a model needs. The kinds of its layers decide, never a measurement.

Invariant: a model with a layer that carries state from one position to the next, other than by attention, is padded.
"""

from __future__ import annotations

from typing import Any

from torch import nn
from transformers import DynamicCache
from transformers.cache_utils import LinearAttentionCacheLayerMixin

from dora.errors import ConfigError
from dora.model_config import rope_limit
from dora.trainer.model import decoder_layers
from dora.trainer.packing import Layout


def layout_of(model: Any) -> Layout:
    """Return the layout of a model, without shared prompts."""
    return Layout(padded=bool(why_padded(model)), rope_limit=rope_limit(model.config))


def why_padded(model: Any) -> str:
    """Return the reason why sequences cannot follow one another in a row, as a predicate; empty if they can."""
    if scales_by_row(model):
        return "scales queries by their position in the row"
    if carries_state(model):
        return "has layers that would carry state from one packed sequence into the next"
    return ""


def require_divided(model: Any, *, ranks: int, longest: int) -> None:
    """Raise ConfigError unless this many ranks can divide a row; `longest`: tokens of the longest sequence."""
    if ranks > 1 and (reason := _why_undivided(model, ranks=ranks, longest=longest)):
        name = type(model).__name__.removeprefix("FSDP")  # FSDP2 makes a subclass of this name
        raise ConfigError(
            f"trainer.parallel.context: {name} {reason}, so {ranks} ranks cannot divide its rows; set it to 1"
        )


def _why_undivided(model: Any, *, ranks: int, longest: int) -> str:
    """Return the reason as a predicate; empty if there is none."""
    if reason := why_padded(model):
        return reason
    limit = rope_limit(model.config)
    if limit is not None and longest > limit:
        return f"has other angles in rows beyond {limit} tokens (LongRoPE), which a slice does not tell"
    heads = getattr(model.config.get_text_config(decoder=True), "num_attention_heads", None)
    return f"has {heads} attention heads" if isinstance(heads, int) and heads % ranks else ""


def carries_state(model: Any) -> bool:
    """Return whether a layer carries state by means other than attention (recurrence, state space, convolution).

    There are two signs: transformers marks many of these families, and such a layer needs a place for its state in the
    cache to decode. Among the causal models that were tested (docs/DECISIONS.md), tokens that cannot attend to each
    other still affect each other in exactly those models that have one of the signs.
    """
    if any(getattr(module, "_is_stateful", False) for module in model.modules()):
        return True
    if any(isinstance(module, nn.Conv1d) for module in decoder_layers(model).modules()):
        return True
    return any(isinstance(layer, LinearAttentionCacheLayerMixin) for layer in DynamicCache(config=model.config).layers)


def scales_by_row(model: Any) -> bool:
    """Return whether queries are scaled by their position in the row, in large steps (Llama 4)."""
    return bool(getattr(model.config.get_text_config(decoder=True), "attn_temperature_tuning", False))
