"""The end of a job: its result is on the disk before its last order is, and nothing that happens later undoes it."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Iterator
from pathlib import Path

import pytest

from dora.core import commands as cmd
from dora.core import events as ev
from dora.core.ids import TrajectoryId
from dora.errors import RunFailed
from dora.journal.reader import Journal
from dora.journal.replay import replay
from tests.controller.fakes import Job, make_job

STEPS = 3


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path


def emits_as_the_trainer_link_does(job: Job) -> set[asyncio.Task[None]]:
    """Facts of the trainer wait for the controller to take them."""
    tasks: set[asyncio.Task[None]] = set()
    job.trainer.emit = lambda event: tasks.add(asyncio.ensure_future(job.inbox.emit(event)))
    return tasks


@pytest.fixture
async def job(folder: Path) -> Iterator[Job]:
    made = make_job(folder, steps=STEPS)
    yield made
    made.close()


async def test_the_last_version_has_its_durable_copy_before_the_run_is_finished(job: Job) -> None:
    """With its news the run may have ended, and no resume comes back for a copy."""
    copied: dict[int, list[int]] = {}

    def note(event: ev.Event, commands: list[cmd.Command]) -> None:
        if isinstance(event, ev.VersionPublished):
            copied[event.version] = list(job.store.copied)

    job.watcher.hook = note
    tasks = emits_as_the_trainer_link_does(job)
    assert (await job.run()).finished
    assert STEPS in copied[STEPS]
    assert STEPS - 1 not in copied[STEPS - 1]  # of those before it the copy follows
    await asyncio.gather(*tasks)


async def test_a_checkpoint_saved_after_the_end_is_journaled(job: Job, folder: Path) -> None:
    """So that a run that is given more steps goes on from there."""

    async def checkpoint(*, timeout_s: float) -> bool:
        await job.inbox.emit(ev.CheckpointSaved(job.io.now(), STEPS, "step-3", "chain"))
        return True

    job.trainer.checkpoint = checkpoint  # type: ignore[method-assign]
    assert (await job.run()).finished
    journal = Journal(folder / "journal.msgpack")
    replayed = replay(job.settings, journal)
    assert replayed.difference is None
    assert replayed.state.feed.checkpoints == {0: "", STEPS: "step-3"}


async def test_a_run_that_was_copied_deletes_its_own_checkpoints_and_not_those_of_the_original(
    job: Job, folder: Path
) -> None:
    """The journal has the paths at which they were written first."""
    original, own = (base / "checkpoints" / "step-000001-0a1b2c3d" for base in (folder / "original", folder))
    for checkpoint in (original, own):
        checkpoint.mkdir(parents=True)

    def save(event: ev.Event, commands: list[cmd.Command]) -> None:
        if isinstance(event, ev.StepTrained):
            name = original.name.replace("1-", f"{event.step + 1}-")
            job.inbox.emit_soon(ev.CheckpointSaved(job.io.now(), event.step + 1, str(original.with_name(name))))

    job.watcher.hook = save
    assert (await job.run()).finished
    assert (original.is_dir(), own.is_dir()) == (True, False)
    assert job.trainer.dropped == [own.name], "on the hosts of the ranks too"


async def test_a_rank_failure_after_the_end_does_not_fail_the_run(job: Job) -> None:
    saving = asyncio.Event()

    async def checkpoint(*, timeout_s: float) -> bool:
        saving.set()
        await asyncio.Event().wait()
        return True

    async def fail() -> None:
        await saving.wait()
        raise RunFailed("trainer ended with SIGKILL")

    job.trainer.checkpoint = checkpoint  # type: ignore[method-assign]
    job.trainer.failing_loop = fail()
    outcome = await job.run()
    assert (outcome.finished, outcome.reason) == (True, f"all {STEPS} steps are trained")


class Calling:
    """Episodes, one of which has a call under way that a stop waits for, and one a call without a place."""

    def __init__(self, job: Job) -> None:
        self.began = self.ended = False
        self.may_end = asyncio.Event()
        self._job = job
        job.watcher.hook = self._begin

    def _begin(self, event: ev.Event, commands: list[cmd.Command]) -> None:
        if isinstance(event, ev.StepTrained) and not self.began:
            self.began = True
            orders = self._job.controller._orders
            orders.episodes = self  # type: ignore[assignment]
            orders.calls[orders.tasks.background(self._call(), name="call")] = TrajectoryId(1)
            orders.calls[orders.tasks.background(self._never_ends(), name="call")] = TrajectoryId(2)
            self._job.controller.interrupt()

    async def _call(self) -> None:
        await self.may_end.wait()
        self.ended = True

    async def _never_ends(self) -> None:
        await asyncio.Event().wait()

    def is_awaited(self, trajectory: TrajectoryId) -> bool:
        return trajectory == 1

    def close(self, trajectories: Iterable[TrajectoryId]) -> None:
        pass


async def test_a_stop_has_the_checkpoint_written_while_it_waits_for_calls(job: Job) -> None:
    calling = Calling(job)

    async def checkpoint(*, timeout_s: float) -> bool:
        calling.may_end.set()
        return True

    job.trainer.checkpoint = checkpoint  # type: ignore[method-assign]
    assert not (await job.run()).finished
    assert calling.ended


async def test_a_stop_does_not_wait_longer_for_a_call_than_for_the_checkpoint(job: Job) -> None:
    calling = Calling(job)
    job.controller._stop_timeout_s = 0.05
    assert not (await job.run()).finished
    assert (calling.ended, job.trainer.checkpoints) == (False, 1)
