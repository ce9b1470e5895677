"""`python -m tests.mutants [--only NAME] [--jobs N]`: apply every mutation to a copy, and check that its tests fail.

The tests are first run on an unchanged copy, where they must pass. Exit code 1 if a mutation survives.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from itertools import groupby
from pathlib import Path
from queue import SimpleQueue

from tests.mutants.copied import NONE_CHOSEN, PASSED, ROOT, Copy, Outcome
from tests.mutants.mutant import Mutant
from tests.mutants.mutants import MUTANTS


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.mutants")
    parser.add_argument("--only", metavar="NAME", action="append", help="those whose names begin so; may be repeated")
    parser.add_argument("--short", action="store_true", help="without the deep tests")
    parser.add_argument("--results", type=Path, metavar="FILE", help="write the table there too")
    parser.add_argument("--jobs", type=int, default=1, metavar="N", help="copies to test at the same time")
    chosen = parser.parse_args()
    mutants = [mutant for mutant in MUTANTS if mutant.name.startswith(tuple(chosen.only or [""]))]
    if not mutants:
        parser.error(f"no mutation has a name that begins with {' or '.join(chosen.only)}")
    copies: SimpleQueue[Copy] = SimpleQueue()

    def run(mutant: Mutant) -> tuple[Mutant, Outcome]:
        copy = copies.get()
        try:
            return mutant, copy.run(mutant, short=chosen.short)
        finally:
            copies.put(copy)

    with tempfile.TemporaryDirectory(prefix="dora-mutants-") as folder, ThreadPoolExecutor(chosen.jobs) as threads:
        made, commit = [Copy(Path(folder, str(job))) for job in range(chosen.jobs)], _commit()
        killers = list(dict.fromkeys(node for mutant in mutants for node in mutant.killers))
        # A process per folder: their files named conftest would hide each other.
        for place, nodes in groupby(sorted(killers), key=lambda node: Path(node.partition("::")[0]).parent):
            chosen_nodes = list(nodes)
            clean = made[0].test(chosen_nodes, short=chosen.short)
            if clean.code not in (PASSED, NONE_CHOSEN):
                _tell(f"{clean.tail}\nthe tests fail on the repository as it is")
                return 1
            _tell(f"{len(chosen_nodes)} tests of {place} pass on the repository as it is ({clean.seconds:.0f} s)")
        for copy in made:
            copies.put(copy)
        lines, survived = [], 0
        for mutant, outcome in threads.map(run, mutants):
            lines.append(_line(mutant, str(outcome), outcome.seconds))
            _tell(lines[-1])
            if not outcome.killed:
                survived += 1
                _tell(outcome.tail)
    last = f"{len(mutants)} mutations, {survived} not killed"
    _tell(last)
    if chosen.results is not None:
        chosen.results.write_text("\n".join([f"commit {commit}", *lines, last, ""]))
    return int(survived > 0)


def _line(mutant: Mutant, outcome: str, seconds: float) -> str:
    return f"{outcome:9} {seconds:5.1f} s  {mutant.name:42} {' '.join(mutant.killers)}"


def _commit() -> str:
    def git(*words: str) -> str:
        return subprocess.run(["git", *words], cwd=ROOT, capture_output=True, text=True, check=True).stdout.strip()

    return git("rev-parse", "HEAD") + (" with changes" if git("status", "--porcelain", "-uno") else "")


def _tell(line: str) -> None:
    sys.stdout.write(line + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    sys.exit(main())
