"""The linear modules of a model that an adapter may change, for training and for serving alike."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection
from typing import Any

from torch import nn
from transformers.pytorch_utils import Conv1D

from dora.errors import ConfigError


def adapted_modules(model: Any, targets: Collection[str], *, field: str) -> dict[str, Any]:
    """Return the modules that `targets` name, by their full names; ConfigError if one of these cannot be adapted.

    `field`: the setting that has the targets, for the message.
    """
    modules = dict(model.named_modules(remove_duplicate=False))
    blocks = {name.rpartition(".")[0] for name, module in modules.items() if _has_experts(name, module)}
    linear = {name for name, module in modules.items() if isinstance(module, nn.Linear | Conv1D)}
    inside = {name for name in linear if any(name.startswith(f"{block}.") for block in blocks)}
    ends = {name for name in linear if modules[name] in (model.get_input_embeddings(), model.get_output_embeddings())}
    uses = Counter(modules[name].weight for name in linear)
    shared = {name for name in linear if uses[modules[name].weight] > 1}
    known = ", ".join(sorted({name.rpartition(".")[2] for name in linear - inside - ends - shared}))
    kind = type(model).__name__
    found: dict[str, Any] = {}
    for target in targets:
        chosen = {name for name in modules if name == target or name.endswith(f".{target}")}
        if chosen & {name for name, module in modules.items() if isinstance(module, nn.Embedding)} or chosen & ends:
            raise ConfigError(
                f"{field}: {target} is an embedding or the head of {kind}, which is not adapted; remove it"
            )
        if any(name.startswith(f"{block}.") for name in chosen for block in blocks):
            raise ConfigError(
                f"{field}: {target} is beside or inside the experts of {kind}, whose adapters would cost servers a "
                f"third of their speed; give projections of attention only, of {known}"
            )
        if not chosen or not chosen <= linear:
            raise ConfigError(f"{field}: {kind} has no linear module {target}; give some of {known}")
        if chosen & shared:
            raise ConfigError(
                f"{field}: layers of {kind} share the weight of {target}, but would have adapters of their own; remove "
                "it"
            )
        found |= {name: modules[name] for name in modules if name in chosen}
    return found


def _has_experts(name: str, module: nn.Module) -> bool:
    """Return whether a module is, or contains, what transformers routes tokens to."""
    return "experts" in name.rpartition(".")[2].lower() or "experts" in type(module).__name__.lower()
