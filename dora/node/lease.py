"""A child that ends when its parent does, however the parent ends: the kernel drops the lock of a dead process.

The parent holds an exclusive lock on a file; each child has a thread that waits for a shared lock on the same file, and
gets it only when the parent is gone. Invariant: while the parent lives and keeps the file descriptor, no child sees the
lock. Works across any exit, kill -9 included, without signals, polling or process groups. Called by the supervisor
(`hold_lease`) and by the commands that it starts (`watch_lease`).
"""

from __future__ import annotations

import fcntl
import os
import threading
from pathlib import Path
from typing import IO

from dora.errors import ConfigError


def hold_lease(path: Path) -> IO[bytes]:
    """Creates and locks the lease file; it is held until the returned file is closed or the process is gone.

    The descriptor is not inherited by exec'd children, so that none of them keeps the lease alive.
    """
    try:
        lease = path.open("ab")
    except OSError as err:
        raise ConfigError(f"{path}: cannot be written ({err.strerror})") from err
    try:
        fcntl.flock(lease, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as err:
        lease.close()
        raise ConfigError(f"lease file {path} is held by another process: is a run still alive there?") from err
    return lease


def watch_lease(path: Path) -> None:
    """Starts the thread that ends this process, with exit code 1, as soon as the holder of `path` is gone."""
    try:
        lease = path.open("rb")
    except OSError as err:
        raise ConfigError(f"lease file {path} cannot be opened: {err.strerror}") from err
    threading.Thread(target=_end_with_the_holder, args=(lease,), name="lease", daemon=True).start()


def _end_with_the_holder(lease: IO[bytes]) -> None:
    """Waits without limit, off the interpreter lock; unblocked by the holder's death."""
    fcntl.flock(lease, fcntl.LOCK_SH)
    os._exit(1)
