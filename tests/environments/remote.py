"""Hosts of environments on another machine, for tests: both programs as processes of this one."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import psutil

from dora.config.schema import EnvironmentConfig
from dora.environments.pool import EnvironmentPool
from tests.e2e.runs import environment, until, until_gone

#: The program of `dora environments`, with beats at another interval: a silence is counted in beats.
FAST = """
import sys
from dora.transport import host_ends
host_ends.BEAT_S = float(sys.argv.pop(1))
from dora.cli.app import main
main()
"""
BEAT_S = 1.0  # 22 s of silence end a line
WAIT_S = 60.0


def program(*words: object, beat_s: float = BEAT_S) -> list[str]:
    return [sys.executable, "-c", FAST, str(beat_s), "environments", *map(str, words)]


class Served:
    """`dora environments serve`."""

    def __init__(
        self, folder: Path, *words: object, port: int = 0, beat_s: float = BEAT_S, command: Sequence[str] = ()
    ):
        self.token = folder / "token"
        self.token.write_text("a token of the tests\n")
        self.log = folder / "serve.log"
        line = program(
            "serve", "--listen", f"127.0.0.1:{port}", "--token-file", self.token, *words, *command, beat_s=beat_s
        )
        with self.log.open("wb") as output:
            self.process = subprocess.Popen(line, stdin=subprocess.DEVNULL, stderr=output, env=environment())
        until(lambda: "at most" in self.log.read_text() or self.process.poll() is not None, what="that it listens")
        assert self.process.poll() is None, self.log.read_text()
        self.port = int(self.log.read_text().partition("127.0.0.1:")[2].partition(",")[0])

    def below(self) -> list[psutil.Process]:
        return psutil.Process(self.process.pid).children(recursive=True)

    def end(self) -> None:
        self.process.terminate()
        assert self.process.wait(WAIT_S) == 0, self.log.read_text()


@contextmanager
def served(folder: Path, *words: object, **changes) -> Iterator[Served]:
    one = Served(folder, *words, **changes)
    try:
        yield one
    finally:
        if one.process.poll() is None:
            below = one.below()
            one.end()
            until_gone(below)


def pool_at(port: int, token: Path, name: str, *, beat_s: float = BEAT_S, **settings) -> EnvironmentPool:
    command = tuple(program("connect", f"127.0.0.1:{port}", "--token-file", token, beat_s=beat_s))
    return EnvironmentPool(EnvironmentConfig(name=name, command=command, **settings))
