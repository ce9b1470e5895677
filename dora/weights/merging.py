"""Weights of a version that are made where they are needed: of the model, which every node has, and the adapter.

A recipe beside the adapter says what else a node must know: the tensors in the order in which their files are planned,
the type in which the ranks hold the model's, and the matrices that are added to each.

    element = held(model's) + scale B[row, 1] A[1, column] + scale B[row, 2] A[2, column] + ...

in float64, from left to right, each operation rounded by itself, and the sum rounded to the published type. This is
what `Factors.added_to` of dora/trainer/adapters.py computes. A product of matrices would add in an order of the
library's and the processor's own, so that float32 versions would differ between hosts in a few elements of a billion.

The manifest has the checksums of the weights. Of a version that is its adapter alone, the recipe has those of the
model's files. Invariant: a file that is left has its checksum, or is made of files that have theirs. Recipe and adapter
may come from another machine: what does not fit is refused before anything is written, and memory is bounded by the
matrices of one weight and some blocks.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from threading import Event
from typing import Final

import msgspec
import numpy as np
from numpy.typing import NDArray

from dora import foreign
from dora.adapter_files import WEIGHTS, stored_name
from dora.errors import ConfigError
from dora.weights.file_plan import ITEM_BYTES, PlannedFile, TensorSpec, plan_files
from dora.weights.store import ADAPTER, Manifest, StoreError, checksum_of, clear_errors
from dora.weights.tensors import FLOATS, Floats, Shape, StoredTensor, decode, encode, tensors_in, tensors_of

#: Name of the recipe in a version; `dora export --adapter` leaves it out.
RECIPE: Final = f"{ADAPTER}/recipe.json"
MATRICES: Final = f"{ADAPTER}/{WEIGHTS}"
_MAX_TOLD: Final = 500  # characters of an error, which may have a name of any length
_MAX_RECIPE_BYTES: Final = 32 << 20  # 94,000 experts stored one by one take 14 MB
#: Largest rank of an adapter with a recipe: with 128, eight cores make weights as fast as 1 Gbit/s would bring them.
MAX_RANK: Final = 128
#: Elements that are computed at a time: their sums in float64 fit into a core's cache.
_BLOCK: Final = 1 << 16
_MAX_THREADS: Final = 8  # servers need the other cores
#: What recipe, adapter or model raise if they do not fit.
_UNFIT: Final = (ValueError, msgspec.MsgspecError, RecursionError, OSError, ConfigError)


class Origin(msgspec.Struct, frozen=True):
    """A tensor of a version, and how it is made of the model's tensor of the same name and shape."""

    name: str
    dtype: str  # as safetensors calls it
    shape: Shape
    held: str  # type in which the ranks hold the model's
    module: str = ""  # whose matrices are added
    is_transposed: bool = False  # whether it is stored as [inputs, outputs]


class MergeRecipe(msgspec.Struct, frozen=True, omit_defaults=True):
    """How the weights of a version are made."""

    scale: float
    tensors: tuple[Origin, ...]  # of all files, in the order in which they are planned
    model: dict[str, str] = {}  # name and checksum of the model's files, if the version is its adapter alone

    def encode(self) -> bytes:
        """Return the contents of its file."""
        return msgspec.json.encode(self)


def has_recipe(manifest: Manifest) -> bool:
    """Return whether the weights of a version can be made of the model."""
    return RECIPE in manifest.files


def is_weights(name: str) -> bool:
    """Return whether a file of a version is made, if there is a recipe; the others are small."""
    return name.endswith(".safetensors") and "/" not in name


def has_weights(manifest: Manifest) -> bool:
    """Return whether a version is more than an adapter."""
    return any(map(is_weights, manifest.files))


def checksums_of_model(model: Path) -> dict[str, str]:
    """Return the checksum of each file that has tensors of a model, by its name; ConfigError if one is damaged."""
    paths = {tensor.path for tensor in tensors_of(model).values()}
    return {path.name: checksum_of(path, follow_links=True) for path in sorted(paths)}


def made_of(model: Path, folder: Path) -> None:
    """Raise StoreError unless the version in `folder`, an adapter alone, was trained from this model."""
    try:
        _require_model(model, _read_recipe(folder))
    except _UNFIT as err:
        raise StoreError(f"{folder}: is not of {model}: {str(err)[:_MAX_TOLD]}") from err


class Merge:
    """The weights of a version, to be written beside all its other files, or into another folder."""

    def __init__(self, model: Path, folder: Path, manifest: Manifest, *, into: Path | None = None) -> None:
        """Read and check the recipe; StoreError if it does not fit the model, the adapter or the manifest."""
        self._model = model
        self._folder = into or folder
        self._checksums = {name: checksum for name, checksum in manifest.files.items() if is_weights(name)}
        self._what = f"cannot make version {manifest.version} of {model}"
        try:
            recipe = _read_recipe(folder)
            self._scale = recipe.scale
            self._sources = tensors_of(model)
            self._matrices = tensors_in(folder / MATRICES)
            self._origins = {origin.name: origin for origin in recipe.tensors}
            if len(self._origins) < len(recipe.tensors) or not math.isfinite(recipe.scale):
                raise ValueError("a tensor is named twice, or the scale is not a number")
            for origin in recipe.tensors:
                self._check(origin)
            self._plan = plan_files([TensorSpec(one.name, one.dtype, one.shape) for one in recipe.tensors])
            num_bytes = sum(file.num_bytes for file in self._plan.files)
            if not self._checksums:
                _require_model(model, recipe)
            elif {*self.names} != self._checksums.keys() or num_bytes > manifest.num_bytes:
                raise ValueError("its files would be others")
        except _UNFIT as err:
            raise StoreError(f"{self._what}: {str(err)[:_MAX_TOLD]}") from err

    @property
    def names(self) -> list[str]:
        """The files to write."""
        return [file.name for file in self._plan.files]

    @property
    def index(self) -> bytes | None:
        """The contents of their index, which several files have."""
        return self._plan.index() if len(self.names) > 1 else None

    def _check(self, origin: Origin) -> None:
        source = self._sources.get(origin.name)
        if source is None or source.shape != origin.shape:
            raise ValueError(f"the model has no tensor {origin.name!r} of shape {[*origin.shape]}")
        types = {source.dtype, origin.held, origin.dtype}
        if not (types <= FLOATS or (len(types) == 1 and not origin.module)):
            raise ValueError(f"{origin.name!r} cannot be converted from {source.dtype}")
        if origin.module:
            matrix_RI, matrix_OR = self._matrices_of(origin)
            expected = (*matrix_OR.shape[:1], *matrix_RI.shape[1:])
            if (
                not len(matrix_RI.shape) == len(matrix_OR.shape) == len(origin.shape) == 2
                or not {matrix_RI.dtype, matrix_OR.dtype} <= FLOATS
                or not 0 < matrix_RI.shape[0] == matrix_OR.shape[1] <= MAX_RANK
                or (expected[::-1] if origin.is_transposed else expected) != origin.shape
            ):
                raise ValueError(f"the matrices of {origin.module!r} do not fit {origin.name!r}")

    def _matrices_of(self, origin: Origin) -> tuple[StoredTensor, StoredTensor]:
        name_RI, name_OR = stored_name(origin.module, "A"), stored_name(origin.module, "B")
        if name_RI not in self._matrices or name_OR not in self._matrices:
            raise ValueError(f"the adapter has no matrices of {origin.module!r}")
        return self._matrices[name_RI], self._matrices[name_OR]

    def write(self, name: str, *, stop: Event) -> None:
        """Write a file; StoreError, and it is not left, if it would not have its checksum, or if `stop` is set."""
        [file] = [file for file in self._plan.files if file.name == name]
        path = self._folder / name
        try:
            with clear_errors(self._what):
                self._write(file, path, stop=stop)
                if self._checksums and checksum_of(path) != self._checksums[name]:
                    raise StoreError(f"{self._what}: {name} would have another checksum; is the model another one?")
        except BaseException as err:
            path.unlink(missing_ok=True)
            if isinstance(err, ConfigError):  # the model's file is no longer what it was
                raise StoreError(f"{self._what}: {err}") from err
            raise

    def _write(self, file: PlannedFile, path: Path, *, stop: Event) -> None:
        with path.open("xb") as out, ThreadPoolExecutor(_num_threads()) as threads:
            out.write(file.header)
            out.flush()
            os.posix_fallocate(out.fileno(), 0, file.num_bytes)
            for origin in self._origins.values():
                if self._plan.places[origin.name].file == file.name:
                    if stop.is_set():
                        raise StoreError(f"{self._what}: it is not wanted any more")
                    self._write_tensor(origin, out.fileno(), threads, stop=stop)

    def _write_tensor(self, origin: Origin, out: int, threads: ThreadPoolExecutor, *, stop: Event) -> None:
        """Write a tensor to its place, in blocks of some rows; without matrices, elements are rows."""
        columns = origin.shape[1] if origin.module else 1
        rows, step = math.prod(origin.shape) // max(1, columns), max(1, _BLOCK // max(1, columns))
        source, offset = self._sources[origin.name], self._plan.places[origin.name].offset
        left, right = self._factors(origin) if origin.module else (None, None)

        def write(start: int) -> None:
            if not stop.is_set():
                stop_row = min(start + step, rows)
                data = source.read(start * columns, stop_row * columns)
                added = None if left is None or right is None else partial(_add, left[start:stop_row], right)
                at = offset + start * columns * ITEM_BYTES[origin.dtype]
                _write_all(out, _converted(data, source.dtype, origin, added), at)

        for _ in threads.map(write, range(0, rows, step)):
            pass

    def _factors(self, origin: Origin) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
        """Return two matrices whose product is what is added, [rows, R] and [R, columns]."""
        matrix_RI, matrix_OR = (
            decode(one.read(), one.dtype).reshape(one.shape).astype(np.float64) for one in self._matrices_of(origin)
        )
        left, right = (matrix_RI.T, matrix_OR.T) if origin.is_transposed else (matrix_OR, matrix_RI)
        return self._scale * left, np.ascontiguousarray(right)


def _read_recipe(folder: Path) -> MergeRecipe:
    return msgspec.json.decode(foreign.read(folder / RECIPE, max_bytes=_MAX_RECIPE_BYTES), type=MergeRecipe)


def _require_model(model: Path, recipe: MergeRecipe) -> None:
    if checksums_of_model(model) != recipe.model:
        raise ValueError("it is not the model that was trained")


def _converted(data: bytes, dtype: str, origin: Origin, add: Callable[[Floats], Floats] | None) -> bytes:
    if add is None and dtype == origin.held == origin.dtype:
        return data
    values = decode(data, dtype)
    if dtype != origin.held:
        values = decode(encode(values, origin.held), origin.held)
    return encode(values if add is None else add(values), origin.dtype)


def _add(left: NDArray[np.float64], right: NDArray[np.float64], values: Floats) -> Floats:
    """Return values of rows with what is added: one product after the other."""
    total = values.reshape(len(left), -1).astype(np.float64)
    product = np.empty_like(total)
    with np.errstate(all="ignore"):
        for column, row in zip(left.T, right, strict=True):
            np.multiply(column[:, None], row, out=product)
            total += product
    return total


def _write_all(out: int, data: bytes, at: int) -> None:
    rest = memoryview(data)
    while rest:
        written = os.pwrite(out, rest, at)
        rest, at = rest[written:], at + written


def _num_threads() -> int:
    return min(_MAX_THREADS, len(os.sched_getaffinity(0)))
