"""Where the optimizer's moments are: on the host the update is the same, in 8 bits nearly, and both resume exactly."""

from __future__ import annotations

from importlib.util import find_spec

import msgspec
import pytest
import torch
from conftest import SETTINGS
from torch import Tensor

from dora.errors import ConfigError
from dora.trainer.optimizer import MOMENT_BYTES, ShardOptimizer

#: torchao is not installed with the tests, because transformers loads it in every process if it is there.
needs_torchao = pytest.mark.skipif(find_spec("torchao") is None, reason="asked for by pip install torchao")
STATES = ("device", "host", pytest.param("8bit", marks=needs_torchao))


def make_shards() -> dict[str, Tensor]:
    """One that divides into blocks of 8-bit numbers, one that does not, and one without rows."""
    generator = torch.Generator().manual_seed(0)
    return {name: torch.randn(shape, generator=generator) for name, shape in SHAPES.items()}


SHAPES = {"layer": (64, 256), "norm": (7,), "nothing": (0, 5)}


def make(shards: dict[str, Tensor], state: str) -> ShardOptimizer:
    return ShardOptimizer(shards, msgspec.structs.replace(SETTINGS, optimizer_state=state))


def update(optimizer: ShardOptimizer, step: int) -> None:
    generator = torch.Generator().manual_seed(step)
    gradients = {name: torch.randn(shape, generator=generator) for name, shape in SHAPES.items()}
    with torch.compiler.set_stance("force_eager"):  # torchao compiles its update, which takes 15 s
        optimizer.update(gradients, learning_rate=1e-2 / (step + 1))


def trained(state: str, steps: int = 4) -> tuple[dict[str, Tensor], ShardOptimizer]:
    shards = make_shards()
    optimizer = make(shards, state)
    for step in range(steps):
        update(optimizer, step)
    return shards, optimizer


def test_updates_on_the_host_equal_those_on_the_device() -> None:
    torch.testing.assert_close(trained("host")[0], trained("device")[0], rtol=0, atol=0)


@needs_torchao
def test_moments_in_8_bits_take_a_quarter_and_lead_nearly_to_the_same_weights() -> None:
    shards, optimizer = trained("8bit")
    expected, _ = trained("device")
    torch.testing.assert_close(shards["norm"], expected["norm"], rtol=1e-5, atol=1e-6)  # too small for blocks
    moved = expected["layer"] - make_shards()["layer"]
    error = (shards["layer"] - expected["layer"]).norm() / moved.norm()
    assert 0 < error < 0.05
    of_layer = [t for name, t in optimizer.state().items() if name.endswith("/layer") and not name.startswith("step")]
    assert sum(t.nbytes for t in of_layer) == MOMENT_BYTES["8bit"] * shards["layer"].numel()


@pytest.mark.parametrize("state", STATES)
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


@pytest.mark.skipif(find_spec("torchao") is not None, reason="torchao is installed")
def test_a_missing_package_is_named() -> None:
    with pytest.raises(ConfigError, match=r"^trainer\.optimizer_state: 8bit needs torchao; pip install"):
        make(make_shards(), "8bit")
