"""The adapters that a model serves beside its own weights: several in one forward pass (arXiv 2311.03285).

Each adapted module has the matrices of all places in two tensors, allocated once. A forward pass multiplies every row
by all places that its rows use and, between the two products, sets to zero what is not of the row's own place. So any
mixture costs two products a module. Invariants: the matrices are finite, so a row depends on its own adapter alone; a
row without an adapter has the model's own output.

Legend: P places, R rank, B rows, T tokens of a row, C = R x places in use, I and O input and output features of a
module.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

import torch
from torch import Tensor
from transformers.pytorch_utils import Conv1D

from dora.adapted_modules import adapted_modules
from dora.adapter_files import WEIGHTS, AdapterConfig, adapter_folder, read_adapter, stored_name
from dora.embedded.scheduler import AdapterRoom
from dora.errors import ConfigError
from dora.foreign import ForeignFileError
from dora.weights.tensors import FLOATS, StoredTensor, decode, tensors_in

#: In errors: the key of a load that has the folder, and the option that has the targets.
FOLDER_KEY: Final = "lora_path"
TARGETS_OPTION: Final = "--lora-target-modules"
#: What a trial adapter adds to a weight, relative to a weight drawn from -1 / sqrt(I) to 1 / sqrt(I).
TRIAL: Final = 0.1

#: The matrices of one adapter, by module: [rank, I] and scale x [rank, O]. Modules that are not among its targets are
#: missing.
Matrices = dict[str, tuple[Tensor, Tensor]]


class AdapterStack:
    """Not thread-safe, except for `read`."""

    def __init__(self, model: Any, room: AdapterRoom) -> None:
        """ConfigError if a target cannot be adapted. From now on, `aim` decides what each forward pass adds."""
        self.room = room
        modules = adapted_modules(model, room.targets, field=TARGETS_OPTION)
        self._adapted = {name: _Adapted(module, room) for name, module in modules.items()}
        self._rows: list[int | None] = []  # places of the rows of the next forward pass; empty: call `aim` first

    def modules(self) -> dict[str, Any]:
        """Return the adapted modules, by name."""
        return {name: one.module for name, one in self._adapted.items()}

    def read(self, folder: Path) -> Matrices:
        """Read an adapter, which others may have made; ConfigError, in one line, if it cannot be served.

        As in SGLang, `use_rslora` is not read: the scale is lora_alpha / r.
        """
        try:
            found = read_adapter(adapter_folder(str(folder), field=FOLDER_KEY), field=FOLDER_KEY)
            modules = self._modules_of(found, folder)
            stored = tensors_in(folder / WEIGHTS)
            _require_names(stored, modules, folder=folder)
            return {name: _matrices(stored, name, one, found) for name, one in modules.items()}
        except (ForeignFileError, OSError) as err:
            raise ConfigError(f"{FOLDER_KEY}: {err}") from err

    def _modules_of(self, found: AdapterConfig, folder: Path) -> dict[str, _Adapted]:
        """Return the modules that an adapter changes; ConfigError if there is no room for it."""
        if found.r > self.room.rank:
            raise ConfigError(f"{FOLDER_KEY}: {folder} has rank {found.r}, above --max-lora-rank {self.room.rank}")
        targets = frozenset(found.target_modules)
        if other := sorted(targets - {*self.room.targets}):
            raise ConfigError(f"{FOLDER_KEY}: {folder} adapts {', '.join(other)[:200]}, not among {TARGETS_OPTION}")
        return {name: one for name, one in self._adapted.items() if _is_target(name, targets)}

    @torch.inference_mode()
    def put(self, place: int, matrices: Matrices) -> None:
        """Replace the adapter at `place`, which no live row has."""
        self._rows = []
        for name, one in self._adapted.items():
            one.put(place, matrices.get(name))

    def draw(self, place: int) -> None:
        """Put an adapter of random values with a small effect."""
        generator = torch.Generator().manual_seed(place)

        def drawn(features: int, bound: float) -> Tensor:
            return torch.empty(self.room.rank, features).uniform_(-bound, bound, generator=generator)

        self.put(
            place,
            {
                name: (drawn(one.inputs, one.inputs**-0.5), drawn(one.outputs, TRIAL * self.room.rank**-0.5))
                for name, one in self._adapted.items()
            },
        )

    @torch.inference_mode()
    def aim(self, rows: Sequence[int | None]) -> None:
        """Choose the places of the rows of the next forward pass; None: no adapter."""
        if self._rows == rows:
            return
        self._rows = list(rows)
        used = sorted({place for place in rows if place is not None})
        if not used:
            for one in self._adapted.values():
                one.others = None
            return
        device = next(iter(self._adapted.values())).down_PRI.device
        place_C = torch.tensor(used, device=device).repeat_interleave(self.room.rank)
        place_B = torch.tensor([-1 if place is None else place for place in rows], device=device)
        others_B1C = place_B[:, None, None] != place_C
        for one in self._adapted.values():
            one.use(used, others_B1C)


class _Adapted:
    """The matrices of a module and, as its hook, what they add to its output."""

    def __init__(self, module: Any, room: AdapterRoom) -> None:
        self.module = module
        is_transposed = isinstance(module, Conv1D)
        self.inputs, self.outputs = module.weight.shape if is_transposed else module.weight.shape[::-1]
        self.down_PRI = module.weight.new_zeros(room.count, room.rank, self.inputs)
        self.up_PRO = module.weight.new_zeros(room.count, room.rank, self.outputs)
        self._copied: list[int] = []  # the places of `_copies`
        self.others: Tensor | None = None  # [B, 1, C]: what is not of a row's own place; None: no row has an adapter
        module.register_forward_hook(self)

    def put(self, place: int, matrices: tuple[Tensor, Tensor] | None) -> None:
        self._copied = []
        for mine, new in zip((self.down_PRI[place], self.up_PRO[place]), matrices or (None, None), strict=True):
            mine.zero_()
            if new is not None:
                mine[: len(new)] = new

    def use(self, places: list[int], others_B1C: Tensor) -> None:
        self.others = others_B1C
        if places[-1] - places[0] < len(places):  # one beside the other
            between = slice(places[0], places[-1] + 1)
            self._down, self._up = self.down_PRI[between].flatten(0, 1), self.up_PRO[between].flatten(0, 1)
            return
        if places != self._copied:
            self._copied = places
            self._copies = self.down_PRI[places].flatten(0, 1), self.up_PRO[places].flatten(0, 1)
        self._down, self._up = self._copies

    def __call__(self, module: Any, args: tuple[Tensor, ...], output: Tensor) -> None:
        if self.others is None:
            return
        hidden = args[0].reshape(-1, self.inputs) @ self._down.T  # of all tokens, row by row
        hidden.view(len(self.others), -1, len(self._down)).masked_fill_(self.others, 0.0)
        output.view(-1, self.outputs).addmm_(hidden, self._up)


def _is_target(name: str, targets: frozenset[str]) -> bool:
    return any(name == target or name.endswith(f".{target}") for target in targets)


def _names(module: str) -> tuple[str, str]:
    return stored_name(module, "A"), stored_name(module, "B")


def _require_names(stored: dict[str, StoredTensor], modules: dict[str, _Adapted], *, folder: Path) -> None:
    """ConfigError unless the file has the matrices of these modules, and no others."""
    expected = {name for module in modules for name in _names(module)}
    if missing := sorted(expected - stored.keys()):
        raise ConfigError(f"{FOLDER_KEY}: {folder} lacks {len(missing)} tensors, first {missing[0]}")
    if extra := sorted(stored.keys() - expected):
        raise ConfigError(
            f"{FOLDER_KEY}: {folder} has {len(extra)} tensors that belong to none of its targets, first "
            f"{extra[0][:200]!r}"
        )


def _matrices(stored: dict[str, StoredTensor], name: str, one: _Adapted, found: AdapterConfig) -> tuple[Tensor, Tensor]:
    down, up = _names(name)
    matrix_RI = _matrix(stored[down], down, (found.r, one.inputs), scale=1.0, like=one.down_PRI)
    matrix_OR = _matrix(stored[up], up, (one.outputs, found.r), scale=found.lora_alpha / found.r, like=one.up_PRO)
    return matrix_RI, matrix_OR.T


def _matrix(stored: StoredTensor, name: str, shape: tuple[int, int], *, scale: float, like: Tensor) -> Tensor:
    """Return scale x a matrix in the type of the model; ConfigError if it has another shape, or is not finite."""
    if stored.shape != shape or stored.dtype not in FLOATS:
        raise ConfigError(
            f"{FOLDER_KEY}: {name} in {stored.path} has type {stored.dtype} and shape {[*stored.shape]}, expected "
            f"{' or '.join(sorted(FLOATS))} and {[*shape]}"
        )
    values = torch.from_numpy(decode(stored.read(), stored.dtype).astype("f8")).view(shape)
    matrix = (scale * values).to(like.dtype)
    if not matrix.isfinite().all():
        raise ConfigError(f"{FOLDER_KEY}: {name} in {stored.path} has values that are infinite or not numbers")
    return matrix
