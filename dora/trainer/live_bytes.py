"""Memory counted by storage: what a forward pass keeps for the backward pass, and the peak of any computation.

The storages that tensor operations of this thread make are counted, from the operation that makes them until they are
freed. Parameters and inputs exist before, so they are not counted. Hooks on saved tensors would miss the outputs that
selective checkpointing holds outside the graph. The scratch memory of kernels is not counted; a GPU's allocator counts
it.
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
    """While active, counts the bytes that operations make: `now` are the bytes still alive, `peak` is their maximum."""

    def __init__(self) -> None:
        super().__init__()
        self.now = 0
        self._made: dict[int, tuple[int, weakref.ref[Any]]] = {}  # live storages: key -> (number, reference)
        self._changes: list[tuple[int, int]] = []  # number of a storage, and the bytes made (positive) or freed

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


def activation_bytes(forward: Callable[[], object]) -> int:
    """Return the bytes that `forward` makes and that are alive at its end: its result, and what the graph keeps."""
    with LiveBytes() as live:
        result = forward()
        kept = live.now
    del result
    return kept


def _storage(tensor: Tensor) -> torch.UntypedStorage:
    local = getattr(tensor, "_local_tensor", tensor)  # of a DTensor
    return local.untyped_storage()
