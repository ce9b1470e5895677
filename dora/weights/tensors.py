"""Tensors in safetensors files, read some elements at a time, and the floating-point types that they are stored in.

A file may come from elsewhere: its header is checked before anything is read, and no more is read than is asked for.
numpy has no bfloat16: values are widened to float32, and rounded as torch does it: to float32 first, and then to 16
bits, each time to the nearest and to even.
"""

from __future__ import annotations

import math
import os
import struct
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Annotated, Any, Final, NamedTuple

import msgspec
import numpy as np
from numpy.typing import NDArray

from dora import foreign
from dora.foreign import ForeignFileError
from dora.model_files import indexed_files
from dora.weights.file_plan import ITEM_BYTES

#: Values of a tensor, in a type that holds them exactly.
Floats = NDArray[np.float64] | NDArray[np.float32]
_MAX_HEADER: Final = 32 << 20  # 94,000 experts stored one by one take 14 MB
Size = Annotated[int, msgspec.Meta(ge=0, le=1 << 48)]
#: Of a tensor.
Shape = Annotated[tuple[Size, ...], msgspec.Meta(max_length=8)]


class StoredTensor(NamedTuple):
    """A tensor in a file."""

    path: Path
    dtype: str  # as safetensors calls it
    shape: tuple[int, ...]
    offset: int  # of its first byte, in the file

    def read(self, start: int = 0, stop: int | None = None) -> bytes:
        """Return the bytes of the elements from `start` to `stop`; ForeignFileError if the file is shorter now."""
        stop = math.prod(self.shape) if stop is None else stop
        size = ITEM_BYTES[self.dtype]
        with foreign.open_regular(self.path, follow_links=True) as file:
            data = os.pread(file.fileno(), (stop - start) * size, self.offset + start * size)
        if len(data) != (stop - start) * size:
            raise ForeignFileError(f"{self.path}: ends early")
        return data


class _Entry(msgspec.Struct, frozen=True):
    dtype: str
    shape: Shape
    data_offsets: tuple[Size, Size]


def tensors_in(path: Path) -> dict[str, StoredTensor]:
    """Return the tensors of a safetensors file, without those of unknown types; ForeignFileError if it is damaged."""
    with foreign.open_regular(path, follow_links=True) as file:
        size = os.fstat(file.fileno()).st_size
        start = file.read(8)
        length = struct.unpack("<Q", start)[0] if len(start) == 8 else 0
        if not 2 <= length <= min(size - 8, _MAX_HEADER):
            raise ForeignFileError(f"{path}: is not a safetensors file, or is truncated")
        header = file.read(length)
    try:
        raw = msgspec.json.decode(header, type=dict[str, msgspec.Raw])
        entries = {name: msgspec.json.decode(one, type=_Entry) for name, one in raw.items() if name != "__metadata__"}
    except (msgspec.MsgspecError, ValueError, RecursionError) as err:
        raise ForeignFileError(f"{path}: has a damaged header ({err})") from err
    found = {}
    for name, entry in entries.items():
        if entry.dtype in ITEM_BYTES:
            begin, end = entry.data_offsets
            if end - begin != math.prod(entry.shape) * ITEM_BYTES[entry.dtype] or end > size - 8 - length:
                raise ForeignFileError(f"{path}: has a damaged header ({name!r} does not fit into it)")
            found[name] = StoredTensor(path, entry.dtype, entry.shape, 8 + length + begin)
    return found


def tensors_of(model: Path) -> dict[str, StoredTensor]:
    """Return the tensors of a model folder; ConfigError if its files are damaged."""
    if indexed := indexed_files(model):
        files = {path: tensors_in(path) for path in sorted(set(indexed.values()))}
        return {name: files[path][name] for name, path in indexed.items() if name in files[path]}
    single = model / "model.safetensors"
    paths: Iterable[Path] = [single] if single.is_file() else sorted(model.glob("*.safetensors"))
    return {name: tensor for path in paths for name, tensor in tensors_in(path).items()}


# ---- types ----------------------------------------------------------------------------------------------------------


def _widened(data: bytes) -> Floats:
    return (np.frombuffer(data, "<u2").astype(np.uint32) << 16).view(np.float32)


def _rounded(values: Floats) -> NDArray[Any]:
    """Return bfloat16, as 16-bit words; NaN is not kept."""
    bits = values.astype(np.float32).view(np.uint32)
    return ((bits + 0x7FFF + (bits >> 16 & 1)) >> 16).astype("<u2")


_DECODE: Final[Mapping[str, Callable[[bytes], Floats]]] = {
    "F64": lambda data: np.frombuffer(data, "<f8"),
    "F32": lambda data: np.frombuffer(data, "<f4"),
    "F16": lambda data: np.frombuffer(data, "<f2").astype(np.float32),
    "BF16": _widened,
}
_ENCODE: Final[Mapping[str, Callable[[Floats], NDArray[Any]]]] = {
    "F64": lambda values: values.astype("<f8"),
    "F32": lambda values: values.astype("<f4"),
    "F16": lambda values: values.astype(np.float32).astype("<f2"),
    "BF16": _rounded,
}
FLOATS: Final = frozenset(_DECODE)  #: names of the types that can be converted


def decode(data: bytes, dtype: str) -> Floats:
    """Return the values of elements of a type in FLOATS."""
    return _DECODE[dtype](data)


def encode(values: Floats, dtype: str) -> bytes:
    """Return values as elements of a type in FLOATS, rounded as torch does it."""
    with np.errstate(all="ignore"):
        return _ENCODE[dtype](values).tobytes()
