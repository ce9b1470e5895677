"""The trainer as the controller sees it: facts of all ranks in rank 0's order, once each."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from typing import Any

import msgspec
import numpy as np
import pytest

from dora.controller.lineage import Lineage
from dora.controller.trainer_link import StepReport, TrainerLink
from dora.core import events as ev
from dora.errors import RemoteError, RunFailed
from dora.transport import messages as wire
from dora.transport.controller_end import ControllerEnd
from dora.transport.messages import empty_micro_batch
from dora.transport.trainer_end import TrainerEnd

CHAIN = "0" * 32

CONFIGURE = wire.Configure(
    run_id="test-run",
    model_path="/model",
    settings=wire.TrainerSettings(
        device="cpu", dtype="float32", publish_dtype="float32", fp32_head=False,
        activation_checkpointing="none", optimizer_state="device", optimizer="adamw", compile=False,
        schedule="constant", min_learning_rate=0.0, threads=1, micro_batch_tokens=64,
        longest_request=128, steps=2,
        learning_rate=1e-3, warmup_steps=0, weight_decay=0.0, beta1=0.9, beta2=0.95, max_grad_norm=1.0,
        updates=1, copies="device", probe_tokens=0, probe_every=1, objective="{}", max_new_tokens=100,
        temperature=1.0, max_staleness=1, shard_ranks=0,
        checkpoint_every=1,
    ),
    memory_root="/live",
    durable_root="/durable",
    checkpoints="/checkpoints",
    resume_from=(),
    may_start_over=True,
    chain=CHAIN,
    epoch=0,
    fence="/epoch",
)  # fmt: skip


class FakeEnd:
    """A stand-in for the transport: it keeps what is sent, and takes the messages of ranks from a queue, one by one."""

    def __init__(self, *, ready: bool = True) -> None:
        self.sent: list[tuple[int, wire.ToTrainer]] = []
        self.said: asyncio.Queue[tuple[int, wire.ToController]] = asyncio.Queue()
        self.incarnation = 0
        self.waiting = asyncio.Event()  # nothing is left to be received
        self.sending = asyncio.Event()
        self.ready = ready
        self.num_ranks = 2  # that connect

    async def wait_ready(self, timeout_s: float) -> int:
        if not self.ready:
            raise RemoteError(f"trainer: rank 1 sent no HELLO within {timeout_s:g} s")
        return self.num_ranks

    def renew(self, incarnation: int) -> None:
        self.incarnation = incarnation
        self.sent.clear()
        self.said = asyncio.Queue()

    async def send(self, rank: int, message: wire.ToTrainer) -> None:
        self.sent.append((rank, message))
        self.sending.set()

    async def has_sent(self, count: int) -> None:
        async with asyncio.timeout(10):
            while len(self.sent) < count:
                self.sending.clear()
                await self.sending.wait()

    async def receive(self) -> tuple[int, wire.ToController]:
        if self.said.empty():
            self.waiting.set()
        return await self.said.get()

    async def hears(self, rank: int, *messages: wire.ToController) -> None:
        """Until the link has dealt with them."""
        for message in messages:
            self.waiting.clear()
            self.said.put_nowait((rank, message))
        async with asyncio.timeout(10):
            await self.waiting.wait()


class FakeRanks:
    """Processes that the test ends."""

    def __init__(self) -> None:
        self.ends: asyncio.Queue[str] = asyncio.Queue()
        self.restarts: list[int] = []
        self.failures: list[RemoteError] = []  # of the next restarts
        self.are_cut_off = False
        self.num_ranks = 2  # of the next start
        self.wish = ""

    async def ended(self) -> str:
        return await self.ends.get()

    async def restart(self, incarnation: int) -> int:
        self.restarts.append(incarnation)
        if self.failures:
            raise self.failures.pop(0)
        return self.num_ranks

    def why_restart(self) -> str:
        return self.wish


class Linked:
    """A link whose start and receiver loops run."""

    def __init__(
        self,
        end: FakeEnd,
        *,
        ranks: Any = None,
        start_timeout_s: float = 5.0,
        configure: Callable[[int], wire.Configure] = lambda rank: CONFIGURE,
        keep: Any = None,
    ) -> None:
        self.end = end
        self.events: list[ev.Event] = []
        self.ready: list[int] = []
        self.reports: list[StepReport] = []
        self.stepped = asyncio.Event()
        self.told: list[str] = []
        self.waits: list[int] = []  # journal positions waited for
        self.waited = asyncio.Event()
        self.on_disk = asyncio.Event()
        self.on_disk.set()
        ticks = itertools.count(1)
        self.link = TrainerLink(
            end=end,  # type: ignore[arg-type]
            ranks=ranks or FakeRanks(),
            num_ranks=2,
            configure=configure,
            start_timeout_s=start_timeout_s,
            now=lambda: float(next(ticks)),
            emit=self._emit,
            on_ready=lambda num_ready, num_ranks: self.ready.append(num_ready),
            on_step=self.reports.append,
            durable=self._wait,
            lineage=Lineage(base=CHAIN, settings=b"", trained={step: f"chain-{step}" for step in range(9)}),
            tell=self.told.append,
            keep=keep,
        )
        self.starter = asyncio.create_task(self.link.start_ranks(), name="starter")
        self.receiver = asyncio.create_task(self.link.receive_messages(), name="receiver")

    async def close(self) -> None:
        for task in (self.starter, self.receiver):
            task.cancel()
        await asyncio.gather(self.starter, self.receiver, return_exceptions=True)

    async def _wait(self, position: int) -> None:
        self.waits.append(position)
        self.waited.set()
        await self.on_disk.wait()

    async def _emit(self, event: ev.Event) -> None:
        self.events.append(event)
        if isinstance(event, ev.StepTrained):
            self.stepped.set()

    def kinds(self) -> list[tuple[str, ...]]:
        """Events since the last call, without their times."""
        found = [(type(e).__name__, *(getattr(e, n) for n in ("step", "index", "version") if hasattr(e, n)))
                 for e in self.events]  # fmt: skip
        self.events.clear()
        return found


@asynccontextmanager
async def linked(end: FakeEnd | None = None, **options: Any) -> AsyncIterator[Linked]:
    made = Linked(end or FakeEnd(), **options)
    yield made
    await made.close()


def ready(rank: int, *, step: int = 0) -> wire.RankReady:
    return wire.RankReady(rank=rank, next_step=step)


def trained(rank: int, step: int, index: int) -> wire.MicroBatchDone:
    return wire.MicroBatchDone(rank=rank, step=step, index=index, num_tokens=9, busy_s=0.1)


def step_trained(step: int) -> wire.StepDone:
    return wire.StepDone(rank=0, step=step, metrics={"grad_norm": 0.5}, chain=f"chain-{step}")


def published(version: int, *, differs: str = "") -> wire.VersionWritten:
    chain = f"chain-{version - 1}" if version else CHAIN
    return wire.VersionWritten(version=version, num_bytes=7, files={"m": "0"}, chain=chain, differs=differs)


def checkpoint_written(step: int, *, folder: str = "/checkpoints", chain: str = "") -> wire.CheckpointWritten:
    return wire.CheckpointWritten(
        step=step, folder=f"{folder}/step-{step}", num_bytes=5, files={"m": "0"}, chain=chain or f"chain-{step - 1}"
    )


async def make_ready(one: Linked, *, step: int = 0) -> None:
    await one.end.hears(0, ready(0, step=step))
    assert one.kinds() == []
    await one.end.hears(1, ready(1, step=step))
    assert one.kinds() == [("TrainerReady", step)]


async def test_the_first_message_to_every_rank_is_configure() -> None:
    async with linked() as one:
        await make_ready(one)
        assert one.end.sent == [(0, CONFIGURE), (1, CONFIGURE)]
        assert one.ready == [1, 2], "ranks that are ready, for the status"


async def test_a_wave_is_trained_when_every_rank_has_trained_it_however_far_ahead_rank_0_is() -> None:
    async with linked() as one:
        await make_ready(one)
        await one.end.hears(0, trained(0, 0, 0), trained(0, 0, 1), step_trained(0), published(1), trained(0, 1, 0))
        assert one.kinds() == []
        assert one.reports == []
        await one.end.hears(1, trained(1, 0, 0))
        assert one.kinds() == [("MicroBatchTrained", 0, 0)]
        await one.end.hears(1, trained(1, 0, 1))
        assert one.kinds() == [("MicroBatchTrained", 0, 1), ("StepTrained", 0), ("VersionPublished", 1)]
        assert one.reports == [StepReport(0, {"grad_norm": 0.5})]
        await one.end.hears(1, trained(1, 1, 0))
        assert one.kinds() == [("MicroBatchTrained", 1, 0)]


async def test_a_rank_ahead_of_rank_0_changes_nothing() -> None:
    async with linked() as one:
        await make_ready(one)
        await one.end.hears(1, trained(1, 0, 0), trained(1, 0, 1))
        assert one.kinds() == []
        await one.end.hears(0, trained(0, 0, 0), trained(0, 0, 1), step_trained(0))
        assert one.kinds() == [("MicroBatchTrained", 0, 0), ("MicroBatchTrained", 0, 1), ("StepTrained", 0)]


async def test_ranks_that_would_resume_at_different_steps_end_the_run() -> None:
    async with linked() as one:
        await one.end.hears(0, ready(0, step=4))
        one.end.said.put_nowait((1, ready(1, step=2)))
        with pytest.raises(RunFailed, match=r"ranks disagree on the step to resume at: \{0: 4, 1: 2\}"):
            await one.receiver


async def test_a_rank_that_fails_ends_the_run_with_its_reason() -> None:
    async with linked() as one:
        await make_ready(one)
        one.end.said.put_nowait((1, wire.TrainerFailed(rank=1, reason="group 7 is too old", is_final=True)))
        with pytest.raises(RunFailed, match=r"^trainer rank 1: group 7 is too old$"):
            await one.receiver


async def test_ranks_that_do_not_connect_end_the_run_and_the_error_names_the_setting() -> None:
    async with linked(FakeEnd(ready=False)) as one:
        with pytest.raises(RunFailed, match=r"^trainer.start_timeout_s: trainer: rank 1 sent no HELLO within 5 s$"):
            await one.starter


async def test_a_rank_that_never_loads_its_model_ends_the_run_and_is_named() -> None:
    async with linked(start_timeout_s=0.1) as one:
        one.end.said.put_nowait((0, ready(0)))
        with pytest.raises(RunFailed, match=r"^trainer.start_timeout_s: ranks 1 did not load the model within 0.1 s$"):
            await one.starter


async def test_no_wave_is_sent_before_all_ranks_are_ready() -> None:
    end = FakeEnd()
    async with linked(end) as one:
        sender = asyncio.create_task(one.link.send_waves(), name="sender")
        wave = [empty_micro_batch(step=0, index=0, last=True, group_size=2) for _ in range(2)]
        one.link.train(wave, position=5)
        await one.end.hears(0, ready(0))
        assert len(end.sent) == 2
        await one.end.hears(1, ready(1))
        await end.has_sent(4)
        assert [type(message).__name__ for _, message in end.sent] == ["Configure"] * 2 + ["MicroBatch"] * 2
        assert [rank for rank, _ in end.sent[2:]] == [0, 1]
        sender.cancel()
        await asyncio.gather(sender, return_exceptions=True)


async def test_a_checkpoint_is_asked_of_every_rank_and_waited_for() -> None:
    async with linked() as one:
        await make_ready(one)
        asked = asyncio.create_task(one.link.checkpoint(timeout_s=10), name="asked")
        await one.end.has_sent(4)
        saved = checkpoint_written(3)
        await one.end.hears(0, saved)
        assert await asked
        assert one.kinds() == [("CheckpointSaved", 3)]
        assert not await one.link.checkpoint(timeout_s=0.01)


async def test_the_last_checkpoint_is_not_one_that_was_being_written_as_it_was_asked_for() -> None:
    """Steps were trained since; without their checkpoint, a resume trains them again."""
    async with linked() as one:
        await make_ready(one, step=2)
        for rank in range(2):
            await one.end.hears(rank, trained(rank, 2, 0))
        await one.end.hears(0, step_trained(2))
        asked = asyncio.create_task(one.link.checkpoint(timeout_s=10), name="asked")
        await one.end.has_sent(4)
        await one.end.hears(0, checkpoint_written(2))
        assert one.kinds()[-1] == ("CheckpointSaved", 2)
        for _ in range(10):  # turns of the loop in which it would end
            await asyncio.sleep(0)
        assert not asked.done()
        await one.end.hears(0, checkpoint_written(3))
        assert await asked


def of_node(rank: int) -> wire.Configure:
    """Each rank is on a node of its own."""
    return msgspec.structs.replace(CONFIGURE, checkpoints=f"/node-{rank}", ranks_here=(rank,), owns_checkpoints=True)


async def test_each_rank_gets_the_paths_of_its_node() -> None:
    async with linked(configure=of_node) as one:
        await make_ready(one)
        assert one.end.sent == [(0, of_node(0)), (1, of_node(1))]


@pytest.mark.parametrize("order", [(0, 1), (1, 0)])
async def test_a_checkpoint_is_saved_when_every_folder_has_it(order: tuple[int, int]) -> None:
    async with linked(configure=of_node) as one:
        await make_ready(one)
        first, second = order
        await one.end.hears(first, checkpoint_written(2, folder=f"/node-{first}"))
        assert one.kinds() == []
        await one.end.hears(second, checkpoint_written(2, folder=f"/node-{second}"))
        assert [event.folder for event in one.events] == ["/node-0/step-2"]
        assert one.kinds() == [("CheckpointSaved", 2)]


async def test_a_node_with_copies_of_the_weights_reports_no_checkpoint() -> None:
    def configure(rank: int) -> wire.Configure:
        one = of_node(rank)
        return msgspec.structs.replace(one, settings=msgspec.structs.replace(one.settings, shard_ranks=1))

    async with linked(configure=configure) as one:
        await make_ready(one)
        await one.end.hears(0, checkpoint_written(2, folder="/node-0"))
        assert one.kinds() == [("CheckpointSaved", 2)]


async def test_a_node_that_is_a_checkpoint_ahead_does_not_stand_in_for_another() -> None:
    """Also not with the same step, which is reported again when a checkpoint is requested twice."""
    async with linked(configure=of_node) as one:
        await make_ready(one)
        await one.end.hears(1, *[checkpoint_written(2, folder="/node-1")] * 2)
        await one.end.hears(0, *[checkpoint_written(2, folder="/node-0")] * 2)
        assert one.kinds() == [("CheckpointSaved", 2)] * 2


async def test_later_events_of_rank_0_wait_for_the_checkpoint_of_the_other_node() -> None:
    async with linked(configure=of_node) as one:
        await make_ready(one)
        await one.end.hears(0, checkpoint_written(2, folder="/node-0"), step_trained(2))
        assert one.kinds() == []
        await one.end.hears(1, checkpoint_written(2, folder="/node-1"))
        assert one.kinds() == [("CheckpointSaved", 2), ("StepTrained", 2)]


@pytest.mark.parametrize(
    ("configure", "reports", "says"),
    [
        (of_node, (checkpoint_written(2, folder="/node-0"), checkpoint_written(3)), "hosts have different checkpoints"),
        (of_node, (checkpoint_written(2), checkpoint_written(2, chain="another")), "has chain another, but"),
        (lambda rank: CONFIGURE, (checkpoint_written(2), checkpoint_written(2)), "has no folder of its own"),
    ],
    ids=["another step", "another history", "no folder"],
)
async def test_a_report_of_a_checkpoint_that_does_not_fit_ends_the_run(
    configure: Any, reports: tuple[wire.CheckpointWritten, wire.CheckpointWritten], says: str
) -> None:
    async with linked(configure=configure) as one:
        await make_ready(one)
        for rank, report in enumerate(reports):
            one.end.said.put_nowait((rank, report))
        with pytest.raises(RunFailed, match=says):
            await asyncio.wait_for(one.receiver, 10)


async def test_a_checkpoint_counts_once_it_is_copied_and_training_goes_on_meanwhile() -> None:
    copying, copied = asyncio.Queue[Any](), asyncio.Queue[str]()

    async def keep(reports: Mapping[int, wire.CheckpointWritten]) -> str:
        copying.put_nowait({rank: report.folder for rank, report in reports.items()})
        return await copied.get()

    async with linked(configure=of_node, keep=keep) as one:
        await make_ready(one)
        keeper = asyncio.create_task(one.link.keep_checkpoints(keep), name="keeper")
        for step in (1, 2, 3):
            await one.end.hears(1, checkpoint_written(step, folder="/node-1"))
            await one.end.hears(0, checkpoint_written(step, folder="/node-0"))
            if step == 1:
                assert await asyncio.wait_for(copying.get(), 10) == {0: "/node-0/step-1", 1: "/node-1/step-1"}
        await one.end.hears(0, trained(0, 3, 0))
        await one.end.hears(1, trained(1, 3, 0))
        assert one.kinds() == [("MicroBatchTrained", 3, 0)]
        copied.put_nowait("/run/step-1")
        assert await asyncio.wait_for(copying.get(), 10) == {0: "/node-0/step-3", 1: "/node-1/step-3"}, (
            "the newest that waits"
        )
        assert one.end.sent[2:] == [(rank, wire.DeleteCheckpoint(name="step-2")) for rank in range(2)]
        assert [event.folder for event in one.events] == ["/run/step-1"]
        asked = asyncio.create_task(one.link.checkpoint(timeout_s=10), name="asked")
        await one.end.has_sent(6)
        copied.put_nowait("/run/step-3")
        assert await asked
        assert [event.folder for event in one.events] == ["/run/step-1", "/run/step-3"]
        keeper.cancel()
        await asyncio.gather(keeper, return_exceptions=True)


async def test_the_first_rank_of_each_folder_that_ranks_own_is_told_what_to_delete() -> None:
    async with linked(configure=of_node) as one:
        await one.link.drop_checkpoint("step-1")
        await make_ready(one)
        await one.link.drop_checkpoint("step-2")
        assert one.end.sent[2:] == [(rank, wire.DeleteCheckpoint(name="step-2")) for rank in range(2)]
    async with linked() as one:
        await make_ready(one)
        await one.link.drop_checkpoint("step-2")
        assert len(one.end.sent) == 2


async def test_no_checkpoint_is_asked_of_ranks_that_are_not_ready() -> None:
    """They have trained nothing since the one they start from; nothing may be sent before the barrier."""
    async with linked() as one:
        await one.end.hears(0, ready(0))
        assert await one.link.checkpoint(timeout_s=10)
        assert [type(message).__name__ for _, message in one.end.sent] == ["Configure"] * 2


async def test_ranks_that_are_not_ready_when_a_run_ends_are_not_told() -> None:
    """A resume that had nothing left but its last evaluation may end before they have connected."""
    async with linked(FakeEnd()) as link:
        await link.end.hears(0, ready(0))
        before = list(link.end.sent)
        assert not await link.link.stop("all 2 steps are trained")
        assert link.end.sent == before
        await link.end.hears(1, ready(1))
        assert await link.link.stop("all 2 steps are trained")
        assert len(link.end.sent) == len(before) + 2


async def test_a_replayed_version_that_differs_is_an_event_with_both_digests() -> None:
    async with linked() as one:
        await make_ready(one)
        await one.end.hears(0, published(1, differs="made again"))
        (event,) = one.events
        assert (event.files, event.differs) == ({"m": "0"}, "made again")


async def test_a_wave_leaves_only_when_the_journal_is_on_the_disk() -> None:
    end = FakeEnd()
    async with linked(end) as one:
        one.on_disk.clear()
        sender = asyncio.create_task(one.link.send_waves(), name="sender")
        await make_ready(one)
        wave = [empty_micro_batch(step=0, index=0, last=True, group_size=2) for _ in range(2)]
        one.link.train(wave, position=5)
        await asyncio.wait_for(one.waited.wait(), 10)
        assert (one.waits, len(end.sent)) == ([5], 2)  # Configure alone
        one.on_disk.set()
        await end.has_sent(4)
        sender.cancel()


@pytest.mark.parametrize(
    "message",
    [
        wire.StepDone(rank=0, step=2, metrics={}, chain="another"),
        wire.VersionWritten(version=2, num_bytes=1, files={}, chain="another"),
        checkpoint_written(2, chain="another"),
    ],
    ids=lambda m: type(m).__name__,
)
async def test_output_of_another_history_ends_the_run(message: Any) -> None:
    async with linked() as one:
        await make_ready(one)
        one.end.said.put_nowait((0, message))
        with pytest.raises(RunFailed, match="has chain another, but the waves sent have chain-"):
            await asyncio.wait_for(one.receiver, 10)


async def test_skipped_checkpoints_are_reported_once() -> None:
    async with linked() as one:
        for rank in range(2):
            message = wire.RankReady(rank=rank, next_step=1, skipped=("step-2 is damaged",))
            await one.end.hears(rank, message)
        assert one.told == ["step-2 is damaged; the trainer continues from step 2"]


async def test_a_wave_reaches_real_ranks_and_results_in_one_event() -> None:
    """Over real sockets: two ranks in threads, as the trainer runs them."""
    end = ControllerEnd(address="tcp://127.0.0.1:0", token="t", world_size=2, now=lambda: 0.0)
    address = await end.start()
    one = Linked(end)  # type: ignore[arg-type]
    sender = asyncio.create_task(one.link.send_waves(), name="sender")
    wave = [empty_micro_batch(step=0, index=0, last=True, group_size=2) for _ in range(2)]
    one.link.train(wave, position=5)
    tokens = await asyncio.gather(*(asyncio.to_thread(be_a_rank, address, rank) for rank in range(2)))
    async with asyncio.timeout(20):
        await one.stepped.wait()
    assert one.kinds() == [("TrainerReady", 0), ("MicroBatchTrained", 0, 0), ("StepTrained", 0)]
    assert tokens == [0, 0]
    sender.cancel()
    await asyncio.gather(sender, return_exceptions=True)
    await one.close()
    await end.close()


def be_a_rank(address: str, rank: int) -> int:
    """Configure, Ready, one micro-batch, its reports."""
    end = TrainerEnd(address=address, token="t", rank=rank, world_size=2)
    end.connect(20)
    assert isinstance(end.receive(20), wire.Configure)
    end.send(ready(rank))
    batch = end.receive(20)
    assert isinstance(batch, wire.MicroBatch)
    end.send(trained(rank, batch.step, batch.index))
    if rank == 0:
        end.send(step_trained(0))
    end.close()
    return int(np.asarray(batch.tokens).size)
