"""The kill matrix: every kind of process, killed at every moment of a run.

    python -m tests.chaos.matrix --out FILE.json      runs what FILE.json does not have
    python -m tests.chaos.matrix --table FILE.json    prints it for docs/RELIABILITY.md

A row is one job, in which each target in turn is killed at the same moment; if that ends the run, it is resumed. The
folder is checked after each kill, and the whole history at the end of the row. The last moments need one job per kill.
A cell has the seconds from the resume command (or from the kill, if the run survives) to the first request and to the
next step or the end. The first request is seen when it is in the journal on the disk, up to a second late.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from pathlib import Path

from tests.chaos.checker import check
from tests.chaos.phases import PHASES, until_asked, until_counted, wait_for
from tests.chaos.session import DEADLY, LIVE, Session, Unexpected

TARGETS = (*DEADLY[:1], *LIVE, *DEADLY[1:])
#: Moments that a job reaches only once.
LAST = ("evaluating", "ending")
Cell = dict[str, object]


class Matrix:
    """The cells; the file is written after each one."""

    def __init__(self, base: Path, out: Path) -> None:
        self.base = base
        self.out = out
        self.cells: dict[str, dict[str, Cell]] = json.loads(out.read_text()) if out.exists() else {}

    def fill(self, phase: str) -> None:
        """Run a row; skip cells that are filled, but not failed ones."""
        filled = [target for target, cell in self.cells.get(phase, {}).items() if "wrong" not in cell]
        left = [target for target in TARGETS if target not in filled]
        jobs = [[target] for target in left] if phase in LAST else [left] if left else []
        for number, targets in enumerate(jobs):
            base = self.base / f"{phase}-{number}"
            base.mkdir()
            with Session(base, **_shape(phase, len(targets))) as session:  # type: ignore[arg-type]
                try:
                    self._row(session, phase, targets)
                except Unexpected as err:
                    self._write(phase, targets[-1], {"wrong": str(err)})

    def _row(self, session: Session, phase: str, targets: list[str]) -> None:
        session.start()
        for target in targets:
            if not wait_for(session, phase):
                raise Unexpected(f"{phase} did not come for {target}: {session.life.told()}")
            killed = session.hit(target)
            cell: Cell = {"killed processes": killed}
            began = time.monotonic()
            try:
                if target in DEADLY:
                    began = self._resume(session, phase, cell)
                if not session.is_over:
                    self._recover(session, phase, target, cell, began=began)
            except Unexpected as err:
                self._write(phase, target, cell | {"wrong": str(err)})
                return
            self._write(phase, target, cell)
        if not session.is_over:
            session.finish()
        if violations := [str(v) for v in session.judge().violations]:
            raise Unexpected(f"at the end: {violations}")

    def _resume(self, session: Session, phase: str, cell: Cell) -> float:
        """Start the next life and return its time. A run that has ended has none."""
        code = session.end()
        assert session.folder is not None
        verdict = check(session.folder)
        if verdict.violations and not verdict.finished:
            raise Unexpected(f"after the kill: {[str(v) for v in verdict.violations]}")
        cell["exit code"] = code
        began = time.monotonic()
        if phase == "ending" and code == 0:
            cell["ended"] = "by itself"
            return began
        session.start()
        if phase == "ending":
            again = session.end()
            told = session.life.told()
            if again != 0 and "the run has ended" not in told:
                raise Unexpected(f"a resume at the end: {again} {told}")
            cell["ended"] = "the resume says that the run has ended" if again else "the resume completed it"
        return began

    def _recover(self, session: Session, phase: str, target: str, cell: Cell, *, began: float) -> None:
        if target in DEADLY and until_asked(session):
            cell["s to the first request"] = round(time.monotonic() - began, 1)
        if phase in LAST:
            session.finish()
            cell["s to the end"] = round(time.monotonic() - began, 1)
        elif until_counted(session, "StepTrained"):
            cell["s to the next step"] = round(time.monotonic() - began, 1)

    def _write(self, phase: str, target: str, cell: Cell) -> None:
        self.cells.setdefault(phase, {})[target] = cell
        self.out.parent.mkdir(parents=True, exist_ok=True)
        self.out.write_text(json.dumps(self.cells, indent=1) + "\n")
        print(phase, target, cell, flush=True)


def _shape(phase: str, num_targets: int) -> dict[str, object]:
    """Return a job that is long enough for all kills of its row, and whose moments last long enough to be seen."""
    if phase == "ending":
        return {"steps": 1, "grade_s": 0.0}
    if phase == "evaluating":
        return {"steps": 1, "grade_s": 0.15, "changes": {"eval__sets": "[{prompts=40}]"}}
    return {"steps": 3 * num_targets + 4, "grade_s": 0.03}


def table(cells: dict[str, dict[str, Cell]]) -> str:
    """Return a Markdown table; a cell has the seconds to the first request / to the next step or the end."""
    lines = ["| killed | " + " | ".join(PHASES) + " |", "|---" * (len(PHASES) + 1) + "|"]
    for target in TARGETS:
        lines.append(f"| {target} | " + " | ".join(_text(cells.get(phase, {}).get(target)) for phase in PHASES) + " |")
    return "\n".join(lines) + "\n"


def _text(cell: Cell | None) -> str:
    if cell is None:
        return "not run"
    if "wrong" in cell:
        return "**failed**"
    if "ended" in cell:
        return "nothing to do" if cell["ended"] != "the resume completed it" else "completed"
    first, step = cell.get("s to the first request"), cell.get("s to the next step", cell.get("s to the end"))
    return " / ".join("-" if value is None else f"{value:g}" for value in (first, step))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, help="the cells; those that are there are not run again")
    parser.add_argument("--table", type=Path, help="print the table of this file and do nothing else")
    parser.add_argument("--phases", nargs="*", default=list(PHASES), choices=list(PHASES))
    parser.add_argument("--folder", type=Path, help="where the jobs lie (default: a temporary folder)")
    options = parser.parse_args()
    if options.table:
        print(table(json.loads(options.table.read_text())), end="")
        return
    matrix = Matrix(options.folder or Path(tempfile.mkdtemp(prefix="matrix-")), options.out)
    for phase in options.phases:
        matrix.fill(phase)


if __name__ == "__main__":
    main()
