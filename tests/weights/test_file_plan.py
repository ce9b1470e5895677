"""Files of a version: what the safetensors library reads of them, and how it would have written them."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor

from dora.weights.file_plan import FilePlan, TensorSpec, plan_files

TYPES = {torch.float32: "F32", torch.bfloat16: "BF16", torch.int64: "I64", torch.bool: "BOOL"}
TENSORS = {
    "b.weight": torch.randn(3, 5),
    "a.bias": torch.randn(7).to(torch.bfloat16),
    "count": torch.tensor(5),
    "é\"mask": torch.tensor([True, False, True]),
    "empty": torch.zeros(0, 4),
    "a.weight": torch.randn(2, 3, 4),
}  # fmt: skip


def specs_of(tensors: dict[str, Tensor]) -> list[TensorSpec]:
    return [TensorSpec(name, TYPES[tensor.dtype], tuple(tensor.shape)) for name, tensor in tensors.items()]


def write(plan: FilePlan, tensors: dict[str, Tensor], folder: Path) -> None:
    """Write row by row, the last row first."""
    for file in plan.files:
        with (folder / file.name).open("wb") as opened:
            opened.write(file.header)
            os.posix_fallocate(opened.fileno(), 0, file.num_bytes)
    for name, tensor in tensors.items():
        place = plan.places[name]
        with (folder / place.file).open("r+b") as opened:
            rows = tensor if tensor.dim() else tensor[None]
            for number in reversed(range(len(rows))):
                data = rows[number].contiguous().reshape(-1).view(torch.uint8).numpy().data
                os.pwrite(opened.fileno(), data, place.offset + number * place.row_bytes)


def test_one_file_is_the_one_that_the_library_writes(tmp_path: Path) -> None:
    plan = plan_files(specs_of(TENSORS))
    write(plan, TENSORS, tmp_path)
    save_file(TENSORS, tmp_path / "expected", metadata={"format": "pt"})
    assert [file.name for file in plan.files] == ["model.safetensors"]
    assert (tmp_path / "model.safetensors").read_bytes() == (tmp_path / "expected").read_bytes()


@pytest.mark.parametrize("max_bytes", [1, 100, 130])
def test_several_files_are_read_by_the_library(tmp_path: Path, max_bytes: int) -> None:
    plan = plan_files(specs_of(TENSORS), max_bytes=max_bytes)
    write(plan, TENSORS, tmp_path)
    found = {name: tensor for file in plan.files for name, tensor in load_file(tmp_path / file.name).items()}
    assert found.keys() == TENSORS.keys()
    for name, tensor in TENSORS.items():
        assert torch.equal(found[name], tensor)
        with safe_open(tmp_path / plan.places[name].file, framework="pt") as opened:
            assert name in opened.keys()  # noqa: SIM118
    for file in plan.files:
        assert (tmp_path / file.name).stat().st_size == file.num_bytes


def test_files_are_filled_in_order_and_a_larger_tensor_has_one_of_its_own() -> None:
    specs = [TensorSpec(name, "F32", (size,)) for name, size in {"a": 10, "b": 15, "c": 100, "d": 5, "e": 20}.items()]
    plan = plan_files(specs, max_bytes=100)
    together: dict[str, list[str]] = {}
    for name, place in plan.places.items():
        together.setdefault(place.file, []).append(name)
    assert together == {
        "model-00001-of-00003.safetensors": ["a", "b"],
        "model-00002-of-00003.safetensors": ["c"],
        "model-00003-of-00003.safetensors": ["d", "e"],
    }
