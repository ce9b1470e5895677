"""docs/SIMULATION.md and docs/SCALE.md match the stored simulations, a stored command is what was simulated, and the
pictures of an explanation are what its command draws."""

from __future__ import annotations

import importlib
import itertools
import json
import re
import shlex
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

import msgspec
import pytest
from typer.testing import CliRunner

from dora.app.plan import ask
from dora.cli.app import app
from dora.sim.measure import Result
from dora.sim.sweep import simulate
from tests.sim.test_simulate import dora

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def tables() -> Iterator[ModuleType]:
    """`bench/sweeps/simulation_tables.py`, which is in no package."""
    added = [str(ROOT / "bench"), str(ROOT / "bench" / "sweeps")]
    sys.path[:0] = added
    try:
        yield importlib.import_module("simulation_tables")
    finally:
        for path in added:
            sys.path.remove(path)


@pytest.fixture(scope="module")
def rows(tables: ModuleType) -> list[Any]:
    """What is stored."""
    return list(sys.modules["simulation_found"].recorded())


def test_the_documents_are_what_the_results_render_to(tables: ModuleType, rows: list[Any]) -> None:
    for path, text in tables.documents(rows).items():
        assert (ROOT / path).read_text() == text, "run: PYTHONPATH=. python bench/sweeps/simulation.py --render"


def test_every_table_is_in_a_document(tables: ModuleType) -> None:
    text = "".join((ROOT / path).read_text() for path in tables.DOCUMENTS)
    assert [name for name in tables._BLOCKS if f"<!-- {name} -->\n" not in text] == []


def test_every_stored_simulation_is_of_a_case(tables: ModuleType, rows: list[Any]) -> None:
    assert {row.command for row in rows} <= {case.command for case in tables.CASES}
    assert len({(row.command, row.seed) for row in rows}) == len(rows)


def test_a_row_is_shown_once_all_of_its_seeds_are_simulated(tables: ModuleType, rows: list[Any]) -> None:
    case = next(case for case in tables.CASES if case.file == "tail-bound" and case.k == 2 and not case.sets)
    fewer = [row for row in rows if (row.command, row.seed) != (case.command, 1)]
    text = tables.documents(fewer)["docs/SIMULATION.md"]
    shown, _, missing = (
        text.partition("<!-- interrupt -->")[2].partition("<!-- end -->")[0].partition("Not simulated yet")
    )
    assert case.command not in shown
    assert case.command in missing


def test_the_headline_is_against_the_faster_of_the_on_policy_baselines(tables: ModuleType) -> None:
    plans, plan_tables = sys.modules["plans"], sys.modules["plan_tables"]

    def headline(**step_s: float) -> str:
        changed = []
        for row in plans.recorded():
            name = f"{row.result.strategy}{row.result.max_staleness}"
            result = msgspec.structs.replace(row.result, step_s=step_s.get(name, row.result.step_s))
            changed.append(msgspec.structs.replace(row, result=result))
        return " ".join(plan_tables.headline(plan_tables.found_in(changed)).split())

    times = {"dora1": 600.0, "dora2": 500.0, "dora3": 500.0}
    text = headline(sync0=700.0, dora0=800.0, **times)
    assert "**1.40** times as fast as the best on-policy baseline on 128 GPUs (500 s a step with K" in text
    assert "`sync` takes 700)" in text
    text = headline(sync0=900.0, dora0=800.0, **times)
    assert "`periodic` takes 800)" in text
    assert "Against `sync` alone it is 1.80 times on 128 GPUs" in text


def test_every_stored_plan_is_of_a_case(tables: ModuleType) -> None:
    plans = sys.modules["plans"]
    rows = plans.recorded()
    assert {row.command for row in rows} <= {case.command for case in plans.CASES}
    assert len({(row.command, row.seed) for row in rows}) == len(rows)


@pytest.mark.parametrize("index", [0, 20])
def test_a_command_plans_what_its_case_does(tables: ModuleType, index: int) -> None:
    case = sys.modules["plans"].CASES[index]
    words = shlex.split(case.command)[2:]
    options = dict(itertools.pairwise(words))
    sets = [value for option, value in itertools.pairwise(words) if option == "--set"]
    question = ask(ROOT / words[0], None, gpus=None, overrides=sets)
    asked = question.workload.with_changes(
        job={
            "strategy": options["--strategy"],
            "max_staleness": int(options["--k"]),
            "steps": case.workload().job.steps,
        }
    )
    assert asked == case.workload()


def test_only_a_rule_without_which_every_seed_is_slower_is_said_to_matter(tables: ModuleType, rows: list[Any]) -> None:
    case = next(case for case in tables.CASES if case.file == "tail-bound" and case.k == 2 and not case.sets)
    results = [row.result for row in rows if row.command == case.command]
    base = tables.Found(case, results)
    for factors, is_bold in (((1.01, 1.3, 1.02), True), ((0.99, 1.3, 1.3), False)):
        changed = [
            msgspec.structs.replace(r, step_s=r.step_s * factor) for r, factor in zip(results, factors, strict=True)
        ]
        one = tables.Found(replace(case, sets=("some",)), changed)
        found = {("tail-bound", ()): base, ("tail-bound", ("some",)): one}
        assert tables._against(found, "tail-bound", ("some",)).startswith("**") is is_bold


@pytest.mark.parametrize("strategy", ["dora", "partial"])
def test_a_command_simulates_what_its_case_does(tables: ModuleType, strategy: str, tmp_path: Path) -> None:
    chosen = [case for case in tables.CASES if (case.file, case.strategy) == ("tail-bound", strategy)]
    case = replace(chosen[-1], steps=8, seeds=1)
    [_, _, *words] = shlex.split(case.command)
    done = dora(*words, "--json", str(tmp_path / "found.json"))
    assert (done.returncode, done.stderr) == (0, "")
    [found] = json.loads((tmp_path / "found.json").read_text())
    assert msgspec.convert(found, Result) == simulate((case.workload(), 0))


def test_the_pictures_of_the_idle_gpus_are_what_the_command_below_them_draws(tmp_path: Path) -> None:
    text = (ROOT / "docs/explanation/idle-gpus.md").read_text()
    [command] = re.findall(r"^    dora (simulate .*) FOLDER$", text, re.MULTILINE)
    done = CliRunner().invoke(app, [*command.split(), str(tmp_path), "--processes", "1"])
    assert done.exit_code == 0, done.output
    drawn = {"idle-sync": "timeline-sync-k0-12of12", "idle-dora": "timeline-dora-k2-8of12"}
    for name, timeline in drawn.items():
        assert (ROOT / f"docs/pictures/{name}.svg").read_text() == (tmp_path / f"{timeline}.svg").read_text()
