"""Experts divided among ranks (EP), by transformers' plan for the family.

Each rank of a group has some experts of every layer, whole. In a pass, all ranks of the group send each token to the
ranks of its experts and get the results back (all-to-all), so a rank computes tokens of other ranks too, and the
gradient of an expert is that of the tokens of all ranks of the group.
"""

from __future__ import annotations

import re
from typing import Any, Final

from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from transformers.distributed.tensor_parallel import apply_expert_parallelism

from dora.errors import ConfigError

_STACK: Final = "grouped_gemm"  # a parameter with a row for each expert
_DISPATCH: Final = "ep_dispatch_experts"  # the module that has these parameters


def divide(model: Any, group: DeviceMesh) -> list[nn.Module]:
    """Divide the experts of a model without data among the ranks of `group`; return the modules that have them."""
    require_experts(model, ranks=group.size())
    apply_expert_parallelism(model, group, None, model.ep_plan)
    return [module for name, module in model.named_modules() if _style(model, name) == _DISPATCH]


def require_experts(model: Any, *, ranks: int) -> None:
    """Raise ConfigError unless the experts of this model can be divided among `ranks` ranks."""
    name = type(model).__name__
    if not set(model.ep_plan.values()) == {_STACK, _DISPATCH}:
        raise ConfigError(
            f"trainer.parallel.expert: transformers has no plan to divide experts of {name} among ranks; set it to 1"
        )
    for parameter in expert_parameters(model).values():
        if len(parameter) % ranks:
            raise ConfigError(
                f"trainer.parallel.expert: {len(parameter)} experts of {name} cannot be divided among {ranks} ranks"
            )


def expert_parameters(model: Any) -> dict[str, nn.Parameter]:
    """Return the parameters that are divided, by name: each has a row for each expert of a layer."""
    return {name: parameter for name, parameter in model.named_parameters() if _style(model, name) == _STACK}


def _style(model: Any, name: str) -> str | None:
    """Return the entry of transformers' plan for a module or parameter."""
    style: str | None = model.ep_plan.get(re.sub(r"\.\d+(?=\.|$)", ".*", name))
    return style
