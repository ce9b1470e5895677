"""AdamW over a rank's own rows of the parameters, with its moments on the device or on the host.

It is elementwise, so sharding does not change it. The moments exist from the start, so that all checkpoints have the
same format.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

import torch
from torch import Tensor, nn

from dora.transport.messages import TrainerSettings

#: Bytes of moments on the device per parameter, by `trainer.optimizer_state`.
MOMENT_BYTES: Final = {"device": 8, "host": 0}


class ShardOptimizer:
    """Updates this rank's rows in place."""

    def __init__(self, shards: Mapping[str, Tensor], settings: TrainerSettings) -> None:
        self._shards = shards
        self._is_on_host = settings.optimizer_state == "host"
        self._parameters = {name: nn.Parameter(self._placed(shard)) for name, shard in shards.items()}
        self._adamw = torch.optim.AdamW(
            self._parameters.values(),
            lr=settings.learning_rate,
            betas=(settings.beta1, settings.beta2),
            weight_decay=settings.weight_decay,
            fused=True,
        )
        for parameter in self._parameters.values():
            self._adamw.state[parameter] = {
                "step": torch.zeros((), device=parameter.device),
                "exp_avg": torch.zeros_like(parameter),
                "exp_avg_sq": torch.zeros_like(parameter),
            }

    @torch.no_grad()
    def update(self, gradients: Mapping[str, Tensor], *, learning_rate: float) -> None:
        """Make one update with gradients of the shards. With moments on the host, it is computed there."""
        for name, parameter in self._parameters.items():
            parameter.grad = gradients[name].to(parameter.device)
            if self._is_on_host:
                parameter.copy_(self._shards[name])  # a checkpoint may have been loaded
        for group in self._adamw.param_groups:
            group["lr"] = learning_rate
        self._adamw.step()
        self._adamw.zero_grad(set_to_none=True)
        if self._is_on_host:
            for name, parameter in self._parameters.items():
                self._shards[name].copy_(parameter)

    def state(self) -> dict[str, Tensor]:
        """Return moments and update counts by name, for a checkpoint; not copies. A name has a kind before a slash."""
        return {
            f"{kind}/{name}": value
            for name, parameter in self._parameters.items()
            for kind, value in self._adamw.state[parameter].items()
        }

    def _placed(self, shard: Tensor) -> Tensor:
        """Return the tensor that is updated: the shard itself, or its copy on the host."""
        if not self._is_on_host:
            return shard
        return torch.empty_like(shard, device="cpu", pin_memory=shard.is_cuda).copy_(shard)
