"""Runs commands in forks of a process that has imported everything, so that what a command uses is due to its input.

`python -m tests.app.forked` reads requests, a line of JSON each: the arguments of a command. It answers each with a
line: exit code (negative: killed by that signal), CPU seconds, peak memory in bytes, stdout, stderr, and, for `view`,
the answers to what the page asks: status and text.
"""

from __future__ import annotations

import json
import os
import re
import resource
import signal
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Sequence
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path

#: A fork that takes longer, or more memory, is killed.
LIMIT_S = 30
LIMIT_BYTES = 8 << 30
PAGE = ("status", "metrics", "healthz", "data/info", "data/groups", "data/steps", "data/timeline", "data/samples")
COMMANDS = (
    *("dora.app.deep", "dora.app.job", "dora.cli.audit", "dora.cli.export", "dora.cli.run", "dora.cli.simulate"),
    *("dora.cli.status", "dora.cli.terminal", "dora.cli.track", "dora.cli.view", "dora.trackers.tensorboard"),
)


@dataclass(frozen=True)
class Used:
    """What a command did."""

    code: int
    cpu_s: float
    peak_bytes: int
    out: str
    err: str
    answers: dict[str, tuple[int, str]]


class Forks:
    """The process, as its tests see it; a context manager."""

    def __init__(self, cwd: Path) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-m", __name__],
            cwd=cwd,
            env={**os.environ, "PYTHONPATH": os.pathsep.join([str(Path.cwd()), os.environ.get("PYTHONPATH", "")])},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def run(self, *arguments: str) -> Used:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(json.dumps(arguments) + "\n")
        self._process.stdin.flush()
        return Used(**json.loads(self._process.stdout.readline()))

    def __enter__(self) -> Forks:
        return self

    def __exit__(self, *_: object) -> None:
        self._process.communicate(timeout=2 * LIMIT_S)


def _serve() -> None:
    for name in COMMANDS:
        import_module(name)
    from dora.cli.app import main

    for line in sys.stdin:
        used = _run(main, json.loads(line))
        sys.stdout.write(json.dumps(used.__dict__) + "\n")
        sys.stdout.flush()


def _run(main: object, arguments: Sequence[str]) -> Used:
    assert callable(main)
    with tempfile.TemporaryDirectory() as scratch:
        out, err = Path(scratch) / "out", Path(scratch) / "err"
        child = os.fork()
        if not child:
            _become(main, arguments, out, err)
        answers = _ask(child, out) if arguments[0] == "view" else {}
        _, status, used = os.wait4(child, 0)
        return Used(
            code=os.waitstatus_to_exitcode(status),
            cpu_s=used.ru_utime + used.ru_stime,
            peak_bytes=used.ru_maxrss * 1024,
            out=out.read_text(),
            err=err.read_text(),
            answers=answers,
        )


def _become(main: object, arguments: Sequence[str], out: Path, err: Path) -> None:
    """Run the command in this process, and end it."""
    assert callable(main)
    signal.signal(signal.SIGINT, signal.default_int_handler)  # even if the tests run in the background
    signal.alarm(LIMIT_S)
    resource.setrlimit(resource.RLIMIT_AS, (LIMIT_BYTES, LIMIT_BYTES))
    for stream, path in ((1, out), (2, err)):
        os.dup2(os.open(path, os.O_WRONLY | os.O_CREAT), stream)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    sys.argv = ["dora", *arguments]
    code = 99
    try:
        main()
        code = 0
    except SystemExit as ending:
        code = ending.code if isinstance(ending.code, int) else int(ending.code is not None)
    except BaseException:  # noqa: BLE001  as the interpreter would print it
        sys.excepthook(*sys.exc_info())
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def _ask(child: int, out: Path) -> dict[str, tuple[int, str]]:
    """Make the page's requests once the command listens, and end it; return nothing if it ended by itself."""
    deadline = time.monotonic() + LIMIT_S
    while time.monotonic() < deadline and not os.waitid(os.P_PID, child, os.WEXITED | os.WNOHANG | os.WNOWAIT):
        if out.exists() and (found := re.match(r"(http://\S+) shows .*\n", out.read_text())):
            answers = {name: _get(f"{found[1]}/{name}") for name in PAGE}
            os.kill(child, signal.SIGINT)
            return answers
        time.sleep(0.01)
    return {}


def _get(url: str) -> tuple[int, str]:
    try:
        with urllib.request.urlopen(url, timeout=LIMIT_S) as answer:
            return answer.status, answer.read().decode()
    except urllib.error.HTTPError as err:
        return err.code, err.read().decode()
    except OSError as err:
        return 0, str(err)


if __name__ == "__main__":
    _serve()
