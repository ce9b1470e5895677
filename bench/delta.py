"""Deltas between policy versions: their share of a file, and the CPU time to make and apply them beside a plain copy.

Run: python bench/delta.py [--full] [--folder FOLDER]. One file of bfloat16 weights of the size of the default job's
policy, and one of 512 MiB, in shared memory if there is room. Nothing is trained, an update is simulated: float32
weights from N(0, 0.02^2), to each of which the learning rate times r is added; before and after they are rounded to
bfloat16. `noise`: r from N(0, 0.23^2), what AdamW makes of gradients that are independent from step to step (beta1 0.9:
the square root of 0.1 / 1.9). `sign`: r is 1 or -1, as in the first step, when most values change; only the share is
measured. There is no weight decay and no clipping.

Encoding, applying (with the checksums of base and result), copying and hashing take turns; figures are medians over the
rounds, ratios those within a round. CPU seconds, because these calls wait for nothing if the folder is in memory.
"""

from __future__ import annotations

import itertools
import shutil
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import torch
from result import Report, number, parser

from dora.weights.delta import apply, encode
from dora.weights.store import checksum_of

SIZES = {"0.9 MB": 905_000, "512 MiB": 512 << 20}  # bytes
Update = Callable[[torch.Tensor], torch.Tensor]
UPDATES: dict[str, Update] = {"noise": lambda r: 0.23 * r, "sign": torch.sign}
#: What the default job's versions took in a prototype that wrote the values that changed, not their differences.
BARS = {2e-5: 11.1, 1e-6: 1.2}
PIECE = 1 << 22  # weights


def make_versions(root: Path, *, size: int, learning_rate: float, update: Update) -> None:
    """Write `base/w` and `new/w`."""
    generator = torch.Generator().manual_seed(0)
    for name in ("base", "new", "deltas", "into"):
        shutil.rmtree(root / name, ignore_errors=True)
        (root / name).mkdir()
    with (root / "base" / "w").open("wb") as base, (root / "new" / "w").open("wb") as new:
        for begin in range(0, size // 2, PIECE):
            shape = min(PIECE, size // 2 - begin)
            weights = 0.02 * torch.randn(shape, generator=generator)
            base.write(_bfloat16(weights))
            new.write(_bfloat16(weights + learning_rate * update(torch.randn(shape, generator=generator))))


def _bfloat16(weights: torch.Tensor) -> bytes:
    return weights.to(torch.bfloat16).view(torch.int16).numpy().tobytes()


def cpu_s(work: Callable[[], object]) -> float:
    begun = time.process_time()
    work()
    return time.process_time() - begun


def measure(root: Path, *, rounds: int) -> dict[str, list[float]]:
    """Return CPU seconds of each round, after one that is not counted."""
    base, new, deltas, into = (root / name for name in ("base", "new", "deltas", "into"))
    files = {"w": checksum_of(new / "w")}
    works: dict[str, Callable[[], object]] = {
        "encode": lambda: encode(base, new, ["w"], deltas),
        "apply": lambda: apply(base, deltas, into, files),
        "copying": lambda: shutil.copyfile(new / "w", root / "copy"),
        "hashing": lambda: checksum_of(new / "w"),
    }
    took: dict[str, list[float]] = {name: [] for name in works}
    for _ in range(rounds + 1):
        for path in (deltas / "w", into / "w", root / "copy"):
            path.unlink(missing_ok=True)
        for name, work in works.items():
            took[name].append(cpu_s(work))
    return {name: seconds[1:] for name, seconds in took.items()}


def add_rows(report: Report, root: Path, size: str, learning_rate: float, update: str, *, rounds: int) -> None:
    make_versions(root, size=SIZES[size], learning_rate=learning_rate, update=UPDATES[update])
    took = measure(root, rounds=rounds if update == "noise" else 0)
    what = f"{size}, {learning_rate:g}, {update}"
    share = 100 * (root / "deltas" / "w").stat().st_size / SIZES[size]
    if update == "sign":
        report.row(f"{what}: delta", share, "% of the file")
        return
    report.row(f"{what}: delta", share, "% of the file", bar=f"figure <= {BARS[learning_rate]}")
    for done, beside in itertools.product(("encode", "apply"), ("copying", "hashing")):
        ratio = statistics.median(a / b for a, b in zip(took[done], took[beside], strict=True))
        against = f"{beside} the file, {number(statistics.median(took[beside]))} CPU s"
        report.row(f"{what}: {done}", statistics.median(took[done]), "CPU s", against=against, ratio=ratio)


def main() -> None:
    arguments = parser(__doc__)
    arguments.add_argument("--folder", type=Path, help="where the files lie")
    options = arguments.parse_args()
    in_memory = Path("/dev/shm")
    has_room = in_memory.is_dir() and shutil.disk_usage(in_memory).free > 6 * SIZES["512 MiB"]
    folder = options.folder or (in_memory if has_room else Path(tempfile.gettempdir()))
    rounds = 9 if options.full else 3
    report = Report(__doc__, full=options.full, sizes=f"{' and '.join(SIZES)} in {folder}, {rounds} rounds")
    with tempfile.TemporaryDirectory(dir=folder) as name:
        for case in itertools.product(SIZES, BARS, UPDATES):
            add_rows(report, Path(name), *case, rounds=rounds)
    report.print()


if __name__ == "__main__":
    main()
