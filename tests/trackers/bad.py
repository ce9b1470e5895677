"""Trackers that go wrong in the ways that real ones do, until a file `healed` is beside their folders.

Each is a real TensorBoard tracker, so that its record can be read and compared.
"""

from __future__ import annotations

import os
import resource
import signal
import threading

from dora.trackers.api import Position, TrackedRow, TrackedRun
from dora.trackers.tensorboard import TensorBoardTracker
from tests.escapes import HOSTILE

#: Rows after which a tracker goes wrong.
GOOD_ROWS = 2


class _Bad(TensorBoardTracker):
    def __init__(self, run: TrackedRun, position: Position) -> None:
        super().__init__(run, position)
        self._is_ill = not (run.folder.parent / "healed").exists()

    def log(self, row: TrackedRow) -> None:
        if self._is_ill and row.number >= GOOD_ROWS:
            self.fail()
        super().log(row)

    def fail(self) -> None:
        raise NotImplementedError


class Raising(_Bad):
    def fail(self) -> None:
        raise ConnectionError("the service is gone")


class Hostile(_Bad):
    """Its service answers with text that would control a terminal."""

    def fail(self) -> None:
        raise ConnectionError(HOSTILE)


class Hanging(_Bad):
    def fail(self) -> None:
        threading.Event().wait()


class Stopped(_Bad):
    """A process that somebody has stopped: it does not even receive SIGTERM."""

    def fail(self) -> None:
        os.kill(os.getpid(), signal.SIGSTOP)


class FullDisk(_Bad):
    """No file may grow beyond the rows that it has: as on a full file system, a part of a row can be written."""

    def fail(self) -> None:
        self.save()
        size = self._file.tell() + 100
        resource.setrlimit(resource.RLIMIT_FSIZE, (size, resource.RLIM_INFINITY))


class Deaf(_Bad):
    """It holds the interpreter, so that no handler of a signal runs."""

    def fail(self) -> None:
        sum(iter(int, 1))
