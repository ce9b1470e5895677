"""LoRA adapters of a model (arXiv 2106.09685): modules and names are those of peft.

Each target, a linear module, gets two matrices beside its weight W: its output becomes that of W + scale B A. The
weights of the model are frozen, and TRAINED is the adapter that is trained. Policies that differ from the trained one
by their adapter alone are computed by the same modules: with PROXIMAL, a frozen copy of the adapter, with REFERENCE,
the one that training began with, or with none, as the model was read.

Invariant: first values are those of a folder, or depend on the seed and the name of a weight alone, not on the ranks. B
is zero then, so that version 0 is the model as it was read.
Legend: R rank of the adapter, I and O input and output features of a target.
"""

from __future__ import annotations

import json
import math
import warnings
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final, Literal, NamedTuple

import safetensors.torch
import torch
import torch.distributed as dist
import xxhash
from torch import Tensor
from torch.distributed.tensor import DTensor

from dora.adapted_modules import adapted_modules
from dora.adapter_files import CONFIG, WEIGHTS, adapter_digest, stored_name
from dora.errors import ConfigError
from dora.trainer.buckets import rows_in
from dora.trainer.loading import own_block
from dora.trainer.stored_adapter import StoredAdapter
from dora.transport.messages import LoraSettings

TRAINED: Final = "default"  # peft's name
PROXIMAL: Final = "proximal"
REFERENCE: Final = "reference"
#: Most bytes of the float64 sum of a weight and its adapter at a time, unless one row is larger.
SUM_BYTES: Final = 8 * 2**20
#: What a check of the model adds to a weight, relative to a weight of peft's own distribution of A.
TRIAL: Final = 0.1


class Factors(NamedTuple):
    """The whole matrices of an adapted weight."""

    matrix_RI: Tensor
    matrix_OR: Tensor
    scale: float
    is_transposed: bool  # whether the model stores the weight as [I, O]

    def added_to(self, rows: Tensor, *, start: int, dtype: torch.dtype) -> Tensor:
        """Return rows of the weight, from row `start` on, with the adapter: in float64, rounded once to `dtype`.

        Nodes compute the same bytes (dora/weights/merging.py), so products are added one after the other, in two
        operations each: a product of matrices would add in an order of the machine's own.
        """
        left, right = (self.matrix_RI.T, self.matrix_OR.T) if self.is_transposed else (self.matrix_OR, self.matrix_RI)
        left, right = self.scale * left[start : start + len(rows)].double(), right.double()
        result = torch.empty_like(rows, dtype=dtype)
        step = rows_in(SUM_BYTES, right)
        for into, some, factors in zip(result.split(step), rows.split(step), left.split(step), strict=True):
            total = some.to(torch.float64, copy=True)
            for column, row in zip(factors.T, right, strict=True):
                total += column[:, None] * row
            into.copy_(total)
        return result


class Adapters:
    """The adapters of a model."""

    def __init__(self, model: Any, settings: LoraSettings, *, frozen: Collection[str] = ()) -> None:
        """Add TRAINED and the `frozen` ones to a model on meta, of which only TRAINED then requires gradients.

        ConfigError if a target cannot have one, or if the folder that training begins with has another one.
        """
        from peft import LoraConfig, inject_adapter_in_model  # takes half a second
        from peft.tuners.lora import LoraLayer

        adapted_modules(model, settings.targets, field="trainer.lora.targets")
        config = LoraConfig(
            r=settings.rank,
            lora_alpha=settings.alpha,
            use_rslora=settings.rslora,
            target_modules=list(settings.targets),
            init_lora_weights=False,
        )
        with warnings.catch_warnings(), torch.device("meta"):
            warnings.simplefilter("ignore")  # about weights that are stored transposed
            try:
                inject_adapter_in_model(config, model, TRAINED, low_cpu_mem_usage=True)
            except ValueError as err:  # what peft knows of a family
                raise ConfigError(f"trainer.lora.targets: peft refuses {type(model).__name__}: {err}") from err
            modules = {name: module for name, module in model.named_modules() if isinstance(module, LoraLayer)}
            for module in modules.values():
                for adapter in frozen:
                    module.update_layer(adapter, settings.rank, lora_alpha=settings.alpha, config=config)
        self.settings = settings
        #: By the name that the adapted weight has without adapters.
        self._modules: Mapping[str, Any] = {f"{name}.weight": module for name, module in modules.items()}
        if settings.begins_with:
            self._stored(Path(settings.begins_with))

    @contextmanager
    def using(self, adapter: str | None) -> Iterator[None]:
        """In this context, passes of the model are those with another adapter, or with none."""
        self._switch(adapter)
        try:
            yield
        finally:
            self._switch(TRAINED)

    def _switch(self, adapter: str | None) -> None:
        for module in self._modules.values():  # peft's own methods also change which of them require gradients
            module._disable_adapters = adapter is None
            module._active_adapter = adapter or TRAINED

    def _stored(self, folder: Path) -> StoredAdapter:
        """Open the folder of an adapter; ConfigError unless it has this one."""
        shapes = {
            stored_name(name, part): matrices[TRAINED].weight.shape
            for name, module in self._modules.items()
            for part, matrices in _parts(module)
        }
        return StoredAdapter(folder, self.settings, shapes)

    @torch.no_grad()
    def fill(self, *, rank: int) -> bytes:
        """Write this rank's rows of the first values, of TRAINED and, if it is there, of REFERENCE. `rank`: its number
        in its copy of the weights. The weights must be sharded. ConfigError if a value is not finite.

        Return a digest of where they are from, for a comparison with other ranks.
        """
        if not self.settings.begins_with:
            self.draw(rank=rank)
            return b"-"
        folder = Path(self.settings.begins_with)
        self.read(folder, rank=rank, into=(TRAINED, REFERENCE))
        return adapter_digest(folder).encode()

    @torch.no_grad()
    def read(self, folder: Path, *, rank: int, into: Collection[str] = (TRAINED,)) -> None:
        """Write this rank's rows of the adapter in a folder, into those of `into` that are there. `rank`, ConfigError:
        as in `fill`."""
        stored = self._stored(folder)
        for name, module in self._modules.items():
            for part, matrices in _parts(module):
                rows = stored.rows(stored_name(name, part), own_block(matrices[TRAINED].weight, rank).rows)
                for adapter in into:
                    if adapter in matrices:
                        matrices[adapter].weight.to_local().copy_(rows)

    @torch.no_grad()
    def draw(self, *, rank: int, is_trial: bool = False) -> None:
        """Write this rank's rows of a new TRAINED: A as in peft, B zero or, in a trial, drawn too. `rank`: as in
        `fill`."""
        for name, module in self._modules.items():
            matrix_RI, matrix_OR = module.lora_A[TRAINED].weight, module.lora_B[TRAINED].weight
            bound = 1 / math.sqrt(matrix_RI.shape[1])
            size = TRIAL / (module.scaling[TRAINED] * math.sqrt(len(matrix_RI))) if is_trial else 0.0
            _fill(matrix_RI, self._drawn(f"A {name}", matrix_RI.shape, bound), rank=rank)
            _fill(matrix_OR, self._drawn(f"B {name}", matrix_OR.shape, size), rank=rank)

    def _drawn(self, name: str, shape: torch.Size, bound: float) -> Tensor:
        """Return values between -bound and bound, equal for equal seeds and names."""
        generator = torch.Generator().manual_seed(xxhash.xxh3_64_intdigest(f"{self.settings.seed} {name}".encode()))
        return torch.empty(shape).uniform_(-bound, bound, generator=generator)

    @torch.no_grad()
    def refresh(self) -> None:
        """Copy this rank's rows of TRAINED to PROXIMAL."""
        for module in self._modules.values():
            for matrices in (module.lora_A, module.lora_B):
                matrices[PROXIMAL].weight.to_local().copy_(matrices[TRAINED].weight.to_local())

    def factors(self) -> Factored:
        """Return access to the matrices of TRAINED; made while the weights are sharded."""
        return Factored(self._modules)


class Factored:
    """The matrices of an adapter, each sharded over the ranks of a copy of the weights."""

    def __init__(self, modules: Mapping[str, Any]) -> None:
        # A module has other tensors while it is gathered.
        self._matrices = {
            name: (module.lora_A[TRAINED].weight.detach(), module.lora_B[TRAINED].weight.detach(), module)
            for name, module in modules.items()
        }

    @property
    def names(self) -> set[str]:
        """The names of the adapted weights."""
        return {*self._matrices}

    def whole(self, group: dist.ProcessGroup, *, dtype: torch.dtype) -> dict[str, Factors]:
        """Return the factors of each adapted weight, in the published type `dtype`; a collective. `group`: the ranks of
        a copy of the weights."""
        found = {}
        for name, (sharded_RI, sharded_OR, module) in self._matrices.items():
            matrices = _whole(sharded_RI, group).to(dtype), _whole(sharded_OR, group).to(dtype)
            found[name] = Factors(*matrices, module.scaling[TRAINED], module.fan_in_fan_out)
        return found


def write_adapter(folder: Path, factors: Mapping[str, Factors], settings: LoraSettings) -> None:
    """Write an adapter to a new folder that peft and servers read.

    Servers scale by lora_alpha / r and may ignore `use_rslora`, so lora_alpha has the whole scale.
    """
    config = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": None,  # a path of this host says nothing elsewhere
        "r": settings.rank,
        "lora_alpha": settings.alpha * (math.sqrt(settings.rank) if settings.rslora else 1.0),
        "use_rslora": False,
        "lora_dropout": 0.0,
        "bias": "none",
        "fan_in_fan_out": any(one.is_transposed for one in factors.values()),
        "target_modules": sorted(settings.targets),
        "inference_mode": True,
    }
    tensors = {}
    for name, one in factors.items():
        tensors[stored_name(name, "A")] = one.matrix_RI.contiguous()
        tensors[stored_name(name, "B")] = one.matrix_OR.contiguous()
    folder.mkdir()
    (folder / CONFIG).write_text(json.dumps(config, indent=2, sort_keys=True))
    (folder / WEIGHTS).write_bytes(safetensors.torch.save(tensors, metadata={"format": "pt"}))


def _parts(module: Any) -> Iterator[tuple[Literal["A", "B"], Any]]:
    """Yield the two matrices of an adapted module, each by adapter."""
    yield "A", module.lora_A
    yield "B", module.lora_B


def _fill(matrix: DTensor, values: Tensor, *, rank: int) -> None:
    rows = own_block(matrix, rank).rows
    matrix.to_local().copy_(values[rows.start : rows.stop])


def _whole(matrix: DTensor, group: dist.ProcessGroup) -> Tensor:
    """Return a matrix whose rows the ranks of a group share, as FSDP2 cuts them; a collective."""
    local = matrix.to_local()
    mine = local.new_zeros(-(-len(matrix) // group.size()), matrix.shape[1])
    mine[: len(local)] = local
    parts = [torch.empty_like(mine) for _ in range(group.size())]
    dist.all_gather(parts, mine, group=group)
    return torch.cat(parts)[: len(matrix)]
