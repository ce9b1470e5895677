"""A phase changes only as its table says: each change is tried with each cause, and what is listed occurs."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, Final, get_args

import pytest

from dora.core import events as ev
from dora.core import tables
from dora.core.ids import GroupId, InstanceId, Subject, TrajectoryId
from dora.core.phases import (
    GROUP,
    MEMBERSHIP,
    TRAJECTORY,
    WEIGHTS,
    Cause,
    Decision,
    GroupPhase,
    ImpossibleChange,
    Membership,
    Phase,
    TrajectoryPhase,
    WeightsPhase,
    name_of,
)
from dora.core.strategies import rules_of
from dora.core.tables import Group, Holding, Ledger, Server
from tests.core.builders import PROMPT, Core, packing, published, started, unloading
from tests.identity.runs import CALLS, OUTSIDES, play

#: Name of the table, phases before and after, cause.
Change = tuple[str, Phase, Phase, Cause]

TABLES: Final[dict[str, Any]] = {
    "GROUP": GROUP,
    "TRAJECTORY": TRAJECTORY,
    "WEIGHTS": WEIGHTS,
    "MEMBERSHIP": MEMBERSHIP,
}
LISTED: Final[set[Change]] = {
    (name, before, after, cause)
    for name, table in TABLES.items()
    for before, following in table.items()
    for after, causes in following.items()
    for cause in causes
}
CAUSES: Final[tuple[Cause, ...]] = (*get_args(ev.AnyEvent), *Decision)


# -- the tables are the rule ------------------------------------------------------------------------------------------


def change_group(before: GroupPhase, after: GroupPhase, cause: Cause) -> GroupPhase:
    ledger, group = Ledger(), Group(GroupId(7), version=3, deadline=5, num_prompt_tokens=1, group_size=2, admitted_at=0)
    ledger.admit(group)
    group.phase = before
    ledger.move(group, after, cause)
    return group.phase


def change_trajectory(before: TrajectoryPhase, after: TrajectoryPhase, cause: Cause) -> TrajectoryPhase:
    group = Group(GroupId(3), version=3, deadline=5, num_prompt_tokens=1, group_size=2, admitted_at=0)
    trajectory = group.trajectories[1]
    trajectory.phase = before
    trajectory.move(after, cause)
    return trajectory.phase


def change_weights(before: WeightsPhase, after: WeightsPhase, cause: Cause) -> WeightsPhase:
    holding = Holding(before)
    holding.move(after, cause, instance=Server(InstanceId(7), [holding]))
    return holding.phase


def change_membership(before: Membership, after: Membership, cause: Cause) -> Membership:
    instance = Server(InstanceId(7), membership=before)
    instance.change(after, cause)
    return instance.membership


@pytest.mark.parametrize("cause", CAUSES, ids=name_of)
@pytest.mark.parametrize(
    ("name", "kind", "change"),
    [
        ("GROUP", GroupPhase, change_group),
        ("TRAJECTORY", TrajectoryPhase, change_trajectory),
        ("WEIGHTS", WeightsPhase, change_weights),
        ("MEMBERSHIP", Membership, change_membership),
    ],
    ids=TABLES,
)
def test_a_change_is_made_if_its_table_lists_it_with_its_cause(
    name: str, kind: type[Phase], change: Callable[..., Phase], cause: Cause
) -> None:
    for before in kind:
        for after in kind:
            if (name, before, after, cause) in LISTED:
                assert change(before, after, cause) is after
            else:
                message = rf"^\w+ 7: {before.value} --> {after.value} by {name_of(cause)} is impossible \(.+\)$"
                with pytest.raises(ImpossibleChange, match=message):
                    change(before, after, cause)


def test_an_impossible_change_tells_what_the_core_knows_and_the_event_that_led_to_it() -> None:
    core = started()
    core.finished(0)
    core.state.ledger.groups[GroupId(0)].phase = GroupPhase.COMPLETE  # a bug, as no event leads there
    with pytest.raises(ImpossibleChange) as caught:
        core.finished(1, tokens=7)
    assert str(caught.value) == (
        "group 0: complete --> grading by GenerationFinished is impossible "
        "(version 0, deadline 1, 0 siblings unfinished, 2 ungraded)"
    )
    assert caught.value.subject == Subject("group", 0)
    event = "GenerationFinished trajectory=1 attempt=1 num_tokens=7 length_capped=False spans=((0, 0, 7),)"
    assert caught.value.excerpt == (f"     0.000 s  {event}",)


def test_what_the_core_knows_of_a_trajectory_and_of_an_instance() -> None:
    core = packing()
    core.tick(1.0)
    assert str(core.state.trajectories[TrajectoryId(22)]) == "group 11, version 0, 0 tokens, attempt 1, on instance 1"
    assert [str(i) for i in core.state.instances.values()] == [
        "incarnation 1, member, serving, version 0, 2 residents, 2 moving here",
        "incarnation 1, member, draining, version 0, 2 residents, 0 moving here",
    ]
    core.stopped(22, tokens=7)
    core.stopped(23, tokens=7)
    holds = "incarnation 1, member, updating, push 2 of 1, 0 residents, 0 moving here"
    assert str(core.state.instances[InstanceId(1)]) == holds


# -- every change of the tables occurs --------------------------------------------------------------------------------


class Noting(frozenset[Cause]):
    """The causes of a change; those that occur are noted."""

    note: Callable[[Cause], None]

    def __contains__(self, cause: object) -> bool:
        self.note(cause)  # type: ignore[arg-type]
        return super().__contains__(cause)


def noting(seen: set[Change], name: str, before: Phase, after: Phase, causes: Iterable[Cause]) -> Noting:
    noted = Noting(causes)
    noted.note = lambda cause: seen.add((name, before, after, cause))
    return noted


@pytest.fixture
def seen(monkeypatch: pytest.MonkeyPatch) -> set[Change]:
    """The changes that were made, with their causes; those that are not listed have raised."""
    seen: set[Change] = set()
    for name, table in TABLES.items():
        noted = {
            before: {after: noting(seen, name, before, after, causes) for after, causes in following.items()}
            for before, following in table.items()
        }
        monkeypatch.setattr(tables, name, noted)
    return seen


def reads_back(version: int) -> Core:
    """A first push ends with another version than ordered."""
    core = Core()
    core.ready()
    core.publish(0)
    core.up(0)
    core.pushed(0, version)
    return core


def reads_back_again() -> None:
    core = reads_back(7)
    core.tick(1.0)
    core.pushed(0, 7)


def reads_back_in_flight() -> None:
    core = started("partial", groups_per_step=2, instances=2, slots=4)
    for group in (0, 1):
        core.answer(group)
    core.train(0)
    core.publish(1)
    core.pushed(1, 7)


def moving() -> Core:
    """Instance 1 is drained of 22 and 23, which move to instance 0."""
    core = packing()
    core.tick(1.0)
    return core


def a_call_ends_a_move() -> None:
    moving().called(22)


def a_draining_instance_is_lost() -> None:
    moving().lost(1, {22: 7, 23: 7})


def a_draining_instance_is_drained_by_request() -> None:
    moving().drain(1)


def a_controller_restarts_during_a_move() -> None:
    moving().restarted()


def an_instance_is_removed_during_a_move() -> None:
    moving().removed(1)


def an_instance_is_removed_while_siblings_of_a_failed_group_stop() -> None:
    core = started()
    core.failed(0, final=True)
    core.removed(0)


def an_instance_is_removed_while_it_loads() -> None:
    core = Core()
    core.publish(0)
    core.up(0)
    core.removed(0)


def an_instance_is_removed_while_it_is_updated() -> None:
    core = reads_back(7)
    core.tick(1.0)
    core.removed(0)


def an_evaluation_sample_that_is_to_stop_is_refused_for_good() -> None:
    core = started(groups_per_step=2, instances=2, slots=5, eval_prompt_tokens=(PROMPT,))
    core.drain(0)
    core.failed(-1, final=True)


def a_sibling_of_a_failed_group_calls_instead_of_stopping() -> None:
    core = started()
    core.failed(0, final=True)
    core.called(1)


def a_sibling_of_a_failed_group_calls_until_a_restart() -> None:
    core = started()
    core.called(1)
    core.failed(0, final=True)
    core.restarted()


def all_but_one_graded(core: Core, *rewards: tuple[float, float]) -> Core:
    """Groups of three: two siblings of each are graded, and the last one calls."""
    for group, pair in enumerate(rewards):
        first = 3 * group
        for t, reward in zip((first, first + 1), pair, strict=True):
            core.finished(t)
            core.graded(t, reward)
        core.called(first + 2)
    return core


def the_last_sibling_of_equal_ones_fails_with_the_controller() -> None:
    all_but_one_graded(started(group_size=3), (1.0, 1.0)).restarted()


def two_groups_are_complete_at_once_and_the_step_takes_one() -> None:
    rules = rules_of("oversample", max_staleness=0, oversample=2.0)
    core = started("oversample", groups_per_step=1, group_size=3, slots=8, rules=rules)
    all_but_one_graded(core, (0.0, 1.0), (0.0, 1.0)).restarted()


def a_step_was_trained_while_no_controller_lived() -> None:
    core = started(groups_per_step=2)
    for group in (0, 1):
        core.answer(group)
    core.restarted()
    core.ready(1)


def a_server_is_taken_over() -> None:
    core = started()
    core.restarted()
    core.up(0, holds=0)


def a_failed_load_is_unloaded() -> None:
    core = published()
    core.load_failed(0, 1)
    core.tick(1.0)


G, T, W, M = GroupPhase, TrajectoryPhase, WeightsPhase, Membership
#: Changes that random jobs make hardly ever: a list of events for each.
RARE: Final[dict[Change, Callable[[], object]]] = {
    ("GROUP", G.GRADING, G.FILTERED, ev.ControllerRestarted): the_last_sibling_of_equal_ones_fails_with_the_controller,
    ("GROUP", G.COMPLETE, G.DISCARDED, Decision.COMMIT): two_groups_are_complete_at_once_and_the_step_takes_one,
    ("GROUP", G.COMMITTED, G.TRAINED, ev.TrainerReady): a_step_was_trained_while_no_controller_lived,
    ("TRAJECTORY", T.RESIDENT, T.STOPPING, ev.WeightPushFinished): reads_back_in_flight,
    ("TRAJECTORY", T.STOPPING, T.CALLING, ev.CallStarted): a_call_ends_a_move,
    ("TRAJECTORY", T.STOPPING, T.GRADING, ev.GenerationFailed): (
        an_evaluation_sample_that_is_to_stop_is_refused_for_good
    ),
    ("TRAJECTORY", T.STOPPING, T.ABANDONED, ev.CallStarted): a_sibling_of_a_failed_group_calls_instead_of_stopping,
    ("TRAJECTORY", T.CALLING, T.ABANDONED, ev.ControllerRestarted): a_sibling_of_a_failed_group_calls_until_a_restart,
    # A controller removes only instances that are empty, without a push, and not members; the core does not rely on it.
    ("TRAJECTORY", T.RESIDENT, T.WAITING, ev.InstanceRemoved): lambda: started().removed(0),
    ("TRAJECTORY", T.STOPPING, T.WAITING, ev.InstanceRemoved): an_instance_is_removed_during_a_move,
    ("TRAJECTORY", T.STOPPING, T.ABANDONED, ev.InstanceRemoved): (
        an_instance_is_removed_while_siblings_of_a_failed_group_stop
    ),
    ("WEIGHTS", W.LOADING, W.LOST, ev.InstanceRemoved): an_instance_is_removed_while_it_loads,
    ("WEIGHTS", W.DRAINING, W.LOST, ev.InstanceRemoved): an_instance_is_removed_during_a_move,
    ("WEIGHTS", W.UPDATING, W.LOST, ev.InstanceRemoved): an_instance_is_removed_while_it_is_updated,
    ("WEIGHTS", W.LOADING, W.QUARANTINED, ev.WeightPushFinished): lambda: reads_back(7),
    ("WEIGHTS", W.UPDATING, W.QUARANTINED, ev.WeightPushFinished): reads_back_again,
    ("WEIGHTS", W.DRAINING, W.SERVING, ev.InstanceDrainRequested): a_draining_instance_is_drained_by_request,
    ("WEIGHTS", W.DRAINING, W.LOST, ev.InstanceLost): a_draining_instance_is_lost,
    ("WEIGHTS", W.DRAINING, W.LOST, ev.ControllerRestarted): a_controller_restarts_during_a_move,
    ("WEIGHTS", W.LOST, W.SERVING, ev.InstanceUp): a_server_is_taken_over,
    # Random jobs have no adapters, and all siblings have the prompt of their group.
    ("TRAJECTORY", T.WAITING, T.CALLING, Decision.DISPATCH): lambda: started(own_prompts=True),
    ("WEIGHTS", W.SERVING, W.UNLOADING, Decision.PLACE): unloading,
    ("WEIGHTS", W.QUARANTINED, W.UNLOADING, Decision.PLACE): a_failed_load_is_unloaded,
    ("WEIGHTS", W.UNLOADING, W.BLANK, ev.VersionUnloaded): lambda: unloading().unloaded(0, 0),
    ("WEIGHTS", W.UNLOADING, W.QUARANTINED, ev.VersionUnloadFailed): lambda: unloading().unload_failed(0, 0),
    ("WEIGHTS", W.UNLOADING, W.LOST, ev.InstanceLost): lambda: unloading().lost(0),
    ("WEIGHTS", W.UNLOADING, W.LOST, ev.InstanceRemoved): lambda: unloading().removed(0),
    ("WEIGHTS", W.UNLOADING, W.LOST, ev.ControllerRestarted): lambda: unloading().restarted(),
}


@pytest.mark.parametrize("change", RARE, ids=lambda c: f"{c[0]}-{c[1].value}-{c[2].value}-{name_of(c[3])}")
def test_a_rare_change_occurs(change: Change, seen: set[Change]) -> None:
    RARE[change]()
    assert change in seen


def test_every_other_change_occurs_in_random_jobs_and_none_that_is_not_listed(seen: set[Change]) -> None:
    left = LISTED - RARE.keys()
    for seed in range(OUTSIDES):
        play(f"outside:{seed}", lambda *_: None)
        if seed < CALLS:
            play(f"calls:{seed}", lambda *_: None)
        if left <= seen:
            break
    assert left - seen == set()
