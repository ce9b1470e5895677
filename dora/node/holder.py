"""Records in a run's lock file which process holds the run, so that others can signal it or see whether it is alive.

Invariant: a process is taken for the holder only if it began when the holder did and works on the folder, so that no
other process is signaled, such as one that got the same number later.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Final

import msgspec
import psutil

from dora import foreign
from dora.errors import ConfigError
from dora.node.lease import hold

_SAME_START_S: Final = 1  #: starts are rounded
_MAX_BYTES: Final = 1_000


class Holder(msgspec.Struct, frozen=True):
    """A process that holds, or held, a run."""

    pid: int
    started: int  #: seconds after its host, so that it stays when the clock is set
    host: str

    @classmethod
    def of(cls, pid: int) -> Holder:
        """Describe a process of this host."""
        return cls(pid, round(_started(pid)), socket.gethostname())

    def is_process(self, pid: int, started: int) -> bool:
        """Whether it is the process of this number that began then."""
        return self.pid == pid and abs(self.started - started) <= _SAME_START_S

    @property
    def is_here(self) -> bool:
        """Whether the process is, or was, on this host."""
        return self.host == socket.gethostname()


def find_process(pid: int, started: int, *, lock: Path) -> psutil.Process | None:
    """Return the process of this host that holds a run; None if it has ended, or never had to do with that run."""
    with suppress(psutil.Error, ValueError, OverflowError):
        found = psutil.Process(pid)
        is_same = abs(_started(pid) - started) <= _SAME_START_S
        if is_same and found.status() != psutil.STATUS_ZOMBIE and _works_on(found, lock):
            return found
    return None


def _started(pid: int) -> float:
    booted = psutil.boot_time()  # first: some releases of psutil keep it, and add it to every start
    return psutil.Process(pid).create_time() - booted


def _works_on(process: psutil.Process, lock: Path) -> bool:
    """Whether the command line names the folder, as one from Python does, or the lock is open. A folder received from
    others may name any process in its lock."""
    return str(lock.parent) in process.cmdline() or str(lock) in (file.path for file in process.open_files())


@contextmanager
def hold_run(lock: Path) -> Iterator[None]:
    """Lock a run as `lease.hold` does, and write who holds it; after a ConfigError, who held it before."""
    with hold(lock) as held:
        before = held.read(_MAX_BYTES)
        note_holder(lock, Holder.of(os.getpid()))
        try:
            yield
        except ConfigError:
            if before:
                _write(lock, before)
            raise


def note_holder(lock: Path, holder: Holder) -> None:
    """Write the holder; without an effect while the disk is full, as only the lock itself must be right."""
    _write(lock, msgspec.json.encode(holder))


def _write(lock: Path, data: bytes) -> None:
    with suppress(OSError), open(os.open(lock, os.O_WRONLY | os.O_CREAT | os.O_NOFOLLOW, 0o600), "wb") as file:
        file.truncate()
        file.write(data)


def read_holder(lock: Path) -> Holder | None:
    """Return the last holder of a run; None if the file does not say."""
    with suppress(OSError, foreign.ForeignFileError, msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        return msgspec.json.decode(foreign.read(lock, max_bytes=_MAX_BYTES), type=Holder)
    return None


def is_held_here(lock: Path) -> bool:
    """Return whether a process of this host holds the run."""
    holder, lock = read_holder(lock), lock.parent.resolve() / lock.name
    return holder is not None and holder.is_here and find_process(holder.pid, holder.started, lock=lock) is not None


def was_held_here(lock: Path) -> bool:
    """Return whether the last holder was a process of this host, and has ended."""
    holder = read_holder(lock)
    return holder is not None and holder.is_here and not is_held_here(lock)
