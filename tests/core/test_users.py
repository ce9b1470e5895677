"""What users ask for: granted or refused by the core, at most once for each id, and never at the end of a run."""

from __future__ import annotations

import pytest

from dora.core import commands as cmd
from dora.core import events as ev
from dora.core.core import handle
from dora.core.ids import InstanceId
from tests.core.builders import Core, generate, started
from tests.core.test_evaluation import SAMPLES, evaluating, reports

ZERO = InstanceId(0)
STOPPING = "the run is being stopped: nothing was changed"
AGAIN = "this request was answered before: nothing was changed again"


def asking(id: str = "") -> ev.RequestTag:
    return ev.RequestTag(id, "ada (127.0.0.1)")


def evaluate(core: Core, id: str = "") -> list[cmd.Command]:
    return core.tell(ev.EvaluationRequested(core.now, request=asking(id)))


def stop(core: Core, id: str = "") -> list[cmd.Command]:
    return core.tell(ev.StopRequested(core.now, request=asking(id)))


def drain(core: Core, id: str, *, instance: int = 0) -> list[cmd.Command]:
    return core.tell(ev.InstanceDrainRequested(core.now, InstanceId(instance), False, request=asking(id)))


def of_every_kind(core: Core, id: str = "") -> list[ev.UserRequest]:
    now, request = core.now, asking(id)
    return [
        ev.InstanceDrainRequested(now, ZERO, True, request=request),
        ev.InstanceRecalled(now, ZERO, request=request),
        ev.ServerOffered(now, "http://a:1", request=request),
        ev.EvaluationRequested(now, request=request),
        ev.StopRequested(now, request=request),
    ]


def refusals(orders: list[cmd.Command]) -> list[str]:
    assert all(isinstance(order, cmd.RefuseRequest) for order in orders)
    return [order.reason.removeprefix("instance 0: ") for order in orders if isinstance(order, cmd.RefuseRequest)]


# -- evaluate now -----------------------------------------------------------------------------------------------------


def with_version_1(*, every: int) -> Core:
    """Version 0 is evaluated; version 1 is published and not yet pushed."""
    core = started("sync", slots=4, groups_per_step=1, steps=5, eval_prompt_tokens=SAMPLES, eval_every=every)
    for index in range(1, 5):
        core.finished(-index)
        core.graded(-index, 1.0)
    core.answer(0)
    core.train(0)
    core.publish(1)
    return core


def test_a_version_that_is_asked_for_is_evaluated_as_one_that_is_due() -> None:
    due, asked = with_version_1(every=1), with_version_1(every=0)
    assert asked.state.evaluation.version is None
    assert evaluate(asked) == []
    for core in (due, asked):
        assert core.pushed(0, 1)[0] == generate(-5, on=0, version=1)
    assert due.orders == asked.orders
    for core in (due, asked):
        for index in range(5, 9):
            core.finished(-index)
            core.graded(-index, 1.0)
        assert reports(core) == [0, 1]
    assert due.orders == asked.orders
    assert refusals(evaluate(asked)) == ["version 1, the newest, is evaluated already"]


def test_there_is_nothing_to_evaluate_without_a_held_out_set() -> None:
    assert refusals(evaluate(started())) == ["the run has no held-out set (eval.sets)"]


def test_no_version_is_evaluated_twice() -> None:
    core = evaluating()
    assert refusals(evaluate(core)) == ["version 0 is being evaluated, or is next"]


# -- once -------------------------------------------------------------------------------------------------------------


def test_what_comes_again_under_an_id_is_refused_by_the_next_controller_too() -> None:
    core = started(instances=2)
    drain(core, "one")
    core.recall(0)
    assert refusals(drain(core, "one")) == [AGAIN]
    core.restarted()
    assert refusals(drain(core, "one")) == [AGAIN]
    assert core.state.instances[ZERO].is_member


def test_an_id_that_was_refused_is_not_granted_later() -> None:
    core = started()
    last = "no other instance is there to take its work; add one first"
    assert refusals(drain(core, "one")) == [last]
    core.up(1)
    core.pushed(1, 0)
    assert refusals(drain(core, "one")) == [AGAIN]
    assert not refusals([o for o in drain(core, "two") if isinstance(o, cmd.RefuseRequest)])


def test_without_an_id_a_request_may_be_repeated() -> None:
    core = started(instances=2)
    for _ in range(3):
        drain(core, "")
        core.recall(0)
    assert core.state.instances[ZERO].is_member


def test_the_memory_of_ids_is_bounded() -> None:
    core = started(instances=2)
    for number in range(1000):
        core.state.requests.append(str(number))
    assert len(core.state.requests) < 1000


# -- the end ----------------------------------------------------------------------------------------------------------


def test_a_stop_ends_the_run_once_and_everything_else_is_then_refused() -> None:
    core = started(instances=2)
    assert stop(core) == [cmd.StopRun()]
    for event in of_every_kind(core):
        assert refusals(core.tell(event)) == [STOPPING]
    assert core.state.instances[ZERO].is_member
    assert core.finished(0) != []  # what is under way still counts


def test_the_next_controller_is_not_stopped() -> None:
    core = started(instances=2)
    stop(core, "one")
    core.restarted()
    assert refusals(stop(core, "one")) == [AGAIN]
    assert stop(core, "two") == [cmd.StopRun()]


@pytest.mark.parametrize("id", ["", "new"])
def test_a_request_to_a_run_that_has_ended_changes_nothing(id: str) -> None:
    core = evaluating()
    core.pushed(0, 0)
    for index in range(1, 5):
        core.finished(-index)
        core.graded(-index, 1.0)
    assert core.state.finished
    assert reports(core) == [0]
    for event in of_every_kind(core, id):
        assert refusals(handle(core.state, event)) == [ev.ENDED]
    assert core.state.instances[ZERO].is_member
    assert not core.state.stopping
