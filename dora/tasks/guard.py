"""The parent of one grader: `python -m dora.tasks.guard PID`, started by `pool`, whose process id is PID.

Invariant: it ends after all that its grader ever started, processes in sessions of their own included: the kernel gives
it every descendant whose own parent ends (Linux). It begins to end them when the grader ends, on SIGTERM, which is how
the pool kills a grader, and when the pool's process dies. Its exit status is the grader's. SIGKILL of the guard itself
takes the grader along, but not what the grader started.

It has no threads and imports little before it forks the grader, so it costs a few milliseconds of a start.
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
_HEARD = {signal.SIGTERM, signal.SIGCHLD}


def main() -> None:
    libc = ctypes.CDLL(None)
    signal.pthread_sigmask(signal.SIG_BLOCK, _HEARD)
    if sys.platform == "linux":
        libc.prctl(_PR_SET_CHILD_SUBREAPER, 1)
        libc.prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)
    if os.getppid() != int(sys.argv[1]):
        return  # the pool died before the kernel was told
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))  # two processes end by the signal that ends a grader
    grader = os.fork()
    if grader == 0:
        if sys.platform == "linux":
            libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, _HEARD)
        _grade()
    for pipe in (0, 1):
        os.close(pipe)  # the pool and the grader alone hold them
    status = _wait(grader)
    _end_all()
    _end_like(status)


def _grade() -> None:
    from dora.tasks.grader import main as grade

    grade()
    sys.exit(0)


def _wait(grader: int) -> int:
    """The status with which the grader ended; 0 if it is to be ended. Reaps what others leave behind."""
    while signal.sigwait(_HEARD) != signal.SIGTERM:
        while (ended := os.waitpid(-1, os.WNOHANG))[0]:
            if ended[0] == grader:
                return ended[1]
    return 0


def _end_all() -> None:
    """Kill generation by generation: the children of those killed become children of this process."""
    import psutil

    while children := psutil.Process().children():
        for child in children:
            with suppress(psutil.NoSuchProcess):
                child.kill()
        for _ in children:
            os.wait()


def _end_like(status: int) -> None:
    code = os.waitstatus_to_exitcode(status)
    if code < 0:
        with suppress(OSError):  # SIGKILL has no handler
            signal.signal(-code, signal.SIG_DFL)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {-code})
        os.kill(os.getpid(), -code)
    os._exit(code)


if __name__ == "__main__":
    main()
