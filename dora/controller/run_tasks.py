"""The tasks of a run in one task group, so that an error in any of them ends the run."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any

#: A coroutine that runs until it returns or is cancelled.
Loop = Coroutine[Any, Any, None]


class RunTasks:
    """The tasks of one run, to be started within `async with group`."""

    def __init__(self) -> None:
        self.group = asyncio.TaskGroup()
        self._background: set[asyncio.Task[None]] = set()

    def background(self, coroutine: Loop, *, name: str) -> asyncio.Task[None]:
        """Start a task that the shutdown cancels."""
        task = self.group.create_task(coroutine, name=name)
        self._background.add(task)
        task.add_done_callback(self._background.discard)
        return task

    def finishing(self, coroutine: Loop, *, name: str) -> asyncio.Task[None]:
        """Start a task that the shutdown waits for."""
        return self.group.create_task(coroutine, name=name)

    def cancel(self) -> None:
        """Cancel all background tasks."""
        for task in list(self._background):
            task.cancel()
