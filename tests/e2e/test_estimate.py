"""The numbers of `dora check`: arithmetic compared with what torch really holds, and a bad split of the GPUs, which is
reported."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, DynamicCache

from dora.app.estimate import Shapes, kv_bytes_per_token, lines, step_time
from dora.config.load import load
from dora.config.schema import Config
from dora.seed.policy import path as seed_path
from dora.trainer.forecast import Outline
from tests.families import make_model

GPU_8 = Path(__file__).parents[2] / "launch" / "configs" / "gpu-8.toml"
#: Qwen2.5-1.5B.
ONE_AND_A_HALF_B = Shapes(parameters=1_543_714_304, experts=0, chosen=1.0, layers=28, kv_width=256, kv_heads=2)


def gpu_8(*changes: str) -> Config:
    return load(GPU_8, changes, environ={})


def test_parameters_and_kv_are_what_transformers_holds() -> None:
    shapes = Shapes.read(seed_path())
    model = AutoModelForCausalLM.from_pretrained(seed_path())
    assert shapes.parameters == sum(parameter.numel() for parameter in model.parameters())
    cache = DynamicCache()
    model(torch.zeros(1, 10, dtype=torch.int64), past_key_values=cache)
    held = sum(tensor.nbytes for layer in cache.layers for tensor in (layer.keys, layer.values))
    assert kv_bytes_per_token(shapes, dtype_bytes=4) * 10 == held


def test_the_limit_of_a_step_is_its_slowest_part() -> None:
    time = step_time(gpu_8(), ONE_AND_A_HALF_B, instances=4, ranks=4)
    assert time.limit_s == max(time.decode_s, time.train_s, time.longest_s)
    more_servers = step_time(gpu_8(), ONE_AND_A_HALF_B, instances=6, ranks=2)
    assert more_servers.decode_s < time.decode_s
    assert more_servers.train_s == pytest.approx(2 * time.train_s)
    staler = step_time(gpu_8("rollout.max_staleness=3"), ONE_AND_A_HALF_B, instances=4, ranks=4)
    assert staler.longest_s == pytest.approx(time.longest_s * 3 / 4)


def test_a_token_of_a_mixture_of_experts_uses_those_that_it_is_routed_to() -> None:
    """Three quarters of the parameters are experts, of which a token has two of sixteen."""
    mixture = replace(ONE_AND_A_HALF_B, experts=3 * ONE_AND_A_HALF_B.parameters // 4, chosen=1 / 8)
    dense, sparse = (step_time(gpu_8(), shapes, instances=4, ranks=4) for shapes in (ONE_AND_A_HALF_B, mixture))
    share = 1 / 4 + 3 / 4 / 8
    assert mixture.active == pytest.approx(share * mixture.parameters)
    assert sparse.train_s == pytest.approx(share * dense.train_s)
    assert sparse.longest_s < dense.longest_s
    assert sparse.decode_s == pytest.approx(dense.decode_s), "a batch of 128 uses all of them"


@pytest.mark.parametrize("family", ["qwen3_moe", "mixtral", "deepseek_v3", "gpt_oss", "olmoe", "minimax_m2", "qwen3"])
def test_experts_are_counted_from_files_and_from_the_configuration_alike(family: str, tmp_path: Path) -> None:
    model = make_model(family)
    model.save_pretrained(tmp_path)
    shapes = Shapes.read(tmp_path)
    assert shapes.of(Outline(tmp_path, dtype=torch.float32)).experts == shapes.experts
    assert bool(shapes.experts) is (family != "qwen3")
    assert shapes.chosen == (0.5 if shapes.experts else 1.0)
    assert shapes.active <= shapes.parameters


def test_the_copies_of_versions_are_told_with_their_size() -> None:
    told = dict(lines(gpu_8("weights.keep=0"), ONE_AND_A_HALF_B))
    assert told["disk"] == (
        "201 copies of versions in the run folder, 2.9 GB each, 578.0 GB in all: weights.keep = 0 keeps every version"
    )
    assert dict(lines(gpu_8(), ONE_AND_A_HALF_B))["disk"] == (
        "8 copies of versions in the run folder, 2.9 GB each, 23.0 GB in all"
    )


def test_what_limits_a_split_is_told() -> None:
    told = dict(lines(gpu_8("engine.instances=7", "trainer.ranks=1"), ONE_AND_A_HALF_B))
    assert "limited by training" in told["split"]


def test_gpus_share_the_kv_heads_but_divide_none() -> None:
    whole, halved, quartered = (
        kv_bytes_per_token(ONE_AND_A_HALF_B, dtype_bytes=2, tp=tensor_parallel) for tensor_parallel in (1, 2, 4)
    )
    assert whole == 2 * halved == 2 * quartered
