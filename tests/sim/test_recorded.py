"""The journal of a finished run suffices to simulate it again."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import pytest
import typer

from dora.cli.app import app
from dora.core import commands as cmd
from dora.core import events as ev
from dora.core.decode_time import DecodeTime
from dora.core.ids import InstanceId, TrajectoryId
from dora.core.strategies import Settings
from dora.errors import ConfigError
from dora.journal.codec import FORMAT, Header
from dora.journal.run_folder import RunFolder
from dora.journal.writer import JournalWriter
from dora.sim.measure import Result
from dora.sim.recorded import Timed, _Batch, _Reader, fit_times, read_run
from dora.sim.workload import Workload, with_overrides
from tests.core.world import Faults, run
from tests.sim.worlds import simulate, workload


def record(one: Workload, parent: Path, *, steps: int | None = None) -> tuple[RunFolder, Result]:
    """Simulate, and write the run folder of a run that was killed after `steps`."""
    result, world, journal = simulate(one)
    if steps is not None:
        ends = [i for i, (event, _) in enumerate(journal) if isinstance(event, ev.StepTrained)]
        journal = journal[: ends[steps]]
    return write(journal, world.settings, parent), result


def write(journal: Iterable[tuple[ev.Event, Sequence[cmd.Command]]], settings: Settings, parent: Path) -> RunFolder:
    folder = RunFolder.create(parent, name="recorded")
    folder.config.write_text("")
    writer = JournalWriter(folder.journal)
    writer.append(Header(FORMAT, folder.run_id, "2026-01-01T00:00:00Z", "0", settings))
    for event, orders in journal:
        writer.handled(event, orders)
    writer.close()
    return folder


@pytest.mark.parametrize(("strategy", "k"), [("dora", 2), ("periodic", 0), ("one_step_off", 1)])
def test_a_recorded_run_is_predicted_from_its_journal(tmp_path: Path, strategy: str, k: int) -> None:
    one = workload(strategy, k=k)
    folder, own = record(one, tmp_path)
    found, _ = read_run(folder.root)
    assert (found.job.strategy, found.rules) == (one.job.strategy, one.rules)
    assert found.num_instances == one.num_instances
    answers = one.answers(seed=0)
    assert found.lengths.answers[:20] == tuple(tuple(answers.group(i).lengths) for i in range(20))
    assert found.train.update_s == pytest.approx(one.train.update_s)
    assert found.push_s == pytest.approx(one.push_s)
    predicted, _, _ = simulate(found, seed=1)
    assert predicted.step_s == pytest.approx(own.step_s, rel=0.05)


def test_requests_cut_short_by_a_restart_or_a_loss_are_not_measured() -> None:
    faults = Faults(controller_restarts=0.1, instance_dies=0.02, late_completion=0.3)
    world = run(seed=9, slots=4, token_s=0.05, steps=16, faults=faults)
    assert sum(isinstance(event, ev.ControllerRestarted) for event, _ in world.journal) > 1
    trained = [event.step for event, _ in world.journal if isinstance(event, ev.StepTrained)]
    found = _Reader(world.settings, graders=1).read(world.journal)
    assert len(found.trained) == len(set(trained)) == 16
    assert found.trained == sorted(found.trained)
    for request in found.requests:
        assert request.seconds == pytest.approx(0.05 * request.tokens)
        assert 1 <= request.batch + 1e-9 <= 4 + 2e-9


def test_the_end_of_an_older_attempt_is_not_the_end_of_the_request() -> None:
    first, second = (cmd.Generate(TrajectoryId(0), attempt, InstanceId(0), 0, 0) for attempt in (1, 3))
    end = [ev.GenerationFinished(at, TrajectoryId(0), attempt, 9, False, ()) for at, attempt in ((3.0, 1), (7.0, 3))]
    lost = ev.InstanceLost(1.0, InstanceId(0), 1, {}, "gone")
    entries = [(ev.Ticked(0.0), [first]), (lost, []), (ev.Ticked(2.0), [second]), (end[0], []), (end[1], [])]
    found = _Reader(workload().settings(), graders=1).read(entries)
    assert found.requests == [Timed(tokens=9, batch=1.0, read=0, seconds=5.0)]


def test_a_prompt_is_read_once_for_siblings_that_overlap_and_again_when_the_last_has_left() -> None:
    batch = _Batch()
    read = [batch.join(7, prompt=100, produced=produced, at=0.0)[1] for produced in (0, 5, 0)]
    assert (read, batch.read) == ([0, 100, 105], 105)
    for _ in range(3):
        batch.leave(7, at=1.0)
    batch.join(7, prompt=100, produced=0, at=1.0)
    assert batch.read == 205


def test_a_prediction_shows_the_runs_own_step_time_and_the_measurements(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder, _ = record(workload("periodic", k=0), tmp_path)
    dora = typer.main.get_command(app)
    dora.main(["simulate", "--from", str(folder.root), "--processes", "1"], standalone_mode=False)
    told = capsys.readouterr().out
    assert re.search(r"the run itself took [\d.]+ s per step\nmeasured: decoding step [\d.]+ ms \+ ", told)


def timed(*, base_s: float, per_request_s: float, prefill_s: float, answer_s: float) -> list[Timed]:
    return [
        Timed(n, b, read, n * (base_s + per_request_s * b) + read * prefill_s + answer_s)
        for n in (7, 90, 300)
        for b in (1.0, 3.5, 8.0)
        for read in (50, 400)
    ]


def test_times_are_recovered_from_durations() -> None:
    times = {"base_s": 0.01, "per_request_s": 0.002, "prefill_s": 1e-4, "answer_s": 0.2}
    decode, prefill_s, answer_s = fit_times(timed(**times))
    assert decode == DecodeTime(pytest.approx(0.01), pytest.approx(0.002), 0.0)
    assert (prefill_s, answer_s) == (pytest.approx(1e-4), pytest.approx(0.2))


def test_a_fit_has_no_negative_time() -> None:
    decode, prefill_s, answer_s = fit_times(timed(base_s=0.02, per_request_s=-0.001, prefill_s=1e-4, answer_s=-0.01))
    assert min(decode.base_s, decode.per_request_s, prefill_s, answer_s) >= 0
    assert decode.base_s > 0


def test_a_run_that_trained_too_little_cannot_be_simulated(tmp_path: Path) -> None:
    folder, _ = record(workload(), tmp_path, steps=1)
    with pytest.raises(ConfigError, match="has trained 1 steps"):
        read_run(folder.root)


def test_servers_that_left_are_not_simulated(tmp_path: Path) -> None:
    one = workload("periodic", k=0)
    _, world, journal = simulate(one)
    left = [InstanceId(len(world.instances) + i) for i in range(2)]
    come = [(ev.InstanceUp(0.0, id, 1, 16, 8_000), []) for id in left]
    found, _ = read_run(
        write([*come, *((ev.InstanceRemoved(0.0, id), []) for id in left), *journal], world.settings, tmp_path).root
    )
    assert found.num_instances == one.num_instances
    again = [(ev.ControllerRestarted(0.0, 1, {}), []), *((event, orders) for event, orders in journal)]
    (tmp_path / "resumed").mkdir()
    found, _ = read_run(write([*come, *again], world.settings, tmp_path / "resumed").root)
    assert found.num_instances == one.num_instances


@pytest.mark.parametrize(
    "job",
    [
        {}, {"rules": "paper"}, {"rules": "psrl", "calls": "keep"}, {"refill": True, "without": ("tail_care",)},
        {"rules": "areal", "without": ("consolidation", "hysteresis"), "calls": "pinned"},
    ],
    ids=str,
)  # fmt: skip
def test_the_rules_of_a_run_are_read_by_their_names_and_can_be_changed(tmp_path: Path, job: dict[str, Any]) -> None:
    one = workload(job={"steps": 4} | job)
    folder, _ = record(one, tmp_path)
    found, _ = read_run(folder.root)
    assert found.orchestration == one.orchestration
    assert (found.job.rules, found.job.calls) == (one.job.rules, one.job.calls)
    assert with_overrides(found, ['job.calls="keep"']).orchestration.calls == "keep"
    assert with_overrides(found, ['job.rules="paper"']).orchestration.window == "fixed"


@pytest.mark.parametrize("text", ["task = 3", '[task]\ngraders = "many"', "[task]\ngraders = 0"])
def test_graders_that_no_run_has_are_refused_in_one_line(tmp_path: Path, text: str) -> None:
    folder = write([], workload().settings(), tmp_path)
    folder.config.write_text(text)
    with pytest.raises(ConfigError, match=rf"^{re.escape(str(folder.config))}: .*\$\.task.*$"):
        read_run(folder.root)


def test_more_graders_than_answers_take_no_memory(tmp_path: Path) -> None:
    folder, _ = record(workload(), tmp_path)
    folder.config.write_text("[task]\ngraders = 1_000_000_000_000")
    found, measured = read_run(folder.root)
    assert found.grade.workers == len(measured.grading_s)
