"""The document is what its script makes of the results; results can be resumed; statistics against figures by hand."""

from __future__ import annotations

import math
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import msgspec
import pytest
from learning import cells, document, fleet_tables, fleets, sweep_tables
from learning.cells import Cell, LiveCell, Result
from learning.fleets import FAST, UNCORRECTED, UNFILTERED, FleetCell, FleetCurve, PlanFound, Setting
from learning.jobs import finished
from learning.live import from_rows
from learning.stats import crossing, interval, paired, paired_ratio, smoothed

from dora.config.load import load
from dora.errors import ConfigError


def result(cell: Cell, area: float) -> Result:
    return Result(cell, [(0, 0.2), (4, area)], area, {}, 1.0, profile="p", commit="c", machine="m")


def curve(strategy: str, k: int, seed: int, *, step_s: float, rewards: list[float], control: str = "") -> FleetCurve:
    """A curve with an evaluation every five steps."""
    scored = [(5 * i, reward) for i, reward in enumerate(rewards)]
    times = [step_s * version for version in range(scored[-1][0] + 1)]
    return FleetCurve(
        FleetCell("tail-bound", strategy, k, seed, control),
        times,
        scored,
        scored,
        [],
        [4, 4],
        0,
        0,
        0,
        "",
        60.0,
        "p",
        "c",
        "m",
    )


def of_whole_batch(made: FleetCurve) -> FleetCurve:
    """The same, of a cell whose groups are all trained."""
    return msgspec.structs.replace(made, cell=msgspec.structs.replace(made.cell, every=1), seconds=960.0)


def test_the_document_and_its_pictures_are_those_of_the_results() -> None:
    found = document.measured()
    assert document.DOCUMENT.read_text() == document.render(found), "run: python bench/learning render"
    assert document.first_screen(found).join(document.MARKS) in document.README.read_text()
    drawn = document.pictures(found)
    assert {path.name: path.read_text() for path in document.picture_files()} == drawn, (
        "run: python bench/learning render"
    )


def test_the_results_are_of_the_shipped_configurations() -> None:
    found = document.measured()
    assert all(one.profile == cells.profile(cells.TASKS[one.cell.task]) for one in found.sweep)
    assert {one.profile for one in found.live} <= {cells.with_objective(cells.LIVE_CONFIG)}
    assert all(one.profile == fleets.profile(one.fleet) for one in found.plans)
    assert all(one.profile == fleets.profile(one.cell.fleet) for one in found.curves)
    for rows in (found.sweep, found.curves, found.live):
        assert len({one.cell for one in rows}) == len(rows)
    assert {curve.cell for curve in found.curves} <= {*fleets.curve_cells()}


def test_curves_of_another_task_are_not_gone_on_with(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fleets, "CURVES", tmp_path / "curves.jsonl")
    cells.append(fleets.CURVES, curve("sync", 0, 0, step_s=1.0, rewards=[0.2, 0.4]))
    with pytest.raises(ConfigError, match=r"curves\.jsonl: made with other settings of the task .* move the file away"):
        fleets.run(processes=1, fleets=["tail-bound"])


def test_results_are_of_one_objective_also_if_it_is_the_default(tmp_path: Path) -> None:
    given, other = tmp_path / "given.toml", tmp_path / "other.toml"
    task = cells.TASKS["tail"].read_text()
    given.write_text(task)
    other.write_text(task + '\n[objective]\npreset = "dapo"\n')
    assert cells.with_objective(given) == cells.with_objective(cells.TASKS["tail"]) != cells.with_objective(other)


def test_nothing_is_claimed_before_all_seeds_have_run() -> None:
    results = [result(cell, 0.6) for cell in cells.tuning()]
    stale = [cell for cell in cells.second_round(results) if (cell.objective, cell.correction) == cells.FORMER]
    results += [result(cell, 0.5 if cell.staleness else 0.6) for cell in stale if cell.task == "sums" or cell.seed < 3]
    said = sweep_tables.in_words(results, cells.FORMER)
    assert said.startswith(
        "shows a loss in sums, K = 2: -0.100 ± 0.000; sums, K = 4: -0.100 ± 0.000, and is not decided"
    )
    assert said.endswith("tail, K = 2: -0.100 ± 0.000 (3 of 5 seeds); tail, K = 4: -0.100 ± 0.000 (3 of 5 seeds)")
    assert "**-0.100 ± 0.000**" in sweep_tables.second_table(results, updates=1)
    assert "**-0.100 ± 0.000 (" not in sweep_tables.second_table(results, updates=1)


def test_an_interval_is_that_of_student() -> None:
    found = interval([1.0, 2.0, 3.0, 4.0, 5.0])  # deviation sqrt(2.5), standard error sqrt(0.5), t 2.776
    assert found.mean == pytest.approx(3.0)
    assert found.half == pytest.approx(2.776 * math.sqrt(0.5))
    assert found.is_shown
    assert str(paired({0: 0.5, 1: 0.7, 2: 0.9, 7: 0.0}, {0: 0.4, 1: 0.6, 2: 0.8})) == "+0.100 ± 0.000"
    assert str(paired({0: 0.5}, {1: 0.4})) == "not run"
    assert not paired({0: 0.5}, {0: 0.4}).is_shown


def test_more_seeds_than_the_table_of_student_has_are_refused() -> None:
    assert math.isfinite(interval([*range(10)]).half)
    for seeds, code in (("10", 0), ("11", 2)):
        asked = [sys.executable, "bench/learning", "live", "--seeds", seeds, "--help"]  # options are read in order
        done = subprocess.run(asked, capture_output=True, text=True, timeout=60, check=False)
        assert done.returncode == code, done.stderr
    assert "argument --seeds: invalid choice: 11" in done.stderr


def test_two_equal_differences_show_nothing() -> None:
    """Shares of few prompts are often equal by chance."""
    found = paired({0: 0.5, 1: 0.7}, {0: 0.4, 1: 0.6})
    assert str(found) == "+0.100"
    assert not found.is_shown


def test_a_ratio_is_a_geometric_mean() -> None:
    found = paired_ratio({0: 2.0, 1: 8.0, 2: 4.0}, {0: 1.0, 1: 1.0, 2: 1.0})
    assert found.ratio.startswith("4.00 (")
    assert not found.is_shown  # three seeds show little: 4.3 standard errors


def test_a_reward_is_reached_where_the_smoothed_line_crosses_it() -> None:
    assert smoothed([0.0, 3.0, 0.0, 3.0]) == [0.0, 1.0, 2.0, 1.5]
    assert crossing([(0.0, 0.0), (10.0, 1.0)], 0.5) == 5.0
    assert crossing([(0.0, 0.7), (10.0, 1.0)], 0.5) == 0.0
    assert crossing([(0.0, 0.0), (10.0, 0.4)], 0.5) == math.inf


def test_who_learns_as_much_per_step_in_half_the_time_is_there_twice_as_soon() -> None:
    rewards = [0.2, 0.4, 0.6, 0.7, 0.8, 0.8, 0.8]
    curves = [curve("sync", 0, seed, step_s=100.0 + seed, rewards=rewards) for seed in range(5)]
    curves += [curve("periodic", 0, seed, step_s=120.0 + seed, rewards=rewards) for seed in range(5)]
    curves += [curve("dora", 3, seed, step_s=50.0 + seed / 2, rewards=rewards) for seed in range(5)]
    found = fleet_tables.curves_of(curves, "tail-bound")
    gone = fleet_tables.way(found[Setting("sync", 0)])
    assert (gone.first, gone.last) == (pytest.approx(0.2), pytest.approx(0.8))
    assert fleet_tables.baseline(found, gone.level(0.9)) == Setting("sync", 0)
    faster = fleet_tables.speedup(found, Setting("dora", 3), gone.level(0.9))
    assert math.exp(faster.mean) == pytest.approx(2.0)
    assert faster.is_shown
    plans = {s: PlanFound("tail-bound", s.strategy, s.k, 1, 8, 64, 32_768, 60.0, "p", "c") for s in found}
    row = fleet_tables.main_table(found, plans).splitlines()[3]
    assert row.startswith("| `dora`, K = 3 | 5 |")
    assert "**2.00 (2.00-2.00)**" in row
    assert "+0.000 ± 0.000" in row


def test_the_gain_is_what_more_steps_and_other_step_times_leave_of_the_plans() -> None:
    """By hand: 90 % of the way is 0.74, which the smoothed curves reach after 12 and 15.5 steps."""
    soon, late = [0.2, 0.5, 0.8, 0.8, 0.8, 0.8, 0.8], [0.2, 0.4, 0.6, 0.8, 0.8, 0.8, 0.8]
    curves = [curve("sync", 0, seed, step_s=100.0, rewards=soon) for seed in range(3)]
    curves += [curve("dora", 3, seed, step_s=50.0, rewards=late) for seed in range(3)]
    found = fleet_tables.curves_of(curves, "tail-bound")
    steps = {s: PlanFound("tail-bound", s.strategy, s.k, 1, 8, 64, 32_768, 60.0 / (1 + s.k), "p", "c") for s in found}
    said = " ".join(fleet_tables.parts_of_gain(found, steps).split())
    assert (
        "4.00 times as fast as those of `sync`. It needs 15.5 of them for 12.0, which leaves a ratio of 3.10." in said
    )
    assert said.endswith("it is 1.55.")


def test_the_whole_batch_is_compared_with_the_same_seed() -> None:
    rewards = [0.2, 0.4, 0.6, 0.7, 0.8, 0.8, 0.8]
    curves = [curve("sync", 0, seed, step_s=100.0, rewards=rewards) for seed in range(2)]
    curves += [curve("dora", 3, seed, step_s=50.0 + seed, rewards=rewards) for seed in range(2)]
    assert fleet_tables.batch_control(curves, "tail-bound") == ""
    curves.append(of_whole_batch(curve("dora", 3, 1, step_s=72.0, rewards=[0.1, *rewards[1:]])))
    assert len(fleet_tables.curves_of(curves, "tail-bound")[Setting("dora", 3)]) == 2
    words, _, rows = fleet_tables.batch_control(curves, "tail-bound").partition("\n\n")
    assert words.startswith("**Control**: with the whole batch. The 90 % take 1.41 times the hours, ")
    assert " ".join(words.split()).endswith("How the strategies compare with the whole batch was not measured.")
    part, all_groups = rows.splitlines()[2:]
    assert part == "| `dora`, K = 3, seed 1 | one in 1 | 0.11 | 0.17 | 0.26 | 0.633 | 0.800 | 0.800 | 0.50 | 51 | 1.0 |"
    assert (
        all_groups == "| `dora`, K = 3, seed 1 | all | 0.17 | 0.24 | 0.36 | 0.625 | 0.800 | 0.800 | 0.50 | 72 | 16.0 |"
    )


def test_with_the_whole_batch_strategies_have_a_way_of_their_own_and_one_seed_no_interval() -> None:
    """By hand: with few groups all go to 0.74; with all, to 0.83, where `sync` ends at 0.9."""
    few, whole = [0.2, 0.4, 0.6, 0.7, 0.8, 0.8, 0.8], [0.2, 0.4, 0.6, 0.8, 0.9, 0.9, 0.9]
    curves = [
        made
        for strategy, k, step_s in (("sync", 0, 100.0), ("dora", 3, 60.0), ("periodic", 0, 90.0))
        for made in (
            *(curve(strategy, k, seed, step_s=step_s + 30 * seed, rewards=few) for seed in range(2)),
            of_whole_batch(curve(strategy, k, 0, step_s=2 * step_s + k * 10, rewards=whole)),
        )
    ]
    said = " ".join(fleet_tables.batch_control(curves, "tail-bound").partition("\n\n")[0].split())
    assert said.endswith(
        "`dora` with K = 3 goes 90 % of the way that `sync` goes 1.20 times as soon as `periodic`; with few groups and "
        "the same seed 1.50 times as soon as `periodic`. One seed shows no interval."
    )


def test_a_strategy_that_does_not_arrive_has_no_ratio() -> None:
    up, flat = [0.2, 0.4, 0.6, 0.8, 0.8, 0.8], [0.2, 0.2, 0.2, 0.2, 0.2, 0.2]
    curves = [curve("sync", 0, seed, step_s=100.0, rewards=up) for seed in range(2)]
    curves += [curve("dora", 3, seed, step_s=50.0, rewards=flat) for seed in range(2)]
    found = fleet_tables.curves_of(curves, "tail-bound")
    plans = {s: PlanFound("tail-bound", s.strategy, s.k, 1, 8, 64, 32_768, 60.0, "p", "c") for s in found}
    row = fleet_tables.main_table(found, plans).splitlines()[3]
    assert "| not reached | not reached | not reached |" in row
    assert "not run" not in row
    assert fleet_tables.sentence(found) == ""


def test_a_fault_is_compared_with_what_is_right() -> None:
    good, bad = [0.2, 0.4, 0.6, 0.8, 0.8, 0.8], [0.2, 0.3, 0.4, 0.5, 0.5, 0.5]
    kinds = [("dora", 3, FAST, good), ("dora", 3, UNCORRECTED, bad), ("dora", 3, "", bad)]
    kinds += [("sync", 0, UNFILTERED, bad), ("oversample", 0, UNFILTERED, bad), ("oversample", 0, "", bad)]
    curves = [
        curve(strategy, k, seed, step_s=50.0, rewards=rewards, control=control)
        for strategy, k, control, rewards in kinds
        for seed in range(3)
    ]
    rows = fleet_tables.controls_table(curves).splitlines()[2:]
    assert len(rows) == 2  # the curves of one side of the others are missing
    assert rows[0].startswith(f"| `dora`, K = 3, {UNCORRECTED} | `dora`, K = 3, {FAST} | 3 |")
    assert "**-0.300 ± 0.000**" in rows[0]
    assert rows[1].startswith(f"| `oversample`, {UNFILTERED} | `sync`, {UNFILTERED} | 3 | +0.000 ± 0.000 |")


def test_the_pairs_of_the_second_round_are_those_that_staleness_harms_least() -> None:
    results = [result(cell, 0.6 if cell.objective == "dppo" else 0.5) for cell in cells.tuning()]
    results += [
        result(cell, {"dppo": 0.6, "cispo": 0.55}.get(cell.objective, 0.3)) for cell in cells.first_round(results)
    ]
    best = cells.repeated(results)
    assert [objective for objective, _ in best] == ["dapo"] + ["dppo"] * 3 + ["cispo"] * 2
    stale = [
        result(cell, (0.5 if cell.staleness else 0.6) + 0.01 * cell.seed)
        for cell in dict.fromkeys(cells.second_round(results))
        if cell.seed
    ]
    row = sweep_tables.second_table([*results, *stale], updates=1).splitlines()[3]
    assert row.startswith("| dppo |")
    assert "K = 2" in sweep_tables.second_table(results, updates=1)


def test_the_best_learning_rate_is_that_with_the_largest_area() -> None:
    results = [result(cell, 1.0 - cell.rate) for cell in cells.tuning()]
    assert cells.rates(results)["sums", "gspo", 4] == 0.25
    assert cells.rates(results)["tail", "dapo", 1] == 2.0


@pytest.mark.deep
@pytest.mark.parametrize("path", [*cells.TASKS.values(), cells.LIVE_CONFIG], ids=lambda path: path.name)
def test_the_configurations_pass_their_check(path: Path) -> None:
    command = [sys.executable, "-m", "dora", "check", str(path), "--set", "status.port=0"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "server and trainer agree" in done.stdout


def test_a_cut_line_is_run_again(tmp_path: Path) -> None:
    path = tmp_path / "sweep.jsonl"
    first, second = (result(cell, 0.5) for cell in cells.tuning()[:2])
    cells.append(path, first)
    with path.open("ab") as file:
        file.write(b'{"cell":')
    assert cells.read(path, Result) == [first]
    cells.append(path, second)
    assert cells.read(path, Result) == [first, second]


def test_every_cell_is_a_valid_configuration_and_no_run_is_planned_twice() -> None:
    made = [*cells.tuning(), *cells.first_round([]), *dict.fromkeys(cells.second_round([]))]
    configs = [cell.config().model_dump_json() + f"K={cell.staleness}" for cell in dict.fromkeys(made)]
    assert len(set(configs)) == len(configs)


def test_a_job_that_fails_is_named_and_the_others_are_kept(capsys: pytest.CaptureFixture[str]) -> None:
    with ThreadPoolExecutor(1) as pool:
        jobs = {pool.submit(math.sqrt, number): f"the root of {number}" for number in (4.0, -1.0, 9.0)}
        assert sorted(finished(jobs)) == [2.0, 3.0]
    assert capsys.readouterr().out.startswith("the root of -1.0: ValueError: ")


def test_every_curve_has_a_plan_to_be_made_of() -> None:
    kinds = {(cell.fleet, cell.strategy, cell.k) for cell in fleets.curve_cells()}
    assert len(kinds) == len(fleets.FLEETS) * len(fleets.SETTINGS)
    for fleet, strategy, k in kinds:
        assert fleets.base(fleet, strategy, k).rules.max_staleness <= max(k, 1)


def test_every_live_run_is_a_valid_configuration_with_the_same_servers() -> None:
    planned = cells.live_cells(cells.SEEDS)
    configs = {cell: load(cells.LIVE_CONFIG, cell.overrides, environ={}) for cell in planned}
    assert len(configs) == 4 * cells.SEEDS
    assert {config.num_managed for config in configs.values()} == {4}
    found = {(config.rollout.strategy, config.rules.max_staleness) for config in configs.values()}
    assert found == {("sync", 0), ("periodic", 0), ("dora", 1), ("dora", 3)}


def test_a_live_run_counts_seconds_from_when_its_rank_was_ready() -> None:
    steps = [{"kind": "step", "step": s, "at": 70.0 + 2 * s, "staleness_mean": float(s > 0)} for s in range(3)]
    steps[0]["rank_s"] = {"start": 64.0, "waiting:start": 1.0, "waiting:tail": 3.0, "forward_backward": 2.0}
    scores = [{"kind": "evaluation", "version": v, "mean": 0.2 + 0.2 * v, "at": 0.0} for v in (0, 3)]
    run = from_rows(
        LiveCell("dora", 2, 0), [*scores, *steps, {"kind": "evaluation_skipped", "version": 2}], profile="p"
    )
    assert run.published == [0.0, 5.0, 7.0, 9.0]
    assert run.heldout == [(0, 0.2), (3, pytest.approx(0.8))]
    assert run.staleness == [0.0, 1.0, 1.0]
