"""The audit of servers of adapters: nothing is found in real journals, and every fault that is planted."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from dora.core import commands as cmd
from dora.core import events as ev
from dora.core.commands import Command
from dora.core.ids import VersionId
from dora.journal.audit import audit_entries
from tests.core.builders import Core, generate, published, push, shared, unload, unloading
from tests.core.world import Faults, run
from tests.journal.recorded import (
    Entries,
    first_command,
    first_event,
    with_command,
    with_commands,
    with_event,
)

FAULTS = Faults(
    push_fails=0.1,
    request_fails=0.05,
    instance_dies=0.05,
    zero_variance=0.2,
    controller_restarts=0.1,
    late_completion=0.1,
    kept=0.5,
)


def found(core: Core, change: Callable[[Entries], Entries] = lambda entries: entries) -> set[str]:
    """What the audit itself finds; that the replay decides otherwise is another finding."""
    entries = change([(event, list(orders)) for event, orders in core.journal])
    violations = audit_entries(core.state.settings, entries).violations
    return {f"{v.rule}: {v.id} {v.message}" for v in violations if v.rule not in ("replay", "invariants")}


def last(*orders: Command) -> Callable[[Entries], Entries]:
    """Further orders at the end of a journal."""
    return lambda entries: with_commands(entries, len(entries) - 1, [*entries[-1][1], *orders])


@pytest.mark.parametrize("strategy", ["dora", "sync", "periodic", "one_step_off"])
def test_a_real_journal_is_clean_and_its_late_completions_are_those_of_the_core(strategy: str) -> None:
    unloads = 0
    for seed in range(3):
        world = run(
            strategy, seed=seed, num_instances=2, faults=FAULTS, adapters=True, max_top_up=1000.0, checked=False
        )
        report = audit_entries(world.settings, world.journal)
        assert report.violations == ()
        assert report.late_completions == world.state.counters.late_completions
        assert report.migrations == world.state.counters.migrations
        unloads += sum(isinstance(e, ev.VersionUnloaded) for e, _ in world.journal)
    assert unloads


def test_a_request_before_the_load_of_its_version_is_confirmed_is_found() -> None:
    core = published()
    work = [cmd.AdmitGroup(8, 1, 2), generate(16, on=0, version=1)]
    said = "C1 serving: trajectory 16 of version 1 goes to instance 0, which holds version 0"
    assert said in found(core, last(*work))
    core.loaded(0, 1)
    assert found(core) == set()


@pytest.mark.parametrize("changes", [{"attempt": 9}, {"version": 0}])
def test_a_request_after_a_load_that_was_never_confirmed_is_found(changes: dict[str, int]) -> None:
    core = shared()
    at, _ = first_event(core.journal, ev.WeightPushFinished, lambda e: e.version == 1)
    assert found(core, lambda entries: with_event(entries, at, **changes)) == {
        f"C1 serving: trajectory {t} of version 1 goes to instance 0, which holds version 0" for t in (16, 17)
    }


def test_a_request_under_a_version_that_was_unloaded_is_found() -> None:
    core = unloading()
    core.unload_failed(0, 0)
    work = generate(15, on=0, version=0, attempt=9, tokens=1)
    said = "C1 serving: trajectory 15 of version 0 goes to instance 0, which holds version 1"
    assert said in found(core, last(work))


@pytest.mark.parametrize("up", [{}, {"holds": None}, {"holds": 1}], ids=["down", "up", "with the label of a version"])
def test_a_request_on_a_server_that_outlived_its_controller_is_found(up: dict[str, Any]) -> None:
    core = shared()
    core.restarted(dict.fromkeys(range(8, 18), 0))
    if up:
        core.up(0, **up)
    work = generate(16, on=0, version=1, attempt=2)
    said = "C1 serving: trajectory 16 of version 1 goes to instance 0, which holds no confirmed version"
    assert said in found(core, last(work))


#: Orders at the end of a journal, each with what is said of it. Version 0 is load 1 there, version 1 load 2. Version 0
#: is being unloaded by attempt 3; trajectories 16 and 17 run under version 1.
WRONG = [
    (unload(0, version=1, attempt=4, load=2), "unloads version 1 while trajectory 16 runs on it"),
    (unload(0, version=0, attempt=4, load=1), "unloads version 0, but its load 1 is under way"),
    (unload(0, version=0, attempt=4, load=2), "unloads version 0, but its load 2 has another version or is unknown"),
    (unload(0, version=0, attempt=4, load=9), "unloads version 0, but its load 9 has another version or is unknown"),
    (push(0, version=0, attempt=4), "is given version 0, which it has or may have already"),
    (push(0, version=1, attempt=4), "is given version 1, which it has or may have already"),
]


@pytest.mark.parametrize(("order", "said"), WRONG)
def test_a_load_or_unload_out_of_place_is_found(order: Command, said: str) -> None:
    core = unloading()
    assert found(core) == set()
    assert f"C1 serving: instance 0 {said}" in found(core, last(order))


def test_an_unload_under_a_request_is_found_although_its_group_was_given_up() -> None:
    core = shared()
    core.failed(8, final=True)  # 9 runs until it is stopped
    found_here = found(core, last(*[unload(0, version=0, attempt=3, load=1)]))
    assert "C1 serving: instance 0 unloads version 0 while trajectory 9 runs on it" in found_here


def test_an_unload_of_what_an_unfinished_answer_needs_elsewhere_is_found() -> None:
    core = shared(instances=2)
    idle = {order.instance for _, orders in core.journal for order in orders if isinstance(order, cmd.Generate)}
    assert idle == {0, 1}
    for t in range(8, 18):
        if core.state.trajectories[t].instance is core.state.instances[0]:  # type: ignore[index]
            core.finished(t)
    assert found(core) == set()
    running = min(t for t, one in core.state.trajectories.items() if one.version == 0 and one.instance is not None)
    said = f"C1 serving: instance 0 unloads version 0 while trajectory {running} is unfinished"
    assert found(core, last(unload(0, version=0, attempt=3, load=1))) == {said}


def test_an_answer_whose_environment_failed_needs_its_version_no_more() -> None:
    core = shared()
    core.called(8)
    for t in range(9, 16):
        core.finished(t)
    core.result(8, failed="raised: ValueError")
    assert [order.version for order in core.of(cmd.UnloadVersion)] == [0]
    assert found(core) == set()


def test_an_unload_under_a_call_is_found_although_no_request_runs() -> None:
    core = shared()
    core.called(8)
    for t in range(9, 16):
        core.finished(t)
    assert found(core, last(unload(0, version=0, attempt=3, load=1))) == {
        "C1 serving: instance 0 unloads version 0 while trajectory 8 is unfinished"
    }


def test_a_load_that_failed_may_be_unloaded_while_answers_wait_for_its_version() -> None:
    core = shared()
    core.lost(0)
    core.up(0)
    core.load_failed(0, 0)
    core.tick(2.0)
    core.unloaded(0, 0)
    assert [order.version for order in core.of(cmd.UnloadVersion)] == [0]
    assert found(core) == set()


def test_a_load_that_reads_back_another_version_is_a_failure_and_may_be_unloaded() -> None:
    core = published()
    core.pushed(0, 7, attempt=2)
    core.tick(2.0)
    core.unloaded(0, 1)
    assert [order.attempt for order in core.of(cmd.UnloadVersion)] == [3]
    assert found(core) == set()


@pytest.mark.parametrize(
    ("kind", "said"),
    [
        (cmd.PushWeights, "is given version 1 as load 1, but that name was used before"),
        (cmd.UnloadVersion, "unloads version 0 as attempt 1, but that name was used before"),
    ],
)
def test_a_name_that_is_used_twice_is_found(kind: type[Command], said: str) -> None:
    core = unloading()
    place, _ = first_command(core.journal, kind, lambda order: order.attempt > 1)  # type: ignore[attr-defined]
    assert f"C1 serving: instance 0 {said}" in found(core, lambda entries: with_command(entries, place, attempt=1))


def test_a_name_of_before_a_loss_is_found_and_a_new_one_is_not() -> None:
    core = shared()
    core.lost(0)
    core.up(0)
    assert found(core) == set()
    place, order = first_command(core.journal, cmd.PushWeights, lambda o: o.attempt > 2)
    said = f"C1 serving: instance 0 is given version {order.version} as load 2, but that name was used before"
    assert said in found(core, lambda entries: with_command(entries, place, attempt=2))


def test_more_adapters_than_a_server_has_room_for_are_found() -> None:
    core = shared()  # K + 3 = 4
    loads = [push(0, version=v, attempt=v + 1) for v in (2, 3, 4)]
    assert not any("beside" in message for message in found(core, last(*loads[:2])))
    assert "C1 serving: instance 0 is given version 4 beside 4 others" in found(core, last(*loads))


@pytest.mark.parametrize("fails", [False, True])
def test_a_version_that_is_released_while_a_server_may_have_its_adapter_is_found(fails: bool) -> None:
    core = unloading(instances=2)
    core.unloaded(0, 0)
    if fails:
        core.unload_failed(1, 0)
    assert found(core, last(cmd.ReleaseVersion(VersionId(0)))) == {
        "versions: version 0 is released, but still needed (untrained groups: 4, on instances 1)"
    }
