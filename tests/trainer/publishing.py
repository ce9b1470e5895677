"""A folder loaded into a policy, and a version written as the trainer publishes it."""

from __future__ import annotations

from pathlib import Path

import torch
import torch.distributed as dist
from safetensors.torch import save_file
from torch import Tensor

from dora.trainer.model import Policy, make_mesh
from dora.trainer.publish import copy_model_files, gather


def write(folder: Path, tensors: dict[str, Tensor]) -> None:
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


def load_policy(folder: Path) -> Policy:
    return Policy(folder, mesh=make_mesh("cpu"), dtype=torch.float32)


def publish(policy: Policy, source: Path, target: Path, *, dtype: str) -> dict[str, Tensor]:
    """Write what the trainer would publish, on rank 0."""
    tensors = gather(policy, dtype=dtype, keep=dist.get_rank() == 0)
    if dist.get_rank() == 0:
        target.mkdir()
        write(target, tensors)
        copy_model_files(source, target, dtype=dtype)
    return tensors
