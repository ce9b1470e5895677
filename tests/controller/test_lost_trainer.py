"""A trainer that is lost: one event, and nothing more of that start of it."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import msgspec
import pytest

from dora.controller import trainer_link, vitals
from dora.core import commands as cmd
from dora.core import events as ev
from dora.errors import RemoteError, RunFailed
from dora.transport import messages as wire
from dora.transport.messages import empty_micro_batch
from tests.controller.test_trainer_link import CONFIGURE, FakeEnd, FakeRanks, Linked, checkpoint_written

WAIT_S = 10.0


@pytest.fixture(autouse=True)
def no_last_words(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trainer_link, "LAST_WORDS_S", 0.0)


class Lost(Linked):
    """A link whose trainer loop runs."""

    def __init__(self, end: FakeEnd, ranks: FakeRanks) -> None:
        super().__init__(end, ranks=ranks)
        self.ranks = ranks
        self.heard = asyncio.Event()
        self.recalled: list[int] = []
        self.task: asyncio.Task[None]  # of the trainer loop
        self.link.recall = self._recall

    async def _recall(self, step: int) -> None:
        self.recalled.append(step)

    async def _emit(self, event: ev.Event) -> None:
        await super()._emit(event)
        self.heard.set()

    async def event(self, kind: type[ev.Event]) -> ev.Event:
        """The next event of a kind; earlier ones are dropped."""
        async with asyncio.timeout(WAIT_S):
            while True:
                while self.events:
                    if isinstance(event := self.events.pop(0), kind):
                        return event
                self.heard.clear()
                await self.heard.wait()

    async def restarted(self, incarnation: int) -> None:
        self.end.sent.clear()
        self.link.restart(cmd.RestartTrainer(incarnation, 0.0))
        await self.end.has_sent(self.end.num_ranks)


@asynccontextmanager
async def running(*, failures: tuple[RemoteError, ...] = ()) -> AsyncIterator[Lost]:
    """A link to two ranks that are ready."""
    ranks = FakeRanks()
    ranks.failures = [*failures]
    lost = Lost(FakeEnd(), ranks)
    await lost.close()  # its loops: the trainer loop has its own
    [(_, loop)] = lost.link.loops()
    lost.task = task = asyncio.create_task(loop)
    try:
        await lost.end.has_sent(2)
        await lost.end.hears(0, wire.RankReady(rank=0, next_step=3))
        await lost.end.hears(1, wire.RankReady(rank=1, next_step=3))
        await lost.event(ev.TrainerReady)
        yield lost
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


async def test_ranks_that_have_ended_are_started_again_when_the_core_orders_it() -> None:
    async with running() as one:
        one.ranks.ends.put_nowait("trainer ended with SIGKILL")
        lost = await one.event(ev.TrainerLost)
        assert (lost.incarnation, lost.reason) == (0, "trainer ended with SIGKILL")
        assert (one.ranks.restarts, one.ready[-1]) == ([], 0)
        await one.restarted(1)
        assert (one.end.incarnation, one.ranks.restarts) == (1, [1])
        assert [order.incarnation for _, order in one.end.sent if isinstance(order, wire.Configure)] == [1, 1]
        await one.end.hears(0, wire.RankReady(rank=0, next_step=2))
        await one.end.hears(1, wire.RankReady(rank=1, next_step=2))
        again = await one.event(ev.TrainerReady)
        assert (again.step, one.recalled) == (2, [2])


async def test_the_reason_of_a_rank_says_more_than_that_of_its_process() -> None:
    async with running() as one:
        await one.end.hears(1, wire.TrainerFailed(rank=1, reason="a collective failed"))
        assert (await one.event(ev.TrainerLost)).reason == "trainer rank 1: a collective failed"


async def test_a_failure_that_would_come_again_ends_the_run() -> None:
    one = Lost(FakeEnd(), FakeRanks())
    await one.close()
    [(_, loop)] = one.link.loops()
    one.end.said.put_nowait((0, wire.TrainerFailed(rank=0, reason="out of memory", is_final=True)))
    with pytest.raises(RunFailed, match=r"^trainer rank 0: out of memory$"):
        await loop


async def test_waves_for_lost_ranks_are_not_sent_to_those_that_follow() -> None:
    async with running() as one:
        one.on_disk.clear()
        wave = [empty_micro_batch(step=3, index=0, last=True, group_size=2) for _ in range(2)]
        one.link.train(wave, position=5)
        await asyncio.wait_for(one.waited.wait(), WAIT_S)
        one.ranks.ends.put_nowait("killed")
        await one.event(ev.TrainerLost)
        one.link.train(wave, position=6)
        one.on_disk.set()
        await one.restarted(1)
        await one.end.hears(0, wire.RankReady(rank=0, next_step=3))
        await one.end.hears(1, wire.RankReady(rank=1, next_step=3))
        await one.event(ev.TrainerReady)
        assert [type(message).__name__ for _, message in one.end.sent] == ["Configure"] * 2
        one.link.train(wave, position=7)
        await one.end.has_sent(4)


async def test_fewer_ranks_train_all_parts_of_a_wave() -> None:
    async with running() as one:
        one.ranks.ends.put_nowait("a node is lost")
        await one.event(ev.TrainerLost)
        one.ranks.num_ranks = one.end.num_ranks = 1
        await one.restarted(1)
        await one.end.hears(0, wire.RankReady(rank=0, next_step=3))
        await one.event(ev.TrainerReady)
        one.link.train([empty_micro_batch(step=3, index=0, last=True, group_size=2) for _ in range(2)], position=5)
        await one.end.has_sent(2)
        assert [(rank, type(message).__name__) for rank, message in one.end.sent] == [
            (0, "Configure"),
            (0, "MicroBatch"),
        ]
        await one.end.hears(0, wire.MicroBatchDone(rank=0, step=3, index=0, num_tokens=0, busy_s=0.0))
        await one.event(ev.MicroBatchTrained)


async def test_fewer_ranks_that_divide_sequences_get_all_parts_of_a_wave() -> None:
    divided = msgspec.structs.replace(CONFIGURE.settings, context_ranks=2)
    async with running() as one:
        one.link.configure = lambda rank: msgspec.structs.replace(CONFIGURE, settings=divided)
        one.ranks.ends.put_nowait("a node is lost")
        await one.event(ev.TrainerLost)
        await one.restarted(1)
        await one.end.hears(0, wire.RankReady(rank=0, next_step=3))
        await one.end.hears(1, wire.RankReady(rank=1, next_step=3))
        await one.event(ev.TrainerReady)
        one.link.train([empty_micro_batch(step=3, index=0, last=True, group_size=2) for _ in range(2)], position=5)
        await one.end.has_sent(4)
        (_, first), (_, second) = one.end.sent[2:]
        assert first is second


async def test_ranks_that_should_start_again_do_so_after_a_checkpoint() -> None:
    async with running() as one:
        one.ranks.wish = "node b is back"
        one.end.said.put_nowait((0, checkpoint_written(1)))
        assert (await one.event(ev.CheckpointSaved)).step == 1
        assert (await one.event(ev.TrainerLost)).reason == "node b is back"


async def test_ranks_that_have_no_more_to_do_are_not_started_again() -> None:
    async with running() as one:
        one.ranks.wish = "node b is back"
        await one.end.hears(0, checkpoint_written(2))  # after the last step
        asked = asyncio.create_task(one.link.checkpoint(timeout_s=WAIT_S))
        await one.end.has_sent(4)
        await one.end.hears(0, checkpoint_written(3))
        assert await asked
        assert [kind for kind, *_ in one.kinds()] == ["CheckpointSaved"] * 2


async def test_ranks_of_another_number_than_was_started_are_refused() -> None:
    async with running() as one:
        one.ranks.ends.put_nowait("killed")
        await one.event(ev.TrainerLost)
        one.ranks.num_ranks = 1
        one.link.restart(cmd.RestartTrainer(1, 0.0))
        with pytest.raises(RunFailed, match=r"^trainer.ranks: 1 ranks were to be started, but 2 have connected$"):
            await one.task


async def test_a_start_that_fails_is_another_loss() -> None:
    async with running(failures=(RemoteError("trainer: cannot be ended"),)) as one:
        one.ranks.ends.put_nowait("killed")
        await one.event(ev.TrainerLost)
        one.link.restart(cmd.RestartTrainer(1, 0.0))
        lost = await one.event(ev.TrainerLost)
        assert (lost.incarnation, lost.reason) == (1, "trainer: cannot be ended")
        await one.restarted(2)
        assert one.ranks.restarts == [1, 2]


async def test_a_later_start_that_is_not_ready_in_time_is_a_loss() -> None:
    async with running() as one:
        one.link.start_timeout_s = 0.05
        one.ranks.ends.put_nowait("killed")
        await one.event(ev.TrainerLost)
        await one.restarted(1)
        lost = await one.event(ev.TrainerLost)
        assert lost.reason == "trainer.start_timeout_s: ranks 0, 1 did not load the model within 0.05 s"


async def test_tokens_may_take_longer_to_be_read_than_ranks_to_load_the_model() -> None:
    async with running() as one:
        one.link.recall = lambda step: asyncio.sleep(0.5)
        one.link.start_timeout_s = 0.2
        one.ranks.ends.put_nowait("killed")
        await one.event(ev.TrainerLost)
        await one.restarted(1)
        one.end.said.put_nowait((0, wire.RankReady(rank=0, next_step=2)))
        one.end.said.put_nowait((1, wire.RankReady(rank=1, next_step=2)))
        assert type(await one.event(object)) is ev.TrainerReady


async def test_tokens_are_read_by_one_at_a_time_even_if_ranks_are_lost_meanwhile() -> None:
    began: asyncio.Queue[int] = asyncio.Queue()
    is_read = asyncio.Event()
    reading: list[int] = []

    async def recall(step: int) -> None:
        assert not reading
        reading.append(step)
        began.put_nowait(step)
        await is_read.wait()
        reading.remove(step)

    async def lost_and_ready(incarnation: int, step: int) -> None:
        one.ranks.ends.put_nowait("killed")
        await one.event(ev.TrainerLost)
        await one.restarted(incarnation)
        one.end.said.put_nowait((0, wire.RankReady(rank=0, next_step=step)))
        one.end.said.put_nowait((1, wire.RankReady(rank=1, next_step=step)))

    async with running() as one:
        one.link.recall = recall
        await lost_and_ready(1, step=2)
        assert await began.get() == 2
        await lost_and_ready(2, step=1)
        for _ in range(20):  # turns of the loop in which it would begin
            await asyncio.sleep(0)
        is_read.set()
        assert (await one.event(ev.TrainerReady)).step == 1
        assert await began.get() == 1


async def test_a_checkpoint_that_lost_ranks_cannot_write_is_not_waited_for() -> None:
    async with running() as one:
        asked = asyncio.create_task(one.link.checkpoint(timeout_s=1e6))
        await one.end.has_sent(4)
        one.ranks.ends.put_nowait("killed")
        assert not await asyncio.wait_for(asked, WAIT_S)
        assert not await one.link.checkpoint(timeout_s=1e6)
        assert not await one.link.stop("the end")
        await one.link.drop_checkpoint("step-1")
        assert len(one.end.sent) == 4


@pytest.fixture
def short_limits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trainer_link, "LOOK_S", 0.01)
    monkeypatch.setattr(vitals, "SILENT_S", 0.4)
    monkeypatch.setattr(vitals, "FIRST_S", 0.1)


async def beat(one: Lost, *ranks: int, progress: bool) -> None:
    """Have ranks send pulses until the link is cancelled or has judged them."""
    for count in itertools.count():
        for rank in ranks:
            pulse = wire.RankPulse(rank=rank, count=count * progress, activity="forward_backward")
            await one.end.hears(rank, pulse)
        await asyncio.sleep(0.01)


@pytest.mark.usefixtures("short_limits")
@pytest.mark.parametrize(
    ("beating", "progress", "reason"),
    [
        ([0], True, "trainer rank 1 has been silent for "),
        ([0, 1], False, "no trainer rank has made progress for "),
    ],
)
async def test_ranks_that_are_silent_or_make_no_progress_are_lost(
    beating: list[int], progress: bool, reason: str
) -> None:
    async with running() as one:
        beats = asyncio.create_task(beat(one, *beating, progress=progress))
        assert (await one.event(ev.TrainerLost)).reason.startswith(reason)
        beats.cancel()
        await one.restarted(1)


@pytest.mark.usefixtures("short_limits")
async def test_ranks_whose_host_is_cut_off_are_not_judged_before_it_is_back() -> None:
    async with running() as one:
        one.ranks.are_cut_off = True
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(1.0):
                await one.event(ev.TrainerLost)
        one.ranks.are_cut_off = False
        assert "silent" in (await one.event(ev.TrainerLost)).reason


@pytest.mark.usefixtures("short_limits")
async def test_the_collectives_of_ranks_without_progress_are_kept() -> None:
    """Under the number of the rank that has sent them, whichever it claims."""
    async with running() as one:
        kept: list[tuple[int, str]] = []
        one.link.on_flight_record = lambda rank, record: kept.append((rank, record))
        await one.end.hears(1, wire.FlightRecord(rank=70, record="{}"))
        await one.event(ev.TrainerLost)
        assert kept == [(1, "{}")]
