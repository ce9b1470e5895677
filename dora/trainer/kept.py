"""Memory counted by storage: what a forward pass keeps for the backward pass, and the peak of any computation.

Counted are the storages that tensor operations of this thread made, from the operation that made them until they are
freed; parameters and inputs existed before and are not among them. Hooks on saved tensors would miss the outputs that
selective checkpointing holds beside the graph. The scratch memory of a kernel is not seen. A GPU's allocator says more.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter


class LiveBytes(TorchDispatchMode):
    """While active: the bytes alive `now` that operations made since the start; at any time, their `peak`."""

    def __init__(self) -> None:
        super().__init__()
        self.now = 0
        self._made: dict[int, tuple[int, weakref.ref[Any]]] = {}  # alive: number of the storage in order of making
        self._changes: list[tuple[int, int]] = []  # this number, and the bytes that were made or (negative) freed

    def peak(self, *, without: Iterable[Tensor] = ()) -> int:
        """Return the largest number of bytes alive so far, not counting the storages of some tensors (gradients)."""
        left_out = {self._made[key][0] for tensor in without if (key := _storage(tensor)._cdata) in self._made}
        now = peak = 0
        for number, change in self._changes:
            now += change if number not in left_out else 0
            peak = max(peak, now)
        return peak

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = {_storage(x)._cdata for x in tree_iter((args, kwargs)) if isinstance(x, Tensor)}
        out = func(*args, **(kwargs or {}))
        for tensor in tree_iter(out):
            if isinstance(tensor, Tensor) and (storage := _storage(tensor))._cdata not in given:
                self._add(storage)
        return out

    def _add(self, storage: torch.UntypedStorage) -> None:
        key, size = storage._cdata, storage.nbytes()
        if key in self._made:
            return

        number = len(self._changes)

        def change(by: int) -> None:
            self.now += by
            self._changes.append((number, by))

        def freed(_: object) -> None:
            del self._made[key]
            change(-size)

        self._made[key] = number, weakref.ref(storage, freed)
        change(size)


def kept_bytes(forward: Callable[[], object]) -> int:
    """Return the bytes that the graph of `forward` keeps, its result included: all it made that is alive at its end."""
    with LiveBytes() as live:
        result = forward()
        kept = live.now
    del result
    return kept


def _storage(tensor: Tensor) -> torch.UntypedStorage:
    local = getattr(tensor, "_local_tensor", tensor)  # of a DTensor
    return local.untyped_storage()
