"""The run lock, and leases, which end a child when its controller ends in any way.

The controller holds an exclusive lock on its lease file. A thread in each child waits for a shared lock on it, which it
gets only when the controller has ended, because the kernel releases the locks of a dead process. In addition, the
kernel kills a child when its parent dies (Linux), even a stopped child. The run lock is another file: one controller at
a time holds it, and children do not use it.

Invariant: no child gets the lock of its lease while the controller lives and keeps the descriptor open, and no child
mistakes a later controller for its own.
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
    """Create and lock a file. The lock lasts until the returned file is closed or the process ends.

    Children do not inherit the descriptor across exec, so they cannot keep the lock.
    """
    try:
        held = os.fdopen(os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o600), "r+b")
    except OSError as err:
        raise ConfigError(f"{path}: cannot be written ({err.strerror or 'it is not a regular file'})") from err
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
    """Begin to watch: when the holder of `path` ends, this process ends with exit code 1; when its parent ends, the
    kernel kills this process."""
    try:
        lease = path.open("rb")
    except OSError as err:
        raise ConfigError(f"lease file {path} cannot be opened: {err.strerror}") from err
    die_with_parent()
    threading.Thread(target=_end_with_the_holder, args=(lease,), name="lease", daemon=True).start()


def die_with_parent() -> None:
    """Have the kernel kill this process when the thread that forked it ends. The setting survives exec, not fork."""
    if sys.platform == "linux":
        _LIBC.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def _end_with_the_holder(lease: IO[bytes]) -> None:
    """Wait, without the interpreter lock and without a timeout, for the end of the holder."""
    fcntl.flock(lease, fcntl.LOCK_SH)
    os._exit(1)
