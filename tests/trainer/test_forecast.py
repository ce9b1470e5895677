"""The forecast of a rank's memory, from a config alone, against what the real model takes."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from transformers import Qwen3Config, Qwen3ForCausalLM

from dora.trainer import attention, forecast
from dora.trainer import model as policy
from dora.trainer.checkpointing import MODES, Mode, apply_checkpointing
from dora.trainer.forecast import LOOP_ROWS, Outline, choose_mode, trial_row
from dora.trainer.layouts import layout_of
from dora.trainer.live_bytes import activation_bytes
from dora.trainer.logprobs import logprobs
from dora.trainer.meshes import make_mesh
from dora.trainer.model import Policy, decoder_layers
from dora.transport.messages import LoraSettings
from tests.families import make_config, make_model

TOLERANCE = 0.15
CASES: list[tuple[str, Mode]] = [
    *(("qwen3", mode) for mode in MODES),
    ("llama", "none"), ("gemma3_text", "full"), ("olmo3", "selective"), ("phi", "none"), ("qwen3_moe", "selective"),
    ("deepseek_v3", "full"), ("qwen3_5_text", "full"), ("lfm2", "selective"),
]  # fmt: skip
TOKENS, LONGEST = 96, 40


@pytest.fixture(autouse=True)
def _without_data(monkeypatch: pytest.MonkeyPatch) -> None:
    """Forecast the tiny models of these tests as large ones."""
    monkeypatch.setattr(forecast, "WITH_DATA", 0)


LORA = LoraSettings(rank=8, alpha=16.0, rslora=False, targets=("q_proj", "v_proj", "down_proj"), seed=0)


def saved_config(folder: Path, config: Any) -> Path:
    config.save_pretrained(folder)
    return folder


def measure(model: Any, tokens: int, longest: int) -> int:
    model.set_attn_implementation(attention.NAME)
    row = trial_row(tokens, longest=longest, layout=layout_of(model))
    return activation_bytes(lambda: logprobs(model.eval().requires_grad_(), row, temperature=1.0))


@pytest.mark.parametrize(("family", "mode"), CASES)
def test_bytes_kept_are_those_of_the_real_model(family: str, mode: Mode, tmp_path: Path) -> None:
    outline = Outline(saved_config(tmp_path, make_config(family)), dtype=torch.float32, checkpointing=mode)
    model = make_model(family)
    assert outline.parameters == sum(p.numel() for p in model.parameters())
    apply_checkpointing(decoder_layers(model), mode)
    found = outline.forecast(tokens=TOKENS, longest=LONGEST, ranks=2)
    assert found.kept == pytest.approx(measure(model, TOKENS, LONGEST), rel=TOLERANCE)


def test_a_forecast_does_not_change_with_the_one_before(tmp_path: Path) -> None:
    outline = Outline(saved_config(tmp_path, make_config("qwen3_moe")), dtype=torch.float32)
    first = outline.forecast(tokens=TOKENS, longest=LONGEST, ranks=2)
    longer = outline.forecast(tokens=2 * TOKENS, longest=LONGEST, ranks=2)
    assert longer.kept == pytest.approx(2 * first.kept, rel=0.1)
    assert outline.forecast(tokens=TOKENS, longest=LONGEST, ranks=2) == first


def test_one_answer_longer_than_the_budget_is_a_pass_by_itself(tmp_path: Path) -> None:
    outline = Outline(saved_config(tmp_path, make_config("qwen3")), dtype=torch.float32)
    alone = outline.forecast(tokens=200, longest=200, ranks=2)
    assert outline.forecast(tokens=64, longest=200, ranks=2) == alone


@pytest.mark.deep
def test_a_loop_over_tokens_is_extrapolated(tmp_path: Path) -> None:
    tokens = 2 * LOOP_ROWS[1]
    outline = Outline(saved_config(tmp_path, make_config("mamba", num_hidden_layers=1)), dtype=torch.float32)
    found = outline.forecast(tokens=tokens, longest=tokens, ranks=1)
    assert outline._live.operations < 50 * LOOP_ROWS[1]  # of the last row, at 40 for each token
    assert found.kept == pytest.approx(measure(make_model("mamba", num_hidden_layers=1), tokens, tokens), rel=TOLERANCE)


def test_with_data_it_is_the_same(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A small model runs with data, on short rows."""
    without = Outline(folder, dtype=torch.float32).forecast(tokens=2000, longest=700, ranks=1)
    monkeypatch.setattr(forecast, "WITH_DATA", 2**26)
    found = Outline(folder, dtype=torch.float32).forecast(tokens=2000, longest=700, ranks=1)
    assert found.kept == pytest.approx(without.kept, rel=0.01)
    assert found.total == pytest.approx(without.total, rel=0.1)


# ---- the whole rank -------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    config = Qwen3Config(
        vocab_size=2000, hidden_size=128, intermediate_size=384, num_hidden_layers=6, num_attention_heads=4,
        num_key_value_heads=2, head_dim=32, tie_word_embeddings=True,
    )  # fmt: skip
    path = tmp_path_factory.mktemp("model")
    Qwen3ForCausalLM(config).save_pretrained(path)
    return path


@pytest.fixture(scope="module")
def one_rank() -> Iterator[None]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.mark.parametrize(
    ("gathered_bytes", "dtype", "mode", "tokens", "lora"),
    [
        (0, torch.float32, "none", 512, None),
        pytest.param(0, torch.bfloat16, "full", 5000, None, marks=pytest.mark.deep),
        (policy.GATHERED_BYTES, torch.float32, "selective", 512, None),
        (policy.GATHERED_BYTES, torch.bfloat16, "none", 256, None),
        (0, torch.bfloat16, "selective", 512, LORA),
        (policy.GATHERED_BYTES, torch.float32, "none", 512, LORA),
        (policy.GATHERED_BYTES, torch.bfloat16, "none", 256, LORA),
    ],
)
def test_the_total_is_the_peak_of_the_allocator(
    one_rank: None,
    folder: Path,
    gathered_bytes: int,
    dtype: torch.dtype,
    mode: Mode,
    tokens: int,
    lora: LoraSettings | None,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    gc.collect()  # of other tests: what is freed during a pass would count
    monkeypatch.setattr(policy, "GATHERED_BYTES", gathered_bytes)
    loaded = Policy(folder, mesh=make_mesh("cpu"), dtype=dtype, activation_checkpointing=mode, lora=lora)
    held = sum(shard.nbytes for shard in loaded.shards().values())
    row = trial_row(tokens, longest=200)
    passes = [allocations(loaded, row, closes_update=closes) for closes in (False, True)]
    peak = held + sum(passes[0]) + max(running_sums(passes[1]))  # of the second: the gradients of the first are there
    found = Outline(folder, dtype=dtype, checkpointing=mode, lora=lora).forecast(
        tokens=tokens, longest=200, ranks=1, is_trial=True
    )
    assert found.total == pytest.approx(peak, rel=TOLERANCE)
    kept = activation_bytes(lambda: logprobs(loaded.model, row, temperature=1.0))
    assert found.kept == pytest.approx(kept, rel=0.05 if lora is None else 0.07)  # the first of 6 layers keeps less


def allocations(loaded: Policy, row: Any, *, closes_update: bool) -> list[int]:
    """Bytes allocated (or, below 0, freed) during a forward and backward pass, in order."""
    loaded.prepare(closes_update=closes_update)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profile:
        logprobs(loaded.model, row, temperature=1.0)[0].sum().backward()
    assert profile.profiler is not None
    events = [event for event in profile.profiler.kineto_results.events() if event.name() == "[memory]"]
    return [event.nbytes() for event in sorted(events, key=lambda event: event.start_ns())]


def running_sums(values: list[int]) -> list[int]:
    return [sum(values[: n + 1]) for n in range(len(values))]


def test_the_first_mode_that_fits_is_chosen(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(forecast, "WITH_DATA", 2**26)
    sizes = {"dtype": torch.float32, "tokens": 2000, "longest": 500, "ranks": 2}
    needs = [choose_mode(folder, memory=memory, **sizes)[1].total for memory in (2**40, 0)]
    assert needs[1] < needs[0] / 2
    chosen = {memory: choose_mode(folder, memory=memory, **sizes)[0] for memory in (2**40, needs[0], needs[1], 1)}
    assert list(chosen.values()) == ["none", "selective", "full", "full"]
