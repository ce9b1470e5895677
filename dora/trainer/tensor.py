"""Matrices of a layer divided among ranks (tensor parallelism), by transformers' plan for the family.

Each rank of a group has some heads of attention and some units of the feed-forward part: columns of the first
matrices' results, and of the second ones what takes these as input. The ranks compute the same tokens. They sum
activations twice in a layer's forward pass and twice in its backward pass, and these matrices are not gathered over the
group.

All ranks of a group have the same gradient of any other weight, but for norms of queries and keys, whose gradient on a
rank is that of its heads. transformers sums these gradients in each backward pass, those of earlier passes included;
here they are units of FSDP2 by themselves, which sums them over the ranks once.
"""

from __future__ import annotations

import re
from typing import Any, Final, NamedTuple

from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from transformers.distributed.tensor_parallel import apply_tensor_parallelism

from dora.errors import ConfigError

#: Dimension of the weight that is divided, by style of transformers' plan.
_DIVIDED: Final = {"colwise": 0, "rowwise": 1}
_OF_HEADS: Final = "replicated_with_grad_allreduce"


class Unit(NamedTuple):
    """Modules of a layer that FSDP2 gathers together."""

    divided: list[nn.Module]
    of_heads: list[nn.Module]  # norms of queries and keys


def divide(model: Any, layers: nn.ModuleList, group: DeviceMesh) -> list[Unit]:
    """Divide the matrices of a model without data among the ranks of `group`; return those of each layer."""
    require_tensor(model, ranks=group.size())
    plan = _plan(model)
    apply_tensor_parallelism(model, group, {name: style for name, style in plan.items() if style in _DIVIDED})
    names = {module: name for name, module in model.named_modules()}

    def chosen(layer: nn.Module, styles: Any) -> list[nn.Module]:
        return [module for module in layer.modules() if plan.get(_general(names[module])) in styles]

    return [Unit(chosen(layer, _DIVIDED), chosen(layer, (_OF_HEADS,))) for layer in layers]


def require_tensor(model: Any, *, ranks: int) -> None:
    """Raise ConfigError unless the matrices of this model can be divided among `ranks` ranks."""
    name, plan = type(model).__name__, _plan(model)
    if not plan or set(plan.values()) - {*_DIVIDED, _OF_HEADS}:
        odd = sorted(set(plan.values()) - {*_DIVIDED, _OF_HEADS})
        raise ConfigError(
            f"trainer.parallel.tensor: {name} cannot be divided"
            + (f" ({', '.join(odd)} of transformers' plan is not supported)" if odd else "")
            + "; set it to 1"
        )
    for parameter, dimension in divided_parameters(model).items():
        module = model.get_submodule(parameter.rpartition(".")[0])
        if dimension and module.bias is not None:
            raise ConfigError(
                f"trainer.parallel.tensor: {name} cannot be divided ({parameter} has a bias); set it to 1"
            )
    config = model.config.get_text_config()
    heads = {"query heads": config.num_attention_heads, "key heads": config.num_key_value_heads}
    sizes = heads | {"hidden units": config.hidden_size, "feed-forward units": config.intermediate_size}
    for what, size in sizes.items():
        if size % ranks:
            raise ConfigError(
                f"trainer.parallel.tensor: the {size} {what} of {name} cannot be divided among {ranks} ranks"
            )


def divided_parameters(model: Any) -> dict[str, int]:
    """Return the dimension of each parameter that is divided, by name."""
    plan = _plan(model)
    styles = {name: plan.get(_general(name.rpartition(".")[0]), "") for name, _ in model.named_parameters()}
    return {
        name: 0 if name.endswith("bias") else _DIVIDED[style] for name, style in styles.items() if style in _DIVIDED
    }


def _plan(model: Any) -> dict[str, str]:
    """Return transformers' plan for the layers. Embeddings and head are sharded as without."""
    return {name: style for name, style in model.tp_plan.items() if ".layers." in name}


def _general(name: str) -> str:
    return re.sub(r"\.\d+(?=\.|$)", ".*", name)
