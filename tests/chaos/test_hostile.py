"""A local user without keys attacks every port of a run: nothing changes, and neither memory nor logs grow."""

from __future__ import annotations

import pytest

from tests.chaos import hostile
from tests.chaos.attacks import IDLE, MALFORMED, ZMTP
from tests.chaos.hostile import Seen
from tests.e2e.runs import paced_workload

pytestmark = [pytest.mark.deep, pytest.mark.timeout(300)]

ATTACK_S = 6.0
SCALE = 10.0
WORKLOAD = paced_workload(steps=8, devices=4, rollout_devices=3, slots=16, kv_tokens=8000, tokens_s_per_device=600.0)


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> tuple[Seen, Seen]:
    """Return an undisturbed and an attacked run."""
    base = tmp_path_factory.mktemp("hostile")
    (base / "workload.toml").write_text(WORKLOAD)
    seen = []
    for name, attack_s in (("undisturbed", 0.0), ("attacked", ATTACK_S)):
        line = hostile.paced_job(base / name, workload=base / "workload.toml", time_scale=SCALE)
        seen.append(hostile.watch(line, base / name, attack_s=attack_s))
    return seen[0], seen[1]


def test_every_port_was_attacked_and_answered(runs: tuple[Seen, Seen]) -> None:
    _, hit = runs
    assert sorted(hit.ports.values()) == ["controller", "controller", "paced servers", "paced servers", "paced servers"]
    assert hit.attacks.keys() >= {*MALFORMED, *ZMTP, "idle connections", "slow requests", "POST JSON with no key"}
    idle = hit.attacks["idle connections"]
    assert "refused" not in idle
    assert sum(idle.values()) == IDLE * len(hit.ports)


def test_a_stranger_changes_nothing_in_a_run(runs: tuple[Seen, Seen]) -> None:
    assert [bound for bound in hostile.state_bounds(*runs) if not bound.holds] == []


def test_a_stranger_fills_neither_memory_nor_disk(runs: tuple[Seen, Seen]) -> None:
    bounds = hostile.memory_bound(*runs), hostile.log_bound(*runs)
    assert [bound for bound in bounds if not bound.holds] == []
