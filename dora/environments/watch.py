"""Ends a call that blocks the event loop of its host, as `time.sleep` in an `async` method does.

Such a call stops every other episode of the host, and also the loop, which would enforce the time limit. So a thread
watches the loop. If a call blocks it, a signal makes the main thread raise `Blocked` in the code that blocks, and the
loop goes on. Code that never returns to the interpreter, such as an endless computation in C, cannot be ended in this
way; then the controller kills the host.

Invariant: `Blocked` is raised in code of the user only, and only if one callback of the loop has not returned for
`limit_s` of the time in which this process ran. Many short callbacks do not count as a blocking call, and neither does
the time in which the process was stopped.
"""

from __future__ import annotations

import asyncio
import signal
import sys
import threading
import time
from collections.abc import Callable
from types import FrameType

from dora.functions import place_of, stack_of

#: Longest time between two looks at the main thread, and the least number of looks within the limit.
_LOOK_S = 0.5
_LOOKS = 8

_RUN = asyncio.Handle._run.__code__


class Blocked(BaseException):
    """Raised in code that blocks the event loop. Not an `Exception`, so that `except Exception` lets it pass."""


class LoopWatch:
    """A watch of the main thread's event loop. `on_blocked` runs in the main thread before `Blocked` is raised."""

    def __init__(self, limit_s: float, *, on_blocked: Callable[[], None]) -> None:
        self._look_s = min(_LOOK_S, limit_s / _LOOKS)
        self._num_looks = limit_s / self._look_s
        self._on_blocked = on_blocked
        self._main = threading.main_thread().ident
        self._overdue: FrameType | None = None  # the callback that has not returned for too long

    def start(self) -> None:
        """Start the thread, which ends with the process. Call it in the main thread."""
        signal.signal(signal.SIGURG, self._on_signal)  # otherwise sent only to owners of sockets, for urgent data
        threading.Thread(target=self._look, name="loop-watch", daemon=True).start()

    def _look(self) -> None:
        assert self._main is not None
        known, looks = None, 0
        while True:
            time.sleep(self._look_s)
            callback = _callback(sys._current_frames().get(self._main))
            looks = looks + 1 if callback is not None and callback is known else 0
            known = callback
            if looks >= self._num_looks:
                self._overdue = callback
                signal.pthread_kill(self._main, signal.SIGURG)

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        overdue, self._overdue = self._overdue, None
        if overdue is not None and _callback(frame) is overdue and place_of(_within(frame)):
            self._on_blocked()
            raise Blocked


def _callback(frame: FrameType | None) -> FrameType | None:
    """Return the frame of the loop's callback that a stack is in, if any; each callback has its own."""
    while frame is not None and frame.f_code is not _RUN:
        frame = frame.f_back
    return frame


def _within(frame: FrameType | None) -> list[tuple[str, int]]:
    """Return the part of a stack that is within the loop's callback."""
    frames = stack_of(frame)
    return frames[len(stack_of(_callback(frame))) :]
