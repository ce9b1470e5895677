"""A local user without keys, against every port of a run: nothing changes, and neither memory nor logs grow."""

from __future__ import annotations

import pytest

from tests.chaos import hostile
from tests.chaos.attacks import IDLE, MALFORMED, ZMTP
from tests.chaos.hostile import Seen

pytestmark = [pytest.mark.e2e, pytest.mark.slow, pytest.mark.timeout(300)]

ATTACK_S = 6.0
SCALE = 10.0
WORKLOAD = """
[job]
max_staleness = 1
steps = 8
groups_per_step = 8
group_size = 4
[lengths]
regime = "A"
scale = 0.2
cap = 300
prompt_tokens = 50
[fleet]
devices = 4
rollout_devices = 3
push_fixed_s = 0.5
[fleet.server]
slots = 16
kv_tokens = 8000
prefill_s_per_token = 7e-5
decode = { base_s = 0.02, per_request_s = 4e-5, per_token_s = 5e-8 }
[train]
tokens_s_per_device = 600.0
micro_batch_tokens = 2048
"""


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> tuple[Seen, Seen]:
    """Undisturbed, attacked."""
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
