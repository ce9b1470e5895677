"""The number of CUDA devices that a run needs, and the processes that are not checked."""

from __future__ import annotations

import os

import pytest

from dora.config.load import load
from dora.errors import ConfigError
from dora.node.cuda import require_cuda

HIDDEN = {**os.environ, "CUDA_VISIBLE_DEVICES": ""}  # whatever this machine has


def require(*overrides: str) -> None:
    require_cuda(load(None, overrides, environ={}), environ=HIDDEN)


@pytest.mark.parametrize(
    "overrides",
    [
        (),
        ("trainer.device=cuda", "engine.device=cuda", "nodes.expected=3"),
        ("trainer.device=cuda", 'trainer.command=["train-elsewhere"]'),
        ("engine.device=cuda", 'engine.command=["serve-elsewhere", "{port}"]'),
        ("engine.device=cuda", 'engine.urls=["http://a", "http://b", "http://c"]'),
    ],
)
def test_custom_commands_and_nodes_are_not_checked_for_devices(overrides: tuple[str, ...]):
    require(*overrides)


@pytest.mark.parametrize(
    ("overrides", "says"),
    [
        (("trainer.device=cuda", "trainer.ranks=3"), "trainer.device: 3 ranks need"),
        (("engine.device=cuda",), "engine.device: the instances need 1 CUDA"),
        (("engine.device=cuda", "engine.gpus=[0, 5, 0, 1]"), "engine.device: the instances need 6 CUDA"),
        (("engine.device=cuda", "engine.kind=sglang", "engine.tensor_parallel=2"), "the instances need 8 CUDA"),
    ],
)
def test_a_device_that_torch_cannot_use_is_named_by_its_setting(overrides: tuple[str, ...], says: str):
    with pytest.raises(ConfigError, match=f"{says}.* set it to cpu"):
        require(*overrides)
