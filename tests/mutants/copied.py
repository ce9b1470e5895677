"""A copy of the repository in which one mutation at a time is applied and tested.

Invariant: between two mutations the copy equals the repository, and no compiled file outlives its source.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from tests.mutants.mutant import Mutant

ROOT = Path(__file__).parents[2]
TIMEOUT_S = 300
#: More for each test.
TEST_S = 10
#: Exit codes of pytest. Any other means that the tests did not run properly.
PASSED, FAILED, NONE_CHOSEN = 0, 1, 5


class NotApplied(ValueError):
    """The text that a mutation replaces does not occur exactly once in its file."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """The result of the tests for a mutation."""

    code: int  # pytest's
    seconds: float
    tail: str  # of pytest's output

    @property
    def killed(self) -> bool:
        return self.code == FAILED

    def __str__(self) -> str:
        return {FAILED: "killed", PASSED: "SURVIVED", NONE_CHOSEN: "DEEP"}.get(self.code, f"ERROR {self.code}")


def mutated(text: str, mutant: Mutant) -> str:
    """Apply a mutation; raise NotApplied unless it changes exactly one place."""
    found = text.count(mutant.old)
    if found != 1 or mutant.old == mutant.new:
        raise NotApplied(f"{mutant.name}: its text is in {mutant.file} {found} times, not once")
    return text.replace(mutant.old, mutant.new)


class Copy:
    """Copy the files that git tracks, as they are in the working tree."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._written = int(time.time())
        listed = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, check=True).stdout
        for name in filter(None, listed.decode().split("\0")):
            if (ROOT / name).is_file():
                (folder / name).parent.mkdir(parents=True, exist_ok=True)
                shutil.copy2(ROOT / name, folder / name)

    def run(self, mutant: Mutant, *, short: bool = False) -> Outcome:
        """Apply a mutation, run its tests, and revert it."""
        with self._applied(mutant):
            return self.test(mutant.killers, short=short)

    def test(self, nodes: Sequence[str], *, short: bool = False) -> Outcome:
        """Run tests on the copy in its present state (`short`: those that are not deep)."""
        environment = {name: value for name, value in os.environ.items() if not name.startswith(("DORA_", "PYTEST_"))}
        options = ["-m", "not deep" if short else "", "-x", "-q", "-p", "no:cacheprovider", "--timeout=100"]
        began = time.monotonic()
        done = subprocess.run(
            [sys.executable, "-m", "pytest", *options, *nodes],
            cwd=self._folder,
            env={**environment, "PYTHONPATH": str(self._folder)},
            capture_output=True,
            text=True,
            timeout=TIMEOUT_S + TEST_S * len(nodes),
            check=False,
        )
        return Outcome(done.returncode, time.monotonic() - began, "\n".join(done.stdout.splitlines()[-15:]))

    @contextmanager
    def _applied(self, mutant: Mutant) -> Iterator[None]:
        path = self._folder / mutant.file
        original = path.read_text()
        self._write(path, mutated(original, mutant))
        try:
            yield
        finally:
            self._write(path, original)

    def _write(self, path: Path, text: str) -> None:
        """Write with a unique modification time: Python recognizes stale compiled files by whole seconds and size."""
        path.write_text(text)
        self._written += 2
        os.utime(path, (self._written, self._written))
