"""The real SGLang loads a published mixture of experts, whose tensors have other names in SGLang."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import aiohttp
import pytest
import torch.distributed as dist

from tests.embedded.conftest import Reference
from tests.families import make_model
from tests.sglang.conftest import PROMPT, Wire, serving
from tests.trainer.publishing import load_policy, published

pytestmark = [pytest.mark.sglang, pytest.mark.deep, pytest.mark.timeout(600)]

if os.environ.get("DORA_SGLANG") != "1":
    pytest.skip("asked for by DORA_SGLANG=1", allow_module_level=True)


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
            assert await _error(wire, Reference(tmp_path / "0")) < 1e-4
            assert await _error(wire, Reference(tmp_path / "1")) > 0.1
            status, answer = await wire.update(tmp_path / "1", "next")
            assert status == 200, answer
            assert (await wire.post("/flush_cache"))[0] == 200
            assert await _error(wire, Reference(tmp_path / "1")) < 1e-4


async def _error(wire: Wire, reference: Reference) -> float:
    """The largest difference between a log-prob of the server and the reference's."""
    answer = await wire.generate(sampling={"max_new_tokens": 40, "ignore_eos": True})
    given = [logprob for logprob, _, _ in answer["meta_info"]["output_token_logprobs"]]
    plain = reference.logprobs(PROMPT + answer["output_ids"])[len(PROMPT) - 1 :]
    return max(abs(one - other) for one, other in zip(given, plain, strict=True))
