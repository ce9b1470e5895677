"""AdamW over a rank's own rows of the parameters, with its moments on the device, on the host, or in 8 bits.

It is elementwise, so sharding does not change it. The moments exist from the start, so that all checkpoints have the
same format.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

import torch
from torch import Tensor, nn

from dora.errors import ConfigError
from dora.transport.messages import TrainerSettings

#: Bytes of moments on the device per parameter, by `trainer.optimizer_state`. In 8 bits, 256 numbers share a scale.
MOMENT_BYTES: Final = {"device": 8.0, "host": 0.0, "8bit": 2.0 + 2 * 4 / 256}


class ShardOptimizer:
    """Updates this rank's rows in place."""

    def __init__(self, shards: Mapping[str, Tensor], settings: TrainerSettings) -> None:
        """ConfigError if the setting needs a package that is missing."""
        self._shards = shards
        self._is_on_host = settings.optimizer_state == "host"
        self._parameters = {name: nn.Parameter(self._placed(shard)) for name, shard in shards.items()}
        make = _make_8bit if settings.optimizer_state == "8bit" else _make_adamw
        self._adamw = make(list(self._parameters.values()), settings)

    @torch.no_grad()
    def update(self, gradients: Mapping[str, Tensor], *, learning_rate: float) -> None:
        """Make one update with gradients of the shards. With moments on the host, it is computed there."""
        for name, parameter in self._parameters.items():
            parameter.grad = gradients[name].to(parameter.device)
            if self._is_on_host:
                parameter.copy_(self._shards[name])  # a checkpoint may have been loaded
        for group in self._adamw.param_groups:
            if isinstance(group["lr"], Tensor):
                group["lr"].fill_(learning_rate)
            else:
                group["lr"] = learning_rate
        self._adamw.step()
        self._adamw.zero_grad(set_to_none=True)
        if self._is_on_host:
            for name, parameter in self._parameters.items():
                self._shards[name].copy_(parameter)

    def state(self) -> dict[str, Tensor]:
        """Return moments and update counts by name, for a checkpoint; not copies. A name has a kind before a slash."""
        found: dict[str, Tensor] = {}
        for name, parameter in self._parameters.items():
            for kind, value in self._adamw.state[parameter].items():
                if hasattr(value, "codes"):  # in 8 bits; the table of their values is constant
                    found |= {f"{kind}.codes/{name}": value.codes, f"{kind}.scale/{name}": value.scale}
                else:
                    found[f"{kind}/{name}"] = value
        return found

    def _placed(self, shard: Tensor) -> Tensor:
        """Return the tensor that is updated: the shard itself, or its copy on the host."""
        if not self._is_on_host:
            return shard
        return torch.empty_like(shard, device="cpu", pin_memory=shard.is_cuda).copy_(shard)


def _make_adamw(parameters: list[nn.Parameter], settings: TrainerSettings) -> torch.optim.Optimizer:
    optimizer = torch.optim.AdamW(parameters, **_arguments(settings), fused=True)
    for parameter in parameters:
        optimizer.state[parameter] = {
            "step": torch.zeros((), device=parameter.device),
            "exp_avg": torch.zeros_like(parameter),
            "exp_avg_sq": torch.zeros_like(parameter),
        }
    return optimizer


def _make_8bit(parameters: list[nn.Parameter], settings: TrainerSettings) -> torch.optim.Optimizer:
    """AdamW with moments quantized in blocks (arXiv 2110.02861). Tensors that do not divide into blocks stay exact."""
    try:
        from torchao.optim import AdamW8bit
    except ImportError as err:
        raise ConfigError("trainer.optimizer_state: 8bit needs torchao; pip install 'dora[8bit]'") from err
    optimizer: Any = AdamW8bit(parameters, **_arguments(settings))
    for parameter in parameters:
        optimizer.state[parameter] = {
            "step": torch.tensor(0.0),
            "exp_avg": optimizer._new_buffer(parameter, True),
            "exp_avg_sq": optimizer._new_buffer(parameter, False),
        }
    found: torch.optim.Optimizer = optimizer
    return found


def _arguments(settings: TrainerSettings) -> dict[str, Any]:
    return {
        "lr": settings.learning_rate,
        "betas": (settings.beta1, settings.beta2),
        "weight_decay": settings.weight_decay,
    }
