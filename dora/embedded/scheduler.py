"""The requests of one engine, between HTTP and the loop that generates: queue, aborts, orders, publication.

Handlers submit generations, abort them and run control orders. The engine's loop (`Batcher` with a model, `dora.paced`
with a clock) handles all of these between steps. Invariant: a generation is live from `submit` until its end is
published, and handlers see tokens and ends only once they are published. Methods under "orders" may be called only
through `between_steps`.
"""

from __future__ import annotations

import asyncio
import threading
import time
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, TypeVar

from dora.embedded.generation import QUEUE_FULL, Generation, LoadedAdapter
from dora.embedded.metrics import EngineMetrics

Result = TypeVar("Result")


@dataclass(frozen=True, slots=True)
class AdapterRoom:
    """What a model has room for."""

    count: int  # adapters at the same time
    rank: int  # of each, at most
    targets: tuple[str, ...]  # the last parts of the names of the modules that they may change


class AdapterPlaces(Protocol):
    """The adapters beside the model's weights, by place."""

    @property
    def room(self) -> AdapterRoom: ...
    def read(self, folder: Path) -> Any: ...  # on any thread; ConfigError if it is not an adapter of this model
    def put(self, place: int, matrices: Any) -> None: ...  # what `read` returned; no live request has this place


class Model(Protocol):
    """The model, as the control routes see it."""

    context_tokens: int
    vocab_size: int
    eos_token_ids: frozenset[int]
    model_type: str
    architectures: list[str]

    @property
    def cached_tokens(self) -> int: ...  # held by the prefix cache
    @property
    def adapters(self) -> AdapterPlaces | None: ...  # None: it serves none

    def load(self, folder: Path) -> None: ...  # OSError: nothing changed; any other error: weights are undefined
    def put(self, tensors: Iterable[tuple[str, Any]]) -> None: ...  # by name; ConfigError: weights are undefined
    def checksums(self) -> dict[str, str]: ...  # of the weights, by name
    def flush(self) -> None: ...  # drops cached prefixes


class Scheduler(ABC):
    def __init__(
        self,
        model: Model,
        *,
        slots: int,
        kv_tokens: int,
        weight_version: str = "default",
        max_queued_requests: int | None = None,
    ) -> None:
        self.model = model
        self.slots, self.kv_tokens, self.max_queued_requests = slots, kv_tokens, max_queued_requests
        self.weight_version = weight_version
        self.metrics = EngineMetrics()
        self.live: dict[str, Generation] = {}
        self.waiting: deque[Generation] = deque()
        self.rows: list[Generation] = []  # running
        self.used_tokens = 0
        self.holding = False  # paused: controls run, the model does not
        self._output_at = 0.0  # monotonic, of the last step
        self._stepped = asyncio.Event()  # set whenever tokens were made
        self._finished: list[Generation] = []  # not yet published
        self._aborting: set[str] = set()  # live rids to end at the next chance
        self._orders: deque[tuple[Callable[[], object], bool, asyncio.Future[object]]] = deque()
        self._wake = asyncio.Event()
        self._ended = asyncio.Event()  # set whenever live requests have ended
        self._floor_wanted = threading.Event()  # ends the burst in progress

    # --- called from the event loop, at any time

    def submit(self, generation: Generation) -> None:
        generation.queued_at = time.time()
        generation.relabel(self.weight_version)
        if self._queue_is_full():
            generation.finish_reason, generation.done = QUEUE_FULL, True
            generation.finished_at = time.time()
            generation.news.set()
            return
        self.live[generation.rid] = generation
        self.waiting.append(generation)
        self._want_floor()

    def abort(self, rid: str) -> None:
        """End `rid` and, as SGLang does, every live rid that starts with it. No effect if `rid` itself is not live."""
        if rid in self.live:
            self._aborting.update(other for other in self.live if other.startswith(rid))
            self._want_floor()

    def abort_only(self, rid: str) -> None:
        """End the request `rid` alone; its client has disconnected."""
        if rid in self.live:
            self._aborting.add(rid)
            self._want_floor()

    async def emptied(self, *, timeout_s: float) -> bool:
        """Wait until nothing is live. False after `timeout_s`."""
        try:
            async with asyncio.timeout(timeout_s):
                await self._until(lambda: not self.live)
        except TimeoutError:
            return False
        return True

    async def released(self, adapter: LoadedAdapter) -> None:
        """Wait until no live request uses `adapter`. There is no time limit: a paused request is live."""
        await self._until(lambda: all(generation.adapter != adapter for generation in self.live.values()))

    async def _until(self, holds: Callable[[], bool]) -> None:
        while not holds():
            self._ended.clear()
            await self._ended.wait()

    async def output_since(self, begun: float, *, timeout_s: float) -> bool:
        """Wait for a step that ends after `begun` (monotonic time). False after `timeout_s`."""
        try:
            async with asyncio.timeout(timeout_s):
                while self._output_at <= begun:
                    self._stepped.clear()
                    await self._stepped.wait()
        except TimeoutError:
            return False
        return True

    def abort_all(self) -> None:
        self._aborting.update(self.live)
        self._want_floor()

    async def between_steps(self, order: Callable[[], Result], *, on_thread: bool = False) -> Result:
        """Run `order` after the current burst and all earlier orders; return its result."""
        future: asyncio.Future[object] = asyncio.get_running_loop().create_future()
        self._orders.append((order, on_thread, future))
        self._want_floor()
        return await future  # type: ignore[return-value]  # the loop sets what `order` returned

    def _want_floor(self) -> None:
        self._floor_wanted.set()
        self._wake.set()

    @abstractmethod
    async def run(self) -> None:
        """The engine's loop; it ends only with an error."""

    @abstractmethod
    def close(self) -> None:
        """Release the loop's resources, after it was cancelled."""

    # --- orders: run them through `between_steps`

    def relabel(self, version: str) -> None:
        self.weight_version = version
        for generation in self.live.values():
            generation.relabel(version)

    @abstractmethod
    def hold(self, *, retract: bool) -> None:
        """Run no step until `release`. With `retract`, all running requests return to the head of the queue."""

    def release(self) -> None:
        self.holding = False
        self._wake.set()

    def flush(self, *, over_queue: bool = False) -> bool:
        """Empty the prefix cache. False, without effect, while a request is live; with `over_queue`, a held server
        ignores its queued requests."""
        resident = self.rows if over_queue and self.holding else self.live
        if resident:
            return False
        self.model.flush()
        return True

    # --- for the loop

    async def _run_orders(self) -> None:
        while self._orders:
            order, on_thread, future = self._orders.popleft()
            try:
                result = await self._run_on_thread(order) if on_thread else order()
            except Exception as err:  # noqa: BLE001  raised to the caller, who awaits the future
                if not future.cancelled():
                    future.set_exception(err)
            else:
                if not future.cancelled():
                    future.set_result(result)

    @abstractmethod
    async def _run_on_thread(self, order: Callable[[], object]) -> object:
        """Run an order that may take long, such as loading weights."""

    def _publish_finished(self) -> None:
        for generation in self._finished:
            del self.live[generation.rid]
            self._aborting.discard(generation.rid)
            generation.published, generation.done = len(generation.output_ids), True
            generation.news.set()
            self.metrics.finished(generation)
        if self._finished:
            self._ended.set()
        self._finished.clear()

    def _finish(self, generation: Generation, reason: dict[str, object]) -> None:
        generation.finish_reason, generation.finished_at = reason, time.time()
        self._finished.append(generation)

    def _queue_is_full(self) -> bool:
        return self.max_queued_requests is not None and len(self.waiting) >= self.max_queued_requests
