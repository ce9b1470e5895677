"""Loads a model folder as it was published; each rank reads only its own rows of the safetensors.

transformers knows how the tensors of a folder become those of its model: some are renamed, others are converted, such
as the experts of a layer, which are stacked. `plan` applies the conversions to shapes alone, in both directions, before
anything is read. So a tensor that is missing, does not fit or could not be published again is known before that. A rank
chooses its own experts first and then stacks them. transformers' own loader cuts the rows of every source before it
joins them. That is wrong for conversions that join rows (the convolutions of OLMo Hybrid and Kimi Linear), so the
tensors of such conversions are read whole, one conversion at a time.

FP8 folders (`quant_method` fp8, a scale per block or per tensor) are dequantised as they are read.
"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Mapping
from contextlib import ExitStack
from copy import deepcopy
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import torch
import torch.distributed as dist
from safetensors import SafetensorError, safe_open
from torch import Tensor
from torch.distributed.tensor import DTensor
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import (
    Concatenate,
    MergeModulelist,
    WeightConverter,
    WeightRenaming,
    dot_natural_key,
    rename_source_key,
    revert_weight_conversion,
)

from dora.errors import ConfigError
from dora.model_files import indexed_files
from dora.trainer.full_disk import print_error
from dora.trainer.meshes import Block, block_of

_FP8: Final = ("F8_E4M3", "F8_E5M2")


@dataclass(frozen=True, slots=True)
class Conversion:
    """Tensors of a folder, and the tensors of the model that transformers makes of them in one conversion."""

    sources: Mapping[str, str]  # name in the folder -> the pattern of `converter` that it matches
    targets: tuple[str, ...]  # names in the model
    converter: WeightConverter | None  # None: the only source is the only target


@dataclass(frozen=True, slots=True)
class Plan:
    """How all tensors of a model are loaded, and published under the names that they had."""

    conversions: tuple[Conversion, ...]
    untrained: tuple[str, ...]  # names in the folder of buffers, and of tensors that the model has no use for
    float32: frozenset[str]  # names in the folder of tensors that a 16-bit or FP8 folder keeps in float32

    @property
    def wide(self) -> frozenset[str]:
        """Names in the model of tensors that come from `float32`."""
        return frozenset(
            target for one in self.conversions if self.float32 & one.sources.keys() for target in one.targets
        )


@dataclass(frozen=True, slots=True)
class ModelFolder:
    """The opened safetensors of a folder."""

    path: Path
    files: Mapping[str, Any]  # name -> the opened file that contains it, without scales
    scales: Mapping[str, str]  # name of an FP8 tensor -> name of its scale
    scale_files: Mapping[str, Any]
    block: tuple[int, int]  # rows and columns per scale

    def shape(self, name: str) -> tuple[int, ...]:
        return tuple(self.files[name].get_slice(name).get_shape())

    def dtype(self, name: str) -> str:
        """Return the stored type, as safetensors calls it."""
        stored: str = self.files[name].get_slice(name).get_dtype()
        return stored

    def read(self, name: str, start: int = 0, stop: int | None = None) -> Tensor:
        """Return rows `start` to `stop` of a tensor, dequantised."""
        try:
            if not self.shape(name):
                whole: Tensor = self.files[name].get_tensor(name)
                return whole
            rows: Tensor = self.files[name].get_slice(name)[start:stop]
            if name not in self.scales:
                return rows
            scale = self.scale_files[self.scales[name]].get_tensor(self.scales[name]).float()
        except (SafetensorError, OSError) as err:
            raise ConfigError(f"model.path: {name} in {self.path} cannot be read: {err}") from err
        return rows.float() * self._expand(scale, rows.shape, start=start, name=name)

    def _expand(self, scale: Tensor, shape: torch.Size, *, start: int, name: str) -> Tensor:
        """Return a factor for each element of the rows from `start`."""
        if scale.numel() == 1:
            return scale.reshape(())
        *stack, rows, columns = self.shape(name)
        block_rows, block_columns = self.block
        expected = [*stack, math.ceil(rows / block_rows), math.ceil(columns / block_columns)]
        if list(scale.shape) != expected:
            raise ConfigError(
                f"model.path: the scales of {name} in {self.path} have shape {list(scale.shape)}, expected {expected}"
            )
        skip = 0
        if stack:
            scale = scale[start : start + shape[0]]
        else:
            skip, rows = start % block_rows, shape[0]
            scale = scale[start // block_rows : math.ceil((start + rows) / block_rows)]
        each = scale.repeat_interleave(block_rows, -2).repeat_interleave(block_columns, -1)
        return each[..., skip : skip + rows, :columns]


# ---- planning -------------------------------------------------------------------------------------------------------


def open_folder(path: Path, config: Any, stack: ExitStack) -> ModelFolder:
    """Open the safetensors of a folder until `stack` closes; ConfigError for a quantization other than FP8."""
    quantization = getattr(config, "quantization_config", None) or {}
    method = quantization.get("quant_method")
    if method not in (None, "fp8"):
        raise ConfigError(f"model.path: {path} is quantized ({method}); give a bfloat16, float32 or FP8 version of it")
    block = quantization.get("weight_block_size") or (1, 1)
    if not (isinstance(block, list | tuple) and len(block) == 2 and all(type(n) is int and n > 0 for n in block)):
        raise ConfigError(f"model.path: weight_block_size of {path} is {block!r}, expected two positive integers")
    opened: dict[Path, Any] = {}
    files = {}
    for name, file in _files_by_name(path).items():
        try:
            if file not in opened:
                opened[file] = stack.enter_context(safe_open(file, framework="pt"))
            opened[file].get_slice(name)
        except (SafetensorError, OSError) as err:
            raise ConfigError(f"model.path: {name} in {file} cannot be read: {err}") from err
        files[name] = opened[file]
    scales, unused = {}, set()
    for name in files:
        if files[name].get_slice(name).get_dtype() not in _FP8:
            continue
        module = name.removesuffix(".weight")
        found = [scale for scale in (f"{name}_scale_inv", f"{module}.scale") if scale in files]
        if not found or not method:
            what = "without its scale" if method else "but its config.json does not say so (quantization_config)"
            raise ConfigError(f"model.path: {name} in {path} is stored in FP8, {what}")
        scales[name] = found[0]
        unused |= {found[0], f"{module}.activation_scale"}
    return ModelFolder(
        path=path,
        files={name: file for name, file in files.items() if name not in unused},
        scales=scales,
        scale_files={name: files[name] for name in scales.values()},
        block=(block[0], block[1]),
    )


def plan(model: Any, folder: ModelFolder) -> Plan:
    """Return how the tensors of `folder` become those of `model`, which is on the meta device and not yet sharded.

    Raise ConfigError if a tensor is missing, has another shape, or could not be published as it was found. Tensors
    that the model has no use for, such as those of a vision part, are published as they are read.
    """
    mapping = get_model_conversion_mapping(model)
    renamings = [entry for entry in mapping if isinstance(entry, WeightRenaming)]
    converters = [entry for entry in mapping if isinstance(entry, WeightConverter)]
    by_pattern = {pattern: converter for converter in converters for pattern in converter.source_patterns}
    wanted = model.state_dict()
    found: dict[str, dict[str, str]] = {}  # target -> name -> pattern
    unexpected = []
    for name in sorted(folder.files, key=dot_natural_key):
        target, pattern = rename_source_key(name, renamings, converters, model.base_model_prefix, wanted)
        if target not in wanted and name in wanted:
            target, pattern = name, None
        if target in wanted:
            found.setdefault(target, {})[name] = pattern or ""
        else:
            unexpected.append(name)
    model._weight_conversions = [entry for entry in mapping if entry.was_used()]
    conversions = []
    for target, sources in found.items():
        converter = by_pattern.get(next(iter(sources.values())))
        try:
            conversions.append(_conversion(model, folder, wanted, target, sources, converter))
        except ConfigError:
            raise
        except Exception as err:  # anything that transformers' conversion raises
            raise ConfigError(
                f"model.path: {next(iter(sources))} in {folder.path} cannot be converted to {target}: {err!r}"
            ) from err
    _require_all(model, folder, {target for conversion in conversions for target in conversion.targets})
    _name_unused(model, folder, unexpected)
    buffers = dict(model.named_buffers()).keys()
    constant = [name for one in conversions if buffers >= set(one.targets) for name in one.sources]
    return Plan(tuple(conversions), (*unexpected, *constant), _kept_in_float32(folder))


def _conversion(
    model: Any,
    folder: ModelFolder,
    wanted: Mapping[str, Tensor],
    target: str,
    sources: dict[str, str],
    converter: WeightConverter | None,
) -> Conversion:
    """Apply a conversion and its reverse to shapes. `wanted`: the model's tensors."""
    shapes = {name: folder.shape(name) for name in sources}
    if converter is None:
        if len(sources) > 1:
            raise ConfigError(f"model.path: {' and '.join(sources)} in {folder.path} are the same tensor of the model")
        converted = {target: torch.empty(*shapes.values(), device="meta")}
    else:
        if isinstance(converter.operations[0], MergeModulelist):
            _require_experts(folder, list(sources), count=wanted[target].shape[0])
        empty = {name: torch.empty(shape, device="meta") for name, shape in shapes.items()}
        converted = _convert(converter, target, sources, empty, model)
    for name, tensor in converted.items():
        if tensor.shape != wanted[name].shape:
            raise ConfigError(
                f"model.path: {next(iter(sources))} in {folder.path} has shape {list(next(iter(shapes.values())))}, "
                f"from which {name} gets shape {list(tensor.shape)}, expected {list(wanted[name].shape)}"
            )
    conversion = Conversion(sources, tuple(converted), converter)
    published = as_published(model, conversion, {name: wanted[name].to("meta") for name in converted})
    if {name: tuple(tensor.shape) for name, tensor in published.items()} != shapes:
        raise ConfigError(
            f"model.path: transformers would publish {next(iter(published))} in place of {next(iter(sources))}, as "
            f"{folder.path} has it; not supported"
        )
    return conversion


def as_published(model: Any, conversion: Conversion, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return whole tensors of the model (`conversion.targets`) under the names and in the layout of the folder."""
    if conversion.converter is None:
        return dict(zip(conversion.sources, tensors.values(), strict=True))
    return dict(revert_weight_conversion(model, dict(tensors)))


def _convert(
    converter: WeightConverter, target: str, patterns: Mapping[str, str], tensors: Mapping[str, Tensor], model: Any
) -> dict[str, Tensor]:
    """Return the model's tensors, made of the folder's."""
    once = deepcopy(converter)  # it collects tensors
    for name, tensor in tensors.items():
        once.add_tensor(target, name, patterns[name], tensor)
    converted = once.convert(target, model=model, config=model.config)
    return {name: value[0] if isinstance(value, list) else value for name, value in converted.items()}


def _require_experts(folder: ModelFolder, names: list[str], *, count: int) -> None:
    """Raise ConfigError unless every expert has each kind of tensor. The last number in a name is the expert's."""
    kinds: dict[tuple[str, str], set[int]] = {}
    for name in names:
        before, number, after = re.fullmatch(r"(.*\.)(\d+)(\..*)", name).groups()  # type: ignore[union-attr]
        kinds.setdefault((before, after), set()).add(int(number))
    for (before, after), numbers in kinds.items():
        if missing := set(range(count)) - numbers:
            raise ConfigError(f"model.path: {folder.path} lacks {before}{min(missing)}{after}")
        if numbers - set(range(count)):
            raise ConfigError(f"model.path: {folder.path} has {before}{max(numbers)}{after}, of {count} experts")


def _require_all(model: Any, folder: ModelFolder, found: set[str]) -> None:
    """Raise ConfigError unless every tensor of the model is loaded; of tied tensors, one must be."""
    aliases: dict[int, set[str]] = {}
    for name, tensor in model.state_dict(keep_vars=True).items():
        aliases.setdefault(id(tensor), set()).add(name)
    missing = sorted(min(names) for names in aliases.values() if not names & found)
    if missing:
        others = f" and {len(missing) - 1} other tensors" if len(missing) > 1 else ""
        raise ConfigError(f"model.path: {folder.path} lacks {missing[0]}{others}")


def _name_unused(model: Any, folder: ModelFolder, names: list[str]) -> None:
    """Print, on rank 0, which tensors are not loaded, except those that transformers does not mention either."""
    silent = [*(model._keys_to_ignore_on_load_unexpected or ()), r"rotary_emb\.inv_freq", r"(^|\.)position_ids$"]
    names = [name for name in names if not any(re.search(pattern, name) for pattern in silent)]
    if names and dist.get_rank() == 0:
        print_error(
            f"{type(model).__name__} has no use for {names[0]} and {len(names) - 1} other tensors of {folder.path}; "
            "they are not trained, but published as they were read"
        )


def _kept_in_float32(folder: ModelFolder) -> frozenset[str]:
    """Return the tensors in float32, if most numbers of the folder are stored in fewer bits."""
    sizes: Counter[str] = Counter()
    for name in folder.files:
        sizes[folder.dtype(name)] += math.prod(folder.shape(name))
    if sizes.most_common(1)[0][0] in ("F32", "F64"):
        return frozenset()
    return frozenset(name for name in folder.files if folder.dtype(name) == "F32")


def _files_by_name(model_path: Path) -> dict[str, Path]:
    """Map each tensor name to the safetensors file that contains it."""
    if indexed := indexed_files(model_path):
        return indexed
    single = model_path / "model.safetensors"
    found: dict[str, Path] = {}
    for path in [single] if single.is_file() else sorted(model_path.glob("*.safetensors")):
        try:
            with safe_open(path, framework="pt") as opened:
                found |= dict.fromkeys(opened.keys(), path)
        except SafetensorError as err:
            raise ConfigError(f"model.path: {path} is not a readable safetensors file: {err}") from err
    if not found:
        raise ConfigError(f"model.path: {model_path} has no safetensors file; give a Hugging Face model folder")
    return found


# ---- reading --------------------------------------------------------------------------------------------------------


def load_shards(model: Any, folder: ModelFolder, plan: Plan, *, rank: int) -> None:
    """Fill this rank's rows and all persistent buffers. `rank`: its number in its copy of the weights."""
    tensors = tensors_of(model)
    parts = {name: own_block(tensor, rank) for name, tensor in tensors.items()}
    rows = {name: part.rows for name, part in parts.items()}
    filled: dict[int, str] = {}
    for conversion in plan.conversions:
        for name, values in _read(model, folder, conversion, rows).items():
            tensor = tensors[name].detach()
            local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
            if values.dim() > 1:
                values = values[:, parts[name].columns.start : parts[name].columns.stop]
            before = filled.setdefault(id(tensors[name]), name)
            if before == name:
                local.copy_(values)
            elif not torch.equal(local, values.to(local)):
                raise ConfigError(
                    f"model.path: {name} and {before} differ in {folder.path}, but its config.json ties them; set "
                    "tie_word_embeddings to false there"
                )


def tensors_of(model: Any) -> dict[str, Tensor]:
    """Return the parameters and buffers of a model by the names that they have without adapters, which are left out.

    Tied parameters have several names.
    """
    tensors = dict(model.named_parameters(remove_duplicate=False)) | dict(model.named_buffers())
    return {plain_name(name): tensor for name, tensor in tensors.items() if not re.search(r"\.lora_[AB]\.", name)}


def plain_name(name: str) -> str:
    """Return the name that a parameter has without adapters."""
    return name.replace(".base_layer.", ".")


def own_block(tensor: Tensor, rank: int) -> Block:
    """Return the part of a tensor of the model that a rank has; buffers are whole on every rank."""
    if isinstance(tensor, DTensor):
        return block_of(tensor, rank)
    rows, columns = (*tensor.shape[:2], 1, 1)[:2]
    return Block(range(rows), range(columns))


def _read(model: Any, folder: ModelFolder, conversion: Conversion, rows: Mapping[str, range]) -> dict[str, Tensor]:
    """Return `rows` of each target; targets of which no rows are wanted are left out."""
    target, *others = conversion.targets
    mine = rows[target]
    if not mine and not others:
        return {}
    if conversion.converter is None:
        [name] = conversion.sources
        return {target: folder.read(name, mine.start, mine.stop)}
    if stacks_rows(conversion.converter):
        tensors = {name: folder.read(name) for name in conversion.sources if _expert(name) in mine}
        return _convert(conversion.converter, target, conversion.sources, tensors, model)
    tensors = {name: folder.read(name) for name in conversion.sources}
    converted = _convert(conversion.converter, target, conversion.sources, tensors, model)
    return {name: tensor[rows[name].start : rows[name].stop] for name, tensor in converted.items()}


def stacks_rows(converter: WeightConverter) -> bool:
    """Return whether every source becomes one row of a single target, so that rows can be chosen before converting."""
    first, *others = converter.operations
    return (
        isinstance(first, MergeModulelist)
        and first.dim == 0
        and all(isinstance(operation, Concatenate) and operation.dim > 0 for operation in others)
    )


def _expert(name: str) -> int:
    """Return the number of the expert in a tensor's name, the last number."""
    return int(re.findall(r"\.(\d+)\.", name)[-1])
