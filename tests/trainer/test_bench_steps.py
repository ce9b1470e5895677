"""The steps that the benchmarks compare are the same step, and bench/gpu.py counts and measures on a CPU too."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode
from transformers import AutoModelForCausalLM, Qwen3ForCausalLM

sys.path.insert(0, str(Path(__file__).parents[2] / "bench"))

import gpu
from clients import steps
from on_gpu import cases, models, roofline, training
from on_gpu.parts import NOT_REACHED
from result import Result, Row

from dora.trainer.model import Policy
from dora.trainer.packing import PACKED

BENCH = Path(__file__).parents[2] / "bench"
BUDGET = 512
TINY = models.SHAPES["tiny"]


@pytest.fixture
def answers() -> steps.Answers:
    return steps.draw_answers(12, num_tokens=1_500, vocab_size=TINY.vocab)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    torch.manual_seed(0)
    Qwen3ForCausalLM(models.config_of("tiny")).save_pretrained(tmp_path / "model")
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


def test_operations_are_those_of_torch_and_half_of_the_scores_are_causal() -> None:
    length = 64
    answer = steps.draw_answers(1, num_tokens=length, vocab_size=TINY.vocab)
    model = AutoModelForCausalLM.from_config(models.config_of("tiny"), attn_implementation="eager")
    with FlopCounterMode(display=False) as counter:
        steps.accumulate_packed(model, answer, [0])
    assert counter.get_total_flops() == TINY.flops(answer, causal=False)
    half = 6 * TINY.layers * TINY.heads * TINY.head_size * length**2
    assert TINY.flops(answer, causal=True) == counter.get_total_flops() - half


def test_both_sides_checkpoint_layers_where_memory_is_short(tmp_path: Path) -> None:
    answers = steps.draw_answers(4, num_tokens=400, vocab_size=TINY.vocab)
    place = cases.Place("cpu", tmp_path, repeats=1, earlier=[Row(roofline.PRODUCTS, 0.5, "TFLOP/s")])
    plain = list(training.measure_plain("tiny", answers, place, what="tiny, plain transformers", mode="full"))
    place = place._replace(earlier=[*place.earlier, *plain])
    ours = list(training.measure_ours("tiny", answers, place, what="tiny", mode="full", forecasts=False))
    assert plain[0].what == "tiny, plain transformers (SDPA, padded, checkpointing full)"
    assert ours[0].what == "tiny (packed, sdpa, checkpointing full)"
    assert plain[0].figure is not None
    assert ours[0].ratio == pytest.approx((ours[0].figure or 0.0) / plain[0].figure)
    assert [row.what for row in ours[1:]] == [
        "tiny: peak memory", "tiny: MFU, causal scores counted", "tiny: MFU, all scores counted",
        "tiny: clip and update",
    ]  # fmt: skip


def test_mfu_is_that_of_the_datasheet_where_the_gpu_is_known(answers: steps.Answers, tmp_path: Path) -> None:
    known = roofline.beside_datasheet(roofline.PRODUCTS, 800.0, "TFLOP/s", 989.0)
    place = cases.Place("cpu", tmp_path, earlier=[known])
    seconds = TINY.flops(answers, causal=True) / (0.5 * 989e12)
    found = list(training.rows_of("tiny", answers, place, what="tiny", how="packed", seconds=seconds))
    mfu = next(row for row in found if row.what == "tiny: MFU, causal scores counted")
    assert (mfu.figure, mfu.ratio) == (pytest.approx(50), pytest.approx(494.5 / 800))


def test_a_model_without_an_optimizer_keeps_its_weights(answers: steps.Answers, tmp_path: Path) -> None:
    order = models.order_for("tiny", cases.Place("cpu", tmp_path), tokens=1_500)
    with steps.one_rank("cpu"):
        trainer = steps.make_trainer(order, layout=PACKED, policy_kind=models.WithoutOptimizer)
        shards = Policy.shards(trainer._policy)
        before = {name: shard.clone() for name, shard in shards.items()}
        models.Repeated(trainer, answers)(closes=True)
    assert trainer.grad_norm > 0
    assert before.keys() == shards.keys()
    assert all(torch.equal(shards[name], weights) for name, weights in before.items())


def test_memory_that_does_not_suffice_leads_to_the_next_mode_and_is_a_row_after_the_last() -> None:
    def measure(mode: str) -> list[Row]:
        if mode != "full":
            raise torch.OutOfMemoryError(f"no room for {mode}. GPU 0 is full")
        return [Row(mode, 1.0)]

    assert cases.first_that_fits(("none", "full"), measure, what="tiny") == [Row("full", 1.0)]
    failed = Row("tiny", None, against="out of memory: no room for none")
    assert cases.first_that_fits(("none",), measure, what="tiny") == [failed]


@pytest.mark.parametrize(
    ("limit_s", "left_s", "reason"), [(0.01, 9.0, "stopped after 0 s"), (9.0, 0.01, NOT_REACHED)], ids=["case", "part"]
)
def test_a_case_beyond_its_time_or_that_of_its_part_is_a_row(limit_s: float, left_s: float, reason: str) -> None:
    case = roofline.ROOFLINE._replace(limit_s=limit_s)
    found = cases.in_process("training-8B", 0, case, profile="cpu", left_s=left_s, full=False)
    assert found == ("", [Row("the roofline", None, against=reason)])


def test_a_part_is_done_when_every_case_was_reached(tmp_path: Path) -> None:
    def result(*rows: Row) -> Path:
        made = Result("gpu-x", "Title.", "short", "sizes", "a machine", "abc", "2026-01-01", 1.0, (0, 0), list(rows))
        (tmp_path / "gpu-x.json").write_bytes(msgspec.json.encode(made))
        return tmp_path / "gpu-x.json"

    assert not gpu.is_done(tmp_path / "gpu-x.json")
    assert not gpu.is_done(result(Row("first", 1.0), Row("second", None, against=NOT_REACHED)))
    assert gpu.is_done(result(Row("first", 1.0), Row("second", None, against="out of memory")))


def run_gpu(*arguments: str) -> tuple[int, str]:
    command = [sys.executable, str(BENCH / "gpu.py"), "--profile", "cpu", *arguments]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    return done.returncode, done.stdout + done.stderr


def rows_in(path: Path) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = msgspec.json.decode(path.read_bytes())["rows"]
    return rows


#: Two of them; `python bench/gpu.py --profile cpu` runs all, for a quarter of an hour.
ON_A_CPU = ("publication", "queue-wait")


@pytest.mark.deep
@pytest.mark.timeout(300)
@pytest.mark.parametrize("part", ON_A_CPU)
def test_a_part_runs_on_a_cpu_and_is_not_repeated(part: str, tmp_path: Path) -> None:
    code, said = run_gpu("--part", part, "--out", str(tmp_path))
    assert code == 0, said
    rows = rows_in(tmp_path / f"gpu-{part}.json")
    failed = [row for row in rows if row["figure"] is None and "no CUDA device here" not in row.get("against", "")]
    assert failed == [], said
    assert "measured before" in run_gpu("--part", part, "--out", str(tmp_path))[1]
