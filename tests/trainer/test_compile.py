"""Compiled layers: the same log-probs and gradients under the same names, for rows of any length."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.distributed as dist

from dora.trainer.context import Context
from dora.trainer.logprobs import logprobs
from dora.trainer.meshes import make_mesh
from dora.trainer.model import Policy
from dora.trainer.packing import Layout, Row, make_row
from dora.trainer.replay import check_replay, replayed
from tests.families import make_model


def make_packed(lengths: list[int], *, vocab_size: int, context: Context | None) -> Row:
    starts = np.cumsum(lengths) - lengths
    ids = np.random.default_rng(0).integers(0, vocab_size, sum(lengths))
    trained = np.setdiff1d(np.arange(sum(lengths)), starts)
    layout = Layout(context=context)
    return make_row(ids, lengths=lengths, trained=trained, layout=layout, device=torch.device("cpu"))


def run(
    policy: Policy, lengths: list[int], context: Context | None = None
) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """Log-probs of packed sequences and their gradient."""
    policy.prepare(closes_update=True)
    row = make_packed(lengths, vocab_size=policy.vocab_size, context=context)
    found_P = logprobs(policy.model, row, temperature=0.7)[0]
    found_P.square().sum().backward()
    gradients = {name: gradient.clone() for name, gradient in policy.gradients().items()}
    policy.clear_gradients()
    policy.reshard()
    return found_P.detach(), gradients


@pytest.mark.deep
@pytest.mark.timeout(300)  # the C++ compiler runs for each graph
@pytest.mark.filterwarnings("ignore")  # of torch's compiler, about itself
def test_compiled_layers_train_as_eager_ones_and_repeat_their_forward_pass(model_path: Path) -> None:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        eager = Policy(model_path, mesh=make_mesh("cpu"), dtype=torch.float32)
        compiled = Policy(
            model_path, mesh=make_mesh("cpu"), dtype=torch.float32, activation_checkpointing="full", compiled=True
        )
        divided = Context(dist.group.WORLD, rank=0, size=1)  # by one rank, so in one slice
        for lengths, context in (([30, 30, 20], None), ([11, 50], None), ([11, 50], divided), ([9, 30], divided)):
            torch.testing.assert_close(run(compiled, lengths, context), run(eager, lengths), rtol=1e-4, atol=1e-5)
        assert torch._dynamo.utils.counters["stats"]["unique_graphs"] > 0
    finally:
        dist.destroy_process_group()


@pytest.mark.deep
@pytest.mark.timeout(300)
@pytest.mark.filterwarnings("ignore")  # of torch's compiler, about itself
def test_compiled_layers_replay_experts_with_any_table(tmp_path: Path) -> None:
    make_model("qwen3_moe").save_pretrained(tmp_path)
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        eager = Policy(tmp_path, mesh=make_mesh("cpu"), dtype=torch.float32)
        compiled = Policy(
            tmp_path, mesh=make_mesh("cpu"), dtype=torch.float32, activation_checkpointing="full", compiled=True
        )
        assert check_replay(compiled, Layout(), dtype="float32") == check_replay(eager, Layout(), dtype="float32")
        found: list[list[torch.Tensor]] = []
        for policy in (eager, compiled):
            found.append([])
            for seed, lengths in enumerate(([30, 30, 20], [11, 50], [9, 30])):
                row = make_packed(lengths, vocab_size=policy.vocab_size, context=None)
                ids = torch.rand(sum(lengths), 4, 4, generator=torch.manual_seed(seed)).argsort(-1)[..., :2]
                row = replace(row, experts_BTLk=ids[None].to(torch.int16))
                policy.prepare(closes_update=True)
                with replayed(policy.model, row):
                    found_P = logprobs(policy.model, row, temperature=0.7)[0]
                    found_P.square().sum().backward()
                found[-1] += [found_P.detach(), *policy.gradients().values()]
                policy.clear_gradients()
                policy.reshard()
        torch.testing.assert_close(found[1], found[0], rtol=1e-3, atol=1e-4)
        assert torch._dynamo.utils.counters["stats"]["unique_graphs"] > 0
    finally:
        dist.destroy_process_group()
