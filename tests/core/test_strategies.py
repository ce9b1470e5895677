"""The strategies as settings of the same rules, and what holds for whole runs under any of them."""

from __future__ import annotations

import random

import pytest

from dora.core import commands as cmd
from dora.core import events as ev
from dora.core.ids import GroupId, group_of
from dora.core.strategies import Rules, rules_of
from tests.core.builders import C, Core, admit, commit, generate, grade, push, started, wave
from tests.core.world import World, run, settings

STRATEGIES = ["sync", "periodic", "one_step_off", "dora"]


def prompts_by_step(world: World) -> dict[int, set[GroupId]]:
    """Groups in every step's micro-batches."""
    size = world.settings.group_size
    return {
        step: {group_of(t, group_size=size) for wave in waves for rank in wave.ranks for t in rank}
        for step, waves in world.micro_batches.items()
    }


def orders_of(world: World, kind: type[C]) -> list[C]:
    return [o for _, orders in world.journal for o in orders if isinstance(o, kind)]


def heavy_tail(source: random.Random) -> int:
    """One answer in ten is thirty times as long as the others."""
    return 60 if source.random() < 0.1 else 2


# -- settings ---------------------------------------------------------------------------------------------------------


def test_every_strategy_is_three_settings() -> None:
    assert rules_of("sync", max_staleness=3) == Rules(max_staleness=0, streamed=False, batched=False)
    assert rules_of("periodic", max_staleness=3) == Rules(max_staleness=0, streamed=True, batched=False)
    assert rules_of("one_step_off", max_staleness=3) == Rules(max_staleness=1, streamed=False, batched=True)
    assert rules_of("dora", max_staleness=3) == Rules(max_staleness=3, streamed=True, batched=False)


def test_dora_with_k_0_is_periodic_event_for_event() -> None:
    for seed in range(3):
        dora = run("dora", max_staleness=0, seed=seed, eval_prompt_tokens=(3, 3), eval_every=2)
        periodic = run("periodic", max_staleness=0, seed=seed, eval_prompt_tokens=(3, 3), eval_every=2)
        assert dora.journal == periodic.journal


# -- sync and periodic ------------------------------------------------------------------------------------------------


def test_sync_commits_when_all_groups_of_the_batch_are_complete() -> None:
    core = started("sync", groups_per_step=2, slots=4)
    assert core.answer(1) == [grade(2), grade(3)]
    assert core.answer(0)[2:] == [
        commit(1, version=0, step=0),
        commit(0, version=0, step=0),
        cmd.CloseStep(0, 2),
        wave(0, 0, [0, 2], [1, 3], last=True),
    ]


def test_periodic_commits_and_trains_in_completion_order() -> None:
    core = started("periodic", groups_per_step=2, slots=4)
    assert core.answer(1)[2:] == [
        commit(1, version=0, step=0),
        wave(0, 0, [2], [3]),
    ]
    assert core.answer(0)[2:] == [
        commit(0, version=0, step=0),
        cmd.CloseStep(0, 2),
        wave(0, 1, [0], [1], last=True),
    ]


def between_steps(strategy: str) -> Core:
    """Nothing is admitted between a full batch and the next publication."""
    core = started(strategy, groups_per_step=2, slots=8, instances=2)
    assert [o.group for o in core.of(cmd.AdmitGroup)] == [0, 1]
    core.answer(0)
    core.answer(1)
    assert core.train(0) == [cmd.ForgetGroups((GroupId(0), GroupId(1)))]
    assert core.publish(1) == [  # both at once
        push(0, version=1, attempt=2),
        push(1, version=1, attempt=2),
        cmd.ReleaseVersion(0),
    ]
    return core


def test_sync_spreads_siblings_once_all_servers_have_the_version() -> None:
    core = between_steps("sync")
    assert core.pushed(0, 1) == []
    assert core.pushed(1, 1) == [
        admit(2, version=1, deadline=1),
        generate(4, on=0, version=1),
        generate(5, on=1, version=1),
        admit(3, version=1, deadline=1),
        generate(6, on=0, version=1),
        generate(7, on=1, version=1),
    ]


def test_periodic_keeps_siblings_together_on_the_first_server_that_has_the_version() -> None:
    core = between_steps("periodic")
    assert core.pushed(0, 1) == [
        admit(2, version=1, deadline=1),
        generate(4, on=0, version=1),
        generate(5, on=0, version=1),
    ]
    assert core.pushed(1, 1) == [
        admit(3, version=1, deadline=1),
        generate(6, on=1, version=1),
        generate(7, on=1, version=1),
    ]


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_a_top_up_carries_the_version_of_the_batch_it_completes(strategy: str) -> None:
    core = started(strategy, groups_per_step=2, slots=8, max_staleness=0)
    core.answer(1)
    core.answer(0, rewards=(1.0, 1.0))
    due = 1 if strategy == "one_step_off" else 0
    assert core.of(cmd.AdmitGroup)[2:] == [admit(2, version=0, deadline=due)]


def test_sync_and_dora_with_k_0_train_the_same_prompts_in_every_step_with_the_filter_off() -> None:
    for seed in range(3):
        sync = run("sync", seed=seed, filter_zero_variance=False)
        dora = run("dora", max_staleness=0, seed=seed, filter_zero_variance=False)
        assert prompts_by_step(sync) == prompts_by_step(dora) == {s: set(range(4 * s, 4 * s + 4)) for s in range(8)}


# -- one_step_off -----------------------------------------------------------------------------------------------------


def test_one_step_off_admits_the_next_batch_as_one_block_while_this_one_trains() -> None:
    core = started("one_step_off", groups_per_step=2, slots=8, steps=4)
    core.answer(1)
    assert core.answer(0)[2:] == [
        commit(1, version=0, step=0),
        commit(0, version=0, step=0),
        cmd.CloseStep(0, 2),
        wave(0, 0, [0, 2], [1, 3], last=True),
        admit(2, version=0, deadline=1),
        generate(4, on=0, version=0),
        generate(5, on=0, version=0),
        admit(3, version=0, deadline=1),
        generate(6, on=0, version=0),
        generate(7, on=0, version=0),
    ]
    core.train(0)
    assert core.publish(1) == []  # its batch has not drained
    core.answer(2)
    assert core.answer(3)[2:] == [
        commit(2, version=0, step=1),
        commit(3, version=0, step=1),
        cmd.CloseStep(1, 2),
        wave(1, 0, [4, 6], [5, 7], last=True),
        push(0, version=1, attempt=2),
    ]
    assert [o for o in core.pushed(0, 1) if isinstance(o, cmd.AdmitGroup)] == [
        admit(4, version=1, deadline=2),
        admit(5, version=1, deadline=2),
    ]


def test_one_step_off_pushes_a_version_to_the_whole_fleet_at_once() -> None:
    core = started("one_step_off", groups_per_step=2, slots=8, steps=4, instances=2)
    for group in (0, 1):
        core.answer(group)
    core.train(0)
    core.publish(1)
    core.answer(2)
    assert [o for o in core.answer(3) if isinstance(o, cmd.PushWeights)] == [
        push(0, version=1, attempt=2),
        push(1, version=1, attempt=2),
    ]
    assert core.pushed(0, 1) == []
    assert [o for o in core.pushed(1, 1) if isinstance(o, cmd.AdmitGroup)] == [
        admit(4, version=1, deadline=2),
        admit(5, version=1, deadline=2),
    ]


def test_one_step_off_tops_up_a_block_under_the_blocks_version_though_a_newer_one_is_published() -> None:
    core = started("one_step_off", groups_per_step=2, slots=8, steps=4)
    for group in (0, 1):
        core.answer(group)
    core.train(0)
    core.publish(1)
    core.answer(2, rewards=(0.0, 0.0))
    assert core.of(cmd.AdmitGroup)[-1] == admit(4, version=0, deadline=1)


def test_one_step_off_trains_every_batch_but_the_first_one_step_late() -> None:
    world = run("one_step_off", steps=6)
    assert [o.step - o.version for o in orders_of(world, cmd.CommitGroup)] == [0] * 4 + [1] * 20


# -- whole runs -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_a_job_of_t_steps_admits_what_it_can_train_and_no_more_and_ends_with_nothing_in_flight(strategy: str) -> None:
    world = run(strategy, steps=5, max_staleness=3)
    state = world.state
    assert isinstance(world.outcome, cmd.FinishRun)
    assert world.outcome.reason == "all 5 steps are trained"
    assert state.ledger.admitted == 5 * 4
    assert len(world.trained_lengths) == 5 * 4 * 2
    assert not world.running
    assert not state.trajectories
    assert state.pushes == 0
    assert [o.num_groups for o in orders_of(world, cmd.CloseStep)] == [4] * 5


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_a_step_may_close_short_when_the_source_is_dry(strategy: str) -> None:
    world = run(strategy, steps=50, prompts=10)
    assert [o.num_groups for o in orders_of(world, cmd.CloseStep)] == [4, 4, 2]
    assert isinstance(world.outcome, cmd.FinishRun)
    assert world.outcome.reason == "the prompt source is dry after step 3 of 50"
    assert len(world.trained_lengths) == 20


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_an_empty_step_is_not_trained(strategy: str) -> None:
    world = run(strategy, steps=50, prompts=8)
    assert [o.num_groups for o in orders_of(world, cmd.CloseStep)] == [4, 4]


def test_a_source_without_prompts_ends_the_job_with_a_clear_reason() -> None:
    core = Core(source=0)
    core.ready()
    assert core.publish(0) == [cmd.FinishRun("the prompt source is dry after step 0 of 8")]


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_a_dry_source_whose_last_groups_are_filtered_still_ends_the_job(strategy: str) -> None:
    core = started(strategy, groups_per_step=2, slots=8, source=3, max_staleness=1)
    core.answer(0)
    core.answer(1)
    core.train(0)
    core.publish(1)
    if core.attempts[cmd.PushWeights, 0] == 2:
        core.pushed(0, 1)  # with K = 0 the last group waits for version 1
    assert core.answer(2, rewards=(1.0, 1.0))[-1] == cmd.FinishRun("the prompt source is dry after step 1 of 8")


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("k", [0, 1, 3])
def test_staleness_stays_within_the_strategys_bound(strategy: str, k: int) -> None:
    world = run(strategy, steps=10, max_staleness=k, length=heavy_tail)
    bound = {"sync": 0, "periodic": 0, "one_step_off": 1, "dora": k}[strategy]
    staleness = [o.step - o.version for o in orders_of(world, cmd.CommitGroup)]
    assert min(staleness) == 0
    assert max(staleness) <= bound
    assert max(staleness) == bound or strategy == "dora"
    assert sum(world.state.counters.staleness) == len(staleness) == 40


def test_the_lengths_trained_are_the_lengths_generated() -> None:
    world = run(steps=8, max_staleness=3, length=heavy_tail)
    assert world.trained_lengths == world.totals


def test_with_long_tails_dora_is_faster_than_sync() -> None:
    for seed in range(3):
        sync = run("sync", seed=seed, steps=12, length=heavy_tail, filter_zero_variance=False)
        dora = run("dora", max_staleness=3, seed=seed, steps=12, length=heavy_tail, filter_zero_variance=False)
        assert dora.now < 0.6 * sync.now


def test_prompts_are_asked_for_by_one_request_at_a_time_and_in_order() -> None:
    world = run(steps=6)
    expected = 0
    outstanding = False
    for event, orders in world.journal:
        if isinstance(event, ev.PromptsArrived):
            outstanding = False
            expected = event.first + len(event.num_prompt_tokens)
        for o in orders:
            if isinstance(o, cmd.FetchPrompts):
                assert not outstanding
                assert o.first == expected
                outstanding = True


def test_the_same_seed_gives_the_same_journal_and_another_seed_another() -> None:
    config = settings(max_staleness=2)
    worlds = [World(config, seed=seed) for seed in (1, 1, 2)]
    for world in worlds:
        world.run()
    assert worlds[0].journal == worlds[1].journal
    assert worlds[0].journal != worlds[2].journal
