"""Makes the evidence about learning in docs/LEARNING.md.

    python bench/learning sweep [--processes N]
    python bench/learning fleets [--fleets tail-bound ...] [--processes N]
    python bench/learning live [--seeds 5]
    python bench/learning render

`sweep` runs the cells of the lag harness (bench/learning/harness.py), `fleets` learning in simulated time
(bench/learning/fleets.py), `live` whole runs with the CLI, on an idle machine. All append to bench/results/learning and
skip what is there. `render` writes the document and its pictures from these files alone.
"""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "bench")]
os.environ["PYTHONPATH"] = os.pathsep.join([str(ROOT), str(ROOT / "bench")])  # of the processes that it starts
os.environ.setdefault("OMP_NUM_THREADS", "1")

from dora.errors import ConfigError  # noqa: E402
from learning import cells, document, fleets  # noqa: E402
from learning.live import live  # noqa: E402
from learning.stats import T  # noqa: E402
from learning.sweep import sweep  # noqa: E402


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    of_sweep = commands.add_parser("sweep", help="cells of the lag harness")
    of_sweep.add_argument("--processes", type=int, default=os.cpu_count())
    of_fleets = commands.add_parser("fleets", help="learning in simulated time: every strategy on three fleets")
    of_fleets.add_argument("--fleets", nargs="+", choices=fleets.FLEETS, default=[*fleets.FLEETS])
    of_fleets.add_argument("--processes", type=int, default=os.cpu_count())
    of_live = commands.add_parser("live", help="whole runs; nothing else may run meanwhile")
    of_live.add_argument("--seeds", type=int, choices=range(1, max(T) + 2), default=cells.SEEDS)
    commands.add_parser("render", help="write docs/LEARNING.md")
    options = parser.parse_args()
    try:
        if options.command == "sweep":
            ended_well = sweep(processes=options.processes)
        elif options.command == "fleets":
            ended_well = fleets.run(processes=options.processes, fleets=options.fleets)
        elif options.command == "live":
            ended_well = live(seeds=options.seeds)
        else:
            document.write()
            ended_well = True
    except ConfigError as err:
        parser.error(str(err))
    sys.exit(0 if ended_well else 1)


if __name__ == "__main__":
    main()
