"""Partial rollout and over-sampling: updates in flight, the capacity gate, and groups that are thrown away."""

from __future__ import annotations

import msgspec
import pytest

from dora.core import commands as cmd
from dora.core import events as ev
from dora.core.core import handle
from dora.core.feasibility import CapacityGate, Formation, formation_of
from dora.core.ids import FOREIGN_VERSION, GroupId, InstanceId, TrajectoryId
from dora.core.phases import GroupPhase
from dora.core.strategies import STRATEGIES, Rules, rules_of, strategy_of
from dora.journal.audit import audit_entries
from tests.core.builders import Core, admit, commit, generate, grade, push, started, stop
from tests.core.world import Faults, World, run, settings


def finished(core: Core, t: int, *spans: ev.Span) -> list[cmd.Command]:
    return core.tell(ev.GenerationFinished(core.now, TrajectoryId(t), 1, spans[-1][2], False, spans))


def interrupted(strategy: str = "partial", **changes: object) -> Core:
    """Step 0 is trained and version 1 published while groups 2 and 3 (trajectories 4 to 7) run; N = 2, G = 2, K = 1."""
    values: dict[str, object] = {"groups_per_step": 2, "instances": 2, "slots": 4, "max_staleness": 1, **changes}
    core = started(strategy, **values)  # type: ignore[arg-type]
    for group in (0, 1):
        core.answer(group)
    core.train(0)
    core.publish(1)
    return core


# -- settings ---------------------------------------------------------------------------------------------------------


def test_partial_and_oversample_are_settings_of_the_same_rules() -> None:
    free = Rules(max_staleness=3, streamed=True, batched=False, in_flight="in_place", bounded=False)
    assert rules_of("partial", max_staleness=3, pause="in_place") == free
    bounded = Rules(max_staleness=3, streamed=True, batched=False, in_flight="retract")
    assert rules_of("partial_bounded", max_staleness=3) == bounded
    surplus = Rules(max_staleness=0, streamed=True, batched=False, oversample=2.0)
    assert rules_of("oversample", max_staleness=3, oversample=2.0) == surplus
    carried = msgspec.structs.replace(surplus, streamed=False, in_flight="retract", bounded=False)
    assert rules_of("partial_sync", max_staleness=3, oversample=2.0) == carried


@pytest.mark.parametrize("name", STRATEGIES)
def test_a_strategy_is_known_by_its_rules(name: str) -> None:
    assert strategy_of(rules_of(name, max_staleness=2)) == name


def test_only_violations_by_design_are_allowed() -> None:
    broken = {name: rules_of(name, max_staleness=2).broken_by_design for name in STRATEGIES}
    assert {name: found for name, found in broken.items() if found} == {
        "partial": ("C1", "C3"),
        "partial_bounded": ("C1",),
        "partial_sync": ("C1", "C3"),
        "oversample": ("C2",),
    }


# -- the capacity gate ------------------------------------------------------------------------------------------------


def gate(strategy: str = "partial", **changes: object) -> Formation:
    return formation_of(settings(strategy, **changes))  # type: ignore[arg-type]


def test_the_gate_admits_k_plus_v_plus_1_steps_of_groups_less_those_accepted_or_running() -> None:
    form = gate(max_staleness=2, groups_per_step=4, steps=8)
    assert isinstance(form, CapacityGate)
    assert form.slack(0) == 12
    for _ in range(12):
        form.admit(form.deadline(0))
    assert (form.slack(0), form.slack(1)) == (0, 4)
    for _ in range(4):
        form.commit(form.deadline(0))
    form.close()
    form.drop(form.deadline(0))
    assert (form.slack(0), form.slack(1)) == (1, 5)


def test_the_gate_admits_no_more_than_the_job_trains() -> None:
    form = gate(max_staleness=5, groups_per_step=4, steps=3)
    assert form.slack(0) == form.slack(2) == 12


def test_the_gate_commits_whatever_is_complete_however_stale() -> None:
    form = gate(max_staleness=0, groups_per_step=1, steps=8)
    assert form.deadline(0) == 7
    assert form.staleness_allowed(0, step=7)
    assert not form.staleness_allowed(3, step=2)


def test_oversample_admits_alpha_n_groups_per_version() -> None:
    form = gate("oversample", groups_per_step=5)
    assert form.slack(0) == 8
    form.close()
    assert form.slack(0) == 0


def test_partial_sync_has_the_same_surplus_and_none_that_the_job_could_not_train() -> None:
    form = gate("partial_sync", groups_per_step=4, steps=3)
    assert form.slack(0) == 6
    for _ in range(4):
        form.admit(form.deadline(0))
        form.commit(form.deadline(0))
    form.close()
    assert (form.slack(0), form.slack(1)) == (0, 6)
    form.close()
    assert form.slack(2) == 4


# -- updates in flight ------------------------------------------------------------------------------------------------


def test_a_published_version_is_pushed_at_once_to_every_instance_whatever_runs_there() -> None:
    core = interrupted()
    assert core.of(cmd.PushWeights)[-2:] == [push(0, version=1, attempt=2), push(1, version=1, attempt=2)]
    assert core.of(cmd.StopRequest) == []
    assert core.of(cmd.ReleaseVersion) == [cmd.ReleaseVersion(0)]


def test_an_instance_gets_new_work_again_when_it_has_the_new_version() -> None:
    core = interrupted()
    assert not [o for o in core.of(cmd.AdmitGroup) if o.version == 1]
    orders = core.pushed(0, 1)
    assert orders[:2] == [admit(4, version=1, deadline=7), generate(8, on=0, version=1)]


def test_queued_trajectories_continue_under_the_new_version_and_keep_their_tag() -> None:
    core = interrupted(slots=3, instances=1)
    waiting = next(t for g in core.state.ledger.groups.values() for t in g.waiting)
    orders = core.pushed(0, 1)
    for t in [t for t in core.state.trajectories if core.state.trajectories[t].instance is not None]:
        orders += finished(core, t, (0, 0, 5))
    assert generate(waiting.id, on=0, version=1) in orders
    assert waiting.group is not None
    assert (waiting.group.version, waiting.group.current) == (0, 1)


def test_staleness_counts_from_the_version_at_admission() -> None:
    core = interrupted()
    core.pushed(0, 1)
    core.pushed(1, 1)
    for t in (4, 5):
        finished(core, t, (0, 0, 3), (1, 3, 9))
        core.graded(t, float(t % 2))
    assert core.of(cmd.CommitGroup)[-1] == commit(2, version=0, step=1)
    assert core.state.counters.staleness[:2] == [2, 1]


def test_an_answer_with_tokens_of_a_later_version_is_a_conflict_once_and_no_failure() -> None:
    core = interrupted()
    core.pushed(0, 1)
    core.pushed(1, 1)
    assert finished(core, 4, (0, 0, 3), (1, 3, 9))[0] == grade(4)
    assert finished(core, 5, (1, 0, 9))[0] == grade(5)
    assert finished(core, 6, (0, 0, 9))[0] == grade(6)
    assert core.state.counters.version_conflicts == 2


@pytest.mark.parametrize("version", [FOREIGN_VERSION, 2])
def test_an_answer_with_an_impossible_version_fails_the_run(version: int) -> None:
    core = interrupted()
    event = ev.GenerationFinished(core.now, TrajectoryId(4), 1, 9, False, ((version, 0, 9),))
    [order] = [o for o in handle(core.state, event) if isinstance(o, cmd.FailRun)]
    assert order.reason.startswith(f"C1: instance 1 reports version {version} for trajectory 4, whose tag is 0")


def test_after_a_failed_update_residents_continue_elsewhere() -> None:
    core = interrupted()
    failed = next(i.id for i in core.state.instances.values() if i.residents)
    other = 1 - failed
    here = list(core.state.instances[failed].residents)
    core.pushed(other, 1)
    orders = core.push_failed(failed)
    assert [o for o in orders if isinstance(o, cmd.StopRequest)] == [stop(t, on=failed) for t in here]
    stopped = ev.GenerationStopped(core.now, here[0], 1, 4, ((0, 0, 4),))
    core.finished(8)  # makes room
    assert generate(here[0], on=other, version=1, attempt=2, tokens=4) in core.tell(stopped)


def test_no_instance_is_lost_because_it_pauses_during_an_update() -> None:
    core = interrupted(watchdog_s=100.0)
    busy = next(i.id for i in core.state.instances.values() if i.residents)
    core.tick(after=150.0)
    assert core.of(cmd.CondemnInstance) == []
    core.pushed(busy, 1)
    core.tick(after=50.0)
    assert core.of(cmd.CondemnInstance) == []
    core.tick(after=100.0)
    assert [o.instance for o in core.of(cmd.CondemnInstance)] == [busy]


def evaluated() -> tuple[Core, TrajectoryId, int]:
    """Version 2 is published while the sample of version 1 runs; the sample, and where it runs."""
    core = Core("partial", groups_per_step=2, eval_prompt_tokens=(3,), eval_every=1)
    core.ready()
    core.publish(0)
    for i in range(2):
        core.up(i)
    core.pushed(0, 0)
    core.pushed(1, 0)
    core.finished(-1)
    core.graded(-1, 1.0)  # version 0 is evaluated before anything is admitted
    for group in (0, 1):
        core.answer(group)
    core.train(0)
    core.publish(1)
    core.pushed(0, 1)
    core.pushed(1, 1)  # the sample of version 1 runs by now
    sample = next(t for t in core.state.trajectories.values() if t.group is None)
    assert sample.instance is not None
    kept = sample.instance.id
    for group in (2, 3):
        core.answer(group)
    core.train(1)
    orders = core.publish(2)
    assert [o.instance for o in orders if isinstance(o, cmd.PushWeights)] == [1 - kept]
    return core, sample.id, kept


def test_an_evaluation_keeps_its_version_on_the_instances_that_decode_it() -> None:
    core, sample, kept = evaluated()
    core.tell(ev.GenerationFinished(core.now, sample, 1, 4, False, ((1, 0, 4),)))
    assert push(kept, version=2, attempt=3) in core.graded(sample, 1.0)


def test_a_sample_that_lost_its_server_gets_the_next_empty_one_under_its_version() -> None:
    core, sample, kept = evaluated()
    core.lost(kept, {sample: 2})
    assert core.up(kept) == [push(kept, version=1, attempt=3)]
    assert core.pushed(kept, 1) == [generate(sample, on=kept, version=1, attempt=3, tokens=2)]


def test_a_sample_without_a_server_takes_none_that_decodes_for_the_trainer() -> None:
    core, sample, kept = evaluated()
    core.pushed(1 - kept, 2)
    assert core.state.instances[InstanceId(1 - kept)].num_training > 0
    orders = core.lost(kept, {sample: 2}) + core.tick(1.0)
    assert not [order for order in orders if isinstance(order, cmd.PushWeights)]


def test_the_watchdog_of_requests_restarts_after_a_push() -> None:
    core = interrupted(no_progress_s=1e9)
    pushes = [order.instance for order in core.of(cmd.PushWeights) if order.version == 1]
    core.now += 1_000.0
    for instance in pushes:
        core.pushed(instance, 1)
    assert core.tick(20.0) == []


def test_partial_is_not_bounded_by_k_and_its_bounded_variant_is() -> None:
    def stale(strategy: str) -> list[int]:
        seen = [0] * 12
        for seed in range(4):
            tail = lambda r: 60 if r.random() < 0.1 else 2  # noqa: E731
            world = run(strategy, max_staleness=1, seed=seed, steps=12, length=tail, train_s=0.2)
            assert world.state.counters.version_conflicts > 0
            for i, n in enumerate(world.state.counters.staleness):
                seen[i] += n
        return seen

    assert sum(stale("partial")[2:]) > 0
    assert sum(stale("partial_bounded")[2:]) == 0


# -- over-sampling ----------------------------------------------------------------------------------------------------


def oversampled(**changes: object) -> Core:
    """Version 0 has admitted three groups (trajectories 0 to 5) for a step of two; group 0 is complete."""
    rules = rules_of("oversample", max_staleness=0, oversample=1.5)
    core = started("oversample", groups_per_step=2, slots=8, rules=rules, **changes)  # type: ignore[arg-type]
    assert [o.group for o in core.of(cmd.AdmitGroup)] == [0, 1, 2]
    core.answer(0)
    return core


def test_a_full_step_discards_what_is_not_complete_and_stops_it() -> None:
    core = oversampled()
    core.finished(2)
    orders = core.answer(2)
    dropped = cmd.DropGroup(GroupId(1), GroupPhase.DISCARDED, "over-sampled", (None, None))
    assert orders[-5:-1] == [commit(2, version=0, step=0), dropped, stop(3, on=0), cmd.CloseStep(0, 2)]
    assert core.state.counters.scheduling_aborts == 1
    assert core.state.ledger.counts[GroupPhase.DISCARDED] == 1


def test_a_discarded_group_is_forgotten_when_its_last_sibling_has_gone() -> None:
    core = oversampled()
    core.finished(2)
    core.answer(2)
    forgotten = cmd.ForgetGroups((GroupId(1),))
    assert forgotten not in core.stopped(3, tokens=2)
    assert forgotten in core.graded(2, 1.0)


def test_a_new_controller_does_not_grade_what_is_left_of_a_discarded_group() -> None:
    core = oversampled()
    core.finished(2)
    core.answer(2)
    core.stopped(3, tokens=2)
    assert core.restarted() == [cmd.ForgetGroups((GroupId(1),))]
    assert audit_entries(core.state.settings, core.journal).ok


def test_discarded_groups_are_neither_topped_up_nor_counted_as_top_ups() -> None:
    core = oversampled(max_top_up=0.1)
    core.answer(1)
    assert core.of(cmd.FailRun) == []
    assert [o.group for o in core.of(cmd.AdmitGroup)] == [0, 1, 2]


def test_no_discarded_group_is_trained_and_no_other_is_lost() -> None:
    world = run("oversample", faults=Faults(zero_variance=0.3, request_fails=0.02), group_size=3)
    counts = world.state.ledger.counts
    assert counts[GroupPhase.TRAINED] == 32
    assert counts[GroupPhase.DISCARDED] > 0
    assert sum(counts.values()) == world.state.ledger.admitted
    dropped = {o.group for _, orders in world.journal for o in orders if isinstance(o, cmd.DropGroup)}
    assert dropped.isdisjoint(t // 3 for t in world.trained_lengths)


def test_over_sampling_trains_shorter_answers_than_it_generates() -> None:
    def mean_trained(strategy: str) -> float:
        worlds: list[World] = [run(strategy, seed=seed, max_staleness=0, slots=16) for seed in range(4)]
        lengths = [n for world in worlds for n in world.trained_lengths.values()]
        return sum(lengths) / len(lengths)

    assert mean_trained("oversample") < 0.9 * mean_trained("periodic")
