"""Adapters: a server holds all versions that are needed side by side, and its slots go to the most urgent work."""

from __future__ import annotations

import pytest

from dora.core import commands as cmd
from dora.core.admission import why_not
from dora.core.ids import InstanceId
from dora.core.on_instances import PUSH_BACKOFF_S
from dora.core.orchestration import Orchestration
from dora.core.phases import WeightsPhase
from dora.core.strategies import rules_of
from dora.journal.audit import audit_entries
from tests.core.builders import PROMPT, Core, admit, generate, published, push, shared, unload, unloading
from tests.core.world import World, replay, settings

ZERO, ONE = InstanceId(0), InstanceId(1)


def phases(core: Core, instance: int = 0) -> list[WeightsPhase]:
    return [h.phase for h in core.state.instances[InstanceId(instance)].holdings if h.phase is not WeightsPhase.BLANK]


# -- loads ------------------------------------------------------------------------------------------------------------


def test_a_new_version_is_loaded_beside_the_others_while_requests_run() -> None:
    core = published()
    assert len(core.state.instances[ZERO].residents) == 8
    assert core.loaded(0, 1) == [
        admit(8, version=1, deadline=2),
        generate(16, on=0, version=1),
        generate(17, on=0, version=1),
    ]
    assert {t.version for t in core.state.instances[ZERO].residents.values()} == {0, 1}


def test_a_server_that_comes_up_is_given_every_version_that_is_needed_the_newest_first() -> None:
    core = shared()
    assert core.up(1) == [push(1, version=1, attempt=1), push(1, version=0, attempt=2)]


def test_a_version_without_any_instance_comes_before_the_newest() -> None:
    core = shared()
    core.lost(0)
    assert core.up(0) == [push(0, version=0, attempt=3), push(0, version=1, attempt=4)]


def test_a_server_that_is_taken_over_counts_as_empty_as_its_loads_are_not_known() -> None:
    core = shared()
    core.restarted()
    core.up(0, holds=1)
    assert phases(core) == [WeightsPhase.LOADING, WeightsPhase.LOADING]


# -- unloads ----------------------------------------------------------------------------------------------------------


def test_a_version_is_unloaded_when_no_trajectory_needs_it_and_released_when_every_server_has_confirmed() -> None:
    core = shared(instances=2)
    ids = [t.id for t in core.state.trajectories.values() if t.version == 0]
    for t in ids[:-1]:
        assert not [order for order in core.finished(t) if isinstance(order, cmd.UnloadVersion)]
    orders = core.finished(ids[-1])
    assert [o for o in orders if isinstance(o, cmd.UnloadVersion)] == [
        unload(0, version=0, attempt=3, load=1),
        unload(1, version=0, attempt=3, load=1),
    ]
    for t in ids:
        core.graded(t, float(t % 2))
    core.train(1)
    assert core.unloaded(0, 0) == []
    assert core.unloaded(1, 0) == [cmd.ReleaseVersion(0)]


def test_a_version_is_released_when_the_server_that_had_not_confirmed_is_lost() -> None:
    core = shared(instances=2)
    for group in (4, 5, 6, 7):
        core.answer(group)
    core.train(1)
    core.unloaded(0, 0)
    assert cmd.ReleaseVersion(0) in core.lost(1)


def test_an_unload_that_failed_is_ordered_again_after_a_pause_and_at_last_the_server_is_condemned() -> None:
    core = shared(watchdog_s=1e6, no_progress_s=1e6)
    for group in (4, 5, 6, 7):
        core.answer(group)
    for pause_s in PUSH_BACKOFF_S:
        assert core.unload_failed(0, 0) == []
        assert core.tick(pause_s / 2) == []
        [again] = [o for o in core.tick(pause_s / 2) if isinstance(o, cmd.UnloadVersion)]
        assert again.load == 1
    assert core.unload_failed(0, 0) == [cmd.CondemnInstance(ZERO, 1, "8 pushes and unloads failed: refused")]


def test_the_version_under_evaluation_is_kept() -> None:
    core = unloading(eval_prompt_tokens=(PROMPT,))
    assert core.of(cmd.UnloadVersion) == []
    core.finished(-1)
    assert core.graded(-1, 1.0)[-1] == unload(0, version=0, attempt=3, load=1)


def test_an_evaluated_version_is_loaded_although_no_training_needs_it() -> None:
    core = unloading(eval_prompt_tokens=(PROMPT,))
    core.lost(0)
    assert push(0, version=0, attempt=4) in core.up(0)


# -- failures ---------------------------------------------------------------------------------------------------------


def test_a_failed_load_quarantines_one_holding_and_its_requests_go_on() -> None:
    core = published()
    assert core.load_failed(0, 1) == []
    assert phases(core) == [WeightsPhase.SERVING, WeightsPhase.QUARANTINED]
    assert core.state.instances[ZERO].takes_work(core.state.window.entries[0].number)
    assert len(core.state.instances[ZERO].residents) == 8


def test_a_failed_load_is_unloaded_first_and_loaded_again_under_a_fresh_name() -> None:
    core = published()
    core.load_failed(0, 1)
    assert core.tick(0.5) == []
    assert core.tick(0.5) == [unload(0, version=1, attempt=3, load=2)]
    assert core.unloaded(0, 1) == [push(0, version=1, attempt=4)]
    assert core.loaded(0, 1)[0] == admit(8, version=1, deadline=2)


def test_the_answer_of_a_load_that_was_given_up_is_ignored() -> None:
    core = published()
    core.load_failed(0, 1)
    core.tick(1.0)
    assert core.pushed(0, 1, attempt=2) == []
    assert phases(core) == [WeightsPhase.SERVING, WeightsPhase.UNLOADING]


def test_a_server_on_which_every_load_fails_is_condemned() -> None:
    core = Core(adapters=True)
    core.ready()
    core.publish(0)
    core.up(0)
    for pause_s in PUSH_BACKOFF_S:
        core.load_failed(0, 0)
        core.tick(pause_s)
        core.unloaded(0, 0)
    assert core.load_failed(0, 0) == [cmd.CondemnInstance(ZERO, 1, "8 pushes failed: refused")]


def loading_where_version_0_was() -> Core:
    """Version 0 is unloaded and version 2 is loaded where it was; version 1, of which 16 and 17 run, is beside it."""
    core = unloading()
    for t in range(8, 16):
        core.graded(t, float(t % 2))
    core.unloaded(0, 0)
    core.train(1)
    assert core.publish(2) == [push(0, version=2, attempt=4)]
    assert core.state.instances[ZERO].holdings[0].pushing == 2
    return core


def test_a_load_into_any_holding_does_not_stop_what_runs_beside_it_when_it_fails() -> None:
    core = loading_where_version_0_was()
    assert core.load_failed(0, 2) == []
    assert {16, 17} <= core.state.instances[ZERO].residents.keys()
    assert not core.state.instances[ZERO].may_be_paused


def test_a_load_under_way_does_not_keep_a_silent_server_from_being_condemned() -> None:
    core = loading_where_version_0_was()
    assert [type(order) for order in core.tick(200.0)] == [cmd.CondemnInstance]


def test_a_server_is_condemned_although_another_holding_is_empty_when_loads_fail() -> None:
    core = published(watchdog_s=1e6, no_progress_s=1e6)
    for t in range(8, 16):
        core.finished(t)
    core.unloaded(0, 0)
    for pause_s in PUSH_BACKOFF_S:
        core.load_failed(0, 1)
        core.tick(pause_s)
        core.unloaded(0, 1)
    assert core.load_failed(0, 1) == [cmd.CondemnInstance(ZERO, 1, "8 pushes failed: refused")]


# -- a free slot ------------------------------------------------------------------------------------------------------


def on_a_smaller_server(*, slots: int, kv: int = 4096, lost: dict[int, int] | None = None, **changes: object) -> Core:
    """Server 0 is lost; server 1, which has both versions and is empty, is all there is."""
    core = shared(**changes)  # type: ignore[arg-type]
    core.up(1, slots=slots, kv=kv)
    core.loaded(1, 0)
    core.loaded(1, 1)
    assert core.state.instances[ONE].is_empty
    core.lost(0, lost)
    return core


def test_a_free_slot_goes_to_waiting_trajectories_by_deadline() -> None:
    core = on_a_smaller_server(slots=2)
    for _ in range(8):
        core.finished(next(iter(core.state.instances[ONE].residents)))
    begun = [(o.version, o.trajectory) for o in core.of(cmd.Generate)[-10:]]
    assert [version for version, _ in begun] == [0] * 8 + [1] * 2
    assert {t for _, t in begun} == set(range(8, 18))


def test_a_free_slot_goes_to_the_share_of_the_evaluation_first() -> None:
    core = on_a_smaller_server(slots=3, eval_prompt_tokens=(PROMPT,) * 3)
    residents = core.state.instances[ONE].residents
    assert [t < 0 for t in residents] == [True, False, False]
    first, second, _ = residents
    assert [o.trajectory >= 0 for o in core.finished(second) if isinstance(o, cmd.Generate)] == [True]
    assert [o.trajectory < 0 for o in core.finished(first) if isinstance(o, cmd.Generate)] == [True]


def test_nothing_overtakes_a_trajectory_that_lacks_room() -> None:
    core = on_a_smaller_server(slots=4, kv=70, lost={8: 60})
    assert list(core.state.instances[ONE].residents) == [9]  # 10 would fit beside it, and 8 does not
    assert core.finished(9)[-1] == generate(8, on=1, version=0, attempt=3, tokens=60)


def test_no_training_overtakes_a_sample_that_lacks_room() -> None:
    core = on_a_smaller_server(slots=4, kv=80, eval_prompt_tokens=(PROMPT, 75, PROMPT), max_eval_share=1.0)
    assert list(core.state.instances[ONE].residents) == [-3]  # and sample -2 is the next


def test_a_new_group_is_admitted_only_when_nothing_waits() -> None:
    core = on_a_smaller_server(slots=2, orchestration=Orchestration(kv_overcommit=False, window="open"))
    core.failed(9, final=True)  # F and W would admit a group in its place
    assert why_not(core.state, core.state.entry(1).number) is None
    before = len(core.of(cmd.AdmitGroup))
    while any(entry.num_waiting for entry in core.state.window.entries.values()):
        assert len(core.of(cmd.AdmitGroup)) == before
        core.finished(next(iter(core.state.instances[ONE].residents)))
    core.finished(next(iter(core.state.instances[ONE].residents)))
    assert len(core.of(cmd.AdmitGroup)) > before


def test_what_no_server_can_serve_yet_holds_up_nothing() -> None:
    core = shared()
    core.up(1)
    core.loaded(1, 1)
    begun = [o for o in core.lost(0) if isinstance(o, cmd.Generate)]
    assert [o.version for o in begun] == [1, 1]
    assert core.state.entry(core.state.instances[ONE].holdings[1].pushing or 0).num_waiting == 8


# -- members ----------------------------------------------------------------------------------------------------------


def test_a_drained_server_loads_nothing_and_still_unloads_what_nobody_needs() -> None:
    core = shared(instances=2)
    core.drain(1)
    for group in (4, 5, 6, 7):
        core.answer(group)
    assert unload(1, version=0, attempt=3, load=1) in core.of(cmd.UnloadVersion)
    core.unloaded(1, 0)
    core.train(1)
    assert [o.instance for o in core.publish(2) if isinstance(o, cmd.PushWeights)] == [ZERO]


def test_a_server_leaves_when_no_load_or_unload_is_under_way() -> None:
    core = shared(instances=2)
    core.up(2)
    assert not [o for o in core.drain(2, leave=True) if isinstance(o, cmd.DismissInstance)]
    core.loaded(2, 1)
    assert core.loaded(2, 0) == [cmd.DismissInstance(InstanceId(2))]


# -- liveness ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("max_staleness", range(5))
@pytest.mark.parametrize("slots", [1, 3, 8])
def test_one_server_suffices_for_any_staleness(max_staleness: int, slots: int) -> None:
    job = settings(max_staleness=max_staleness, adapters=True, eval_prompt_tokens=(3, 3), eval_every=1)
    world = World(job, num_instances=1, slots=slots, seed=slots)
    assert isinstance(world.run(), cmd.FinishRun)
    assert world.state.counters.migrations == 0
    assert world.state.counters.scheduling_aborts == 0
    assert audit_entries(job, world.journal).ok
    replay(job, world.journal)


def test_a_server_has_room_for_the_live_versions_one_under_evaluation_and_one_that_is_unloaded() -> None:
    assert settings(max_staleness=3, adapters=True).num_holdings == 6
    assert settings(max_staleness=3).num_holdings == 1


def test_updates_in_flight_are_not_for_adapters() -> None:
    assert not settings(rules=rules_of("partial", max_staleness=1), adapters=True).is_possible
    assert settings(adapters=True).is_possible
