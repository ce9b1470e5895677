"""The policy: any causal LM of transformers, sharded by FSDP2; each rank reads only its own rows of the safetensors.

Invariant: trained weights and gradients of the policy that persist are float32; `dtype` is the compute type only. Tied
parameters are one parameter throughout. Where an adapter is trained, the weights of the model are frozen in `dtype`.

A model below GATHERED_BYTES stays gathered during an update, and its gradients are reduced once, in the last pass,
because a small model on a CPU would otherwise spend most of its time in collectives. The layers of a larger model are
gathered on demand and its gradients are reduce-scattered in every micro-batch, so no rank ever has the whole model.
Both are correct, because every rank gets the same number of micro-batches.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, OffloadPolicy, fully_shard
from torch.nn.modules.module import (
    register_module_module_registration_hook,
    register_module_parameter_registration_hook,
)
from transformers import MODEL_FOR_CAUSAL_LM_MAPPING, AutoModelForCausalLM, PreTrainedModel
from transformers.models.auto.modeling_auto import (
    MODEL_FOR_MASKED_LM_MAPPING_NAMES,
    MODEL_FOR_MULTIMODAL_LM_MAPPING_NAMES,
    MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES,
)

from dora.errors import ConfigError
from dora.model_config import load_config, text_config
from dora.trainer import attention, checkpointing, experts, tensor
from dora.trainer.adapters import Adapters
from dora.trainer.agreement import gather_bytes, together
from dora.trainer.loading import ModelFolder, Plan, load_shards, open_folder, plain_name, plan
from dora.trainer.meshes import GROUP, Mesh
from dora.trainer.resharding import Divided
from dora.transport.messages import LoraSettings
from dora.weights.file_plan import TensorSpec

GATHERED_BYTES = 2 * 2**30  # float32 weights + gradients of the whole model on every rank
#: Kinds of models that are or contain an encoder. In 16 bits, the check of the forward pass cannot tell them from
#: decoders.
ENCODERS = {**MODEL_FOR_MASKED_LM_MAPPING_NAMES, **MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES}.keys()
MASTER_DTYPE = torch.float32  # of the trained weights, their gradients and what is computed from them
MAX_PARTS = 200_000  # 60 layers with 256 experts of three parameters each, none of them stacked, have 110,000


class Units(NamedTuple):
    """Modules that FSDP2 gathers together, apart from the layers that have them."""

    divided: list[list[nn.Module]]  # among groups of ranks
    of_heads: list[list[nn.Module]]  # not divided, but their gradients are those of a rank's heads
    alike: int = 1  # number of ranks that have the same gradients of all other weights


class ShardedModel:
    """A causal LM, sharded over all ranks: access to its local shards."""

    def __init__(
        self,
        model_path: Path,
        *,
        mesh: Mesh,
        dtype: torch.dtype,
        frozen: bool = False,
        on_host: bool = False,
        activation_checkpointing: checkpointing.Mode = "none",
        compiled: bool = False,
        lora: LoraSettings | None = None,
        frozen_adapters: Collection[str] = (),
    ) -> None:
        """`dtype`: of the computation, and of the shards if they are `frozen`; trained shards are float32.

        `lora`: the adapter that is trained in place of the weights. `frozen_adapters`: those beside it.

        `on_host`: the shards are in pinned host memory, and FSDP2 copies those of a layer to the device before it runs.
        """
        is_cuda = mesh.weights.device_type == "cuda"
        self.device = torch.device(f"cuda:{torch.cuda.current_device()}") if is_cuda else torch.device("cpu")
        self.mesh, self.dtype, self.compiled = mesh, dtype, compiled
        self.sharding = mesh.sharding  #: the ranks that have one copy of the weights together, this one among them
        self.copy_number = mesh.copy_number
        with ExitStack() as opened:
            self.model: Any  # a transformers model whose class FSDP2 extends
            self.model, folder, self.plan = together(lambda: _planned(model_path, dtype, opened), device=self.device)
            #: Of which only one is trained; None: there is none, and all weights are trained.
            self.adapters: Adapters | None = None
            if lora is not None:
                add = partial(Adapters, self.model, lora, frozen=frozen_adapters)
                self.adapters = together(add, device=self.device)
            self.gathered = stays_gathered(self.model)
            wide = self.plan.wide if lora else frozenset()  # their values are published as they were read
            for name, parameter in self.model.named_parameters():
                is_trained = parameter.requires_grad and not frozen
                is_wide = is_trained or plain_name(name) in wide
                parameter.data = parameter.data.to(MASTER_DTYPE if is_wide else dtype)
                parameter.requires_grad_(is_trained)
            self.vocab_size: int = self.model.config.get_text_config().vocab_size
            #: Whether ranks meet in every pass, so that all need the same number of passes.
            self.meets_in_passes = not self.gathered or mesh.divides == "experts"
            units = self._divide()
            if compiled:
                compile_layers(decoder_layers(self.model))
            checkpointing.apply_checkpointing(decoder_layers(self.model), activation_checkpointing)
            precision = MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=MASTER_DTYPE)
            shard = partial(
                fully_shard,
                mesh=mesh.weights,
                mp_policy=precision,
                offload_policy=CPUOffloadPolicy(pin_memory=is_cuda) if on_host else OffloadPolicy(),
                reshard_after_forward=not self.gathered,
            )
            for unit in units.divided:  # routing weights keep their type
                shard(unit, mesh=mesh.shards, mp_policy=replace(precision, cast_forward_inputs=False))
            for unit in units.of_heads:
                shard(unit)
            for layer in sharding_units(self.model):
                shard(layer)
            shard(self.model)
            _materialize(self.model, device=self.device, shards_on=torch.device("cpu") if on_host else self.device)
            together(lambda: self.load_shards(folder), device=self.device)
            if self.adapters is not None:
                fill = partial(self.adapters.fill, rank=self.sharding.get_local_rank())
                if len({*gather_bytes(together(fill, device=self.device), device=self.device)}) > 1:
                    raise ConfigError("model.adapter: its files differ between hosts; copy those of one to the others")
            keeps = dist.get_rank() == 0 and not frozen
            #: What rank 0 publishes as it was read, by name; a copy, since a folder may change
            self.untrained = {name: folder.read(name).clone() for name in self.plan.untrained if keeps}
            #: Their shapes and stored types, on all ranks.
            self.untrained_specs = {
                name: TensorSpec(name, folder.dtype(name), folder.shape(name)) for name in self.plan.untrained
            }
            self.dequantised = folder.scales.keys()
        differ: set[object] = {module for unit in (*units.divided, *units.of_heads) for module in unit}
        for module in self._sharded_modules():  # lazy initialization allocates the shards; see shards()
            module.set_gradient_divide_factor(1.0 if module in differ else float(units.alike))
            module.set_force_sum_reduction_for_comms(True)  # gloo has no other
            module.unshard()
            module.reshard()
        self.is_sharded = True
        self.model.eval()  # no dropout: the engine has none

    def _divide(self) -> Units:
        """Divide some of the weights among groups of ranks, before FSDP2 shards them."""
        mesh = self.mesh
        if mesh.divided is None:
            return Units([], [])
        if mesh.divides == "experts":
            return Units([[stack] for stack in experts.divide(self.model, mesh.divided[GROUP])], [])
        units = tensor.divide(self.model, decoder_layers(self.model), mesh.divided[GROUP])
        of_heads = [unit.of_heads for unit in units if unit.of_heads]
        return Units([unit.divided for unit in units], of_heads, alike=mesh.divided[GROUP].size())

    def load_shards(self, folder: ModelFolder) -> None:
        """Fill this rank's rows of every parameter, and all persistent buffers."""
        load_shards(self.model, folder, self.plan, rank=self.sharding.get_local_rank())

    def shards(self) -> dict[str, Tensor]:
        """Return this rank's rows of every parameter: plain tensors that share memory with the model."""
        return {name: parameter.to_local().detach() for name, parameter in self.model.named_parameters()}

    def loaded(self) -> dict[str, Tensor]:
        """Return this rank's part of all that a folder contains: `shards` and persistent buffers."""
        persistent = self.model.state_dict().keys()
        return self.shards() | {name: buffer for name, buffer in self.model.named_buffers() if name in persistent}

    @property
    def may_be_divided(self) -> Divided:
        """What groups of ranks divide in this model, or could."""
        of_experts = dict.fromkeys(experts.expert_parameters(self.model), 0)
        return Divided(of_experts, tensor.divided_parameters(self.model))

    def reshard(self) -> None:
        """Drop gathered weights, so that the next pass gathers what was written to the shards."""
        self.is_sharded = True
        for module in self._sharded_modules():
            module.reshard()

    def _sharded_modules(self) -> Iterator[FSDPModule]:
        return (module for module in self.model.modules() if isinstance(module, FSDPModule))


class Policy(ShardedModel):
    """The model that is trained."""

    def trained(self) -> dict[str, Tensor]:
        """Return this rank's rows of the parameters that are trained, as `shards` does."""
        parameters = dict(self.model.named_parameters())
        return {name: shard for name, shard in self.shards().items() if parameters[name].requires_grad}

    @contextmanager
    def trial_adapter(self) -> Iterator[None]:
        """In this context, the adapter is one that is not zero, so that a check of the model is one of its adapter
        too."""
        with nullcontext() if self.adapters is None else self.other_adapter(partial(self.adapters.draw, is_trial=True)):
            yield

    @contextmanager
    def other_adapter(self, write: Callable[..., None]) -> Iterator[None]:
        """In this context, the adapter is what `write(rank=...)` has written; an error of it, on any rank, is raised
        before. A collective."""
        before = {name: shard.clone() for name, shard in self.trained().items()}
        self.reshard()
        try:
            together(partial(write, rank=self.sharding.get_local_rank()), device=self.device)
            yield
        finally:
            self.reshard()
            for name, shard in self.trained().items():
                shard.copy_(before[name])

    @contextmanager
    def without_adapter(self) -> Iterator[None]:
        """In this context, passes are those of the model as it was read."""
        with nullcontext() if self.adapters is None else self.adapters.using(None):
            yield

    def gradients(self) -> dict[str, Tensor]:
        """Return the gradients of `shards`: sums over all ranks."""
        return {name: p.grad.to_local() for name, p in self.model.named_parameters() if p.grad is not None}

    def clear_gradients(self) -> None:
        for parameter in self.model.parameters():
            parameter.grad = None

    def prepare(self, *, closes_update: bool) -> None:
        """Set up the collectives of the next pass; the last one of an update reduces its gradients."""
        if self.gathered:
            self.model.set_requires_gradient_sync(closes_update)
            self.model.set_reshard_after_backward(closes_update)
        else:
            self.model.set_requires_all_reduce(closes_update)  # between copies of the weights

    def gather(self) -> None:
        """Gather the weights for the passes of an update; a collective. On a GPU, the first pass does this instead."""
        self.is_sharded = False
        if self.device.type == "cpu":
            for module in self._sharded_modules():
                module.unshard()

    def await_ranks(self) -> None:
        """Wait until all ranks are here; a collective."""
        if self.mesh.weights.size() > 1:
            arrived = torch.zeros(1, device=self.device)
            dist.all_reduce(arrived)
            arrived.item()


def require_device(device: str, *, index: int = 0) -> None:
    """Raise ConfigError unless torch can use device `index` of this kind."""
    if device == "cuda" and torch.cuda.device_count() <= index:
        raise ConfigError(
            f"trainer.device: torch can use {torch.cuda.device_count()} CUDA devices here, and rank {index} of this "
            "host needs its own; lower trainer.ranks, or use cpu"
        )


# ---- building -------------------------------------------------------------------------------------------------------


def _planned(model_path: Path, dtype: torch.dtype, opened: ExitStack) -> tuple[Any, ModelFolder, Plan]:
    """Build the model without memory for its parameters, and plan how the folder's tensors become its own."""
    config = load_config(model_path)
    folder = open_folder(model_path, config, opened)
    model = build_on_meta(config, dtype)
    planned = plan(model, folder)
    buffers = dict(model.named_buffers())
    for conversion in planned.conversions:
        if planned.float32 & conversion.sources.keys():
            for name in buffers.keys() & set(conversion.targets):
                path, _, leaf = name.rpartition(".")
                model.get_submodule(path)._buffers[leaf] = buffers[name].float()
    return model, folder, planned


def build_on_meta(config: Any, dtype: torch.dtype) -> Any:
    """Build the model of a config, without memory for its parameters.

    Buffers get the types that transformers gives them where it computes in `dtype`.
    """
    require_text_decoder(config)
    attention.require_interface(config)
    if hasattr(config, "quantization_config"):
        del config.quantization_config  # what is read is dequantised
    try:
        with torch.device("meta"), _bounded():
            return AutoModelForCausalLM.from_config(
                config, dtype=dtype, attn_implementation=attention.NAME, trust_remote_code=False
            )
    except ConfigError:
        raise
    except Exception as err:  # anything that the class of a model raises
        raise ConfigError(f"model.path: transformers cannot build {config.model_type} for training: {err!r}") from err


def require_text_decoder(config: Any) -> None:
    """Raise ConfigError for kinds of models that are not just a decoder of text."""
    kind, text = config.model_type, text_config(config)
    if kind in ENCODERS or config.is_encoder_decoder:
        raise ConfigError(
            f"model.path: {kind} is a family of encoders, which see later tokens or count positions differently; "
            "not supported"
        )
    family = MODEL_FOR_CAUSAL_LM_MAPPING.get(type(config), None)
    is_of_text = text is not config and family is not None and family.config_class is type(text)
    if kind in MODEL_FOR_MULTIMODAL_LM_MAPPING_NAMES and not is_of_text:
        alone = None if text is config else MODEL_FOR_CAUSAL_LM_MAPPING.get(type(text), None)
        advice = (
            f"the text model alone can be trained from a folder of {alone.__name__}: text_config as its config.json, "
            "and its tensors under the names of that class"
            if alone is not None
            else "transformers has no class for its text model alone, so it cannot be trained"
        )
        raise ConfigError(f"model.path: {kind} is multimodal: {advice}")


@contextmanager
def _bounded() -> Iterator[None]:
    """Raise ConfigError if models that are built in this context have more than MAX_PARTS modules and parameters."""
    count = 0

    def add(*_: object) -> None:
        nonlocal count
        count += 1
        if count > MAX_PARTS:
            raise ConfigError(f"model.path: its config.json describes more than {MAX_PARTS:,} modules and parameters")

    with (
        register_module_module_registration_hook(add),
        register_module_parameter_registration_hook(add),
    ):
        yield


def decoder_layers(model: Any) -> nn.ModuleList:
    """Return the decoder layers: the list of modules with the most parameters."""
    lists = [module for module in model.get_decoder().modules() if isinstance(module, nn.ModuleList)]
    if not lists:
        raise ConfigError(f"model.path: {type(model).__name__} has no list of decoder layers; not supported")
    return max(lists, key=lambda layers: sum(parameter.numel() for parameter in layers.parameters()))


def compile_layers(layers: nn.ModuleList) -> None:
    """Compile the forward pass of each layer, for any number of tokens; names of parameters do not change.

    Equal layers share their code. The hooks of FSDP2 and the repetition of checkpointing `full` stay around it.
    Attention runs between two compiled parts, because the lengths of a row would be constants in compiled code.
    """
    for layer in layers:
        layer.forward = torch.compile(layer.forward, dynamic=True)


def sharding_units(model: Any) -> list[nn.Module]:
    """Return the modules that are gathered one at a time: the layers, unless they share parameters (Zamba 2)."""
    layers = list(decoder_layers(model))
    parameters = [parameter for layer in layers for parameter in layer.parameters()]
    return layers if len(parameters) == len(set(parameters)) else []


def stays_gathered(model: Any) -> bool:
    """Return whether the whole weights, and gradients of those that require them, are small enough to stay on each
    rank during an update."""
    return sum((4 + 4 * p.requires_grad) * p.numel() for p in model.parameters()) <= GATHERED_BYTES


def _materialize(model: Any, *, device: torch.device, shards_on: torch.device) -> None:
    """Allocate every shard and buffer; tied parameters stay tied. Buffers that no file contains are computed here."""
    seen: dict[nn.Parameter, nn.Parameter] = {}
    for module in model.modules():
        for name, parameter in module._parameters.items():
            if parameter is not None and parameter not in seen:
                empty = torch.empty_like(parameter, device=shards_on)
                seen[parameter] = nn.Parameter(empty, requires_grad=parameter.requires_grad)
                seen[parameter]._is_hf_initialized = True  # type: ignore[attr-defined]  # not by `_init_weights`
            if parameter is not None:
                setattr(module, name, seen[parameter])
        for name, buffer in module._buffers.items():
            if buffer is not None:
                module._buffers[name] = torch.zeros_like(buffer, device=device)
    _build_buffers(model)


def _build_buffers(model: Any) -> None:
    """Compute the buffers that no file contains, as transformers does: by `_init_weights`, innermost modules first."""
    persistent = model.state_dict().keys()
    modules = list(_with_owners(model))
    places = [
        (f"{prefix}{name}", module._buffers, name)
        for _, prefix, module in modules
        for name, buffer in module._buffers.items()
        if buffer is not None and f"{prefix}{name}" not in persistent
    ]
    built = []
    for filling in (0, 1):  # a buffer that `_init_weights` does not set keeps the filling, and is found by that
        for _, buffers, name in places:
            buffers[name].fill_(filling)
        for owner, prefix, module in reversed(modules):
            if any(path.startswith(prefix) for path, _, _ in places):
                with torch.no_grad():
                    owner._init_weights(module)
        built.append([buffers[name].clone() for _, buffers, name in places])
    for (path, _, _), zeros, ones in zip(places, *built, strict=True):
        if not torch.equal(zeros, ones):
            raise ConfigError(f"model.path: {path} of {type(model).__name__} cannot be built; not supported")


def _with_owners(module: Any, *, owner: Any = None, prefix: str = "") -> Iterator[tuple[Any, str, Any]]:
    """Yield (owner, prefix, module): the owner, whose `_init_weights` applies, is the innermost transformers model."""
    owner = module if isinstance(module, PreTrainedModel) else owner
    yield owner, prefix, module
    for name, child in module.named_children():
        yield from _with_owners(child, owner=owner, prefix=f"{prefix}{name}.")
