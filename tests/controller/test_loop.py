"""The loop between fakes at its borders: a run to its end, and effects that freeze, crash or answer late."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from dora.controller.episodes import NoEpisodes
from dora.core import commands as cmd
from dora.core import events as ev
from dora.core.ids import TrajectoryId
from dora.core.invariants import check
from dora.core.phases import GroupPhase, ImpossibleChange
from dora.errors import RunFailed
from dora.journal.audit import audit_entries
from dora.journal.reader import Journal
from dora.journal.tokens import read_tokens
from tests.controller.fakes import ANSWER_TOKENS, TOKEN, Job, make_job


@pytest.fixture
def jobs(tmp_path: Path) -> Iterator[Any]:
    """Makes jobs, and closes their files."""
    made: list[Job] = []

    def make(**changes: Any) -> Job:
        made.append(make_job(tmp_path, **changes))
        return made[-1]

    yield make
    for job in made:
        job.close()


def assert_clean(job: Job, folder: Path) -> None:
    """The audit of what was written, token store included."""
    job.commits.sync()
    counts = read_tokens(folder / "tokens.bin").counts
    report = audit_entries(job.settings, Journal(folder / "journal.msgpack"), token_counts=counts)
    assert report.violations == ()
    check(job.controller.state)


async def test_a_job_runs_to_its_end_and_its_journal_proves_it(jobs: Any, tmp_path: Path) -> None:
    job = jobs(samples=3, eval_every=2)
    outcome = await job.run()
    assert (outcome.finished, outcome.reason) == (True, "all 3 steps are trained")
    assert job.watcher.evaluations == [0, 2, 3]
    assert job.store.copied == [0, 1, 2, 3]
    assert sorted(set(job.store.released)) == job.store.released
    assert [batch.step for wave in job.trainer.waves for batch in wave[:1] if batch.last] == [0, 1, 2]
    assert_clean(job, tmp_path)


class Leaving(NoEpisodes):
    """Notes which episodes are ended."""

    def __init__(self) -> None:
        self.left: list[int] = []

    def close(self, trajectories: Iterable[TrajectoryId]) -> None:
        self.left += trajectories


async def test_the_episode_of_a_sample_that_is_given_up_is_left_at_once(jobs: Any) -> None:
    job = jobs(samples=2)
    job.engines.refused = {0}
    job.controller._orders.episodes = leaving = Leaving()
    given_up: list[TrajectoryId] = []
    was_left: list[bool] = []  # by the next event, and by those after it

    def hook(event: ev.Event, commands: list[cmd.Command]) -> None:
        was_left.extend(trajectory in leaving.left for trajectory in given_up)
        if isinstance(event, ev.GenerationFailed):
            given_up.append(event.trajectory)

    job.watcher.hook = hook
    assert (await job.run()).finished
    assert given_up == [-1]
    assert all(was_left)


@pytest.mark.parametrize(("keep", "left"), [(0, [0, 1, 2, 3]), (1, [3]), (2, [2, 3])])
async def test_the_newest_durable_versions_are_kept_as_configured(jobs: Any, keep: int, left: list[int]) -> None:
    job = jobs(io={"keep_versions": keep})
    await job.run()
    assert job.store.durable() == left


async def test_nothing_is_left_in_memory_of_what_was_trained_or_evaluated(jobs: Any) -> None:
    job = jobs(samples=2)
    await job.run()
    assert job.io.trajectories.records == {}


async def test_nothing_is_left_in_memory_of_groups_that_failed(jobs: Any) -> None:
    """The first answers cannot be graded, and one is refused while its sibling runs."""
    job = jobs(samples=2)
    job.graders.failing = {*range(4)}
    job.engines.refused = {2}
    await job.run()
    failed = [order for order in job.watcher.of(cmd.DropGroup) if order.outcome is GroupPhase.FAILED]
    assert {order.reason.split(":")[0] for order in failed} == {"generation", "grading"}
    assert job.io.trajectories.records == {}
    assert all(group >= job.controller.state.ledger.admitted for group in job.io.trajectories.prompts)


async def test_every_trained_token_was_in_the_token_log_before_it_was_trained(jobs: Any, tmp_path: Path) -> None:
    job = jobs()
    await job.run()
    job.commits.sync()
    stored = read_tokens(tmp_path / "tokens.bin")
    batches = [batch for wave in job.trainer.waves for batch in wave]
    trained = {int(t): int(n) for batch in batches for t, n in zip(batch.trajectories, batch.lengths, strict=True)}
    assert trained.keys() == stored.answers.keys()
    for trajectory, length in trained.items():
        prompt = stored.prompts[trajectory // 2]
        assert length == len(prompt.tokens) + len(stored.answers[TrajectoryId(trajectory)].tokens)


async def test_a_stop_that_a_server_ignores_is_sent_again_while_the_request_goes_on(jobs: Any) -> None:
    """A server does not know a request that has not reached it yet."""
    job = jobs()
    job.engines.frozen.add("http://engine-0")
    job.engines.ignored_stops = 1
    orders: list[cmd.StopRequest] = []

    def stop_the_first(event: ev.Event, commands: list[cmd.Command]) -> None:
        begun = [order for order in commands if isinstance(order, cmd.Generate) and order.instance == 0]
        if begun and not orders:
            orders.append(cmd.StopRequest(begun[0].trajectory, begun[0].attempt, begun[0].instance))
            commands += orders

    job.watcher.hook = stop_the_first
    outcome = await job.run()
    assert outcome.finished
    assert job.engines.stops == [job.io.ids.of(orders[0])] * 2


def freeze_until_lost(job: Job) -> list[str]:
    """Engine 0 falls silent in the middle of its first answers, until it is started again.

    Returns the requests that were given up by the time of the next update.
    """
    given_up: list[str] = []

    def thaw(event: ev.Event, commands: list[cmd.Command]) -> None:
        if isinstance(event, ev.InstanceLost):
            job.engines.frozen.clear()
        if isinstance(event, ev.StepTrained):
            given_up.extend(job.engines.given_up)

    job.engines.frozen.add("http://engine-0")
    job.watcher.hook = thaw
    return given_up


async def test_a_server_whose_kv_is_nearly_full_gets_no_work_until_it_is_relieved(jobs: Any, tmp_path: Path) -> None:
    """Asked only where our own count of its KV is high; a slow server is asked once at a time."""
    job = jobs(watchdog_s=60.0)
    job.io.fleet._limits = replace(job.io.fleet._limits, kv_tokens=8)  # less than one answer
    job.engines.frozen.add("http://engine-0")
    job.engines.used_tokens["http://engine-0"] = 4000
    told: list[bool] = []

    def relieve(event: ev.Event, commands: list[cmd.Command]) -> None:
        if isinstance(event, ev.KvPressureReported):
            told.append(event.pressed)
            assert event.instance == 0
            assert not any(isinstance(c, cmd.Generate) and c.instance == 0 for c in commands if event.pressed)
            job.engines.used_tokens.clear()
            job.engines.thaw.set()

    job.watcher.hook = relieve
    assert (await job.run()).finished
    assert told[0]
    assert told == [True, False][: len(told)]
    assert_clean(job, tmp_path)


async def test_a_frozen_answer_goes_on_elsewhere_from_its_tokens_after_the_watchdogs_time(
    jobs: Any, tmp_path: Path
) -> None:
    job = jobs(watchdog_s=1.0)
    given_up = freeze_until_lost(job)
    outcome = await job.run()
    assert outcome.finished
    condemned = job.watcher.of(cmd.CondemnInstance)
    assert {order.instance for order in condemned} == {0}
    lost = job.watcher.of(ev.InstanceLost)[0]
    assert set(lost.num_tokens.values()) == {ANSWER_TOKENS // 2}
    for trajectory, num_tokens in lost.num_tokens.items():
        first, again = (r for url, r in job.engines.requests if f"{trajectory:+013d}-" in r.id)
        assert first.id in given_up
        assert [*again.tokens] == [*first.tokens, *[TOKEN] * num_tokens]
        assert again.max_new_tokens == first.max_new_tokens - num_tokens
        assert again.seed != first.seed
        assert again.label == first.label
    assert_clean(job, tmp_path)


async def test_late_tokens_of_a_lost_server_are_refused(jobs: Any, tmp_path: Path) -> None:
    job = jobs(watchdog_s=16.0)  # with which progress is reported every second
    late: list[int] = []

    def talk_on(event: ev.Event, commands: list[cmd.Command]) -> None:
        if isinstance(event, ev.InstanceLost):
            for trajectory in event.num_tokens:
                rid = next(rid for rid in job.engines.callbacks if f"{trajectory:+013d}-" in rid)
                job.engines.callbacks[rid]([9, 9], [-1.0, -1.0])
                late.append(trajectory)

    def die_in_mid_answer(event: ev.Event, commands: list[cmd.Command]) -> None:
        talk_on(event, commands)
        if isinstance(event, ev.ProgressReported) and event.instance == 0 and not late:
            job.engines.frozen.discard("http://engine-0")
            job.servers[0].die()

    job.engines.frozen.add("http://engine-0")
    job.watcher.hook = die_in_mid_answer
    outcome = await job.run()
    assert outcome.finished
    assert late
    assert job.io.trajectories.refused_tokens == 2 * len(late)
    assert all(9 not in answer.tokens for answer in read_tokens(tmp_path / "tokens.bin").answers.values())
    assert_clean(job, tmp_path)


async def test_a_frozen_push_fails_in_time_and_is_tried_again(jobs: Any, tmp_path: Path) -> None:
    job = jobs()
    job.engines.frozen_pushes.add("http://engine-1")
    assert (await job.run()).finished
    (failed,) = job.watcher.of(ev.WeightPushFailed)
    assert failed.instance == 1
    assert "did not end within 1 s" in failed.reason
    assert_clean(job, tmp_path)


async def test_a_failed_grading_is_no_reward(jobs: Any, tmp_path: Path) -> None:
    job = jobs()
    job.graders.failing = {0, 1, 2, 3}
    assert (await job.run()).finished
    dropped = job.watcher.of(cmd.DropGroup)
    assert {(order.outcome, order.reason) for order in dropped} == {(GroupPhase.FAILED, "grading")}
    assert all(reward is None for order in dropped for reward in order.rewards)
    assert_clean(job, tmp_path)


async def test_a_late_grade_only_delays_its_group(jobs: Any, tmp_path: Path) -> None:
    job = jobs()
    job.graders.frozen = {0}

    def release(event: ev.Event, commands: list[cmd.Command]) -> None:
        if isinstance(event, ev.StepTrained):
            job.graders.release.set()

    job.watcher.hook = release
    assert (await job.run()).finished
    committed = [order.group for order in job.watcher.of(cmd.CommitGroup)]
    assert committed.index(0) > 1
    assert_clean(job, tmp_path)


async def test_an_unexpected_error_in_an_effect_ends_the_run(jobs: Any) -> None:
    job = jobs()
    job.engines.bug = KeyError("a bug of ours")
    with pytest.raises(ExceptionGroup) as caught:
        await job.run()
    assert caught.group_contains(KeyError, match="a bug of ours")
    assert asyncio.all_tasks() == {asyncio.current_task()}


async def test_a_loop_of_the_trainer_that_fails_ends_the_run_with_its_line(jobs: Any) -> None:
    async def fail() -> None:
        raise RunFailed("trainer rank 1: out of memory")

    job = jobs()
    job.trainer.failing_loop = fail()
    with pytest.raises(RunFailed, match=r"^trainer rank 1: out of memory$"):
        await job.run()
    assert asyncio.all_tasks() == {asyncio.current_task()}


async def test_a_frozen_trainer_is_named_when_there_is_no_progress(jobs: Any) -> None:
    job = jobs(no_progress_s=2.0, watchdog_s=1.0)
    job.trainer.frozen = True
    with pytest.raises(RunFailed, match=r"^no progress for \d s: the trainer works on micro-batch 0 of step 1$"):
        await job.run(timeout_s=6.0)


async def test_an_event_that_would_make_an_impossible_change_ends_the_run_and_is_not_journaled(
    jobs: Any, tmp_path: Path
) -> None:
    """So that a resume goes on from the event before it."""
    job = jobs()

    def confuse(event: ev.Event, commands: list[cmd.Command]) -> None:
        for group in job.controller.state.ledger.groups.values():
            if group.phase is GroupPhase.GENERATING:
                group.phase = GroupPhase.COMMITTED

    job.watcher.hook = confuse
    with pytest.raises(ImpossibleChange, match="committed --> grading by GenerationFinished is impossible"):
        await job.run()
    assert asyncio.all_tasks() == {asyncio.current_task()}
    entries = list(Journal(tmp_path / "journal.msgpack"))
    finished = [event.trajectory // 2 for event, _ in entries if isinstance(event, ev.GenerationFinished)]
    assert len(finished) == len(set(finished)), "the second of a group would have changed its phase"
    assert audit_entries(job.settings, entries).violations == ()


async def test_an_interrupted_run_keeps_what_is_in_flight_and_starts_nothing_more(jobs: Any, tmp_path: Path) -> None:
    job = jobs(steps=50)
    done: list[tuple[int, int]] = []

    def interrupt(event: ev.Event, commands: list[cmd.Command]) -> None:
        if isinstance(event, ev.StepTrained) and event.step == 1:
            job.controller.interrupt()
            done.append((len(job.engines.requests), len(job.trainer.waves)))

    job.watcher.hook = interrupt
    outcome = await job.run()
    assert not outcome.finished
    assert outcome.reason == "everything in flight is kept"
    assert (job.trainer.checkpoints, job.trainer.waited_s) == (1, 600.0)
    assert asyncio.all_tasks() == {asyncio.current_task()}
    assert done == [(len(job.engines.requests), len(job.trainer.waves))]
    assert any(isinstance(order, cmd.PushWeights) for order in job.watcher.commands[-10:])  # ordered, not carried out
    assert_clean(job, tmp_path)


async def test_the_journal_is_readable_up_to_the_event_that_ended_the_run(jobs: Any, tmp_path: Path) -> None:
    job = jobs(max_top_up=1.0, filter_zero_variance=True)
    job.graders.grade = graded_alike  # type: ignore[method-assign]
    with pytest.raises(RunFailed, match="had to top up 3 groups"):
        await job.run()
    orders = [order for _, commands in Journal(tmp_path / "journal.msgpack") for order in commands]
    assert isinstance(orders[-1], cmd.FailRun) or any(isinstance(order, cmd.FailRun) for order in orders)


async def graded_alike(request: object) -> Any:
    from dora.tasks.pool import Graded

    return Graded(0.5)


async def test_the_lag_of_the_loop_is_measured(jobs: Any) -> None:
    job = jobs(watchdog_s=1.0)
    freeze_until_lost(job)
    await job.run()
    assert len(job.watcher.lags) > 5
    assert min(job.watcher.lags) >= 0.0
