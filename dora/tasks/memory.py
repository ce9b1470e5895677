"""The descendants of a process, and the memory that they hold together, for the process's guard (guard.py).

Pages that processes share count once (PSS). The kernel must walk page tables to find that number, so it is read only if
the resident sets exceed the limit together. They are read in microseconds, and their sum is never less. psutil takes
longer to import than everything else in a guard, so it is imported only if PSS is needed, or if the kernel has no lists
of children.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from contextlib import suppress
from itertools import takewhile

#: The kernel lists the children of each thread: 0.02 ms, against some ms to search all processes of the host.
_HAS_LISTS = os.path.exists(f"/proc/self/task/{os.getpid()}/children")
_PAGE = os.sysconf("SC_PAGE_SIZE")


def exceeds(parent: int, limit: int, *, is_over: Callable[[], bool] = lambda: False) -> bool:
    """Return whether the descendants of `parent` hold more than `limit` bytes of memory together.

    PSS takes some ms for each process, so of many it may take seconds: `is_over` ends that, once it returns True.
    """
    below = descendants(parent)
    going = takewhile(lambda _: not is_over(), below)
    return sum(map(_resident, below)) > limit and sum(map(_proportional, going)) > limit


def descendants(parent: int) -> list[int]:
    """Return the descendants of `parent`; processes that start or end during the call may be missing."""
    found = children(parent)
    for each in found:  # the list grows in the loop
        found += children(each)
    return found


def children(parent: int) -> list[int]:
    """Return the children of a process; none if it has ended."""
    if not _HAS_LISTS:
        import psutil

        with suppress(psutil.NoSuchProcess):
            return [child.pid for child in psutil.Process(parent).children()]
        return []
    found: list[int] = []
    with suppress(FileNotFoundError, ProcessLookupError):
        for thread in os.listdir(f"/proc/{parent}/task"):
            listed = f"/proc/{parent}/task/{thread}/children"
            with suppress(FileNotFoundError, ProcessLookupError), open(listed) as file:
                found += map(int, file.read().split())
    return found


def _resident(pid: int) -> int:
    if sys.platform != "linux":
        return _proportional(pid)
    with suppress(FileNotFoundError, ProcessLookupError), open(f"/proc/{pid}/statm") as file:
        return int(file.read().split()[1]) * _PAGE
    return 0


def _proportional(pid: int) -> int:
    import psutil

    with suppress(psutil.NoSuchProcess):
        try:
            memory = psutil.Process(pid).memory_full_info()
        except psutil.AccessDenied:  # the program runs as another user
            return int(psutil.Process(pid).memory_info().rss)
        return int(getattr(memory, "pss", memory.uss))  # not every system has `pss`
    return 0
