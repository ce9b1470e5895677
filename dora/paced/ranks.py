"""All ranks of a paced trainer in one process: real messages over real ZeroMQ, in the simulator's time.

The ranks work in lockstep, like the simulated ones: a wave starts when every rank has its micro-batch, and a delay
caused by this machine does not move the due times of later waves. A version is a folder of a few KB. Invariant: step s
trains waves 0, 1, ... in order and publishes version s + 1 once.
"""

from __future__ import annotations

import itertools
import threading
import time
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Final

from dora.core.ids import FIRST_VERSION, StepId, VersionId
from dora.errors import ProtocolError, RemoteError
from dora.paced.model import write_model
from dora.sim.trainer import wave_time
from dora.sim.workload import Workload
from dora.trainer.spans import RankClock
from dora.transport.messages import (
    PULSE_S,
    CheckpointWritten,
    Configure,
    MicroBatch,
    MicroBatchDone,
    RankActivity,
    RankPulse,
    RankReady,
    SaveCheckpoint,
    StepDone,
    Stop,
    ToTrainer,
    VersionWritten,
)
from dora.transport.trainer_end import TrainerEnd
from dora.weights.store import VersionStore

CONNECT_TIMEOUT_S: Final = 120.0
MESSAGE_TIMEOUT_S: Final = 3600.0
PUBLISH_TIMEOUT_S: Final = 600.0


def run_ranks(workload: Workload, *, address: str, token: str, time_scale: float) -> None:
    """Run every rank of the workload's trainer until Stop."""
    world_size = workload.num_ranks
    ends = [TrainerEnd(address=address, token=token, rank=i, world_size=world_size) for i in range(world_size)]
    try:
        for end in ends:
            end.connect(CONNECT_TIMEOUT_S)
        orders = _from_each(ends)
        if not isinstance(orders[0], Configure):
            raise ProtocolError(f"the first message is {type(orders[0]).__name__}, expected Configure")
        _Trainer(workload, ends, orders[0], time_scale=time_scale).run()
    finally:
        for end in ends:
            end.close()


class _Trainer:
    """The trainer between Configure and Stop; its clock is the workload's."""

    def __init__(self, workload: Workload, ends: Sequence[TrainerEnd], order: Configure, *, time_scale: float) -> None:
        self._ends, self._order, self._time_scale = ends, order, time_scale
        self._workload = workload
        self._publish_s, self._update_s = workload.publish_s, workload.train.update_s
        self._store = VersionStore(memory_root=Path(order.memory_root), durable_root=Path(order.durable_root))
        self._publisher = ThreadPoolExecutor(1, thread_name_prefix="publisher")
        self._published: Future[None] | None = None
        self._clocks = [RankClock(rank) for rank in range(len(ends))]
        self._ended = threading.Event()
        self._pulse = threading.Thread(target=self._beat, name="pulse", daemon=True)
        self._free_at = 0.0
        self._step = StepId(0)
        self._chain = order.chain

    def run(self) -> None:
        self._publish(FIRST_VERSION, self._chain, due=self._now())
        self._report_spans()
        for rank, end in enumerate(self._ends):
            end.send(RankReady(rank=rank, next_step=self._step))
        self._switch("waiting")
        self._pulse.start()
        try:
            while not isinstance((messages := _from_each(self._ends))[0], Stop):
                if isinstance(messages[0], SaveCheckpoint):
                    self._save_checkpoint()
                else:
                    self._train([m for m in messages if isinstance(m, MicroBatch)])
                self._switch("waiting")
        finally:
            self._ended.set()
            self._pulse.join()
        if self._published is not None:
            self._published.result(PUBLISH_TIMEOUT_S)
        self._publisher.shutdown()

    def _beat(self) -> None:
        """Send the pulse of each rank; one that only waits for its time to pass makes progress."""
        for count in itertools.count():
            if self._ended.wait(PULSE_S):
                return
            try:
                for rank, (end, clock) in enumerate(zip(self._ends, self._clocks, strict=True)):
                    end.try_send(RankPulse(rank=rank, count=count, activity=clock.activity))
            except RemoteError:
                return  # the main thread gets this error too

    def _now(self) -> float:
        return time.monotonic() * self._time_scale

    def _wait_until(self, due: float) -> None:
        time.sleep(max(0.0, due - self._now()) / self._time_scale)

    def _switch(self, activity: RankActivity) -> None:
        for clock in self._clocks:
            clock.switch(activity)

    def _report_spans(self) -> None:
        for end, clock in zip(self._ends, self._clocks, strict=True):
            end.send(clock.take())

    def _train(self, wave: list[MicroBatch]) -> None:
        self._switch("forward_backward")
        loads = [len(batch.tokens) for batch in wave]
        first = wave[0]
        if first.step != self._step:
            raise ProtocolError(f"a micro-batch of step {first.step} arrived, expected step {self._step}")
        taken = wave_time(self._workload, loads, closes=first.closes)
        begin = max(self._now(), self._free_at)
        self._free_at = begin + taken.compute_s + taken.update_s
        self._wait_until(self._free_at - (self._update_s if first.last else 0.0))  # the last update ends the step
        self._report_spans()
        for rank, (end, batch) in enumerate(zip(self._ends, wave, strict=True)):
            busy_s = taken.compute_s / self._time_scale
            end.send(
                MicroBatchDone(
                    rank=rank, step=batch.step, index=batch.index, num_tokens=len(batch.tokens), busy_s=busy_s
                )
            )
        if first.last:
            self._close_step(first.chain)

    def _close_step(self, chain: str) -> None:
        self._switch("optimizer")
        self._wait_until(self._free_at)
        trained, self._step, self._chain = self._step, StepId(self._step + 1), chain
        self._report_spans()
        self._ends[0].send(StepDone(rank=0, step=trained, metrics={}, chain=chain))
        due = self._free_at + self._publish_s
        self._switch("publishing")
        if self._published is not None:
            self._published.result(PUBLISH_TIMEOUT_S)
        self._published = self._publisher.submit(self._publish, VersionId(self._step), chain, due=due)
        settings = self._order.settings
        if self._step % settings.checkpoint_every == 0 or self._step == settings.steps:
            self._save_checkpoint()

    def _publish(self, version: VersionId, chain: str, *, due: float) -> None:
        """Publish at `due`; writing the files is part of the workload's publication time."""
        staged = self._store.stage(version)
        write_model(staged, like=Path(self._order.model_path), version=version)
        manifest = self._store.seal(version, staged, chain=chain)
        self._wait_until(due)
        files = dict(manifest.files)
        self._ends[0].send(VersionWritten(version=version, num_bytes=manifest.num_bytes, files=files, chain=chain))

    def _save_checkpoint(self) -> None:
        """A paced trainer has no state but its step."""
        self._switch("saving")
        folder = Path(self._order.checkpoints) / f"step-{self._step}"
        folder.mkdir(exist_ok=True)
        self._ends[0].send(
            CheckpointWritten(step=self._step, folder=str(folder), num_bytes=0, files={}, chain=self._chain)
        )


def _from_each(ends: Sequence[TrainerEnd]) -> list[ToTrainer]:
    """The next message of every rank; the controller sends them all the same kind."""
    return [end.receive(MESSAGE_TIMEOUT_S) for end in ends]
