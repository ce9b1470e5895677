"""Bugs that the state machine or the sweep has found, each as the shortest list of events that shows it."""

from __future__ import annotations

import pytest

from dora.core import commands as cmd
from tests.core.builders import Core


@pytest.mark.parametrize("end", ["lost", "push_failed"])
def test_a_block_is_admitted_when_the_last_push_in_flight_ends_without_success(end: str) -> None:
    core = Core("one_step_off", groups_per_step=1)
    core.ready()
    core.publish(0)
    core.up(0)
    core.up(1)
    assert core.pushed(0, 0) == []  # the fleet gets the block's version all together
    getattr(core, end)(1)
    assert [order.group for order in core.of(cmd.AdmitGroup)] == [0]
