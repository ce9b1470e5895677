"""The files of lines that a run writes for people: metrics, kept trajectories, spans and timeline.

Invariant: before a line is added, lines that a crash has damaged are removed, and so are lines about a step, an
evaluation or a time that the journal does not have. Lines that were written SAVE_EVERY_S ago, or before the last
checkpoint, are on the disk, unless the disk is slow.

Save loop. Consumes: written lines. Waits for: SAVE_EVERY_S, then the disk, in a thread, one file after the other.
Unblocked by: time, and `soon`.
"""

from __future__ import annotations

import asyncio
from contextlib import suppress
from functools import partial
from typing import Any, Final

import msgspec

from dora.controller.run_tasks import Loop
from dora.core.state import State
from dora.files import LineFile
from dora.journal.run_folder import RunFolder
from dora.journal.spans import ends_by

SAVE_EVERY_S: Final = 5.0


class LineFiles:
    """The files of one run, opened for appending."""

    def __init__(self, folder: RunFolder, state: State) -> None:
        """`state`: the core's state at the end of the journal."""
        is_known, has_ended = partial(_is_known, state=state), partial(ends_by, at=state.now)
        self.metrics = LineFile(folder.metrics, is_known=is_known)
        self.trajectories = LineFile(folder.trajectories, is_known=is_known)
        self.spans = LineFile(folder.spans, is_known=has_ended)
        self.timeline = LineFile(folder.timeline, is_known=has_ended)
        self._files = (self.metrics, self.trajectories, self.spans, self.timeline)
        self._requested = asyncio.Event()

    def removed(self) -> list[str]:
        """Return a message for each file from which lines were removed when it was opened."""
        return [
            f"{file.path}: {file.num_dropped} of its lines were damaged or not in the journal, and were removed"
            for file in self._files
            if file.num_dropped
        ]

    def close(self) -> None:
        """Bring everything to the disk, and close the files."""
        for file in self._files:
            file.close()

    def soon(self) -> None:
        """Request that the lines written so far be synced without delay."""
        self._requested.set()

    def loops(self) -> list[tuple[str, Loop]]:
        """Return the named coroutine to run together with the controller."""
        return [("lines", self._save())]

    async def _save(self) -> None:
        while True:
            with suppress(TimeoutError):
                async with asyncio.timeout(SAVE_EVERY_S):
                    await self._requested.wait()
            self._requested.clear()
            for file in self._files:
                await asyncio.to_thread(file.sync)


class _Subject(msgspec.Struct):
    """What a row of metrics or a kept trajectory is about."""

    kind: str = "step"
    step: int = -1
    version: int = -1
    trajectory: int = 0


def _is_known(line: bytes, *, state: State) -> bool:
    """Whether a row is undamaged, and about a step or an evaluation that the journal has."""
    try:
        values: dict[str, Any] = msgspec.json.decode(line)  # decode all of it: a struct would skip damaged values
        row = msgspec.convert(values, _Subject)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        return False
    if row.kind == "evaluation":
        return state.evaluated is not None and row.version <= state.evaluated
    return row.kind != "step" or row.step < state.feed.trained
