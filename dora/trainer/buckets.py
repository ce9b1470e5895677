"""Tensors some rows at a time, as they are converted, copied, gathered and written, so that copies stay small."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, Final

import torch
from torch import Tensor

#: Most bytes of weights that are converted, copied or gathered at a time, unless one row or conversion is larger.
BUCKET_BYTES: Final = 64 * 2**20
#: The names of types in safetensors.
TYPES: Final[Mapping[torch.dtype, str]] = {
    torch.float64: "F64", torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16", torch.int64: "I64",
    torch.int32: "I32", torch.int16: "I16", torch.int8: "I8", torch.uint8: "U8", torch.bool: "BOOL",
}  # fmt: skip


def rows_in(num_bytes: int, tensor: Tensor) -> int:
    """Return how many rows of a tensor fit into a number of bytes; at least one."""
    return max(1, num_bytes // max(1, tensor.shape[1:].numel() * tensor.element_size()))


def buckets_of(tensor: Tensor) -> Iterator[Any]:
    """Yield the bytes of a tensor, a bucket of rows at a time; copied to the host from a GPU."""
    whole = tensor.detach() if tensor.dim() else tensor.detach()[None]
    for rows in whole.split(rows_in(BUCKET_BYTES, whole)):
        yield bytes_of(rows)


def bytes_of(tensor: Tensor) -> Any:
    """Return a buffer with the bytes of a tensor."""
    return tensor.cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data
