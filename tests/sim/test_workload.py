"""Workload files: the shipped ones work, and errors name the field."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest

from dora.core.decode_time import DecodeTime
from dora.errors import ConfigError
from dora.sim.limit import limit
from dora.sim.server import SimulatedServer
from dora.sim.workload import Workload, checked, load

RECORDED: dict[str, Any] = {
    **{"regime": "recorded", "prompts": (5,), "answers": ((9,) * 8,), "rewards": ((1.0,) * 8,), "cap": 1000}
}
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
        ({"train": {"updates": 0}}, "train.updates"),
        ({"job": {"max_episodes": 1}}, "job.max_episodes"),
        ({"fleet": {"weight_bytes": math.inf}}, "fleet.weight_bytes"),
        ({"fleet": {"server": SimulatedServer(decode=DecodeTime(base_s=math.inf))}}, "fleet.server.decode.base_s"),
        ({"fleet": {"server": SimulatedServer(prefill_s_per_token=math.inf)}}, "fleet.server.prefill_s_per_token"),
        ({"job": {"max_staleness": -1}}, "job.max_staleness"),
        ({"fleet": {"server": SimulatedServer(slots=0)}}, "fleet.server.slots"),
        ({"fleet": {"server": SimulatedServer(decode=DecodeTime(base_s=-1.0))}}, "fleet.server.decode.base_s"),
        ({"fleet": {"devices_per_instance": 0}}, "fleet.devices_per_instance"),
        ({"train": {"micro_batch_tokens": 0}}, "train.micro_batch_tokens"),
        ({"faults": {"push_failure_share": 1.0}}, "faults.push_failure_share"),
        ({"fleet": {"answer_s": 0.1}, "faults": {"instance_hours": 1.0}}, "fleet.answer_s"),
        ({"lengths": RECORDED | {"prompts": (65_000,)}}, "fleet.server.kv_tokens"),
        ({"lengths": RECORDED | {"rewards": ((0.0,),)}}, "lengths.rewards"),
        ({"lengths": RECORDED | {"cap": 8}}, "lengths.answers"),
    ],
)
def test_an_impossible_workload_is_an_error_that_names_the_field(
    changes: dict[str, dict[str, Any]], field: str
) -> None:
    with pytest.raises(ConfigError, match=f"there: .*{field}"):
        checked(Workload().with_changes(**changes), origin="there")


def test_many_recorded_answers_without_a_cap_are_checked_in_one_pass() -> None:
    """Each look at the cap goes through all answers: 20,000 looks would take minutes."""
    rows = ((9,) * 8,) * 2_500
    many = {"regime": "recorded", "prompts": (5,) * 2_500, "answers": rows, "rewards": ((1.0,) * 8,) * 2_500}
    assert checked(Workload().with_changes(lengths=many), origin="there").cap == 9


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("[job]\nstep = 3\n", "unknown field `step`"),
        ('[job]\nsteps = "3"\n', "job.steps"),
        ("[job\n", "Expected"),
        ("[fleet.server]\nslots = 1.5\n", "fleet.server.slots"),
    ],
)
def test_a_mistake_in_a_file_is_an_error_that_names_both(tmp_path: Path, text: str, said: str) -> None:
    path = tmp_path / "mine.toml"
    path.write_text(text)
    with pytest.raises(ConfigError, match=rf"mine\.toml:.*{said}"):
        load(path)


def test_a_missing_file_is_an_error_that_names_it(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"none\.toml: no such file"):
        load(tmp_path / "none.toml")
