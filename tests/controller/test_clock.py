"""The clock of a run, over a core: what is late while the controller runs, and what is not after it was stopped."""

from __future__ import annotations

from dora.controller.clock import STOPPED_S, RunClock
from dora.core import commands as cmd
from dora.core import events as ev
from dora.core.commands import Command
from tests.core.builders import Core, started


class Watched:
    """A core with requests in flight, and its clock."""

    def __init__(self, *, scale: float = 1.0) -> None:
        self.seconds = 50.0
        self.now = RunClock(at=7.0, scale=scale, tick_s=1.0 / scale, seconds=lambda: self.seconds)
        self.core: Core = started(no_progress_s=300.0, watchdog_s=60.0)

    def tick(self, *, after_s: float) -> list[Command]:
        self.seconds += after_s
        return self.core.tell(ev.Ticked(self.now()))


def test_a_controller_that_was_stopped_goes_on_as_if_no_time_had_passed() -> None:
    run = Watched()
    assert run.now() == 7.0
    run.now.watch()
    assert run.tick(after_s=1.0) == []
    assert run.tick(after_s=3_600.0) == []
    assert run.now() == 8.0
    assert not run.core.state.finished
    orders = [order for _ in range(60) for order in run.tick(after_s=STOPPED_S)]
    assert [type(order) for order in orders] == [cmd.CondemnInstance, cmd.FailRun]


def test_before_the_controller_runs_nothing_asks_for_the_time_and_all_of_it_counts() -> None:
    run = Watched()
    run.seconds += 600.0
    assert run.now() == 607.0


def test_in_scaled_time_ticks_may_be_rare() -> None:
    run = Watched(scale=0.01)
    run.now.watch()
    run.tick(after_s=100.0)
    assert run.now() == 8.0
