"""The parent process of a grader: `python -m dora.tasks.guard PID`, where PID is the process of the pool. With
`MEMORY_MB CORES COMMAND...` after it, of that command in place of a grader, with a limit on its address space, and on
the given CPU cores ("2,3") only; CORES may be empty.

Invariant: it outlives every process that its grader starts, even in another session, because the kernel makes orphaned
descendants its children (Linux). It kills them when the grader exits, when the pool's process dies, and on SIGTERM,
which the pool sends to kill a grader. Its exit status is the grader's. SIGKILL of the guard also kills the grader, but
not the processes that the grader started.

It starts no thread and imports little before the fork, so it adds only a few milliseconds to the start of a grader.
"""

from __future__ import annotations

import ctypes
import os
import resource
import signal
import sys
from contextlib import suppress

_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36
_SIGNALS = {signal.SIGTERM, signal.SIGCHLD}


def main() -> None:
    libc = ctypes.CDLL(None)
    signal.pthread_sigmask(signal.SIG_BLOCK, _SIGNALS)
    if sys.platform == "linux":
        libc.prctl(_PR_SET_CHILD_SUBREAPER, 1)
        libc.prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)
    if os.getppid() != int(sys.argv[1]):
        return  # the pool died before the call above
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))  # a grader's fatal signal ends both processes
    grader = os.fork()
    if grader == 0:
        if sys.platform == "linux":
            libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, _SIGNALS)
        _run(sys.argv[2:])
        sys.exit(0)
    for pipe in (0, 1):
        os.close(pipe)  # only the pool and the grader may keep them open
    status = _wait(grader)
    _kill_descendants()
    _exit_like(status)


def _run(command: list[str]) -> None:
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


def _wait(grader: int) -> int:
    """Return the wait status of the grader when it exits, or 0 on SIGTERM. Reap other processes meanwhile."""
    while signal.sigwait(_SIGNALS) != signal.SIGTERM:
        while (ended := os.waitpid(-1, os.WNOHANG))[0]:
            if ended[0] == grader:
                return ended[1]
    return 0


def _kill_descendants() -> None:
    """Kill all descendants: the children of a killed process become children of this one, and are next."""
    import psutil

    while children := psutil.Process().children():
        for child in children:
            with suppress(psutil.NoSuchProcess):
                child.kill()
        for _ in children:
            os.wait()


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
