"""Whole trainer jobs: torchrun ranks over gloo, fed through the real transport, compared with a plain trainer.

Five launches serve all tests here: two ranks, the same work cut and ordered otherwise on one rank, two ranks that
treat the model as a large one, also with a hybrid model, and two ranks resumed from the first job's checkpoint.
"""

from __future__ import annotations

import asyncio
import json
import re
import shutil
import signal
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import psutil
import pytest
import torch
from conftest import (
    GROUP_SIZE,
    VOCAB,
    Answer,
    Job,
    PlainTrainer,
    assert_equal_weights,
    chain_of,
    in_history,
    make_batch,
    make_groups,
    start_job,
)
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from dora.trainer.metrics import METRICS
from dora.transport.messages import MicroBatchDone, RankReady, TrainerFailed, VersionWritten
from dora.weights.store import VersionStore
from tests.families import make_model

# Answers of each step with their versions: fresh, mixed lags up to K, none at all, mixed again.
STEPS: list[list[Answer]] = [
    make_groups(6, version=0, seed=1),
    [*make_groups(2, version=0, seed=2), *make_groups(4, version=1, seed=3)],
    [],
    [*make_groups(2, version=1, seed=4), *make_groups(3, version=3, seed=5)],
]
CHECKPOINT_STEP = 2


#: AdamW divides a gradient by its own size. The rounding of gradients near zero, which depends on the processor, thus
#: shows in the weights: one of thousands was seen to differ by 1.01e-5. A wrong gradient moves them by up to 1e-2.
ROUNDING = 3e-5


@dataclass
class Record:
    """The results of a job."""

    weights: list[dict[str, torch.Tensor]] = field(default_factory=list)  # of the versions it published, in order
    metrics: list[dict[str, float]] = field(default_factory=list)
    reports: list[object] = field(default_factory=list)
    exit_code: int = 0
    survivors: list[int] = field(default_factory=list)
    checkpoint: str = ""  # taken in mid-step
    final_state: str = ""  # manifest of the checkpoint after the last step: hashes of weights and moments by rank


def record_weights(record: Record, folder: Path, version: int) -> None:
    record.weights.append(load_file(folder / "memory" / f"v{version:06d}" / "model.safetensors"))


async def train(job: Job, record: Record, folder: Path, *, step: int, waves) -> None:
    record.metrics.append((await job.step(step, waves)).metrics)
    record_weights(record, folder, step + 1)


async def begin(job: Job, record: Record, folder: Path, *, version: int) -> None:
    seen: set[type] = set()
    while seen != {RankReady, VersionWritten}:
        seen.add(type(await job.until(RankReady | VersionWritten)))
    record_weights(record, folder, version)


async def checkpoint_manifest(job: Job) -> str:
    return (Path((await job.save_checkpoint()).folder) / "manifest.json").read_text()


def two_rank_waves(answers: list[Answer]):
    """Uneven waves: rank 1 has nothing in the first, and the last is empty on all ranks."""
    return [[answers[:3], []], [answers[3:10], answers[10:]], [[], []]]


async def run_two_ranks(folder: Path, model_path: Path) -> Record:
    record = Record()
    async with start_job(folder, model_path) as job:
        await begin(job, record, folder, version=0)
        for step, answers in enumerate(STEPS):
            if step == CHECKPOINT_STEP + 1:  # in mid-step: after its first wave has been trained
                first, *rest = two_rank_waves(answers)
                for rank, part in enumerate(first):
                    await job.end.send(rank, in_history(make_batch(part, step=step, index=0, last=False)))
                record.checkpoint = (await job.save_checkpoint()).folder
                for index, wave in enumerate(rest, start=1):
                    for rank, part in enumerate(wave):
                        batch = make_batch(part, step=step, index=index, last=index == len(rest))
                        await job.end.send(rank, in_history(batch))
                await job.until(VersionWritten)
                record_weights(record, folder, step + 1)
            else:
                await train(job, record, folder, step=step, waves=two_rank_waves(answers))
        record.final_state = await checkpoint_manifest(job)
        stale = STEPS[0][:GROUP_SIZE]
        await job.end.send(0, in_history(make_batch(stale, step=4, index=0, last=True)))
        await job.until(TrainerFailed)
        record.exit_code = await job.exit_code()
        record.reports = job.reports
    return record


async def run_one_rank(folder: Path, model_path: Path) -> Record:
    record = Record()
    rng = np.random.default_rng(0)
    async with start_job(folder, model_path, world_size=1) as job:
        await begin(job, record, folder, version=0)
        for step, answers in enumerate(STEPS):
            shuffled = [answers[i] for i in rng.permutation(len(answers))]
            waves = [[shuffled[i : i + 5]] for i in range(0, max(len(shuffled), 1), 5)]
            await train(job, record, folder, step=step, waves=waves)
        record.exit_code = await job.stop()
        record.reports = job.reports
    return record


async def run_layerwise(folder: Path, model_path: Path, *, steps: list[list[Answer]]) -> Record:
    """Micro-batches of one rank need more passes than those of the other."""
    record = Record()
    entry = str(Path(__file__).parent / "layerwise_rank.py")
    changes = {"micro_batch_tokens": 40, "activation_checkpointing": "selective"}
    async with start_job(folder, model_path, entry=entry, **changes) as job:
        await begin(job, record, folder, version=0)
        for step, answers in enumerate(steps):
            await train(job, record, folder, step=step, waves=two_rank_waves(answers))
        record.exit_code = await job.stop()
        record.reports = job.reports
    return record


async def run_resumed(folder: Path, model_path: Path, *, first_folder: Path, checkpoint: str) -> Record:
    """A job that resumes from the checkpoint and then loses a rank. Its store already has version 3, and a version 4
    with other weights."""
    record = Record()
    store = VersionStore(memory_root=folder / "memory", durable_root=folder / "durable")
    for version, content in ((3, 3), (4, 2)):
        staged = store.stage(version)
        shutil.copytree(first_folder / "memory" / f"v{content:06d}", staged, dirs_exist_ok=True)
        (staged / "manifest.json").unlink()
        store.seal(version, staged, chain=chain_of(version))
    async with start_job(folder, model_path, resume_from=checkpoint, activation_checkpointing="full") as job:
        await begin(job, record, folder, version=CHECKPOINT_STEP + 1)
        step = CHECKPOINT_STEP + 1
        await train(job, record, folder, step=step, waves=two_rank_waves(STEPS[step]))
        record.final_state = await checkpoint_manifest(job)
        ranks = [
            p for p in psutil.Process(job.process.pid).children(recursive=True) if "dora.trainer.main" in p.cmdline()
        ]
        assert len(ranks) == 2
        ranks[1].send_signal(signal.SIGKILL)
        record.exit_code = await job.exit_code()
        record.survivors = [p.pid for p in psutil.wait_procs(ranks, timeout=20)[1]]
        record.reports = job.reports
    return record


@pytest.fixture(scope="module")
def first_folder(tmp_path_factory) -> Path:
    return tmp_path_factory.mktemp("first")


@pytest.fixture(scope="module")
def two_ranks(first_folder, model_path) -> Record:
    return asyncio.run(run_two_ranks(first_folder, model_path))


@pytest.fixture(scope="module")
def one_rank(tmp_path_factory, model_path) -> Record:
    return asyncio.run(run_one_rank(tmp_path_factory.mktemp("one"), model_path))


@pytest.fixture(scope="module")
def layerwise(tmp_path_factory, model_path) -> Record:
    return asyncio.run(run_layerwise(tmp_path_factory.mktemp("layerwise"), model_path, steps=STEPS))


@pytest.fixture(scope="module")
def hybrid_path(tmp_path_factory) -> Path:
    """A random model of two convolutions and two attention layers."""
    folder = tmp_path_factory.mktemp("hybrid")
    make_model("lfm2", vocab_size=VOCAB).save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def hybrid(tmp_path_factory, hybrid_path) -> Record:
    return asyncio.run(run_layerwise(tmp_path_factory.mktemp("layerwise"), hybrid_path, steps=STEPS[:2]))


@pytest.fixture(scope="module")
def resumed(two_ranks, first_folder, model_path, tmp_path_factory) -> Record:
    folder = tmp_path_factory.mktemp("resumed")
    return asyncio.run(run_resumed(folder, model_path, first_folder=first_folder, checkpoint=two_ranks.checkpoint))


@pytest.mark.deep
@pytest.mark.parametrize("job", ["two_ranks", "one_rank", "layerwise"])
def test_streamed_steps_equal_a_plain_synchronous_trainer_parameter_for_parameter(job, model_path, request):
    record = request.getfixturevalue(job)
    plain = PlainTrainer(model_path)
    assert_equal_weights(record.weights[0], plain.parameters, atol=0)
    for step, answers in enumerate(STEPS):
        norm = plain.step(answers, step=step)
        assert_equal_weights(record.weights[step + 1], plain.parameters, atol=ROUNDING)
        if step < len(record.metrics):
            assert record.metrics[step]["grad_norm"] == pytest.approx(norm, rel=1e-4)


@pytest.mark.deep
def test_so_do_steps_of_a_hybrid_in_padded_rows_and_the_user_is_told(hybrid, hybrid_path):
    plain = PlainTrainer(hybrid_path)
    assert_equal_weights(hybrid.weights[0], plain.parameters, atol=0)
    for step, answers in enumerate(STEPS[:2]):
        norm = plain.step(answers, step=step)
        assert_equal_weights(
            hybrid.weights[step + 1], plain.parameters, atol=1e-4
        )  # 1 % of an update, whose size AdamW normalizes
        assert hybrid.metrics[step]["grad_norm"] == pytest.approx(norm, rel=1e-4)
        assert 0 < hybrid.metrics[step]["padding_frac"] < 1 / 3
    [note] = {message.note for message in hybrid.reports if isinstance(message, RankReady)}
    assert re.match("Lfm2ForCausalLM has layers that would carry state .* padded rows", note)


@pytest.mark.deep
def test_a_step_without_trained_tokens_skips_the_update_and_still_publishes(two_ranks):
    empty = STEPS.index([])
    assert two_ranks.metrics[empty]["updates_skipped"] == 1
    assert two_ranks.metrics[empty]["denominator"] == 0
    assert_equal_weights(two_ranks.weights[empty + 1], two_ranks.weights[empty], atol=0)


@pytest.mark.deep
def test_metrics_do_not_depend_on_how_work_is_split_over_ranks(two_ranks, one_rank):
    own = {"busy_s", "close_s", "write_wait_s", "useful_frac"}
    for left, right in zip(two_ranks.metrics, one_rank.metrics, strict=False):
        assert left.keys() == right.keys()
        assert METRICS.keys() <= left.keys()
        for name in left.keys() - own:
            assert left[name] == pytest.approx(right[name], rel=1e-4, abs=1e-5), name
        assert left["useful_frac"] >= right["useful_frac"]  # siblings that are apart do not share their prompt
    mixed = two_ranks.metrics[1]
    assert {name.split("/")[0] for name in mixed if "lag" in name} == {"lag=0", "lag=1"}
    assert mixed["lag=0/sequences"] == 4 * GROUP_SIZE
    assert mixed["denominator"] == sum(len(a.logprobs) for a in STEPS[1])
    assert mixed["all/tis_capped_frac"] > 0


@pytest.mark.deep
def test_every_rank_reports_every_micro_batch_once(two_ranks):
    for rank in range(2):
        trained = [(m.step, m.index) for m in two_ranks.reports if isinstance(m, MicroBatchDone) and m.rank == rank]
        assert trained == [(step, index) for step in range(4) for index in range(3)]


@pytest.mark.deep
def test_a_published_version_is_a_folder_that_transformers_loads(two_ranks, first_folder):
    folder = first_folder / "memory" / "v000004"
    model = AutoModelForCausalLM.from_pretrained(folder, local_files_only=True)
    assert model.dtype == torch.float32
    assert_equal_weights(two_ranks.weights[4], dict(model.named_parameters()), atol=0)
    assert model.get_input_embeddings().weight is model.get_output_embeddings().weight


@pytest.mark.deep
def test_a_c3_violation_ends_the_job_and_names_the_group(two_ranks):
    reason = next(m.reason for m in two_ranks.reports if isinstance(m, TrainerFailed) and m.rank == 0)
    assert reason == "C3: group 100 of version 0 was committed to step 5 (K = 2)"
    assert two_ranks.exit_code == 1


@pytest.mark.deep
def test_a_clean_stop_has_exit_code_0(one_rank):
    assert one_rank.exit_code == 0


@pytest.mark.deep
def test_a_resumed_job_equals_the_uninterrupted_one_bit_for_bit(two_ranks, resumed):
    assert {m.next_step for m in resumed.reports if isinstance(m, RankReady)} == {CHECKPOINT_STEP + 1}
    assert json.loads(resumed.final_state)["step"] == CHECKPOINT_STEP + 2
    assert resumed.final_state == two_ranks.final_state


@pytest.mark.deep
def test_a_version_in_the_store_keeps_its_bytes_and_is_compared(two_ranks, resumed):
    published = [m for m in resumed.reports if isinstance(m, VersionWritten)]
    assert [(m.version, bool(m.differs)) for m in published] == [(3, False), (4, True)]
    assert [m.chain for m in published] == [chain_of(3), chain_of(4)]
    original = {m.version: m.files for m in two_ranks.reports if isinstance(m, VersionWritten)}
    assert [m.files for m in published] == [original[3], original[2]]
    assert_equal_weights(resumed.weights[1], two_ranks.weights[2], atol=0)


@pytest.mark.deep
def test_a_killed_rank_ends_the_others(resumed):
    assert resumed.exit_code != 0
    assert resumed.survivors == []
