"""The trainer on a GPU: NCCL, and bfloat16 as compute type over float32 weights."""

from __future__ import annotations

import math

import pytest
import torch
from conftest import PlainTrainer, assert_equal_weights, make_groups, start_job
from safetensors.torch import load_file

from dora.transport.messages import RankReady

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.deep,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device here"),
]


async def run(folder, model_path, **changes):
    """Two steps on one rank; returns the metrics of both and the weights of version 2."""
    metrics = []
    async with start_job(folder, model_path, world_size=1, device="cuda", **changes) as job:
        await job.until(RankReady)
        for step in range(2):
            answers = make_groups(6, version=step, seed=step)
            metrics.append((await job.step(step, [[answers[:9]], [answers[9:]], [[]]])).metrics)
        assert await job.stop() == 0
    return metrics, load_file(folder / "memory" / "v000002" / "model.safetensors")


async def test_float32_on_a_gpu_equals_the_plain_trainer(tmp_path, model_path):
    _, weights = await run(tmp_path, model_path)
    plain = PlainTrainer(model_path)
    for step in range(2):
        plain.step(make_groups(6, version=step, seed=step), step=step)
    assert_equal_weights(weights, plain.parameters, atol=1e-4)


async def test_bfloat16_computes_close_to_float32_and_keeps_float32_weights(tmp_path, model_path):
    exact, _ = await run(tmp_path / "float32", model_path)
    rough, weights = await run(tmp_path / "bfloat16", model_path, dtype="bfloat16")
    assert {tensor.dtype for tensor in weights.values()} == {torch.float32}
    for left, right in zip(exact, rough, strict=True):
        assert right["grad_norm"] == pytest.approx(left["grad_norm"], rel=0.1)
        assert right["all/entropy"] == pytest.approx(left["all/entropy"], rel=0.01)
        assert math.isfinite(right["loss"])
