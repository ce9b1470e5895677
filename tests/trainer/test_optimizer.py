"""The optimizer's moments on the host: the update is the same, and resumes exactly."""

from __future__ import annotations

import msgspec
import pytest
import torch
from conftest import SETTINGS
from torch import Tensor

from dora.trainer.optimizer import ShardOptimizer


def make_shards() -> dict[str, Tensor]:
    """Rows of a matrix and of a norm, and none."""
    generator = torch.Generator().manual_seed(0)
    return {name: torch.randn(shape, generator=generator) for name, shape in SHAPES.items()}


SHAPES = {"layer": (64, 256), "norm": (7,), "nothing": (0, 5)}


def make(shards: dict[str, Tensor], state: str) -> ShardOptimizer:
    return ShardOptimizer(shards, msgspec.structs.replace(SETTINGS, optimizer_state=state))


def update(optimizer: ShardOptimizer, step: int) -> None:
    generator = torch.Generator().manual_seed(step)
    gradients = {name: torch.randn(shape, generator=generator) for name, shape in SHAPES.items()}
    optimizer.update(gradients, learning_rate=1e-2 / (step + 1))


def trained(state: str, steps: int = 4) -> tuple[dict[str, Tensor], ShardOptimizer]:
    shards = make_shards()
    optimizer = make(shards, state)
    for step in range(steps):
        update(optimizer, step)
    return shards, optimizer


def test_updates_on_the_host_equal_those_on_the_device() -> None:
    torch.testing.assert_close(trained("host")[0], trained("device")[0], rtol=0, atol=0)


@pytest.mark.parametrize("state", ["device", "host"])
def test_training_goes_on_exactly_from_a_checkpoint(state: str) -> None:
    shards, optimizer = trained(state, steps=3)
    saved = {name: tensor.clone() for name, tensor in (shards | optimizer.state()).items()}
    update(optimizer, 3)
    again = make_shards()
    restored = make(again, state)
    for name, tensor in (again | restored.state()).items():
        tensor.copy_(saved[name])
    update(restored, 3)
    torch.testing.assert_close(again, shards, rtol=0, atol=0)
    torch.testing.assert_close(restored.state(), optimizer.state(), rtol=0, atol=0)
