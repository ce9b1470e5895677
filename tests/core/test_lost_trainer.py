"""What the core does when the trainer is lost: it is started again, some times, and gets the same waves."""

from __future__ import annotations

import pytest

from dora.core import commands as cmd
from dora.core import events as ev
from dora.core.commands import Command
from dora.core.on_training import RESTART_PAUSES_S
from tests.core.builders import Core, started


def lose(core: Core, *, incarnation: int | None = None) -> list[Command]:
    number = core.state.feed.incarnation if incarnation is None else incarnation
    return core.tell(ev.TrainerLost(core.now, number, "rank 1 was killed"))


def waves(orders: list[Command]) -> list[cmd.TrainMicroBatch]:
    return [order for order in orders if isinstance(order, cmd.TrainMicroBatch)]


def test_ranks_that_are_started_again_get_the_waves_of_their_step_once_more() -> None:
    core = started(groups_per_step=2)
    core.answer(0)
    core.answer(1)
    sent = waves(core.orders)
    assert sent
    assert lose(core) == [cmd.RestartTrainer(1, RESTART_PAUSES_S[0])]
    assert core.state.feed.open_step is None
    assert waves(core.tell(ev.TrainerReady(core.now, 0))) == sent


def test_no_wave_is_sent_while_there_is_no_trainer_but_groups_are_committed() -> None:
    core = started(groups_per_step=2)
    lose(core)
    before = len(core.of(cmd.TrainMicroBatch))
    core.answer(0)
    core.answer(1)
    assert len(core.of(cmd.TrainMicroBatch)) == before
    assert len(core.of(cmd.CommitGroup)) == 2


def test_what_an_earlier_start_says_late_changes_nothing() -> None:
    core = started(groups_per_step=2)
    lose(core)
    assert lose(core, incarnation=0) == []
    assert core.state.counters.trainer_losses == 1
    assert core.state.counters.late_completions == 1


def test_after_some_losses_in_a_row_the_run_ends_and_can_be_resumed() -> None:
    core = started(groups_per_step=2)
    pauses = [order.after_s for _ in RESTART_PAUSES_S for order in lose(core) if isinstance(order, cmd.RestartTrainer)]
    assert tuple(pauses) == RESTART_PAUSES_S
    assert lose(core) == [
        cmd.FailRun(f"the trainer was lost {len(pauses) + 1} times without training a step: rank 1 was killed")
    ]
    assert core.state.stalled
    core.restarted()
    assert lose(core, incarnation=0) == [cmd.RestartTrainer(1, RESTART_PAUSES_S[0])]


def test_a_step_that_is_trained_for_the_first_time_forgives_the_losses_before_it() -> None:
    core = started(groups_per_step=1, max_staleness=0)
    lose(core)
    lose(core)
    core.tell(ev.TrainerReady(core.now, 0))
    core.answer(0)
    [wave] = waves(core.orders)
    core.tell(ev.MicroBatchTrained(core.now, wave.step, wave.index))
    core.tell(ev.StepTrained(core.now, wave.step))
    assert core.state.feed.losses == 0
    assert lose(core) == [cmd.RestartTrainer(3, RESTART_PAUSES_S[0])]


def test_training_a_step_again_is_no_sign_that_losses_have_ended() -> None:
    core = started(groups_per_step=1, max_staleness=0)
    core.answer(0)
    [wave] = waves(core.orders)
    for _ in range(2):
        core.tell(ev.MicroBatchTrained(core.now, wave.step, wave.index))
        core.tell(ev.StepTrained(core.now, wave.step))
        lose(core)
        core.tell(ev.TrainerReady(core.now, 0))
    assert core.state.feed.losses == 2


def test_the_time_without_a_trainer_is_not_time_that_it_idled() -> None:
    core = started(groups_per_step=2)
    lose(core)
    core.now += 50.0
    core.tell(ev.TrainerReady(core.now, 0))
    core.now += 1.0
    core.answer(0)
    core.answer(1)
    assert core.state.feed.idle_s == pytest.approx(1.0)


def test_a_loss_gives_the_ranks_the_time_without_progress_anew() -> None:
    core = started(groups_per_step=2, no_progress_s=100.0, watchdog_s=1e6)
    core.answer(0)
    core.now += 90.0
    lose(core)
    assert core.tick(90.0) == []
    assert [type(order) for order in core.tick(20.0)] == [cmd.FailRun]
