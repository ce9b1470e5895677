"""The weights of a served model, replaced in place under the names of published folders.

A folder may store one parameter of the model in several tensors, its parts: experts are stored one by one, but computed
together. Names and parts come from transformers' own conversion (`core_model_loading`), so a folder is read in the same
way as by `from_pretrained`. Invariant: the parts of a parameter are kept until the last part has arrived, and are then
written together.
"""

from __future__ import annotations

import hashlib
import re
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping
from contextlib import ExitStack
from copy import deepcopy
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open
from torch import Tensor, uint8
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import (
    WeightConverter,
    WeightRenaming,
    dot_natural_key,
    rename_source_key,
    revert_weight_conversion,
)

from dora.errors import ConfigError


class LiveWeights:
    """All parameters and persistent buffers of a model."""

    def __init__(self, model: Any, *, unused: Collection[str] = ()) -> None:
        """`unused`: tensors of folders that this model has no use for, such as those of its vision part."""
        self._model = model
        self._unused = unused
        self._live: dict[str, Tensor] = model.state_dict()
        mapping = get_model_conversion_mapping(model)
        self._renamings = [entry for entry in mapping if isinstance(entry, WeightRenaming)]
        self._converters = [entry for entry in mapping if isinstance(entry, WeightConverter)]
        published = revert_weight_conversion(model, {name: held.to("meta") for name, held in self._live.items()})
        self._num_parts = Counter(self._target(name)[0] for name in published)
        self._parts: dict[str, dict[str, Tensor]] = {}  # incomplete parameters: name -> published name -> part
        self._ignored = [re.compile(pattern) for pattern in model._keys_to_ignore_on_load_unexpected or ()]

    def load(self, folder: Path) -> None:
        """Copy a whole folder of any safetensors sharding.

        OSError, with nothing changed, if there is no such file, or one of them cannot be opened; ConfigError if a
        weight is unknown, missing, or of another shape.
        """
        self._parts.clear()
        written: set[str] = set()
        with ExitStack() as files:
            for file, name, tensor in _tensors(_opened(folder, files)):
                targets = self._write(name, tensor, file=file)
                is_known = name in self._unused or any(pattern.search(name) for pattern in self._ignored)
                if targets is None and not is_known:
                    raise ConfigError(f"{file} holds {name}, which the served model does not have")
                written.update(targets or ())
        held = {self._live[name].data_ptr() for name in written}
        # Tied weights are stored once.
        missing = {name for name in self._live if name not in written and self._live[name].data_ptr() not in held}
        if missing:
            raise ConfigError(f"{folder} lacks {len(missing)} weights of the served model, first {min(missing)}")

    def put(self, tensors: Iterable[tuple[str, Tensor]]) -> None:
        """Copy some of the weights; the parts of a parameter may come in several calls."""
        for name, tensor in tensors:
            self._write(name, tensor, file="the bucket")  # SGLang skips unknown names too

    def checksums(self) -> dict[str, str]:
        """Return the checksum of every tensor of the published folder, by name."""
        return {name: _checksum(tensor) for name, tensor in revert_weight_conversion(self._model, self._live).items()}

    def _target(self, name: str) -> tuple[str, str | None]:
        """Return the (first) parameter that a published tensor becomes, and the pattern of its conversion, or None."""
        prefix = self._model.base_model_prefix
        target, pattern = rename_source_key(name, self._renamings, self._converters, prefix, self._live)
        if target not in self._live and name in self._live:
            return name, None
        return target, pattern

    def _write(self, name: str, tensor: Tensor, *, file: object) -> Iterable[str] | None:
        """Write a tensor; return the parameters that it completes, or None if it belongs to no parameter."""
        target, pattern = self._target(name)
        if target not in self._live:
            return None
        if pattern is None:
            _copy(tensor, self._live[target], name=name, file=file)
            return (target,)
        parts = self._parts.setdefault(target, {})
        parts[name] = tensor
        if len(parts) < self._num_parts[target]:
            return ()
        complete = self._converted(target, self._parts.pop(target))
        for made, value in complete.items():
            _copy(value, self._live[made], name=made, file=file)
        return complete

    def _converted(self, target: str, parts: dict[str, Tensor]) -> dict[str, Tensor]:
        patterns = {name: self._target(name)[1] for name in sorted(parts, key=dot_natural_key)}
        first = next(iter(patterns.values()))
        conversion = deepcopy(next(one for one in self._converters if first in one.source_patterns))
        for name, pattern in patterns.items():
            conversion.add_tensor(target, name, pattern, parts[name])
        made = conversion.convert(target, model=self._model, config=self._model.config)
        return {name: value[0] if isinstance(value, list) else value for name, value in made.items()}


def _opened(folder: Path, files: ExitStack) -> dict[Path, Any]:
    """Open all files of a folder, before a weight is written; OSError if there is none, or one is damaged."""
    paths = sorted(folder.glob("*.safetensors"))
    if not paths:
        raise FileNotFoundError(f"{folder} holds no safetensors files")
    try:
        return {path: files.enter_context(safe_open(path, framework="pt", device="cpu")) for path in paths}
    except SafetensorError as err:
        raise OSError(f"{folder} has a damaged file: {err}") from err


def _tensors(opened: Mapping[Path, Any]) -> Iterator[tuple[Path, str, Tensor]]:
    for path, file in opened.items():
        for name in file.keys():  # noqa: SIM118  a safetensors file is not a mapping
            yield path, name, file.get_tensor(name)


def _copy(source: Tensor, target: Tensor, *, name: str, file: object) -> None:
    if source.shape != target.shape:
        raise ConfigError(f"{file}: {name} has shape {list(source.shape)}, the served model has {list(target.shape)}")
    target.copy_(source)


def _checksum(tensor: Tensor) -> str:
    """SGLang's checksum on a CPU: the first eight bytes of the SHA-256 of the tensor's bytes."""
    data = tensor.detach().cpu().contiguous().reshape(-1).view(uint8).numpy()
    return hashlib.sha256(data.data).hexdigest()[:16]
