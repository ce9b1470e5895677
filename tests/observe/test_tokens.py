"""The account of tokens adds up after every event of whole jobs, and a replay gives the same one."""

from __future__ import annotations

from collections import Counter

import pytest

from dora.core import commands as cmd
from dora.core import events as ev
from dora.core.ids import TrajectoryId
from dora.core.phases import GroupPhase
from dora.observe.tokens import UNGRADED, TokenAccount, TokenLedger
from tests.core.world import Faults, World, settings


class Counted(World):
    """A job whose tokens are counted as a shell would: what an event reports beyond the count before has arrived."""

    def begin(self) -> None:
        self.ledger = TokenLedger(group_size=self.settings.group_size)
        self.counts = Counter[TrajectoryId]()
        self.graded = dict[TrajectoryId, float | None]()
        self.accounts = list[TokenAccount]()
        self.sink = self.take

    def take(self, event: ev.Event, orders: list[cmd.Command]) -> None:
        for trajectory, num_tokens in reported(event).items():
            if num_tokens > self.counts[trajectory]:
                self.ledger.append(trajectory, num_tokens - self.counts[trajectory])
                self.counts[trajectory] = num_tokens
        self.ledger.note(event, orders)
        self.accounts.append(self.ledger.account)


def reported(event: ev.Event) -> dict[TrajectoryId, int]:
    if isinstance(event, ev.GenerationFinished | ev.GenerationStopped | ev.GenerationFailed | ev.CallStarted):
        return {event.trajectory: event.num_tokens}
    if isinstance(event, ev.ProgressReported | ev.InstanceLost | ev.ControllerRestarted):
        return event.num_tokens
    return {}


def job(**faults: float) -> Counted:
    world = Counted(settings(group_size=4, eval_prompt_tokens=(3,) * 4, eval_every=4), seed=11, faults=Faults(**faults))
    world.begin()
    world.run()
    return world


@pytest.fixture(scope="module")
def hard() -> Counted:
    return job(
        zero_variance=0.2, grading_fails=0.2, request_fails=0.1, refused_for_good=0.3, instance_dies=0.05,
        controller_restarts=0.05, late_completion=0.1,
    )  # fmt: skip


def test_the_account_adds_up_after_every_event(hard: Counted) -> None:
    for account in hard.accounts:
        assert account.sampled == account.trained + sum(account.dropped.values()) + account.in_flight
    end = hard.accounts[-1]
    assert end.sampled + end.evaluation == sum(hard.counts.values())
    assert end.evaluation == sum(n for t, n in hard.counts.items() if t < 0) > 0


def test_trained_tokens_are_those_of_graded_answers_in_committed_groups(hard: Counted) -> None:
    size, graded = hard.settings.group_size, dict[int, float | None]()
    committed = set[int]()
    for event, orders in hard.journal:
        if isinstance(event, ev.TrajectoryGraded):
            graded.setdefault(event.trajectory, event.reward)
        committed |= {order.group for order in orders if isinstance(order, cmd.CommitGroup)}
    mine = {t: n for t, n in hard.counts.items() if t >= 0 and t // size in committed}
    end = hard.accounts[-1]
    assert end.trained == sum(n for t, n in mine.items() if graded[t] is not None) > 0
    assert end.dropped[UNGRADED] == sum(n for t, n in mine.items() if graded[t] is None) > 0
    assert {outcome.split(":")[0] for outcome in end.dropped} == {"filtered", "failed"}


def test_a_replay_and_the_counts_of_the_token_store_give_the_same_account(hard: Counted) -> None:
    again = TokenLedger(group_size=hard.settings.group_size, is_replay=True)
    for event, orders in hard.journal:
        again.note(event, orders)
    again.restore(hard.counts)
    assert again.account == hard.accounts[-1]


def test_an_answer_whose_call_a_restart_has_lost_is_not_trained() -> None:
    """Its group is trained with its other answers."""
    world = Counted(settings(group_size=4), seed=2, calls=0.5, faults=Faults(controller_restarts=0.2, replayable=0.3))
    world.begin()
    trained = dict[int, int]()
    deliver = world.deliver

    def watch(event: ev.Event) -> None:
        if isinstance(event, ev.StepTrained):
            answers = [t for group in world.state.feed.groups(event.step) for t in group.trajectories]
            trained[event.step] = sum(t.num_tokens for t in answers if t.reward is not None)
        deliver(event)

    world.deliver = watch  # type: ignore[method-assign]
    world.run()
    end = world.accounts[-1]
    assert end.trained == sum(trained.values())
    assert end.dropped[UNGRADED] > 0
    again = TokenLedger(group_size=4, is_replay=True)
    for event, orders in world.journal:
        again.note(event, orders)
    again.restore(world.counts)
    assert again.account == end


def test_tokens_that_come_after_a_group_has_failed_count_as_failed() -> None:
    ledger = TokenLedger(group_size=2)
    ledger.append(TrajectoryId(0), 5)
    ledger.note(ev.Ticked(1.0), [cmd.DropGroup(0, GroupPhase.FAILED, "generation: gone", (None, None))])
    ledger.append(TrajectoryId(1), 3)
    assert ledger.account == TokenAccount(sampled=8, dropped={"failed: generation: gone": 8})


def test_a_filtered_group_leaves_nothing_behind(hard: Counted) -> None:
    """All of its answers have ended, so that no token of it can arrive."""
    dropped = [order for _, orders in hard.journal for order in orders if isinstance(order, cmd.DropGroup)]
    outcomes = {outcome: {d.group for d in dropped if d.outcome is outcome} for outcome in GroupPhase}
    assert outcomes[GroupPhase.FILTERED]
    assert hard.ledger._outcomes.keys() == outcomes[GroupPhase.FAILED]
