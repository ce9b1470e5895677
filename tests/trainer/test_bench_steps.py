"""The steps that the benchmarks compare are the same step, and bench/gpu.py counts and measures on a CPU too."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode
from transformers import AutoModelForCausalLM, Qwen3ForCausalLM

sys.path.insert(0, str(Path(__file__).parents[2] / "bench"))

import gpu
from clients import steps
from result import Report

BUDGET = 512


@pytest.fixture
def answers() -> steps.Answers:
    return steps.draw_answers(12, num_tokens=1_500, vocab_size=gpu.SHAPES["tiny"].vocab)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    torch.manual_seed(0)
    Qwen3ForCausalLM(gpu.config_of(gpu.Case("ours", "cpu", "tiny"))).save_pretrained(tmp_path / "model")
    return tmp_path


def norm_of_ours(answers: steps.Answers, folder: Path) -> float:
    chosen = steps.settings(device="cpu", dtype="float32", micro_batch_tokens=BUDGET)
    with steps.one_rank("cpu"):
        trainer = steps.make_trainer(steps.configure(folder / "model", chosen, store=folder))
        for batch in steps.micro_batches(answers, step=0, budget=BUDGET):
            trainer.train(batch)
    return trainer.grad_norm


def test_the_trainer_and_all_plain_loops_compute_the_same_gradient(answers: steps.Answers, folder: Path) -> None:
    expected = norm_of_ours(answers, folder)
    model = AutoModelForCausalLM.from_pretrained(folder / "model", dtype=torch.float32, attn_implementation="sdpa")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    for accumulate, batches in (
        (steps.accumulate, steps.in_order(answers, rows=5)),
        (steps.accumulate, steps.by_length(answers, budget=BUDGET)),
        (steps.accumulate_packed, steps.in_order(answers, rows=5)),
    ):
        for batch in batches:
            accumulate(model, answers, batch)
        assert steps.update(model, optimizer) == pytest.approx(expected, rel=1e-4)


def test_lengths_add_up_and_have_a_tail(answers: steps.Answers) -> None:
    assert sum(answers.lengths) == 1_500
    assert max(answers.lengths) > 3 * sorted(answers.lengths)[6]
    assert sorted(i for batch in steps.by_length(answers, budget=BUDGET) for i in batch) == list(range(12))


def test_operations_are_those_of_torch_with_causal_attention_counted_by_half() -> None:
    shape = gpu.SHAPES["tiny"]
    length = 64
    answer = steps.draw_answers(1, num_tokens=length, vocab_size=shape.vocab)
    config = gpu.config_of(gpu.Case("plain", "cpu", "tiny"))
    model = AutoModelForCausalLM.from_config(config, attn_implementation="eager")
    with FlopCounterMode(display=False) as counter:
        steps.accumulate_packed(model, answer, [0])
    other_half = 6 * shape.layers * shape.heads * shape.head_size * length**2
    assert counter.get_total_flops() == shape.flops(answer) + other_half


@pytest.mark.deep
def test_both_sides_and_the_roofline_are_measured_on_a_cpu(tmp_path: Path) -> None:
    def measure(side: str, *, publish: bool = False) -> list[gpu.Found]:
        case = gpu.Case(side, "cpu", "tiny", 512, publish=publish, repeats=1)
        return list(gpu.measure_here(case, tmp_path))

    (plain,), (peaks,) = measure("plain"), measure("roofline")
    ours, published, foretold = measure("ours", publish=True)
    assert isinstance(plain, gpu.Trained)
    assert isinstance(ours, gpu.Trained)
    assert isinstance(published, gpu.Published)
    assert isinstance(foretold, gpu.Foretold)
    assert plain.flops == ours.flops > 0
    assert published.num_bytes >= 2 * gpu.SHAPES["tiny"].parameters
    assert published.written_s > published.stopped_s > 0
    assert min(peaks.tflops, peaks.gb_per_s, peaks.to_host_gb_per_s, peaks.to_store_gb_per_s) > 0


def test_both_sides_checkpoint_layers_where_memory_is_short(answers: steps.Answers, tmp_path: Path) -> None:
    case = gpu.Case("", "cpu", "tiny", 1_500, repeats=1)
    (ours,) = gpu.measure_ours(case, answers, mode="full", folder=tmp_path)
    assert gpu.measure_plain(case, answers, mode="full").how == "SDPA, padded, checkpointing full"
    assert isinstance(ours, gpu.Trained)
    assert ours.how == "packed, sdpa, checkpointing full"


def test_a_case_beyond_its_time_is_a_finding() -> None:
    found = gpu.in_process(gpu.Case("roofline", "cpu"), limit_s=0.01)
    assert found == [gpu.Failed("stopped after 0 s")]


def test_mfu_is_that_of_the_datasheet_where_the_gpu_is_known() -> None:
    report = Report("A title.", full=False, sizes="")
    peaks = gpu.Peaks("NVIDIA H200", 141 << 30, 800.0, 4_300.0, 50.0, 2.0)
    table = gpu.Table(report, peaks)
    trained = gpu.Trained(seconds=2.0, peak_bytes=70 << 30, flops=2 * 0.5 * 989e12, how="packed", update_s=0.1)
    table.add(gpu.Case("plain", "cuda", "8B", 16_384), gpu.Failed("out of memory"))
    table.add(gpu.Case("ours", "cuda", "8B", 16_384), trained)
    table.add(gpu.Case("ours", "cuda", "8B", 16_384), gpu.Foretold(77 << 30, 70 << 30))
    rows = {row.what: row for row in report.result().rows}
    assert rows["8B, 16,384 tokens, plain transformers"].against == "out of memory"
    assert rows["8B, 16,384 tokens (packed)"].figure == 8_192
    assert rows["8B, 16,384 tokens: memory of a micro-batch as `dora check` forecasts it"].ratio == pytest.approx(1.1)
    mfu = rows["8B, 16,384 tokens: MFU"]
    assert (mfu.figure, mfu.ratio, mfu.reached) == (pytest.approx(50), pytest.approx(494.5 / 800), True)
