"""An event loop with virtual time, which passes only while everything waits, and with jobs of threads run in the loop.

Invariant: seed and program determine the order of everything. A job for a thread runs without interruption, some time
after its submission; one that is cancelled before that never runs, as in a busy pool.
"""

from __future__ import annotations

import asyncio
import random
import selectors
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

T = TypeVar("T")

#: Delays of jobs for threads, in seconds of virtual time.
DELAYS = (0.0, 0.0, 0.0, 0.001, 0.02, 0.3)


class Stuck(AssertionError):
    """The program waits for something that will never happen, or runs forever."""


class _Selector(selectors.BaseSelector):
    """No file is ever ready; waiting advances the time."""

    def __init__(self) -> None:
        self.now = 0.0
        self.limit_s = 5_000.0
        self._keys: dict[Any, selectors.SelectorKey] = {}

    def register(self, fileobj: Any, events: int, data: Any = None) -> selectors.SelectorKey:
        key = selectors.SelectorKey(fileobj, fileobj, events, data)  # asyncio gives descriptors
        self._keys[fileobj] = key
        return key

    def unregister(self, fileobj: Any) -> selectors.SelectorKey:
        return self._keys.pop(fileobj)

    def get_map(self) -> Any:
        return self._keys

    def get_key(self, fileobj: Any) -> selectors.SelectorKey:
        return self._keys[fileobj]

    def select(self, timeout: float | None = None) -> list[Any]:
        if timeout is None:
            raise Stuck("everything waits")
        self.now += max(timeout, 0.0)
        if self.now > self.limit_s:
            raise Stuck(f"still running after {self.limit_s:g} s of virtual time")
        return []


class VirtualLoop(asyncio.SelectorEventLoop):
    """The loop."""

    def __init__(self, rng: random.Random) -> None:
        self._clock = _Selector()
        self._rng = rng
        super().__init__(self._clock)

    def time(self) -> float:
        return self._clock.now

    def run_in_executor(self, executor: Any, func: Callable[..., T], *args: Any) -> asyncio.Future[T]:  # type: ignore[override]
        future: asyncio.Future[T] = self.create_future()

        def run() -> None:
            if future.cancelled():
                return
            try:
                future.set_result(func(*args))
            except BaseException as err:  # noqa: BLE001 - raised again in the caller
                future.set_exception(err)

        self.call_later(self._rng.choice(DELAYS), run)
        return future


def run(main: Coroutine[Any, Any, T], *, rng: random.Random) -> T:
    """Like asyncio.run, in virtual time."""
    loop = VirtualLoop(rng)
    try:
        return loop.run_until_complete(main)
    finally:
        for task in asyncio.all_tasks(loop):
            task.cancel()
        loop._clock.limit_s = float("inf")
        loop.run_until_complete(asyncio.sleep(0))
        loop.run_until_complete(loop.shutdown_asyncgens())
        loop.close()
