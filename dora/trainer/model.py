"""The policy: any causal LM of transformers, sharded by FSDP2; each rank reads only its own rows of the safetensors.

Invariant: weights and gradients that persist are float32; `dtype` is the compute type only. Tied parameters are one
parameter throughout.

A model below GATHERED_BYTES stays gathered during a step, and its gradients are reduced once, in the last micro-batch,
because a small model on a CPU would otherwise spend most of its time in collectives. The layers of a larger model are
gathered on demand and its gradients are reduce-scattered in every micro-batch, so no rank ever has the whole model.
Both are correct, because every rank gets the same number of micro-batches.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from transformers import AutoConfig, AutoModelForCausalLM

from dora.errors import ConfigError
from dora.trainer import attention, checkpointing
from dora.trainer.loading import load_shards

GATHERED_BYTES = 2 * 2**30  # float32 weights + gradients of the whole model on every rank


class Policy:
    """A sharded model: its log-probs, and access to its local shards."""

    def __init__(
        self,
        model_path: Path,
        *,
        mesh: DeviceMesh,
        dtype: torch.dtype,
        activation_checkpointing: checkpointing.Mode = "none",
    ) -> None:
        is_cuda = mesh.device_type == "cuda"
        self.device = torch.device(f"cuda:{torch.cuda.current_device()}") if is_cuda else torch.device("cpu")
        self.mesh = mesh
        self.model: Any = _on_meta(model_path)  # a transformers model whose class FSDP2 extends
        self.vocab_size: int = self.model.config.get_text_config().vocab_size
        self.gathered = 8 * sum(p.numel() for p in self.model.parameters()) <= GATHERED_BYTES
        checkpointing.apply_checkpointing(decoder_layers(self.model), activation_checkpointing)
        policy = MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=torch.float32)
        for layer in decoder_layers(self.model):
            fully_shard(layer, mesh=mesh, mp_policy=policy, reshard_after_forward=not self.gathered)
        fully_shard(self.model, mesh=mesh, mp_policy=policy, reshard_after_forward=not self.gathered)
        _materialize(self.model, device=self.device)
        load_shards(self.model, model_path, rank=mesh.get_local_rank(), world_size=mesh.size())
        for module in self._sharded_modules():  # lazy initialization allocates the shards; see shards()
            module.unshard()
            module.reshard()
        self.model.eval()  # no dropout: the engine has none

    def shards(self) -> dict[str, Tensor]:
        """Return this rank's rows of every parameter: plain tensors that share memory with the model."""
        return {name: parameter.to_local().detach() for name, parameter in self.model.named_parameters()}

    def gradients(self) -> dict[str, Tensor]:
        """Return the gradients of `shards`: averages over the ranks (FSDP divides by the world size)."""
        return {name: p.grad.to_local() for name, p in self.model.named_parameters() if p.grad is not None}

    def clear_gradients(self) -> None:
        for parameter in self.model.parameters():
            parameter.grad = None

    def prepare(self, *, closes_step: bool) -> None:
        """Set up the collectives of the next micro-batch."""
        if self.gathered:
            self.model.set_requires_gradient_sync(closes_step)
            self.model.set_reshard_after_backward(closes_step)

    def reshard(self) -> None:
        """Drop gathered weights, so that the next micro-batch gathers what the optimizer has written."""
        for module in self._sharded_modules():
            module.reshard()

    def full_tensors(self) -> Iterator[tuple[str, Tensor]]:
        """Yield every parameter and persistent buffer, whole, one at a time; a collective."""
        for name, parameter in self.model.named_parameters():
            yield name, parameter.full_tensor().detach()
        persistent = self.model.state_dict().keys()
        yield from ((name, buffer) for name, buffer in self.model.named_buffers() if name in persistent)

    def _sharded_modules(self) -> Iterator[FSDPModule]:
        return (module for module in self.model.modules() if isinstance(module, FSDPModule))


def require_device(device: str, *, index: int = 0) -> None:
    """Raise ConfigError unless torch can use device `index` of this kind."""
    if device == "cuda" and torch.cuda.device_count() <= index:
        raise ConfigError(
            f"trainer.device: torch can use {torch.cuda.device_count()} CUDA devices here, and rank {index} of this "
            "host needs its own; lower trainer.ranks, or use cpu"
        )


def make_mesh(device: str) -> DeviceMesh:
    """Return the mesh of all ranks, with one dimension, along which the weights are sharded."""
    return init_device_mesh(device, (dist.get_world_size(),))


# ---- building -------------------------------------------------------------------------------------------------------


def _on_meta(model_path: Path) -> Any:
    """Build the model without memory for its parameters."""
    if not (model_path / "config.json").is_file():
        raise ConfigError(f"model.path: {model_path} has no config.json; give a Hugging Face model folder")
    config = AutoConfig.from_pretrained(model_path, local_files_only=True, trust_remote_code=False)
    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(
            config, dtype=torch.float32, attn_implementation=attention.NAME, trust_remote_code=False
        )


def decoder_layers(model: Any) -> nn.ModuleList:
    """Return the decoder layers, which are the units of sharding."""
    found = [child for child in model.get_decoder().children() if isinstance(child, nn.ModuleList)]
    if len(found) != 1:
        raise ConfigError(f"model.path: {type(model).__name__} has no single list of decoder layers; not supported")
    return found[0]


def _materialize(model: Any, *, device: torch.device) -> None:
    """Allocate every shard and buffer; tied parameters stay tied. Buffers that no file contains are computed here."""
    seen: dict[nn.Parameter, nn.Parameter] = {}
    persistent = set(model.state_dict())
    for prefix, module in model.named_modules():
        for name, parameter in module._parameters.items():
            if parameter is not None and parameter not in seen:
                seen[parameter] = nn.Parameter(torch.empty_like(parameter, device=device))
            if parameter is not None:
                setattr(module, name, seen[parameter])
        for name, buffer in list(module._buffers.items()):
            if buffer is not None:
                module._buffers[name] = torch.full_like(buffer, torch.nan, device=device)
        if any(f"{prefix}.{name}" not in persistent for name in module._buffers):
            with torch.no_grad():
                model._init_weights(module)
            if any(torch.isnan(buffer).any() for buffer in module._buffers.values() if buffer is not None):
                raise ConfigError(f"model.path: the buffers of {type(module).__name__} cannot be built; not supported")
