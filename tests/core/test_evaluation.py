"""Evaluation beside rollout: a version like any other, its share of the slots, never in the ledger (rule 9)."""

from __future__ import annotations

import pytest

from dora.core import commands as cmd
from dora.core import events as ev
from dora.core.evaluation import Evaluation
from dora.core.ids import InstanceId, evaluation_index
from tests.core.builders import PROMPT, Core, admit, generate, grade, push, started, stop
from tests.core.world import Faults, World, run, settings

SAMPLES = (PROMPT,) * 4


def reports(core: Core) -> list[int]:
    return [o.version for o in core.of(cmd.ReportEvaluation)]


def past_the_baseline(strategy: str = "dora", *, slots: int, **changes: object) -> Core:
    """Version 0 is evaluated by the only instance, groups run there, and every further version is to be evaluated."""
    core = started(strategy, slots=slots, eval_prompt_tokens=SAMPLES, eval_every=1, **changes)  # type: ignore[arg-type]
    for index in range(1, 5):
        core.finished(-index)
        core.graded(-index, 1.0)
    assert reports(core) == [0]
    return core


# -- which versions ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("every", "evaluated"), [(0, [0, 7]), (3, [0, 3, 6, 7]), (1, list(range(8)))])
def test_the_first_the_last_and_every_nth_version_are_evaluated(every: int, evaluated: list[int]) -> None:
    evaluation = Evaluation(prompt_tokens=SAMPLES, every=every)
    assert [v for v in range(8) if evaluation.wants(v, is_last=v == 7)] == evaluated


def test_without_samples_nothing_is_evaluated() -> None:
    evaluation = Evaluation(prompt_tokens=(), every=1)
    assert not any(evaluation.wants(v, is_last=v == 7) for v in range(8))


@pytest.mark.parametrize("strategy", ["sync", "periodic", "one_step_off", "dora"])
def test_a_run_reports_its_first_version_first_and_its_last_version_last(strategy: str) -> None:
    world = run(strategy, steps=4, eval_prompt_tokens=SAMPLES, eval_every=2)
    reported = [o.version for _, orders in world.journal for o in orders if isinstance(o, cmd.ReportEvaluation)]
    assert (reported[0], reported[-1]) == (0, 4)
    assert isinstance(world.journal[-1][1][-1], cmd.FinishRun)


def test_the_last_version_is_evaluated_if_the_source_runs_dry() -> None:
    world = run(steps=50, prompts=10, eval_prompt_tokens=SAMPLES)
    reported = [o.version for _, orders in world.journal for o in orders if isinstance(o, cmd.ReportEvaluation)]
    assert reported == [0, world.state.formation.step]


# -- version 0 --------------------------------------------------------------------------------------------------------


def test_version_0_is_evaluated_before_anything_is_admitted() -> None:
    core = Core(eval_prompt_tokens=SAMPLES)
    core.ready()
    core.publish(0)
    core.up(0, slots=3)
    assert core.pushed(0, 0) == [generate(t, on=0, version=0) for t in (-1, -2, -3)]
    assert core.finished(-1) == [grade(-1), generate(-4, on=0, version=0)]
    assert core.finished(-2) == [grade(-2), admit(0, version=0, deadline=1), generate(0, on=0, version=0)]


def test_a_queued_sample_of_version_0_is_not_overtaken_by_a_smaller_group() -> None:
    core = Core(eval_prompt_tokens=(PROMPT, 30))
    core.ready()
    core.publish(0)
    core.up(0, kv=60)  # 16 tokens are expected of each: 19 + 46 do not fit, 19 + 19 would
    assert core.pushed(0, 0) == [generate(-1, on=0, version=0)]


@pytest.mark.parametrize("strategy", ["sync", "periodic", "one_step_off", "dora"])
def test_in_a_whole_run_every_sample_of_version_0_is_dispatched_before_the_first_group(strategy: str) -> None:
    world = run(strategy, steps=2, slots=1, eval_prompt_tokens=(PROMPT,) * 10)
    orders = [o for _, orders in world.journal for o in orders if isinstance(o, cmd.Generate | cmd.AdmitGroup)]
    first = next(i for i, o in enumerate(orders) if isinstance(o, cmd.AdmitGroup))
    assert [o.trajectory for o in orders[:first] if isinstance(o, cmd.Generate)] == [-1 - i for i in range(10)]


# -- its share of the slots -------------------------------------------------------------------------------------------


def test_while_training_wants_slots_evaluation_holds_at_most_its_share() -> None:
    core = past_the_baseline(slots=8, steps=20, max_staleness=2, max_eval_share=0.1)
    for group in range(4):
        core.answer(group)
    core.train(0)
    core.publish(1)
    assert core.up(1, slots=12) == [push(1, version=1, attempt=1)]
    assert core.pushed(1, 1) == [  # a tenth of twenty slots, then as many groups as W lets in
        generate(-5, on=1, version=1),
        generate(-6, on=1, version=1),
        admit(8, version=1, deadline=3),
        generate(16, on=1, version=1),
        generate(17, on=1, version=1),
    ]


def test_evaluation_has_all_slots_while_training_could_not_use_them() -> None:
    core = past_the_baseline(slots=3, groups_per_step=1, steps=1)
    core.answer(0)
    core.train(0)
    assert core.publish(1) == [push(0, version=1, attempt=2), cmd.ReleaseVersion(0)]
    assert core.pushed(0, 1) == [generate(t, on=0, version=1) for t in (-5, -6, -7)]


def test_a_small_fleet_gives_evaluation_one_slot() -> None:
    core = past_the_baseline("sync", slots=4, steps=5)
    for group in range(4):
        core.answer(group)
    core.train(0)
    core.publish(1)
    assert core.pushed(0, 1)[:2] == [generate(-5, on=0, version=1), admit(4, version=1, deadline=1)]


# -- making room ------------------------------------------------------------------------------------------------------


def test_samples_give_way_to_the_newest_version_and_later_continue_from_their_tokens() -> None:
    core = past_the_baseline("sync", slots=4, groups_per_step=1, steps=5)
    core.answer(0)
    core.train(0)
    core.publish(1)
    core.pushed(0, 1)
    core.answer(1)
    core.train(1)
    assert core.publish(2) == [stop(t, on=0) for t in (-5, -6, -7, -8)]
    for t in (-5, -6, -7):
        assert core.stopped(t, tokens=4) == []
    assert core.stopped(-8, tokens=9) == [push(0, version=2, attempt=3)]
    assert core.pushed(0, 2)[0] == admit(2, version=2, deadline=2)
    assert push(0, version=1, attempt=4) in core.answer(2)  # version 2 has all its groups: the slots are free
    assert core.pushed(0, 1) == [
        generate(-8, on=0, version=1, attempt=2, tokens=9),
        generate(-7, on=0, version=1, attempt=2, tokens=4),
        generate(-6, on=0, version=1, attempt=2, tokens=4),
        generate(-5, on=0, version=1, attempt=2, tokens=4),
    ]
    assert core.state.counters.scheduling_aborts == 0


def behind_the_newest() -> Core:
    """Version 1 is under evaluation on instance 0 alone; version 2 has instance 1, and groups for both."""
    core = started("sync", slots=4, groups_per_step=4, steps=5, eval_prompt_tokens=(PROMPT,) * 8, eval_every=1)
    for index in range(1, 9):
        core.finished(-index)
        core.graded(-index, 1.0)
    for group in range(4):
        core.answer(group)
    core.train(0)
    core.publish(1)
    core.pushed(0, 1)
    for group in range(4, 8):
        core.answer(group)
    core.up(1)
    core.train(1)
    assert push(1, version=2, attempt=1) in core.publish(2)
    core.pushed(1, 2)
    return core


def test_the_last_instance_of_an_evaluation_is_kept_if_there_is_another() -> None:
    core = behind_the_newest()
    for t in range(-9, -16, -1):
        core.finished(t)
    assert not [o for o in core.of(cmd.StopRequest) if o.trajectory < 0]
    assert not [o for o in core.of(cmd.PushWeights) if o.version == 2 and o.instance == 0]
    assert push(0, version=2, attempt=3) in core.finished(-16)


def test_an_instance_that_is_kept_for_an_evaluation_takes_all_samples_it_has_room_for() -> None:
    core = behind_the_newest()
    assert core.finished(-9) == [grade(-9), generate(-13, on=0, version=1)]  # four slots; evaluation's share is one
    assert len(core.state.instances[InstanceId(0)].residents) == 4


def test_an_evaluation_without_an_instance_gets_one_before_the_newest_gets_another() -> None:
    core = behind_the_newest()
    core.lost(0)
    assert core.up(0) == [push(0, version=1, attempt=3)]


def test_evaluations_of_a_busy_fleet_are_not_put_off_until_the_end() -> None:
    config = settings(max_staleness=2, steps=40, eval_prompt_tokens=(PROMPT,) * 12, eval_every=4)
    world = World(config, seed=0, num_instances=4, slots=6)
    world.run()
    assert world.state.evaluation.overtaken == []


def test_samples_are_not_stopped_for_each_new_version() -> None:
    """A quarter at most, of runs in which a third was when the newest version, as yet without instance, came first."""
    stopped = samples = 0
    for seed in range(3):
        config = settings(max_staleness=2, steps=40, eval_prompt_tokens=(PROMPT,) * 24, eval_every=4)
        world = World(config, seed=seed, num_instances=4, slots=6)
        world.run()
        orders = [order for _, orders in world.journal for order in orders]
        stopped += sum(isinstance(order, cmd.StopRequest) and order.trajectory < 0 for order in orders)
        samples += 24 * sum(isinstance(order, cmd.ReportEvaluation) for order in orders)
    assert 4 * stopped <= samples > 0


def test_a_version_in_need_comes_before_the_one_under_evaluation() -> None:
    core = past_the_baseline("sync", slots=4, groups_per_step=1, steps=5)
    core.answer(0)
    core.train(0)
    core.publish(1)
    core.pushed(0, 1)
    core.answer(1)
    core.train(1)
    core.publish(2)
    for t in (-5, -6, -7, -8):
        core.stopped(t, tokens=4)
    core.pushed(0, 2)
    core.lost(0)
    assert core.up(0) == [push(0, version=2, attempt=4)]
    assert core.pushed(0, 2) == [generate(t, on=0, version=2, attempt=3) for t in (5, 4)]


def test_evaluation_keeps_its_version_until_it_is_reported_and_no_longer() -> None:
    core = past_the_baseline("sync", slots=4, groups_per_step=1, steps=5)
    core.answer(0)
    core.train(0)
    core.publish(1)
    core.pushed(0, 1)
    core.answer(1)
    core.train(1)
    core.publish(2)
    for t in (-5, -6, -7, -8):
        core.finished(t)
    for t in (-5, -6, -7):
        assert core.graded(t, 1.0) == []
    assert core.graded(-8, 1.0) == [cmd.ReportEvaluation(1), cmd.ReleaseVersion(1)]


# -- apart from training ----------------------------------------------------------------------------------------------


def test_samples_never_enter_the_ledger_or_a_step() -> None:
    world = run(steps=4, eval_prompt_tokens=SAMPLES, eval_every=1)
    assert world.state.ledger.admitted == 16
    assert all(t >= 0 for w in world.micro_batches.values() for wave in w for rank in wave.ranks for t in rank)
    samples = {o.trajectory for _, orders in world.journal for o in orders if isinstance(o, cmd.Generate)}
    reports = [o for _, orders in world.journal for o in orders if isinstance(o, cmd.ReportEvaluation)]
    assert sum(t < 0 for t in samples) == len(reports) * len(SAMPLES) > 0


def test_every_sample_is_decoded_under_the_version_it_evaluates() -> None:
    world = run(steps=6, eval_prompt_tokens=SAMPLES, eval_every=1, faults=Faults(instance_dies=0.05, push_fails=0.1))
    for _, orders in world.journal:
        for o in orders:
            if isinstance(o, cmd.Generate) and o.trajectory < 0:
                assert evaluation_index(o.trajectory, num_samples=len(SAMPLES))[0] == o.version


def test_a_sample_whose_grading_fails_does_not_hold_up_the_evaluation() -> None:
    core = Core(eval_prompt_tokens=(PROMPT, PROMPT))
    core.publish(0)
    core.up(0)
    core.pushed(0, 0)
    core.finished(-1)
    core.finished(-2)
    assert core.graded(-1, None) == []
    assert core.graded(-2, 1.0) == [cmd.ReportEvaluation(0)]


def test_a_sample_that_fails_too_often_counts_as_not_graded() -> None:
    core = Core(eval_prompt_tokens=(PROMPT,), max_attempts=2)
    core.publish(0)
    core.up(0)
    core.pushed(0, 0)
    assert core.failed(-1) == [generate(-1, on=0, version=0, attempt=2)]
    assert core.failed(-1)[0] == cmd.ReportEvaluation(0)


class Watched(World):
    """Notes, after every event, how many versions more than K + 1 are held, and which."""

    def deliver(self, event: ev.Event) -> None:
        super().deliver(event)
        window, evaluation = self.state.window, self.state.evaluation
        self.extra = getattr(self, "extra", 0)
        held = [v for v, entry in window.entries.items() if not entry.loading]
        beyond = {v for v in held if v not in window.live()}
        assert beyond <= {evaluation.version, evaluation.due}
        self.extra = max(self.extra, len(held) - self.settings.rules.max_staleness - 1)


@pytest.mark.parametrize("k", [0, 1, 2])
def test_live_versions_exceed_k_plus_1_only_by_the_one_under_evaluation_and_the_next(k: int) -> None:
    extra = 0
    for seed in range(4):
        config = settings(max_staleness=k, steps=10, eval_prompt_tokens=(PROMPT,) * 48, eval_every=3)
        world = Watched(config, seed=seed, num_instances=k + 2, slots=2)
        world.run()
        extra = max(extra, world.extra)
    assert 1 <= extra <= 2


def test_one_version_waits_for_its_evaluation_and_a_newer_one_takes_its_place() -> None:
    core = Core(eval_prompt_tokens=(PROMPT,), eval_every=1, groups_per_step=8, max_staleness=2)
    core.publish(0)
    core.up(0)
    core.pushed(0, 0)
    core.publish(1)
    assert core.state.evaluation.due == 1
    assert cmd.ReleaseVersion(1) in core.publish(2)
    assert (core.state.evaluation.due, core.state.evaluation.overtaken) == (2, [1])


def test_an_evaluation_that_had_to_wait_is_of_the_version_that_was_due() -> None:
    core = Core(eval_prompt_tokens=(PROMPT,), eval_every=2, max_staleness=2)
    core.publish(0)
    core.up(0)
    core.pushed(0, 0)
    for version in (1, 2, 3):
        core.publish(version)
    core.finished(-1)
    core.graded(-1, 1.0)
    assert core.state.evaluation.version == 2
    assert 2 in core.state.window.entries


@pytest.mark.parametrize("seed", range(4))
def test_every_version_that_was_to_be_evaluated_is_reported_or_overtaken(seed: int) -> None:
    world = run("dora", seed=seed, steps=12, eval_prompt_tokens=(3,) * 12, eval_every=1, max_staleness=3)
    reported = [o.version for _, orders in world.journal for o in orders if isinstance(o, cmd.ReportEvaluation)]
    assert sorted([*reported, *world.state.evaluation.overtaken]) == list(range(13))


# -- without steps ----------------------------------------------------------------------------------------------------


def evaluating(**changes: object) -> Core:
    """A run without steps, whose only instance has two slots."""
    core = Core(steps=0, max_staleness=0, eval_prompt_tokens=SAMPLES, **changes)  # type: ignore[arg-type]
    core.publish(0)
    core.ready()
    core.up(0, slots=2)
    return core


def test_without_steps_the_run_ends_with_its_only_evaluation_and_reads_no_prompt() -> None:
    core = evaluating()
    assert core.pushed(0, 0) == [generate(-1, on=0, version=0), generate(-2, on=0, version=0)]
    for index in range(1, 5):
        core.finished(-index)
        orders = core.graded(-index, 1.0)
    assert orders == [cmd.ReportEvaluation(0), cmd.FinishRun("the model is evaluated")]
    assert not [o for _, found in core.journal for o in found if isinstance(o, cmd.FetchPrompts | cmd.AdmitGroup)]


def test_without_steps_answers_that_do_not_come_end_the_run_unless_others_do() -> None:
    core = evaluating(no_progress_s=100.0, watchdog_s=1e6)
    core.pushed(0, 0)
    core.now = 99.0
    core.finished(-1)
    core.graded(-1, 1.0)
    core.now = 198.0
    assert core.tell(ev.Ticked(core.now)) == []
    core.now = 200.0
    assert core.tell(ev.Ticked(core.now)) == [
        cmd.FailRun("no progress for 101 s: 3 answers of the evaluation are not graded")
    ]
    assert core.state.stalled
