"""The document is what its script makes of the results; results can be resumed; statistics against figures by hand."""

from __future__ import annotations

import math
import subprocess
import sys
from pathlib import Path

import pytest
from learning import cells, document
from learning.cells import Cell, LiveCell, LiveResult, Result
from learning.live import from_rows
from learning.stats import paired

from dora.config.load import load


def result(cell: Cell, area: float) -> Result:
    return Result(cell, [(0, 0.2), (4, area)], area, {}, 1.0, profile="p", commit="c", machine="m")


def test_the_document_and_its_pictures_are_those_of_the_results() -> None:
    lags, live = cells.read(cells.LAGS, Result), cells.read(cells.LIVE, LiveResult)
    assert document.DOCUMENT.read_text() == document.render(lags, live), "run: python bench/learning render"
    drawn = document.pictures(lags, live)
    assert {path.name: path.read_text() for path in document.picture_files()} == drawn, (
        "run: python bench/learning render"
    )


def test_the_results_are_of_the_shipped_configuration() -> None:
    made = [*cells.read(cells.LAGS, Result), *cells.read(cells.LIVE, LiveResult)]
    assert {one.profile for one in made} <= {cells.profile()}
    assert len({one.cell for one in made}) == len(made)


def test_a_paired_difference_and_its_error() -> None:
    found = paired({0: 0.5, 1: 0.7, 2: 0.9, 7: 0.0}, {0: 0.4, 1: 0.5, 2: 0.6})
    assert found.mean == pytest.approx(0.2)
    assert found.two_errors == pytest.approx(2 * 0.1 / math.sqrt(3))
    assert found.is_shown
    assert str(found) == "+0.200 ± 0.115"


def test_one_pair_shows_nothing_and_none_says_so() -> None:
    assert not paired({0: 0.5}, {0: 0.4}).is_shown
    assert str(paired({0: 0.5}, {1: 0.4})) == "not run"


@pytest.mark.deep
def test_the_configuration_passes_its_check() -> None:
    command = [sys.executable, "-m", "dora", "check", str(cells.PROFILE), "--set", "status.port=0"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "server and trainer agree" in done.stdout


def test_a_cut_line_is_run_again(tmp_path: Path) -> None:
    path = tmp_path / "lags.jsonl"
    first, second = (result(cell, 0.5) for cell in cells.corrections(1)[:2])
    cells.append(path, first)
    with path.open("ab") as file:
        file.write(b'{"cell":')
    assert cells.read(path, Result) == [first]
    cells.append(path, second)
    assert cells.read(path, Result) == [first, second]


def test_every_cell_is_a_valid_configuration_and_no_run_is_planned_twice() -> None:
    stages = cells.corrections(1), cells.objectives(1)
    configs = [cell.config().model_dump_json() + f"K={cell.staleness}" for cell in {*stages[0], *stages[1]}]
    assert len(set(configs)) == len(configs) == 26 + 33


def test_every_live_run_is_a_valid_configuration() -> None:
    bounds = [load(cells.PROFILE, cell.overrides, environ={}).rules.max_staleness for cell in cells.live_cells(1)]
    assert bounds[:3] == [0, 2, 8]


def test_a_correction_that_helps_is_said_to_help() -> None:
    areas = {"none": 0.4, "tis": 0.6, "icepop": 0.4}
    runs = [
        result(Cell("grpo", name, 16, 1, seed), area + 0.01 * (seed + (seed % 2) * (name == "icepop")))
        for name, area in areas.items()
        for seed in range(3)
    ]
    text = document.render([*runs, *(result(Cell("grpo", "tis", 0, 1, seed), 0.7) for seed in range(3))], [])
    assert "K = 16, against no correction: tis: helps (+0.200" in text
    assert "icepop: no difference shown" in text
    assert "opsm: fewer than two seeds" in text


def test_a_live_run_counts_seconds_from_the_end_of_step_0() -> None:
    steps = [{"kind": "step", "step": s, "at": 70.0 + 2 * s, "staleness_mean": float(s > 0)} for s in range(3)]
    scores = [{"kind": "evaluation", "version": v, "mean": 0.2 + 0.2 * v, "at": 0.0} for v in (0, 3)]
    run = from_rows(
        LiveCell("dora", 2, 0), [*scores, *steps, {"kind": "evaluation_skipped", "version": 2}], profile="p"
    )
    assert run.published == [0.0, 0.0, 2.0, 4.0]
    assert document.area(run, seconds=False, until=0.0) == pytest.approx(0.5)
    assert document.area(run, seconds=True, until=2.0) == pytest.approx(0.35)
