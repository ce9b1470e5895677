"""Starts `dora` in processes of their own, which a notebook kernel can neither interrupt nor take down with it.

Invariant: such a process is in a session of its own, heeds SIGINT although a kernel ignores it, writes to a file and
never to a pipe, reads nothing from its caller after the start, and is known by its command line once `start` returns.
"""

from __future__ import annotations

import itertools
import os
import shlex
import shutil
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Final

import psutil

from dora.errors import ConfigError, RunFailed
from dora.status.lines import tail

#: How the line of a start and the lines of an error begin in the output.
_PROMPT: Final = "$ "
_ERROR: Final = "dora: "
#: With these a notebook kernel tells its children to treat any output as a terminal; a file would get the live view.
_OF_TERMINALS: Final = ("FORCE_COLOR", "CLICOLOR_FORCE", "TTY_COMPATIBLE", "TTY_INTERACTIVE")
#: The time within which the kernel loads a program, also from a slow disk.
_LOADED_S: Final = 60
#: The end of the output that is searched for errors.
TAIL_BYTES: Final = 1 << 16


def start(arguments: Sequence[str], *, output: Path) -> int:
    """Start `python -m dora` with these arguments, append what it prints to a file, and return its process id."""
    with output.open("ab", buffering=0) as log:
        log.write(f"{_PROMPT}{shlex.join(['dora', *arguments])}\n".encode(errors="replace"))
        pid = os.posix_spawn(
            sys.executable,
            [sys.executable, "-m", "dora", *arguments],
            {name: value for name, value in os.environ.items() if name not in _OF_TERMINALS},
            file_actions=[
                (os.POSIX_SPAWN_OPEN, 0, os.devnull, os.O_RDONLY, 0),
                (os.POSIX_SPAWN_DUP2, log.fileno(), 1),
                (os.POSIX_SPAWN_DUP2, log.fileno(), 2),
            ],
            setsid=True,
            setsigdef=[signal.SIGINT],
            setsigmask=[signal.SIGINT],  # until `dora` handles it: the start of an interpreter does not
        )
    _await_command_line(psutil.Process(pid))
    return pid


def _await_command_line(process: psutil.Process) -> None:
    """Wait until the kernel has loaded the program: before, `find_process` would take it for another process."""
    deadline = time.monotonic() + _LOADED_S
    with suppress(psutil.Error):  # it has ended
        while process.status() != psutil.STATUS_ZOMBIE and not process.cmdline() and time.monotonic() < deadline:
            time.sleep(0.001)


def reap(pid: int) -> None:
    """Take notice of a child's end whenever it comes, so that it does not stay a zombie until this process ends."""
    threading.Thread(target=_wait, args=(pid,), name=f"dora-{pid}", daemon=True).start()


def _wait(pid: int) -> None:
    with suppress(ChildProcessError):
        os.waitpid(pid, 0)


def call(arguments: Sequence[str]) -> None:
    """Run a command and wait for its end; if it fails, raise ConfigError or RunFailed with its error lines.

    KeyboardInterrupt stops the command cleanly; a second one kills it.
    """
    folder = Path(tempfile.mkdtemp(prefix="dora-"))
    output, reasons = folder / "output.log", list[str]()
    try:
        pid = start(arguments, output=output)
        try:
            _, status = os.waitpid(pid, 0)
        except BaseException:
            os.killpg(pid, signal.SIGINT)  # its workers too, as Ctrl-C in a terminal does
            try:
                os.waitpid(pid, 0)
            except KeyboardInterrupt:
                os.killpg(pid, signal.SIGKILL)
                raise
            raise
        if (code := os.waitstatus_to_exitcode(status)) != 0:
            reasons = last_words(output) or [f"dora {arguments[0]} ended with exit code {code}"]
            raise (ConfigError if code == 2 else RunFailed)(*reasons)
    finally:
        if not any(str(output) in reason for reason in reasons):
            shutil.rmtree(folder, ignore_errors=True)


def last_words(output: Path) -> list[str]:
    """Return the errors with which a command ended, or the last line of a traceback; none if it gave no reason."""
    lines = [line.decode(errors="replace").rstrip() for line in tail(output, TAIL_BYTES)]
    lines = [line for line in lines[_last_start(lines) :] if line]
    errors = [*itertools.takewhile(lambda line: line.startswith(_ERROR), reversed(lines))][::-1]
    if errors:
        return [line.removeprefix(_ERROR) for line in errors]
    return [f"{lines[-1]} (a bug: see {output})"] if any(line.startswith("Traceback") for line in lines) else []


def _last_start(lines: Sequence[str]) -> int:
    return max((i for i, line in enumerate(lines) if line.startswith(_PROMPT)), default=-1) + 1
