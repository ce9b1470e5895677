"""What only a GPU can show, in parts of at most eight minutes.

Run: python bench/gpu.py [--part NAME] [--out FOLDER] [--limit SECONDS] [--again] [--full] [--list] [--profile cpu],
after pip install -e '.[dev]', without a network. Each part of bench/on_gpu/parts.py has a result of its own,
FOLDER/gpu-PART.json, which is written after every case and names the cases that were not reached. A part whose cases
were all measured is not repeated unless --again is given. Without --part, those that are not done are run in order, as
far as their limits fit into what is left of --limit. FOLDER is bench/results unless given, from which `python bench/run
--render` writes README.md. Each case is a process with a time limit; one that fails, or for which memory does not
suffice, is a row that says so. Parts that compare with the roofline measure it themselves.

--profile cpu runs the same code in tiny shapes on a CPU, and keeps its results in a temporary folder unless FOLDER is
given. It shows that the code runs; its figures mean nothing.
"""

from __future__ import annotations

import argparse
import math
import signal
import sys
import tempfile
import time
from pathlib import Path

import msgspec
from on_gpu.parts import NOT_REACHED, PARTS, Part
from result import RESULTS, Report, Result, Row, keep, parser

LEAST_S = 15.0  # no case is begun with less left
DEVICES = {"gpu": "cuda", "cpu": "cpu"}


def main() -> None:
    options = parse()
    if options.list:
        for part in PARTS.values():
            print(f"{part.name} (at most {part.limit_s:.0f} s): {part.title}")
            print("".join(f"    {statement.file}: {statement.words} ...\n" for statement in part.settles), end="")
        return
    sys.path.insert(1, str(Path(__file__).parents[1]))  # this repository's own dora and tests
    if options.case:
        measure_case(options)
        return
    if options.profile == "gpu" and not has_gpu():
        sys.exit("no GPU here; --profile cpu runs the same code in tiny shapes")
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # so that no process of a case is left, and no folder
    folder = options.out or (RESULTS if options.profile == "gpu" else Path(tempfile.mkdtemp(prefix="dora-bench-gpu-")))
    folder.mkdir(parents=True, exist_ok=True)
    deadline = time.monotonic() + options.limit
    chosen = [PARTS[options.part]] if options.part else list(PARTS.values())
    for part in chosen:
        path = folder / f"gpu-{part.name}.json"
        if is_done(path) and not options.again:
            print(f"{part.name}: measured before, {path}")
        elif not options.part and deadline - time.monotonic() < part.limit_s:
            print(f"{part.name}: no time left, it may take {part.limit_s:.0f} s")
        else:
            print(f"{part.name}: {part.title}", flush=True)
            measure(part, path, options, deadline=min(deadline, time.monotonic() + part.limit_s))
    sys.exit(0 if all(is_done(folder / f"gpu-{part.name}.json") for part in chosen) else 1)


def parse() -> argparse.Namespace:
    arguments = parser(__doc__)
    arguments.add_argument("--part", choices=list(PARTS), metavar="NAME", help=f"one of {', '.join(PARTS)}")
    arguments.add_argument("--list", action="store_true", help="print the parts and the statements that each settles")
    arguments.add_argument("--out", type=Path, metavar="FOLDER", help="where the result of each part is kept")
    arguments.add_argument("--limit", type=float, default=math.inf, metavar="SECONDS", help="for all parts together")
    arguments.add_argument("--again", action="store_true", help="repeat parts that were measured before")
    arguments.add_argument("--profile", choices=list(DEVICES), default="gpu")
    arguments.add_argument("--case", nargs=3, help=argparse.SUPPRESS)
    return arguments.parse_args()


def measure(part: Part, path: Path, options: argparse.Namespace, *, deadline: float) -> None:
    """Measure the cases of a part, and write its result after each of them."""
    from on_gpu.cases import cases_of, in_process

    sizes = "Random weights" if options.profile == "gpu" else "Tiny shapes on a CPU, which show that the code runs"
    report = Report(part.title, full=options.full, sizes=sizes, name=path.stem)
    cases = cases_of(part, tiny=options.profile == "cpu")
    for index, case in enumerate(cases):
        if (left_s := deadline - time.monotonic()) < LEAST_S:
            print(f"  {NOT_REACHED}: {', '.join(case.what for case in cases[index:])}", flush=True)
            return
        report.accelerator, rows = in_process(
            part.name, index, case, profile=options.profile, left_s=left_s, full=options.full,
            earlier=report.rows,
        )  # fmt: skip
        for row in rows:
            report.add(row)
        rest = [Row(after.what, None, against=NOT_REACHED) for after in cases[index + 1 :]]
        keep(path, msgspec.structs.replace(report.result(), rows=[*report.rows, *rest]))


def measure_case(options: argparse.Namespace) -> None:
    """Measure a case in this process, with the rows of the cases before as JSON on stdin."""
    from on_gpu.cases import Place, measure_here

    part, index, folder = options.case
    earlier = msgspec.json.decode(sys.stdin.buffer.read(), type=list[Row])
    measure_here(part, int(index), Place(DEVICES[options.profile], Path(folder), 10 if options.full else 3, earlier))


def has_gpu() -> bool:
    import torch  # takes seconds

    return torch.cuda.is_available()


def is_done(path: Path) -> bool:
    """Whether every case of a part was measured."""
    if not path.exists():
        return False
    return all(row.against != NOT_REACHED for row in msgspec.json.decode(path.read_bytes(), type=Result).rows)


if __name__ == "__main__":
    main()
