"""`dora pace`: a small workload live, compared with its table and its models."""

from __future__ import annotations

import subprocess
from dataclasses import dataclass
from pathlib import Path

import pytest

from dora.core import commands as cmd
from dora.core import events as ev
from dora.journal.audit import audit
from dora.journal.reader import Journal
from dora.journal.run_folder import RunFolder
from dora.sim.workload import Workload, load
from dora.sim.world import World
from tests.e2e.runs import assert_audit_clean, assert_one_clear_error, orders_of, paced_workload, run_to_end

pytestmark = pytest.mark.deep

SEED, SCALE = 3, 20.0
WORKLOAD = paced_workload(steps=5, devices=10, rollout_devices=8, slots=4, kv_tokens=4000, tokens_s_per_device=3000.0)
CALLING = (
    WORKLOAD.replace("steps = 5", "steps = 3")
    .replace("[job]", '[job]\ncalls = "keep"')
    .replace("[fleet]", "[tools]\ncalls = [1.0, 1.0, 1.0]\nlatency_max_s = 2.0\nresult_tokens = 60\n[fleet]")
)


@dataclass
class Finished:
    result: subprocess.CompletedProcess[str]
    folder: RunFolder
    workload: Workload


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Finished:
    home = tmp_path_factory.mktemp("paced")
    return paced(home, WORKLOAD)


def paced(home: Path, workload: str) -> Finished:
    path = home / "workload.toml"
    path.write_text(workload)
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


@pytest.mark.parametrize("strategy", ["sync", "periodic", "one_step_off"])
def test_a_strategy_of_whole_batches_trains_what_it_trains_in_the_simulator(tmp_path: Path, strategy: str) -> None:
    """Which groups make a step is decided by the batches, whatever the times of the two."""
    run = paced(tmp_path, strategy_of(strategy).replace("[fleet]", "[fleet]\ntime_shared = false"))
    assert run.result.returncode == 0, run.result
    trained: list[cmd.CommitGroup] = []
    World(
        run.workload,
        seed=SEED,
        sink=lambda _, orders: trained.extend(o for o in orders if isinstance(o, cmd.CommitGroup)),
    ).run()
    committed = orders_of(run.folder, cmd.CommitGroup)
    assert {(order.group, order.step) for order in committed} == {(order.group, order.step) for order in trained}
    assert max(order.step - order.version for order in committed) <= (strategy == "one_step_off")
    assert_audit_clean(run.folder)


@pytest.mark.parametrize(("strategy", "broken"), [("partial_bounded", "C1"), ("oversample", "C2")])
def test_a_strategy_that_breaks_a_constraint_runs_paced_as_well(tmp_path: Path, strategy: str, broken: str) -> None:
    run = paced(tmp_path, strategy_of(strategy))
    assert run.result.returncode == 0, run.result
    assert len(orders_of(run.folder, cmd.CommitGroup)) == run.workload.job.steps * run.workload.job.groups_per_step
    report = audit(run.folder)
    assert report.ok
    assert set(report.broken_by_design) == {broken}


def test_a_paced_run_makes_the_calls_of_the_table(tmp_path: Path) -> None:
    run = paced(tmp_path, CALLING)
    assert run.result.returncode == 0, run.result
    assert_audit_clean(run.folder)
    settings, simulated = Journal(run.folder.journal).header.settings, run.workload.settings()
    assert (settings.orchestration, settings.decode_time) == (simulated.orchestration, simulated.decode_time)
    assert settings.orchestration.calls == "keep"
    answers, size, ended = run.workload.answers(seed=SEED), run.workload.job.group_size, 0
    made, sent_at = dict[int, int](), dict[int, float]()
    for event, orders in Journal(run.folder.journal):
        if isinstance(event, ev.CallStarted | ev.CallFinished | ev.GenerationFinished):
            group, sibling = divmod(event.trajectory, size)
            total, calls = answers.group(group).lengths[sibling], answers.group(group).calls_of(sibling)
            number = made.get(event.trajectory, 0)
        if isinstance(event, ev.CallStarted):
            assert event.num_tokens == (calls[number].at if number < len(calls) else total)
        elif isinstance(event, ev.CallFinished) and number < len(calls):
            assert (event.ended, event.failed) == (False, "")
            assert event.num_tokens == calls[number].at + calls[number].num_tokens
            assert event.at - sent_at[event.trajectory] >= calls[number].latency_s
            made[event.trajectory] = number + 1
        elif isinstance(event, ev.CallFinished | ev.GenerationFinished):  # the latter if the token budget ends it
            assert event.num_tokens == total
            assert number == len(calls)
            ended += 1
        sent_at |= {order.trajectory: event.at for order in orders if isinstance(order, cmd.CallEnvironment)}
    job = run.workload.job
    assert ended >= job.steps * job.groups_per_step * size
    settings = Journal(run.folder.journal).header.settings
    assert settings.orchestration.calls == "keep"
    assert settings.prefill_s_per_token == run.workload.fleet.server.prefill_s_per_token


def strategy_of(strategy: str) -> str:
    """The workload under another strategy; without K where it is a setting of `dora` alone."""
    k = "max_staleness = 1\n" if strategy == "partial_bounded" else ""
    return WORKLOAD.replace("max_staleness = 1\n", f'strategy = "{strategy}"\n{k}')


def test_a_workload_with_faults_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "workload.toml"
    path.write_text("[faults]\ninstance_hours = 1.0\n")
    result = run_to_end("pace", str(path), "--folder", str(tmp_path))
    assert_one_clear_error(result, code=2, says="faults: are simulated, not paced")


def test_a_folder_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    path = tmp_path / "workload.toml"
    path.write_text(WORKLOAD)
    result = run_to_end("pace", str(path), "--folder", str(path / "runs"))
    assert_one_clear_error(result, code=2, says=rf"--folder {path}/runs: cannot be written: Not a directory")
