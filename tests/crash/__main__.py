"""`python -m tests.crash --points N --seed S [--plan NAME]`: N crash points, up to the first failure.

`--only SEED:POINT:KIND[:nested] --plan NAME` replays one.
"""

from __future__ import annotations

import argparse
import random
import shutil
import sys
import tempfile
import time
import traceback
from pathlib import Path

from tests.crash.points import PLANS, Prober, Tally


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.crash")
    parser.add_argument("--points", type=int, default=2000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--plan", choices=sorted(PLANS))
    parser.add_argument("--only", metavar="SEED:POINT:KIND[:nested]")
    parser.add_argument("--go-on", action="store_true", help="count failures instead of stopping at the first")
    chosen = parser.parse_args()
    root = Path(tempfile.mkdtemp(prefix="dora-crash-", dir="/dev/shm" if Path("/dev/shm").is_dir() else None))
    try:
        if chosen.only:
            seed, point, kind, *nested = chosen.only.split(":")
            prober = Prober(_world(root), PLANS[chosen.plan], seed=int(seed))
            prober.probe(int(point), kind, nested=bool(nested), tally=Tally())  # type: ignore[arg-type]
            return 0
        return _sweep(root, chosen)
    finally:
        shutil.rmtree(root, ignore_errors=True)


def _world(root: Path) -> Path:
    return Path(tempfile.mkdtemp(prefix="world-", dir=root))


def _sweep(root: Path, chosen: argparse.Namespace) -> int:
    tally, failures = Tally(), {}
    began, cpu = time.monotonic(), time.process_time()
    plans = [PLANS[chosen.plan]] if chosen.plan else list(PLANS.values())
    seed = chosen.seed
    while tally.points < chosen.points:
        for plan in plans:
            path = _world(root)
            prober = Prober(path, plan, seed=seed)
            rng = random.Random(f"{seed} {plan.name}")
            for point in range(prober.num_points):
                kind = rng.choice(("kill", "power"))
                nested = rng.random() < 0.25
                try:
                    prober.probe(point, kind, nested=nested, tally=tally)
                except Exception as err:  # noqa: BLE001 - any failure is reported with its point
                    name = f"--plan {plan.name} --only {seed}:{point}:{kind}{':nested' if nested else ''}"
                    _tell(f"FAILED {name}: {type(err).__name__}: {err}")
                    if not chosen.go_on:
                        traceback.print_exc()
                        return 1
                    failures[name] = err
                if tally.points >= chosen.points:
                    break
            shutil.rmtree(path)
            if tally.points >= chosen.points:
                break
        seed += 1
        _tell(f"{tally.points} crash points, {tally.points / (time.monotonic() - began):.1f}/s")
    wall, used = time.monotonic() - began, time.process_time() - cpu
    _tell(
        f"{tally.points} crash points, {len(failures)} failures, {tally.points / wall:.1f}/s "
        f"({1000 * used / tally.points:.1f} ms of CPU each), seeds {chosen.seed} to {seed}: {dict(tally.ends)}"
    )
    return int(bool(failures))


def _tell(line: str) -> None:
    sys.stdout.write(line + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    sys.exit(main())
