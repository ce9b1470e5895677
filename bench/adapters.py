"""What the default job learns with an adapter of rank 8, and what with all weights, each at its best learning rate.

Run: python bench/adapters.py [--full]. `dora run` without a file, and its audit. The rate of each is the best of three,
by one run each with a seed that is not used after; then one seed, three in the full profile. Learned is the mean
held-out reward of the last LAST evaluations. Then adapters side by side on 1, 2 and 4 servers with K = 2, at the rate
of the adapter.
Ceiling: all weights trained.
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Sequence
from pathlib import Path
from statistics import fmean
from typing import Final

from default_job import run_dora
from result import Report, parser

from dora.journal.run_folder import RunFolder

SEEDS: Final = {False: (0,), True: (0, 1, 2)}
TUNING_SEED: Final = 100
LAST: Final = 3
#: Name -> settings, and the learning rates that are tried.
KINDS: Final = {
    "all weights": ((), (1e-5, 2e-5, 4e-5)),
    "adapter": (("trainer.lora.rank=8",), (1e-4, 2e-4, 4e-4)),
}
#: Servers that hold adapters side by side.
SERVERS: Final = (1, 2, 4)
SERVED: Final = ("trainer.lora.rank=8", "engine.adapters=true", "rollout.max_staleness=2")


def learned(settings: Sequence[str], *, rate: float, seed: int) -> float:
    """Run the job; return the held-out reward at its end."""
    with tempfile.TemporaryDirectory() as home:
        chosen = (f"run.folder={home}", "status.port=0", f"run.seed={seed}", f"trainer.learning_rate={rate}", *settings)
        run_dora("run", *(word for setting in chosen for word in ("--set", setting)))
        [root] = Path(home).iterdir()
        run_dora("audit", str(root))
        rows = [json.loads(line) for line in RunFolder.open(root).metrics.read_text().splitlines()]
    scores = {row["version"]: row["mean"] for row in rows if row["kind"] == "evaluation"}
    return fmean(scores[version] for version in sorted(scores)[-LAST:])


def main() -> None:
    options = parser(__doc__).parse_args()
    seeds = SEEDS[options.full]
    report = Report(__doc__, full=options.full, sizes=f"the default job, {len(seeds)} seeds after one for the rates")
    found: dict[str, list[float]] = {}
    said: dict[str, str] = {}
    rates_found: dict[str, float] = {}
    for kind, (settings, rates) in KINDS.items():
        tuned = {rate: learned(settings, rate=rate, seed=TUNING_SEED) for rate in rates}
        best = rates_found[kind] = max(tuned, key=lambda rate: tuned[rate])
        said[kind] = ", ".join(f"{rate:g}: {score:.3f}" for rate, score in tuned.items())
        found[kind] = [learned(settings, rate=best, seed=seed) for seed in seeds]
        said[kind] += f"; seeds at {best:g}: " + " ".join(f"{score:.3f}" for score in found[kind])
    report.row("all weights: held-out reward", fmean(found["all weights"]), "", against=said["all weights"])
    report.row("adapter: held-out reward", fmean(found["adapter"]), "", against=said["adapter"])
    differences = [mine - full for mine, full in zip(found["adapter"], found["all weights"], strict=True)]
    report.row("adapter: difference", fmean(differences), "", bar="figure >= -0.03")
    for servers in SERVERS:
        settings = (*SERVED, f"engine.instances={servers}")
        scores = [learned(settings, rate=rates_found["adapter"], seed=seed) for seed in seeds]
        differences = [mine - full for mine, full in zip(scores, found["all weights"], strict=True)]
        said_now = " ".join(f"{score:.3f}" for score in scores)
        name = f"adapters side by side on {servers} server{'s' * (servers > 1)}: difference"
        report.row(name, fmean(differences), "", against=said_now, bar="figure >= -0.03")
    report.print()


if __name__ == "__main__":
    main()
