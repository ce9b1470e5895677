"""Workload files: what cannot work is named, and the shipped ones work."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from dora.errors import ConfigError
from dora.sim.limit import limit
from dora.sim.workload import Workload, checked, load

SHIPPED = sorted(Path("launch/workloads").glob("*.toml"))


@pytest.mark.parametrize("path", SHIPPED, ids=lambda p: p.stem)
def test_shipped_workloads_can_be_simulated(path: Path) -> None:
    one = load(path)
    assert limit(one.with_changes(job={"steps": 2}), seed=0).step_s > 0


@pytest.mark.parametrize(
    ("changes", "field"),
    [
        ({"job": {"strategy": "partially"}}, "job.strategy"),
        ({"lengths": {"regime": "E"}}, "lengths.regime"),
        ({"lengths": {"regime": "recorded"}}, "lengths.answers"),
        ({"lengths": {"cap": 66_000}}, "fleet.server.kv_tokens"),
        ({"fleet": {"rollout_devices": 3}}, "fleet.rollout_devices"),
        ({"fleet": {"rollout_devices": 16}}, "fleet.rollout_devices"),
        ({"job": {"group_size": 1}}, "group_size"),
        ({"job": {"steps": 1}}, "steps"),
    ],
)
def test_what_cannot_be_simulated_is_named(changes: dict[str, dict[str, Any]], field: str) -> None:
    with pytest.raises(ConfigError, match=f"there: .*{field}"):
        checked(Workload().with_changes(**changes), origin="there")


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("[job]\nstep = 3\n", "unknown field `step`"),
        ('[job]\nsteps = "3"\n', "job.steps"),
        ("[job\n", "is not TOML"),
        ("[fleet.server]\nslots = 1.5\n", "fleet.server.slots"),
    ],
)
def test_a_file_with_a_mistake_is_named_with_the_mistake(tmp_path: Path, text: str, said: str) -> None:
    path = tmp_path / "mine.toml"
    path.write_text(text)
    with pytest.raises(ConfigError, match=rf"mine\.toml: .*{said}"):
        load(path)


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"none\.toml: cannot be read"):
        load(tmp_path / "none.toml")
