"""The real SGLang loads published experts, whose tensors have other names in SGLang, and weights with an adapter."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import aiohttp
import pytest
import torch
import torch.distributed as dist

from dora.core.ids import VersionId
from dora.trainer.forward_check import check_training
from dora.trainer.meshes import make_mesh
from dora.trainer.model import Policy
from dora.trainer.score import score_with
from dora.transport.messages import LoraSettings
from dora.weights.store import ADAPTER, VersionStore
from tests.embedded.conftest import Reference
from tests.families import make_model
from tests.sglang.conftest import PROMPT, Wire, serving
from tests.trainer.publishing import load_policy, make_publisher, published

pytestmark = [pytest.mark.sglang, pytest.mark.deep, pytest.mark.timeout(600)]

if os.environ.get("DORA_SGLANG") != "1":
    pytest.skip("asked for by DORA_SGLANG=1", allow_module_level=True)

#: Largest difference of log-probs under the same weights.
LIMIT = 1e-4


@pytest.fixture
def alone() -> Iterator[None]:
    """A process group of one rank."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.mark.usefixtures("alone")
async def test_published_experts_have_the_logprobs_of_transformers(tmp_path: Path) -> None:
    """One version at the start, another by an update."""
    for seed in (0, 1):
        source = tmp_path / f"source{seed}"
        make_model("qwen3_moe", seed=seed).save_pretrained(source)
        published(load_policy(source), source, tmp_path / str(seed), dtype="float32")
    with serving("sglang", tmp_path / "0", tmp_path / "logs") as server:
        async with aiohttp.ClientSession(server.url) as http:
            wire = Wire(server, http)
            assert await _error(wire, Reference(tmp_path / "0").logprobs) < LIMIT
            assert await _error(wire, Reference(tmp_path / "1").logprobs) > 0.1
            status, answer = await wire.update(tmp_path / "1", "next")
            assert status == 200, answer
            assert (await wire.post("/flush_cache"))[0] == 200
            assert await _error(wire, Reference(tmp_path / "1").logprobs) < LIMIT


@pytest.mark.usefixtures("alone")
async def test_a_version_of_an_adapter_has_the_logprobs_of_the_trainer(model_a: Path, tmp_path: Path) -> None:
    """SGLang starts with the model, and loads the sum; the trainer computes with the adapter beside the weights."""
    targets = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
    settings = LoraSettings(rank=4, alpha=8.0, rslora=True, targets=targets, seed=0)
    policy = Policy(model_a, mesh=make_mesh("cpu"), dtype=torch.float32, lora=settings)
    assert policy.adapters is not None
    layout = check_training(policy, dtype="float32").layout
    for name, shard in policy.trained().items():
        if ".lora_B." in name:
            shard.normal_(std=0.2, generator=torch.Generator().manual_seed(0))
    store = VersionStore(memory_root=tmp_path / "versions", durable_root=tmp_path / "versions")
    publisher = make_publisher(policy, model_a, store)
    publisher.publish(VersionId(1), chain="")
    publisher.close()
    folder = store.folder(VersionId(1))
    assert (folder / ADAPTER).is_dir()

    def trainer(tokens: Sequence[int]) -> list[float]:
        found = score_with(
            policy.model, layout, [tokens], prompt_lengths=[1], temperature=1.0, device=torch.device("cpu")
        )
        return [*map(float, found[0])]

    with serving("sglang", model_a, tmp_path / "logs") as server:
        async with aiohttp.ClientSession(server.url) as http:
            wire = Wire(server, http)
            assert await _error(wire, trainer) > 0.1
            assert await _error(wire, Reference(model_a).logprobs) < LIMIT
            status, answer = await wire.update(folder, "1")
            assert status == 200, answer
            assert (await wire.post("/flush_cache"))[0] == 200
            assert await _error(wire, trainer) < LIMIT


async def _error(wire: Wire, logprobs: Callable[[list[int]], list[float]]) -> float:
    """The largest difference between a log-prob of the server and the one expected for the same tokens."""
    answer = await wire.generate(sampling={"max_new_tokens": 40, "ignore_eos": True})
    given = [logprob for logprob, _, _ in answer["meta_info"]["output_token_logprobs"]]
    expected = logprobs(PROMPT + answer["output_ids"])[len(PROMPT) - 1 :]
    return max(abs(one - other) for one, other in zip(given, expected, strict=True))
