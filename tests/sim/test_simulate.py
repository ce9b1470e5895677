"""The command `dora simulate`: sweeps, the table, the data, and its errors."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from msgspec.structs import replace

from dora.core.orchestration import SWITCHES
from dora.errors import ConfigError
from dora.sim.report import notes, rows, table
from dora.sim.sweep import cases, run, simulate
from tests.sim.worlds import workload


def dora(*words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "dora", "simulate", *words], capture_output=True, text=True, timeout=60, check=False
    )


def test_a_sweep_runs_every_setting_once_per_seed() -> None:
    found = cases(
        workload(),
        strategies=["dora", "sync", "one_step_off"],
        staleness=[1, 2],
        splits=[6, 8],
        instances=[],
        seeds=range(2),
    )
    settings = [(w.job.strategy, w.rules.max_staleness, w.fleet.rollout_devices, seed) for w, seed in found]
    assert len(settings) == len(set(settings)) == 2 * (4 + 1 + 2), "K counts for dora alone, splits not for sync"


def test_another_fleet_size_keeps_the_trainers_devices() -> None:
    found = cases(workload(), strategies=[], staleness=[], splits=[], instances=[4, 16], seeds=[0])
    assert [(w.num_instances, w.train_devices) for w, _ in found] == [(4, 4), (16, 4)]


def test_a_split_and_a_number_of_instances_are_not_given_together() -> None:
    with pytest.raises(ConfigError, match=r"^--split, --instances: give one of them"):
        cases(workload(), strategies=[], staleness=[], splits=[6], instances=[4], seeds=[0])


def test_many_processes_give_the_same_results_as_one() -> None:
    found = cases(workload(), strategies=["dora", "sync"], staleness=[], splits=[], instances=[], seeds=[0])
    assert list(run(found, processes=2)) == list(run(found, processes=1))


def test_the_table_compares_with_sync_and_marks_the_best_split() -> None:
    found = cases(workload(), strategies=["dora", "sync"], staleness=[2], splits=[6, 8], instances=[], seeds=[0, 1])
    made = rows(run(found, processes=1))
    lines = table(made, wide=True).splitlines()
    assert [row.strategy for row in made] == ["dora", "dora", "sync"]
    assert made[2].sync_ratio == 1
    assert all(sum(row.instance_shares.values()) == pytest.approx(1) for row in made)
    best = min(made[:2], key=lambda row: row.step_s)
    assert [f"{row.rollout_devices}/12*" in line for row, line in zip(made[:2], lines[2:4], strict=True)] == [
        row is best for row in made[:2]
    ]
    assert len({len(line) for line in lines}) == 1


def test_the_table_has_eight_columns_that_fit_a_terminal_unless_it_is_asked_to_be_wide() -> None:
    found = cases(workload(), strategies=["partial"], staleness=[2], splits=[], instances=[], seeds=[0])
    [partial] = rows(run(found, processes=1))
    made = [partial, *(replace(partial, strategy="dora", rules=f"dora - {name}") for name in SWITCHES)]
    lines = table(made, wide=False).splitlines()
    assert lines[0].count("|") == 8 + 1
    assert max(map(len, lines)) <= 100
    assert lines[3].startswith("| dora - streaming ")
    assert table(made, wide=True).splitlines()[0].count("|") > 20


def test_below_the_narrow_table_stands_what_was_broken() -> None:
    found = cases(workload(), strategies=["partial"], staleness=[2], splits=[], instances=[], seeds=[0])
    [partial] = rows(run(found, processes=1))
    partial = replace(partial, mixed_share=0.125, discarded_share=0.0, beyond_share=0.0)
    assert notes([partial])[1:] == ["partial, K = 2: broken by design: C1 12.5%"]
    kept = replace(partial, mixed_share=0.0, rules="paper", violations=3)
    assert notes([kept])[1:] == ["partial, paper rules, K = 2: 3 VIOLATIONS"]


def test_the_command_prints_a_table_and_writes_the_data(tmp_path: Path) -> None:
    out = tmp_path / "out.json"
    done = dora("launch/workloads/tail-bound.toml", "--steps", "12", "--k", "1,3", "--seeds", "2", "--json", str(out))
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.count("\n| dora ") == 2
    data = json.loads(out.read_bytes())
    assert [(r["max_staleness"], r["seed"], r["violations"]) for r in data] == [
        (1, 0, 0),
        (1, 1, 0),
        (3, 0, 0),
        (3, 1, 0),
    ]


def test_a_key_of_the_workload_can_be_set(tmp_path: Path) -> None:
    base, out = ["launch/workloads/tail-bound.toml", "--steps", "6"], tmp_path / "out.json"
    dora(*base, "--set", "lengths.scale=0.5", "--set", "fleet.push_fixed_s=30", "--json", str(out))
    [changed] = json.loads(out.read_bytes())
    dora(*base, "--json", str(out))
    [plain] = json.loads(out.read_bytes())
    assert changed["limit"]["slowest_s"] < plain["limit"]["slowest_s"], "answers half as long"
    assert changed["instance_shares"]["push"] > plain["instance_shares"]["push"]


def test_a_config_of_a_run_can_be_simulated() -> None:
    done = dora("launch/configs/arithmetic-cpu.toml", "--steps", "6")
    assert (done.returncode, done.stderr) == (0, "")
    assert "a config" in done.stdout


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--k", "one"], "--k one"),
        (["nowhere.toml"], "nowhere.toml: no such file"),
        (["--from", "/nowhere"], "no such run folder"),
        (["--strategy", "partially"], "job.strategy"),
        (["--split", "16"], "fleet.rollout_devices"),
        (["--set", "fleet.push=1"], "--set fleet.push=1: Object contains unknown field `push`"),
        (["--set", "fleet.push_fixed_s=soon"], "Expected `float`, got `str` - at `$.fleet.push_fixed_s`"),
        (["--set", "job.group_size=1"], "job.group_size: must be at least 2"),
        (["--instances", "0"], "--instances 0: a fleet has at least one instance"),
        (["--json", "/dev/null/results.json"], "--json /dev/null/results.json: cannot be written"),
        (["--pictures", "/dev/null/pictures"], "--pictures /dev/null/pictures: cannot be written"),
    ],
)
def test_an_impossible_setting_is_one_line(words: list[str], said: str) -> None:
    done = dora(*words)
    assert done.returncode == 2
    assert len(done.stderr.splitlines()) == 1
    assert said in done.stderr
    assert done.stdout == "", "it is refused before the first simulation"


def test_an_ablation_turns_off_one_rule_of_dora_at_a_time() -> None:
    found = cases(
        workload(),
        strategies=["dora", "sync"],
        staleness=[1],
        splits=[],
        instances=[],
        seeds=[0],
        rules=["dora", "paper"],
    )
    assert [(w.job.strategy, w.job.rules) for w, _ in found] == [("dora", "dora"), ("dora", "paper"), ("sync", "dora")]
    found = cases(workload(), strategies=["dora"], staleness=[1], splits=[], instances=[], seeds=[0], ablate=True)
    assert [w.job.without for w, _ in found] == [(), *((name,) for name in SWITCHES)]
    results = [simulate(case) for case in found]
    assert [r.rules for r in results] == ["dora", *(f"dora - {name}" for name in SWITCHES)]
    assert len(rows(results)) == len(results)
    assert all(not r.violations for r in results)
