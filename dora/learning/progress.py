"""What a simulation of learning saves, so that it goes on where it stopped.

Answers and metrics are saved in the order in which they are made; the trainer, with all versions in memory, at some
versions. A simulation that goes on makes all decisions again from the beginning, which costs little, but takes answers
and metrics from the file as long as it has them, and trains from the saved step on. Invariant: the file has all that
came before the saved step.
"""

from __future__ import annotations

import fcntl
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Final, TypeVar

import msgspec

from dora.errors import ConfigError
from dora.journal.frames import FrameReader, FrameWriter

T = TypeVar("T")

#: Name of the file in the folder of a simulation.
MADE: Final = "made"


class Progress:
    """What was made, in order; kept in a folder, unless there is none."""

    def __init__(self, folder: Path | None, *, about: str) -> None:
        """`about`: of what the simulation is. ConfigError if the folder has another one, or is in use."""
        self.folder = folder
        self._writer: FrameWriter | None = None
        self._known: Iterator[tuple[int, bytes]] = iter(())
        if folder is None:
            return
        folder.mkdir(parents=True, exist_ok=True)
        self._lock = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(self._lock)
            raise ConfigError(f"{folder}: another process makes this simulation; wait for it, or end it") from None
        self._writer = FrameWriter(folder / MADE)  # cuts off what a crash has torn
        self._known = iter(FrameReader(folder / MADE))
        if self.recall(lambda: about, str) != about:
            self.close()
            raise ConfigError(
                f"{folder}: is of another simulation, another model or another version of torch; delete it"
            )

    def recall(self, make: Callable[[], T], kind: type[T]) -> T:
        """Return what was made at this place before, or make it, and wait until it is saved."""
        _, record = next(self._known, (0, None))
        if record is not None:
            try:
                return msgspec.msgpack.decode(record, type=kind)
            except msgspec.MsgspecError as err:
                raise ConfigError(f"{self.folder}: does not have what a simulation has saved ({err})") from err
        made = make()
        if self._writer is not None:
            self._writer.write(msgspec.msgpack.encode(made))
            self._writer.store(self._writer.take())
        return made

    def close(self) -> None:
        """Close the file, and let others use the folder."""
        if self._writer is not None:
            self._writer.close()
            os.close(self._lock)
