"""Control groups (cgroup v2), in which the kernel limits the memory of processes together and ends all of them at once.

They are used where the system has given this process a group that it may divide: under `systemd-run --user --scope -p
Delegate=yes`, in a service with `Delegate=yes`, or in a container with a writable hierarchy. A group that contains
processes cannot limit the groups below it, so this process first moves into a group below its own. Where there is no
such group, and with version 1, no control group is made, and guards measure memory instead (memory.py).
"""

from __future__ import annotations

import asyncio
import functools
import itertools
import os
from contextlib import suppress
from pathlib import Path
from typing import Final

import psutil

#: Processes end within milliseconds of a kill, unless the kernel is busy.
_END_TIMEOUT_S: Final = 2.0
_POLL_S: Final = 0.01
_numbers = itertools.count()


class ControlGroup:
    """A control group for the processes of one grader."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def was_exceeded(self) -> bool:
        """Return whether the kernel has killed processes of the group because of their memory."""
        with suppress(OSError):
            events = dict(line.split() for line in (self.path / "memory.events").read_text().splitlines())
            return int(events["oom_kill"]) > 0
        return False

    async def close(self) -> None:
        """Kill all its processes, and remove it."""
        with suppress(OSError):
            (self.path / "cgroup.kill").write_text("1")
        with suppress(TimeoutError):
            async with asyncio.timeout(_END_TIMEOUT_S):
                while self.path.exists():
                    with suppress(OSError):  # they have not ended yet
                        self.path.rmdir()
                        return
                    await asyncio.sleep(_POLL_S)


def make_cgroup(limit_bytes: int) -> ControlGroup | None:
    """Return a new group whose processes together may take `limit_bytes`; None if the system gives none."""
    base = _divided()
    if base is None:
        return None
    path = base / f"grader-{os.getpid()}-{next(_numbers)}"
    try:
        path.mkdir()
        (path / "memory.max").write_text(str(limit_bytes))
        (path / "memory.oom.group").write_text("1")
        with suppress(FileNotFoundError):  # a kernel without swap
            (path / "memory.swap.max").write_text("0")
        if not (path / "cgroup.kill").exists():  # before Linux 5.14
            raise FileNotFoundError
    except OSError:
        with suppress(OSError):
            path.rmdir()
        return None
    return ControlGroup(path)


@functools.cache
def _divided() -> Path | None:
    """Divide the group of this process, once, and return it; None if this process may not divide it."""
    own = _own_group()
    if own is None or not _is_given(own):
        return None
    below = own / f"dora-{os.getpid()}"
    moved: list[str] = []
    try:
        below.mkdir()
        for pid in _pids(own):
            (below / "cgroup.procs").write_text(pid)
            moved.append(pid)
        (own / "cgroup.subtree_control").write_text("+memory")
    except OSError:
        for pid in moved:
            with suppress(OSError):
                (own / "cgroup.procs").write_text(pid)
        with suppress(OSError):
            below.rmdir()
        return None
    return own


def _own_group() -> Path | None:
    """Return the folder of the group that this process is in; None without cgroup v2."""
    with suppress(OSError, ValueError):
        groups = [line.partition("0::")[2] for line in Path("/proc/self/cgroup").read_text().splitlines()]
        mounts = [line.split()[1:3] for line in Path("/proc/self/mounts").read_text().splitlines()]
        root = next((Path(where) for where, kind in mounts if kind == "cgroup2"), None)
        name = next((name for name in groups if name.startswith("/") and ".." not in name), None)
        return root / name[1:] if root is not None and name is not None else None
    return None


def _is_given(group: Path) -> bool:
    """Return whether this process may divide a group: the group can limit memory, and contains only this process and
    its descendants.

    Root may write to every group, but groups that systemd manages are systemd's, unless they are marked as delegated.
    """
    try:
        can_limit = "memory" in (group / "cgroup.controllers").read_text().split()
        is_ours = group.stat().st_uid == os.geteuid() != 0 or not Path("/run/systemd/system").exists()
        below = {str(child.pid) for child in psutil.Process().children(recursive=True)}
        is_alone = {*_pids(group)} <= {str(os.getpid()), *below}
        return can_limit and (is_ours or os.getxattr(group, "user.delegate") == b"1") and is_alone
    except OSError:
        return False


def _pids(group: Path) -> list[str]:
    return (group / "cgroup.procs").read_text().split()
