"""The policy: any causal LM of transformers, sharded by FSDP2; each rank reads only its own rows of the safetensors.

Invariant: weights and gradients that persist are float32; `dtype` is the compute type only. Tied parameters are one
parameter throughout.

A model below GATHERED_BYTES stays gathered during a step, and its gradients are reduced once, in the last micro-batch,
because a small model on a CPU would otherwise spend most of its time in collectives. The layers of a larger model are
gathered on demand and its gradients are reduce-scattered in every micro-batch, so no rank ever has the whole model.
Both are correct, because every rank gets the same number of micro-batches.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.utils.checkpoint import checkpoint
from transformers import AutoConfig, AutoModelForCausalLM

from dora.errors import ConfigError
from dora.trainer import attention
from dora.trainer.packing import Row

GATHERED_BYTES = 2 * 2**30  # float32 weights + gradients of the whole model on every rank
LOGITS_CHUNK = 2**24  # logits converted to log-probs at a time (64 MiB in float32)


class Policy:
    """A sharded model: its log-probs, and access to its local shards."""

    def __init__(self, model_path: Path, *, mesh: DeviceMesh, dtype: torch.dtype) -> None:
        is_cuda = mesh.device_type == "cuda"
        self.device = torch.device(f"cuda:{torch.cuda.current_device()}") if is_cuda else torch.device("cpu")
        self.mesh = mesh
        self.model: Any = _on_meta(model_path)  # a transformers model whose class FSDP2 extends
        self.vocab_size: int = self.model.config.get_text_config().vocab_size
        self.gathered = 8 * sum(p.numel() for p in self.model.parameters()) <= GATHERED_BYTES
        policy = MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=torch.float32)
        for layer in decoder_layers(self.model):
            fully_shard(layer, mesh=mesh, mp_policy=policy, reshard_after_forward=not self.gathered)
        fully_shard(self.model, mesh=mesh, mp_policy=policy, reshard_after_forward=not self.gathered)
        _materialize(self.model, device=self.device)
        _load_shards(self.model, model_path, rank=mesh.get_local_rank(), world_size=mesh.size())
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


def logprobs(model: nn.Module, row: Row, *, temperature: float) -> tuple[Tensor, Tensor]:
    """Return [P] log-probs of the targets under softmax(logits / temperature), and [P] entropies (no gradient)."""
    logits_PV = model(
        input_ids=row.tokens_T[None],
        position_ids=row.positions_T[None],
        use_cache=False,
        logits_to_keep=row.predictors_P,
        segments=attention.make_segments(row.lengths, device=row.tokens_T.device),
    ).logits[0]
    rows = max(1, LOGITS_CHUNK // logits_PV.shape[1])
    if len(logits_PV) <= rows:
        return _select(logits_PV, row.targets_P, temperature)
    parts = [
        checkpoint(_select, part, targets, temperature, use_reentrant=False)
        for part, targets in zip(logits_PV.split(rows), row.targets_P.split(rows), strict=True)
    ]
    chosen, entropy = zip(*parts, strict=True)
    return torch.cat(chosen), torch.cat(entropy)


def _select(logits_PV: Tensor, targets_P: Tensor, temperature: float) -> tuple[Tensor, Tensor]:
    wide = torch.promote_types(logits_PV.dtype, torch.float32)
    log_softmax_PV = (logits_PV.to(wide) / temperature).log_softmax(-1)
    with torch.no_grad():
        entropy_P = -(log_softmax_PV.exp() * log_softmax_PV).sum(-1)
    return log_softmax_PV.gather(-1, targets_P[:, None])[:, 0], entropy_P


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


def _load_shards(model: Any, model_path: Path, *, rank: int, world_size: int) -> None:
    """Fill this rank's rows (dim 0, in chunks of ceil(rows / world size)) and all persistent buffers."""
    files = _files_by_name(model_path)
    buffers = dict(model.named_buffers())
    wanted = dict(model.named_parameters()) | {name: buffers[name] for name in model.state_dict() if name in buffers}
    missing = sorted(wanted.keys() - files.keys())
    if missing:
        raise ConfigError(f"model.path: {model_path} lacks {missing[0]} and {len(missing) - 1} other tensors")
    for path in sorted({files[name] for name in wanted}):
        with safe_open(path, framework="pt") as opened, torch.no_grad():
            for name in (name for name in wanted if files[name] == path):
                stored, target = opened.get_slice(name), wanted[name]
                if tuple(stored.get_shape()) != tuple(target.shape):
                    raise ConfigError(f"{path}: {name} has shape {stored.get_shape()}, expected {tuple(target.shape)}")
                if name in buffers:
                    target.copy_(opened.get_tensor(name))
                    continue
                rows = -(-target.shape[0] // world_size)
                start, stop = (min(rows * r, target.shape[0]) for r in (rank, rank + 1))
                if start < stop:
                    target.to_local().copy_(stored[start:stop])


def _files_by_name(model_path: Path) -> dict[str, Path]:
    """Map each tensor name to the safetensors file that contains it."""
    index = model_path / "model.safetensors.index.json"
    if index.is_file():
        return {name: model_path / file for name, file in json.loads(index.read_text())["weight_map"].items()}
    found: dict[str, Path] = {}
    for path in sorted(model_path.glob("*.safetensors")):
        try:
            with safe_open(path, framework="pt") as opened:
                found |= dict.fromkeys(opened.keys(), path)
        except SafetensorError as err:
            raise ConfigError(f"model.path: {path} is not a readable safetensors file: {err}") from err
    if not found:
        raise ConfigError(f"model.path: {model_path} has no safetensors file; give a Hugging Face model folder")
    return found
