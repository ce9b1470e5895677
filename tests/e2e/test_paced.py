"""`dora pace`: a small workload live, against what the table and the models say of it."""

from __future__ import annotations

import subprocess
from dataclasses import dataclass
from pathlib import Path

import pytest

from dora.core import commands as cmd
from dora.core import events as ev
from dora.journal.reader import Journal
from dora.journal.run_folder import RunFolder
from dora.sim.workload import Workload, load
from tests.e2e.runs import assert_audit_clean, assert_one_clear_error, run_to_end

pytestmark = [pytest.mark.e2e, pytest.mark.slow]

SEED, SCALE = 3, 20.0
WORKLOAD = """
[job]
max_staleness = 1
steps = 5
groups_per_step = 8
group_size = 4
[lengths]
regime = "A"
scale = 0.2
cap = 300
prompt_tokens = 50
[fleet]
devices = 10
rollout_devices = 8
push_fixed_s = 0.5
[fleet.server]
slots = 4
kv_tokens = 4000
prefill_s_per_token = 7e-5
decode = { base_s = 0.02, per_request_s = 4e-5, per_token_s = 5e-8 }
[train]
tokens_s_per_device = 3000.0
micro_batch_tokens = 2048
"""


@dataclass
class Finished:
    result: subprocess.CompletedProcess[str]
    folder: RunFolder
    workload: Workload


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Finished:
    home = tmp_path_factory.mktemp("paced")
    path = home / "workload.toml"
    path.write_text(WORKLOAD)
    result = run_to_end(
        *("pace", str(path), "--seed", str(SEED), "--time-scale", str(SCALE)),
        *("--processes", "2", "--folder", str(home / "runs")),
    )
    [folder] = [path for path in (home / "runs").iterdir() if (path / "journal.msgpack").exists()]
    return Finished(result, RunFolder(folder), load(path))


def test_a_paced_run_ends_well_and_keeps_c1_c2_and_c3(finished: Finished) -> None:
    assert finished.result.returncode == 0, finished.result
    assert "all 5 steps are trained" in finished.result.stdout
    assert_audit_clean(finished.folder)


def test_the_lengths_and_rewards_trained_are_those_of_the_table(finished: Finished) -> None:
    answers, size = finished.workload.answers(seed=SEED), finished.workload.job.group_size
    for event, _ in Journal(finished.folder.journal):
        if isinstance(event, ev.GenerationFinished):
            group, sibling = divmod(event.trajectory, size)
            assert event.num_tokens == answers.group(group).lengths[sibling]
            assert event.length_capped == (event.num_tokens == finished.workload.cap)
        elif isinstance(event, ev.TrajectoryGraded):
            group, sibling = divmod(event.trajectory, size)
            if answers.group(group).lengths[sibling] > 1:  # one token is the end: it has no place for a reward
                assert event.reward == answers.group(group).rewards[sibling]


def test_nothing_is_faster_than_the_models_of_decoding_and_training(finished: Finished) -> None:
    """A busy machine can only add to the times of the models."""
    workload, begun, steps_trained = finished.workload, dict[int, tuple[float, int]](), 0
    decode, sent_at = workload.fleet.server.decode, dict[int, float]()
    for event, orders in Journal(finished.folder.journal):
        for order in orders:
            if isinstance(order, cmd.Generate):
                begun[order.trajectory] = (event.at, order.num_tokens)
            elif isinstance(order, cmd.TrainMicroBatch) and order.last:
                sent_at[order.step] = event.at
        if isinstance(event, ev.GenerationFinished):
            since, had = begun[event.trajectory]
            whole_steps = event.num_tokens - had - 1  # it may join in the middle of one
            assert event.at - since >= whole_steps * decode.base_s
        elif isinstance(event, ev.StepTrained):
            assert event.at - sent_at[event.step] >= workload.train.update_s
            steps_trained += 1
    assert steps_trained == workload.job.steps


def test_a_workload_with_faults_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "workload.toml"
    path.write_text("[faults]\ninstance_hours = 1.0\n")
    result = run_to_end("pace", str(path), "--folder", str(tmp_path))
    assert_one_clear_error(result, code=2, says="faults: are simulated, not paced")
