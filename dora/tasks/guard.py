"""The parents of a process that runs code of the user: `python -m dora.tasks.guard PID TOTAL_MB CGROUP [COMMAND]`.

PID is the process of the pool. Without a command, the process is a grader. COMMAND is `MEMORY_MB CORES ARGV...`: a
limit on the address space of each of its processes, and the CPU cores that it may use ("2,3"; may be empty). TOTAL_MB
limits the memory of all its processes together; 0 is no limit. CGROUP is the folder of the control group that enforces
the limit. If CGROUP is empty, this process measures the memory, MEASURE_S after each measurement (memory.py), and exits
with OVER_MEMORY if it exceeds the limit.

Two guards, one the child of the other, watch over the process. Invariant: each guard outlives every process that was
started below it, even in another session, because the kernel makes orphaned descendants children of the guard (Linux).
A guard kills all its descendants when its child ends in any way, when its parent dies, and on SIGTERM, which the pool
sends. So nothing is left if user code kills one of the guards, or if the pool dies. If both guards are killed at once,
only a control group helps. A guard exits with the status of the process.

Guards start no thread and import little before the forks, so they add only a few milliseconds to the start of a grader.
"""

from __future__ import annotations

import ctypes
import os
import resource
import signal
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Final

from dora.tasks.memory import children, exceeds

#: Exit status of a guard that has killed its descendants because of their memory.
OVER_MEMORY: Final = 78
MEASURE_S: Final = 0.1
_POLL_S: Final = 0.001

_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36
_SIGNALS = {signal.SIGTERM, signal.SIGCHLD, signal.SIGALRM}
_LIBC = ctypes.CDLL(None)


def main() -> None:
    pool, total_mb, cgroup, *command = sys.argv[1:]
    signal.pthread_sigmask(signal.SIG_BLOCK, _SIGNALS)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))  # a grader's fatal signal ends all three processes
    _become_guard(int(pool))
    first = os.getpid()
    limit = 0 if cgroup else int(total_mb) << 20

    def guard_again() -> None:
        _become_guard(first)
        _watch(lambda: _run(command, cgroup), limit=0, cgroup=cgroup)

    _watch(guard_again, limit=limit, cgroup=cgroup)


def _become_guard(parent: int) -> None:
    if sys.platform == "linux":
        _LIBC.prctl(_PR_SET_CHILD_SUBREAPER, 1)
        _LIBC.prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)
    if os.getppid() != parent:
        os._exit(0)  # the parent died before the call above


def _watch(work: Callable[[], None], *, limit: int, cgroup: str) -> None:
    """Fork a process that does `work`. When it exits, kill all descendants that are left, and exit with its status."""
    child = os.fork()
    if child == 0:
        work()
        sys.exit(0)
    for pipe in (0, 1):
        os.close(pipe)  # only the pool and the user's process may keep them open
    if limit:
        signal.setitimer(signal.ITIMER_REAL, MEASURE_S)
    status = _wait(child, limit=limit)
    if cgroup:
        with suppress(OSError):  # the pool was faster
            Path(cgroup, "cgroup.kill").write_text("1")
    _kill_descendants()
    _exit_like(status)


def _run(command: list[str], cgroup: str) -> None:
    if sys.platform == "linux":
        _LIBC.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if cgroup:
        Path(cgroup, "cgroup.procs").write_text("0")
    signal.pthread_sigmask(signal.SIG_UNBLOCK, _SIGNALS)
    if not command:
        from dora.tasks.grader import main as grade

        return grade()
    memory_mb, cores, name = command[:3]
    memory = int(memory_mb) << 20
    resource.setrlimit(resource.RLIMIT_AS, (memory, memory))
    if cores:
        os.sched_setaffinity(0, map(int, cores.split(",")))
    try:
        os.execvp(name, command[2:])
    except OSError as err:
        sys.exit(f"{name}: {err.strerror}")


def _wait(child: int, *, limit: int) -> int:
    """Return the wait status of the child when it exits. Return 0 on SIGTERM, and the wait status of an exit with
    OVER_MEMORY if the descendants exceed the memory limit. Other processes that end are reaped during the wait."""
    while (received := signal.sigwait(_SIGNALS)) != signal.SIGTERM:
        if received == signal.SIGALRM:
            if exceeds(child, limit, is_over=_is_to_end):
                return OVER_MEMORY << 8
            # Only now: of several signals, `sigwait` takes SIGALRM first, which would be there whenever many processes
            # take longer to measure than MEASURE_S.
            signal.setitimer(signal.ITIMER_REAL, MEASURE_S)
        while (ended := os.waitpid(-1, os.WNOHANG))[0]:
            if ended[0] == child:
                return ended[1]
    return 0


def _is_to_end() -> bool:
    return signal.SIGTERM in signal.sigpending()


def _kill_descendants() -> None:
    """Kill all descendants: the children of a killed process become children of this process, and are killed next."""
    while True:
        for child in children(os.getpid()):
            os.kill(child, signal.SIGKILL)  # its id is not reused before this process waits for it
        try:
            while os.waitpid(-1, os.WNOHANG)[0]:  # all that have ended, as a list of many takes long
                pass
        except ChildProcessError:  # there are none
            return
        time.sleep(_POLL_S)


def _exit_like(status: int) -> None:
    code = os.waitstatus_to_exitcode(status)
    if code < 0:
        with suppress(OSError):  # SIGKILL has no handler
            signal.signal(-code, signal.SIG_DFL)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {-code})
        os.kill(os.getpid(), -code)
    os._exit(code)


if __name__ == "__main__":
    main()
