"""The long profile: `python -m tests.chaos --faults 200 --seed 1` injects 200 faults into small jobs.

Prints each fault and a final summary; exit code 3 if anything was lost, done twice or violated, or if the pulse
of a rank that had not been stopped declared it lost.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
from pathlib import Path

from tests.chaos.faults import JOBS, Driver, Report


def summary(report: Report) -> dict[str, object]:
    """Return the figures of a report."""
    recovery = sorted(report.recovery_s)
    return {
        "faults": report.num_faults,
        "by kind": dict(sorted(report.faults.items())),
        "runs": len(report.verdicts),
        "lives": report.lives,
        "groups trained": sum(v.trained for v in report.verdicts),
        "lost": sum(v.lost for v in report.verdicts),
        "twice": sum(v.twice for v in report.verdicts),
        "violations": report.violations,
        "seconds until a stopped rank is lost": [round(seconds, 1) for seconds in report.found_s],
        "ranks lost by their pulse that were not stopped": report.false_alarms,
        "seconds to the first request of a resume": {
            "median": round(statistics.median(recovery), 1) if recovery else None,
            "longest": round(recovery[-1], 1) if recovery else None,
            "resumes": len(recovery),
        },
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--faults", type=int, default=200)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--steps", type=int, default=24, help="of one job")
    parser.add_argument("--jobs", nargs="+", choices=JOBS, default=list(JOBS), help="taken in turn")
    parser.add_argument("--folder", type=Path, help="where the jobs lie (default: a temporary folder)")
    parser.add_argument("--out", type=Path, help="the summary as JSON")
    options = parser.parse_args()
    base = options.folder or Path(tempfile.mkdtemp(prefix="chaos-"))
    driver = Driver(base, options.seed, jobs=options.jobs, tell=lambda line: print(line, flush=True))
    report = driver.drive(options.faults, steps=options.steps)
    found = summary(report)
    text = json.dumps({"seed": options.seed, **found}, indent=1)
    print(text)
    if options.out:
        options.out.write_text(text + "\n")
    sys.exit(3 if found["lost"] or found["twice"] or report.violations or report.false_alarms else 0)


if __name__ == "__main__":
    main()
