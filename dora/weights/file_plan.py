"""The safetensors files of a version, planned from the names, types and shapes of its tensors, and not from who writes
them: so several processes can write one file, and the files of a model are the same for every number of ranks.

Invariant: a plan is a pure function of the specs and their order. Within a file, wider types come first and then names,
as the safetensors library orders them, so that every tensor is aligned.
"""

from __future__ import annotations

import json
import math
import struct
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

#: Largest file, unless a single tensor is larger. Ranks compute the checksums of files side by side, and an engine may
#: read files side by side; a model of 70 B in bfloat16 has 132.
MAX_FILE_BYTES: Final = 2**30
INDEX: Final = "model.safetensors.index.json"
#: Bytes per element, by the name of the type in safetensors.
ITEM_BYTES: Final[Mapping[str, int]] = {
    **dict.fromkeys(("F64", "I64", "U64"), 8),
    **dict.fromkeys(("F32", "I32", "U32"), 4),
    **dict.fromkeys(("F16", "BF16", "I16", "U16"), 2),
    **dict.fromkeys(("I8", "U8", "BOOL", "F8_E4M3", "F8_E5M2"), 1),
}


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """A tensor of a version."""

    name: str
    dtype: str  # as safetensors calls it
    shape: tuple[int, ...]

    @property
    def num_bytes(self) -> int:
        return math.prod(self.shape) * ITEM_BYTES[self.dtype]


@dataclass(frozen=True, slots=True)
class PlannedFile:
    """A safetensors file: its header, which is written first, and its size."""

    name: str
    header: bytes
    num_bytes: int


@dataclass(frozen=True, slots=True)
class TensorPlace:
    """Where a tensor is."""

    file: str
    offset: int  # of its first byte, in the file
    row_bytes: int  # between rows of its first dimension


@dataclass(frozen=True, slots=True)
class FilePlan:
    """The files of a version, and where each tensor is."""

    files: tuple[PlannedFile, ...]
    places: Mapping[str, TensorPlace]

    def index(self) -> bytes:
        """Return the contents of the index, which a folder of several files has."""
        headers = sum(len(file.header) for file in self.files)
        total = sum(file.num_bytes for file in self.files) - headers
        weight_map = {name: place.file for name, place in sorted(self.places.items())}
        return json.dumps({"metadata": {"total_size": total}, "weight_map": weight_map}, indent=2).encode()


def plan_files(specs: Sequence[TensorSpec], *, max_bytes: int = MAX_FILE_BYTES) -> FilePlan:
    """Fill one file after the other with the tensors in the order given."""
    groups = list(_groups(specs, max_bytes=max_bytes))
    files, places = [], {}
    for number, group in enumerate(groups, start=1):
        name = "model.safetensors" if len(groups) == 1 else f"model-{number:05d}-of-{len(groups):05d}.safetensors"
        ordered = sorted(group, key=lambda spec: (-ITEM_BYTES[spec.dtype], spec.name))
        header, offsets = _header(ordered)
        for spec, offset in zip(ordered, offsets, strict=True):
            rows = spec.shape[0] if spec.shape else 1
            places[spec.name] = TensorPlace(name, len(header) + offset, spec.num_bytes // rows if rows else 0)
        files.append(PlannedFile(name, header, len(header) + sum(spec.num_bytes for spec in group)))
    return FilePlan(tuple(files), places)


def _groups(specs: Iterable[TensorSpec], *, max_bytes: int) -> Iterator[list[TensorSpec]]:
    group: list[TensorSpec] = []
    held = 0
    for spec in specs:
        if group and held + spec.num_bytes > max_bytes:
            yield group
            group, held = [], 0
        group.append(spec)
        held += spec.num_bytes
    if group:
        yield group


def _header(specs: Sequence[TensorSpec]) -> tuple[bytes, list[int]]:
    """Return the header of a file with these tensors, and where each begins behind it."""
    entries: dict[str, object] = {"__metadata__": {"format": "pt"}}
    offsets, end = [], 0
    for spec in specs:
        start, end = end, end + spec.num_bytes
        offsets.append(start)
        entries[spec.name] = {"dtype": spec.dtype, "shape": list(spec.shape), "data_offsets": [start, end]}
    text = json.dumps(entries, separators=(",", ":"), ensure_ascii=False).encode()
    padded = text.ljust(-(-len(text) // 8) * 8)
    return struct.pack("<Q", len(padded)) + padded, offsets
