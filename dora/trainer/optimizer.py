"""The optimizer over a rank's own rows of the parameters: AdamW, or Muon for matrices and AdamW for the rest.

AdamW is elementwise, so sharding does not change it. Its moments are in float32, on the device or on the host, or in
8 bits. Only matrices are decayed. Norms and biases are not, because they are scales and offsets, and embeddings are
not, because most of their rows get no gradient in a step. State exists from the start, so that all checkpoints have the
same format.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final, Literal, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.modules.conv import _ConvNd

from dora.trainer.eight_bit import AdamW8bit
from dora.trainer.muon import ShardedMuon
from dora.transport.messages import TrainerSettings

#: `hidden`: matrices between the layers' inputs and outputs, which Muon takes. `outer`: head and convolutions.
#: `undecayed`: norms, biases, embeddings (also where the head shares them), and A of state spaces.
Role = Literal["hidden", "outer", "undecayed"]


class MomentBytes(NamedTuple):
    """Bytes of moments on the device per parameter."""

    hidden: float  # for a parameter of a hidden matrix
    other: float


#: Bytes of moments with AdamW, by the value of `trainer.optimizer_state`.
MOMENT_BYTES: Final = {"device": 8.0, "host": 0.0, "8bit": 2.02}


def moment_bytes(*, optimizer: str, optimizer_state: str) -> MomentBytes:
    """Return the bytes of moments on the device, by the settings of these names."""
    other = MOMENT_BYTES[optimizer_state]
    return MomentBytes(hidden=4.0 if optimizer == "muon" else other, other=other)


def roles_of(model: Any) -> dict[str, Role]:
    """Return the role of every parameter of a model of transformers."""
    return {name: _role(model, name, parameter) for name, parameter in model.named_parameters()}


def _role(model: Any, name: str, parameter: Tensor) -> Role:
    path, _, leaf = name.rpartition(".")
    module = model.get_submodule(path)
    is_norm = parameter.dim() < 2 or "Norm" in type(module).__name__  # two dimensions: those of single heads (Cohere)
    if is_norm or isinstance(module, nn.Embedding) or leaf.endswith("bias") or leaf == "A_log":
        return "undecayed"
    if module is model.get_output_embeddings() or isinstance(module, _ConvNd):
        return "outer"
    return "hidden"


class ShardOptimizer:
    """Updates this rank's rows in place."""

    def __init__(
        self, shards: Mapping[str, Tensor], settings: TrainerSettings, *, model: Any, group: dist.ProcessGroup
    ) -> None:
        """`shards`: this rank's rows of the parameters of `model`, by name. `group`: all ranks that share them."""
        roles = roles_of(model)
        self._parts: list[_AdamW | AdamW8bit | ShardedMuon] = []
        rest = dict(shards)
        if settings.optimizer == "muon":
            hidden = {name: rest.pop(name) for name, role in roles.items() if role == "hidden"}
            rows = {name: parameter.shape[0] for name, parameter in model.named_parameters()}
            self._parts.append(ShardedMuon(hidden, rows=rows, weight_decay=settings.weight_decay, group=group))
        decay = {name: 0.0 if role == "undecayed" else settings.weight_decay for name, role in roles.items()}
        if settings.optimizer_state == "8bit":
            matrices = {name: rest.pop(name) for name, shard in shards.items() if shard.dim() > 1}
            betas = settings.beta1, settings.beta2
            self._parts.append(AdamW8bit(matrices, betas=betas, weight_decay=decay))
        self._parts.append(_AdamW(rest, settings, weight_decay=decay))

    @torch.no_grad()
    def update(self, gradients: Mapping[str, Tensor], *, learning_rate: float) -> None:
        """Make one update with gradients of the shards; with Muon, a collective."""
        for part in self._parts:
            part.update(gradients, learning_rate=learning_rate)

    def state(self) -> dict[str, Tensor]:
        """Return the moments and update counts themselves, not copies, by name (KIND/PARAMETER), for a checkpoint."""
        return {name: tensor for part in self._parts for name, tensor in part.state().items()}


class _AdamW:
    """torch's AdamW. With moments on the host, it runs there."""

    def __init__(
        self, shards: Mapping[str, Tensor], settings: TrainerSettings, *, weight_decay: Mapping[str, float]
    ) -> None:
        self._shards = shards
        self._is_on_host = settings.optimizer_state == "host"
        self._parameters = {name: nn.Parameter(self._placed(shard)) for name, shard in shards.items()}
        self._adamw = torch.optim.AdamW(
            [
                {
                    "params": [p for name, p in self._parameters.items() if weight_decay[name] == decay],
                    "weight_decay": decay,
                }
                for decay in sorted(set(weight_decay.values()))
            ],
            lr=settings.learning_rate,
            betas=(settings.beta1, settings.beta2),
            fused=True,
        )
        for parameter in self._parameters.values():
            self._adamw.state[parameter] = {
                "step": torch.zeros((), device=parameter.device),
                "exp_avg": torch.zeros_like(parameter),
                "exp_avg_sq": torch.zeros_like(parameter),
            }

    def update(self, gradients: Mapping[str, Tensor], *, learning_rate: float) -> None:
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
