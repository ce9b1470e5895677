"""Periodic reports to the core: the time, the progress of answers, and servers with little free KV.

The tick loop produces ProgressReported, KvPressureReported and Ticked until it is cancelled. As the journal keeps them
for good, progress is reported only as often as others look at it.
"""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Callable, Mapping
from typing import Final, Protocol

import structlog

from dora.controller.fleet import Fleet
from dora.controller.inbox import Inbox
from dora.controller.run_tasks import Loop
from dora.controller.trajectories import Trajectories
from dora.core import events as ev
from dora.core.ids import InstanceId, TrajectoryId
from dora.core.tables import Server
from dora.engine.api import InferenceEngine
from dora.errors import RemoteError
from dora.journal.commits import Commits

log = structlog.get_logger(__name__)

TICK_S: Final = 1.0
#: Maximum number of ticks between two reports of an instance's progress: fewer than between two health checks, which
#: take a server without a new report for one that may prefill.
REPORT_TICKS: Final = 4
#: The same as a share of the watchdog's time, in which the core looks at them eight times.
_REPORT_SHARE: Final = 1 / 16
#: Shares of KV in use: above KV_PRESSED a server will soon retract requests; below KV_RELIEVED it gets work again.
KV_PRESSED: Final = 0.95
KV_RELIEVED: Final = 0.8
_LAG_PROBE_S: Final = 0.1


class LagObserver(Protocol):
    """A receiver of measurements of the event loop's lag."""

    def on_lag(self, seconds: float) -> None: ...


class Reporters:
    """The loops that produce periodic reports."""

    def __init__(
        self,
        rows: Mapping[InstanceId, Server],
        *,
        trajectories: Trajectories,
        fleet: Fleet,
        engine: InferenceEngine,
        inbox: Inbox,
        commits: Commits,
        observer: LagObserver,
        now: Callable[[], float],
        watchdog_s: float,
        tick_s: float = TICK_S,
    ) -> None:
        """`rows` is the core's instance table; `tick_s` is by the wall clock, `watchdog_s` by the run's."""
        self._rows = rows
        self._trajectories = trajectories
        self._fleet = fleet
        self._engine = engine
        self._inbox = inbox
        self._commits = commits
        self._observer = observer
        self._now = now
        self._tick_s = tick_s
        self._report_ticks = max(1, min(REPORT_TICKS, int(_REPORT_SHARE * watchdog_s / TICK_S)))
        self._reported: dict[InstanceId, dict[TrajectoryId, int]] = {}
        self._polled: set[InstanceId] = set()  # requests for their KV use are in flight

    def loops(self) -> list[tuple[str, Loop]]:
        """Return the named coroutines to run together with the controller."""
        return [("ticks", self._tick()), ("event-loop-lag", self._measure_lag())]

    async def _tick(self) -> None:
        async with asyncio.TaskGroup() as polls:
            for tick in itertools.count():
                await asyncio.sleep(self._tick_s)
                for instance in list(self._rows.values()):
                    if instance.residents and (tick + instance.id) % self._report_ticks == 0:
                        await self._report_progress(instance.id)
                    if instance.pressed or instance.kv_load >= KV_RELIEVED * instance.kv_tokens:
                        self._poll_kv(instance, polls)
                self._commits.soon()
                await self._inbox.emit(ev.Ticked(self._now()))

    async def _report_progress(self, instance: InstanceId) -> None:
        records = self._trajectories.records
        counts = {t: len(records[t].tokens) for t in self._rows[instance].residents if t in records}
        if counts != self._reported.get(instance):
            self._reported[instance] = counts
            await self._inbox.emit(ev.ProgressReported(self._now(), instance, counts))

    def _poll_kv(self, instance: Server, polls: asyncio.TaskGroup) -> None:
        """Start a poll in its own task, so that a server that does not answer does not delay the ticks."""
        if instance.id not in self._polled:
            self._polled.add(instance.id)
            poll = polls.create_task(self._report_kv(instance), name=f"kv-{instance.id}")
            poll.add_done_callback(lambda _: self._polled.discard(instance.id))

    async def _report_kv(self, instance: Server) -> None:
        """Ask a server for its KV use, and report a change of pressure."""
        url = self._fleet.urls.get(instance.id)
        if url is None:
            return
        try:
            kv = await self._engine.kv_use(url)
        except RemoteError as err:
            log.warning("loads_failed", instance=instance.id, reason=str(err))
            return
        limit = KV_RELIEVED if instance.pressed else KV_PRESSED
        pressed = kv.used_tokens >= limit * kv.kv_tokens
        if pressed != instance.pressed:
            await self._inbox.emit(ev.KvPressureReported(self._now(), instance.id, pressed))

    async def _measure_lag(self) -> None:
        loop = asyncio.get_running_loop()
        while True:
            before = loop.time()
            await asyncio.sleep(_LAG_PROBE_S)
            self._observer.on_lag(max(0.0, loop.time() - before - _LAG_PROBE_S))
