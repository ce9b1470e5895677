"""Leaks from one sequence into the next are found in any type, before training and on trained weights."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

import numpy as np
import pytest
import torch
import torch.distributed as dist
from conftest import GROUP_SIZE, in_history, make_batch, make_groups, start_job
from transformers import AutoModelForCausalLM

from dora.errors import ConfigError, RunFailed
from dora.trainer import attention
from dora.trainer.forward_check import check_again, check_forward, check_training
from dora.trainer.layouts import layout_of
from dora.trainer.logprobs import logprobs
from dora.trainer.meshes import make_mesh
from dora.trainer.model import Policy
from dora.trainer.packing import make_row
from dora.transport.messages import CheckpointWritten, RankReady, TrainerFailed, VersionWritten
from dora.weights.store import VersionStore
from tests.families import make_config
from tests.leaks import leaking

CPU: Final = torch.device("cpu")
LEAKING_RANK: Final = str(Path(__file__).parent / "leaking_rank.py")
LENGTH, UPDATES = 24, 12


def model_of(family: str, *, updates: int = 0) -> Any:
    """A model with the weights that transformers draws, which learns a few sequences by heart."""
    torch.manual_seed(0)
    model: Any = AutoModelForCausalLM.from_config(make_config(family)).eval()
    model.set_attn_implementation(attention.NAME)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    tokens = np.random.default_rng(0).integers(0, 97, 4 * LENGTH)
    trained = np.flatnonzero(np.arange(len(tokens)) % LENGTH)
    row = make_row(tokens, lengths=[LENGTH] * 4, trained=trained, layout=layout_of(model), device=CPU)
    for _ in range(updates):
        (-logprobs(model, row, temperature=1.0)[0].mean()).backward()
        optimizer.step()
        optimizer.zero_grad()
    return model


@pytest.mark.parametrize("updates", [0, UPDATES])
@pytest.mark.parametrize("family", ["llama", "qwen3_moe", "lfm2", "recurrent_gemma", "qwen3_next"])
def test_a_leak_of_a_hundredth_is_found_in_bfloat16_and_nothing_without_it(family: str, updates: int) -> None:
    model = model_of(family, updates=updates).bfloat16()
    check_forward(model, device=CPU, dtype="bfloat16", shared_prompts="off")
    with (
        leaking(model, share=0.01),
        pytest.raises(ConfigError, match=r"sequences change by \S+ if those before them have other tokens$"),
    ):
        check_forward(model, device=CPU, dtype="bfloat16", shared_prompts="off")


def test_a_leak_where_prompts_are_shared_is_no_reason_to_refuse() -> None:
    model = model_of("llama").bfloat16()

    def leak(_: Any, __: Any, given: dict[str, Any], out: torch.Tensor) -> torch.Tensor:
        return out + 0.01 * out.roll(1, dims=1) * (given["position_ids"] == 11)[..., None]  # first after a prompt

    model.model.layers[1].register_forward_hook(leak, with_kwargs=True)
    found = check_forward(model, device=CPU, dtype="bfloat16", shared_prompts="auto")
    assert found.layout == layout_of(model)
    assert "computes each prompt once per answer: with shared prompts, log-probs of packed sequences" in found.note


@pytest.fixture
def alone() -> Iterator[None]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_trained_weights_are_checked_again_without_a_change_and_a_leak_ends_the_run(
    dtype: str, alone: None, model_path: Path
) -> None:
    policy = Policy(model_path, mesh=make_mesh("cpu"), dtype=getattr(torch, dtype))
    layout = check_training(policy, dtype=dtype, shared_prompts="auto").layout
    random = torch.Generator().manual_seed(0)
    for shard in policy.shards().values():
        shard.add_(0.01 * torch.randn(shard.shape, generator=random))
    before = {name: shard.clone() for name, shard in policy.shards().items()}

    def check() -> None:
        check_again(policy, layout, dtype=dtype, longest=64, weights="the weights after step 49")

    check()
    assert policy.gradients() == {}
    assert all(torch.equal(shard, before[name]) for name, shard in policy.shards().items())
    with leaking(policy.model, share=0.01), pytest.raises(RunFailed) as failed:
        check()
    problem, _, advice = str(failed.value).rpartition("; ")
    assert problem.startswith(
        "under the weights after step 49, Qwen3ForCausalLM can no longer be trained: log-probs of"
    )
    assert advice == ("report it" if dtype == "float32" else 'resume with trainer.dtype = "float32", and report it')


@pytest.mark.deep
async def test_ranks_end_the_run_at_a_leak_and_neither_publish_nor_save_nor_resume_such_weights(
    tmp_path: Path, model_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parents[2]))
    monkeypatch.setenv("LEAKS_FROM", "1")  # the second check: that of step 1
    async with start_job(tmp_path, model_path, entry=LEAKING_RANK, dtype="bfloat16", checkpoint_every=1) as job:
        seen: set[type] = set()
        while seen != {RankReady, VersionWritten}:
            seen.add(type(await job.until(RankReady | VersionWritten)))
        answers = make_groups(2, version=0, seed=1)
        await job.step(0, [[answers[:GROUP_SIZE], answers[GROUP_SIZE:]]])
        while not (kept := [report for report in job.reports if isinstance(report, CheckpointWritten)]):
            await job.until(CheckpointWritten)
        for rank in range(job.world_size):
            batch = make_batch(make_groups(1, version=1, seed=2 + rank), step=1, index=0, last=True)
            await job.end.send(rank, in_history(batch))
        failed = await job.until(TrainerFailed)
        assert await job.exit_code() == 1
    assert failed.reason.startswith("under the weights after step 2, which are neither published nor saved, Qwen3For")
    assert failed.reason.endswith('resume with trainer.dtype = "float32", and report it')
    assert VersionStore(memory_root=tmp_path / "memory", durable_root=tmp_path / "durable").live() == [0, 1]
    assert [str(path) for path in (tmp_path / "checkpoints").iterdir()] == [kept[0].folder]
    monkeypatch.setenv("LEAKS_FROM", "0")
    async with start_job(tmp_path, model_path, entry=LEAKING_RANK, resume_from=kept[0].folder) as job:
        failed = await job.until(TrainerFailed)
        assert await job.exit_code() == 1
    assert failed.reason.startswith("under the weights of the checkpoint of step 1, Qwen3ForCausalLM can no longer be")
