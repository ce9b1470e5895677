"""The run lock, and leases: how a child ends with its controller, however that ends.

The controller holds an exclusive lock on its lease, a file that no other process ever locks; each child has a thread
that waits for a shared lock on it, and gets it only when the controller is gone, because the kernel drops the locks of
a dead process. In addition the kernel kills a child when its parent dies (Linux), which reaches a stopped child too.
The run lock is another file: one controller at a time holds it, and children do not know it.

Invariant: while the controller lives and keeps the descriptor, no child sees the lock of its lease; and a child never
takes a later controller for its own.
"""

from __future__ import annotations

import ctypes
import fcntl
import os
import signal
import sys
import threading
from pathlib import Path
from typing import IO

from dora.errors import ConfigError

_LIBC = ctypes.CDLL(None)
_PR_SET_PDEATHSIG = 1


def hold(path: Path) -> IO[bytes]:
    """Creates and locks a file; it is held until the returned file is closed or the process is gone.

    The descriptor is not inherited by exec'd children, so that none of them keeps the lock alive.
    """
    try:
        held = os.fdopen(os.open(path, os.O_RDWR | os.O_CREAT, 0o600), "r+b")
    except OSError as err:
        raise ConfigError(f"{path}: cannot be written ({err.strerror})") from err
    try:
        fcntl.flock(held, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        held.close()
        raise ConfigError(f"{path} is held by another process: is a run still alive there?") from None
    except OSError as err:
        held.close()
        raise ConfigError(f"{path}: cannot be locked ({err.strerror}); use a file system with locks") from err
    return held


def watch_lease(path: Path) -> None:
    """From now on this process ends, with exit code 1, as soon as the holder of `path` is gone; and by SIGKILL as soon
    as its own parent is."""
    try:
        lease = path.open("rb")
    except OSError as err:
        raise ConfigError(f"lease file {path} cannot be opened: {err.strerror}") from err
    die_with_parent()
    threading.Thread(target=_end_with_the_holder, args=(lease,), name="lease", daemon=True).start()


def die_with_parent() -> None:
    """The kernel kills this process when the thread that forked it is gone. It survives an exec, but not a fork."""
    if sys.platform == "linux":
        _LIBC.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def _end_with_the_holder(lease: IO[bytes]) -> None:
    """Waits without limit, off the interpreter lock; unblocked by the holder's death."""
    fcntl.flock(lease, fcntl.LOCK_SH)
    os._exit(1)
