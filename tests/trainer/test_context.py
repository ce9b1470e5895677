"""Rows that several ranks divide: attention, checks and memory are those of the whole row."""

from __future__ import annotations

import multiprocessing
from functools import partial
from pathlib import Path
from typing import Final, NamedTuple

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import Tensor, nn

from dora.errors import ConfigError
from dora.trainer import attention, forward_check
from dora.trainer.attention import Pattern, Segments, attend
from dora.trainer.checkpointing import MODES
from dora.trainer.context import Context, make_context
from dora.trainer.forecast import Outline, trial_row
from dora.trainer.forward_check import check_training
from dora.trainer.layouts import require_divided
from dora.trainer.live_bytes import LiveBytes
from dora.trainer.logprobs import logprobs
from dora.trainer.meshes import make_mesh
from dora.trainer.model import Policy
from dora.trainer.packing import Layout
from tests.families import make_model

RANKS: Final = 4
CPU: Final = torch.device("cpu")


class Heads(NamedTuple):
    """Heads of a layer, and what it sees."""

    ranks: int
    queries: int
    keys: int
    window: int | None = None
    chunk: int | None = None
    softcap: float | None = None
    has_sinks: bool = False
    prompts: tuple[int, ...] = ()


LENGTHS: Final = (3, 10, 7, 20)  # with a prompt of three
HEADS: Final = (
    Heads(2, 4, 2),
    Heads(2, 4, 1, prompts=(-1, 0, 0, -1)),
    Heads(4, 8, 2, window=5, has_sinks=True),
    Heads(4, 12, 6, has_sinks=True, prompts=(-1, 0, 0, -1)),
    Heads(2, 6, 3, softcap=1.5),
    Heads(4, 4, 4, chunk=6),
)


def compare(heads: Heads, context: Context) -> None:
    """Attention of slices, and its gradients, against those of the row."""
    generator = torch.Generator().manual_seed(0)
    draw = partial(torch.randn, generator=generator, dtype=torch.float64)
    total = sum(LENGTHS)
    inputs = [draw(1, heads.queries, total, 8), draw(1, heads.keys, total, 8), draw(1, heads.keys, total, 6)]
    if heads.has_sinks:
        inputs.append(draw(heads.queries))
    weight = draw(1, total, heads.queries, 6)

    def run(inputs: list[Tensor], weight: Tensor, context: Context | None) -> tuple[Tensor, list[Tensor]]:
        leaves = [tensor.clone().requires_grad_() for tensor in inputs]
        segments = Segments(LENGTHS, CPU, heads.prompts, context=context)
        pattern = Pattern(segments, window=heads.window, chunk=heads.chunk)
        sinks = leaves[3] if heads.has_sinks else None
        out, _ = attend(nn.Module(), *leaves[:3], pattern, softcap=heads.softcap, s_aux=sinks)
        (out * weight).sum().backward()
        return out.detach(), [leaf.grad for leaf in leaves if leaf.grad is not None]

    out, gradients = run(inputs, weight, None)
    own = slice(context.rank * total // context.size, (context.rank + 1) * total // context.size)
    part, parts = run([t[:, :, own] for t in inputs[:3]] + inputs[3:], weight[:, own], context)
    torch.testing.assert_close(part, out[:, own], rtol=0, atol=1e-12)
    for found, expected in zip(parts[:3], gradients[:3], strict=True):
        torch.testing.assert_close(found, expected[:, :, own], rtol=0, atol=1e-12)
    if heads.has_sinks:
        dist.all_reduce(parts[3], group=context.group)
        torch.testing.assert_close(parts[3], gradients[3], rtol=0, atol=1e-12)


def pass_checks(root: Path, context: Context) -> None:
    """The checks before a run, for each kind of checkpointing."""
    cases = [("gemma3_text", mode, torch.float32) for mode in MODES]
    for family, mode, dtype in (*cases, ("deepseek_v3", "none", torch.bfloat16)):
        policy = Policy(root / family, mesh=make_mesh("cpu"), dtype=dtype, activation_checkpointing=mode)
        found = check_training(policy, dtype=str(dtype).removeprefix("torch."), context=context, longest=128)
        assert (found.layout.context, found.layout.share_above, found.note) == (context, 1.15, "")


def compare_memory(root: Path, context: Context) -> None:
    """What a rank keeps of a row that it divides, against the forecast of its part."""
    model = make_model("qwen3")
    model.set_attn_implementation(attention.NAME)
    row = trial_row(1024, longest=512, layout=Layout(context=context))
    logprobs(model, row, temperature=1.0)  # what the model does after its head is measured once
    with LiveBytes() as live:
        loss = logprobs(model, row, temperature=1.0)[0].sum()
    part = 1024 // context.size
    kept = Outline(root / "qwen3", dtype=torch.float32).forecast(tokens=part, longest=part, ranks=1).kept
    assert live.now == pytest.approx(kept, rel=0.06)  # 5 % more: attention's output is kept twice
    loss.backward()  # what it needs was kept until here


def find_what_is_not_exact(root: Path, context: Context) -> None:
    """A check of rows whose slices cannot tell that the row is long."""
    forward_check.require_divided = lambda *_, **__: None  # type: ignore[assignment]
    policy = Policy(root / "phi3", mesh=make_mesh("cpu"), dtype=torch.float32)
    with pytest.raises(ConfigError, match=r"cannot be trained: log-probs of packed sequences differ by"):
        check_training(policy, dtype="float32", context=context, longest=64)


def _compare_heads(rank: int, root: Path) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", store=dist.FileStore(str(root / "store"), RANKS), rank=rank, world_size=RANKS)
    contexts = {ranks: make_context(ranks) for ranks in (2, 4)}
    assert make_context(1) is None
    with pytest.raises(ConfigError, match=r"^trainer\.parallel\.context: 4 ranks cannot be divided by 3$"):
        make_context(3)
    for heads in HEADS:
        compare(heads, contexts[heads.ranks])  # type: ignore[arg-type]
    dist.destroy_process_group()


def _check(rank: int, root: Path) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", store=dist.FileStore(str(root / "store"), 2), rank=rank, world_size=2)
    context = make_context(2)
    assert context is not None
    for work in (compare_memory, pass_checks, find_what_is_not_exact):
        work(root, context)
    dist.destroy_process_group()


LONG: Final = {"rope_type": "longrope", "short_factor": [1.0] * 4, "long_factor": [4.0] * 4, "rope_theta": 1e4}
PHI3: Final = {
    "max_position_embeddings": 128, "original_max_position_embeddings": 48, "pad_token_id": 0, "head_dim": 8,
    "rope_parameters": {**LONG, "original_max_position_embeddings": 48},
}  # fmt: skip


@pytest.mark.deep
def test_attention_of_slices_is_that_of_the_row(tmp_path: Path) -> None:
    multiprocessing.set_forkserver_preload([__name__])
    mp.start_processes(_compare_heads, (tmp_path,), nprocs=RANKS, start_method="forkserver")


@pytest.mark.deep
@pytest.mark.timeout(300)
def test_divided_rows_pass_the_checks_and_take_the_memory_of_their_parts(tmp_path: Path) -> None:
    for family, changes in {"gemma3_text": {}, "deepseek_v3": {}, "qwen3": {}, "phi3": PHI3}.items():
        make_model(family, **changes).save_pretrained(tmp_path / family)
    multiprocessing.set_forkserver_preload([__name__])
    mp.start_processes(_check, (tmp_path,), nprocs=2, start_method="forkserver")


@pytest.mark.parametrize(
    ("family", "ranks", "says"),
    [
        ("qwen3", 3, "Qwen3ForCausalLM has 4 attention heads, so 3 ranks cannot divide its rows; set it to 1"),
        ("bamba", 2, "BambaForCausalLM has layers that would carry state from one packed sequence into the next, so"),
        ("llama4_text", 2, "Llama4ForCausalLM scales queries by their position in the row, so 2 ranks"),
        (
            "phi3",
            2,
            "Phi3ForCausalLM has other angles in rows beyond 48 tokens (LongRoPE), which a slice does not tell",
        ),
    ],
)
def test_models_whose_rows_cannot_be_divided_are_refused_by_name(family: str, ranks: int, says: str) -> None:
    model = make_model(family, **(PHI3 if family == "phi3" else {}))
    require_divided(model, ranks=1, longest=49)
    with pytest.raises(ConfigError) as caught:
        require_divided(model, ranks=ranks, longest=49)
    assert str(caught.value).startswith(f"trainer.parallel.context: {says}")


def test_long_angles_do_not_matter_to_runs_without_long_sequences() -> None:
    require_divided(make_model("phi3", **PHI3), ranks=2, longest=48)


def test_a_layer_with_other_heads_than_the_model_says_is_refused() -> None:
    context = Context(group=None, rank=0, size=3)  # type: ignore[arg-type]
    query, key = torch.zeros(1, 4, 6, 8), torch.zeros(1, 2, 6, 8)
    with pytest.raises(ConfigError, match=r"^trainer\.parallel\.context: 3 ranks cannot divide the 4 heads of Module"):
        attend(nn.Module(), query, key, key, Pattern(Segments((18,), CPU, context=context)))
