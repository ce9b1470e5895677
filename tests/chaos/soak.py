"""A long run of many short steps, with a check for resource leaks.

    python -m tests.chaos.soak --minutes 30

The job is like the default one, with steps of one or two seconds, a checkpoint every second step and two durable
versions; in the middle its controller is killed with SIGKILL and the run is resumed. Every 10 s all resources are
counted from outside. A life is judged by the medians of the first and the last third of its samples, beginning a minute
after its first step. Descriptors of answers in flight, of which faster steps have more, are left out in controller and
engines. Exit code 1 if descriptors or threads of a role grow by more than GROWTH, files by more than FILES or
memory by more than MEMORY_SHARE and MEMORY_MB, if there are more versions or checkpoints than are kept and needed, or
if checker or audit find a violation.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from tests.chaos.session import Session, Unexpected
from tests.chaos.vitals import Sample, Vitals, count_files, look_at, size_of_logs
from tests.e2e.runs import heed_ctrl_c

SAMPLE_S = 10.0
WARM_UP_S = 60.0
#: Additional descriptors or threads that are not a leak: control calls come and go.
GROWTH = 3
#: A version or a checkpoint that is just being written or deleted has up to five files.
FILES = 10
#: A leak is growth of a role's memory by more than both.
MEMORY_SHARE = 0.10
MEMORY_MB = 10.0
KEEP = 2
STALENESS = 2
#: Kept ones, the window (K + 1), one under evaluation, and one being written or deleted.
MOST_VERSIONS = KEEP + STALENESS + 1 + 2
#: Two kept ones, one being written, and one whose deletion waits for the journal.
MOST_CHECKPOINTS = 4

CHANGES: dict[str, object] = {
    "rollout__max_new_tokens": 32,
    "rollout__max_staleness": STALENESS,
    "engine__instances": 3,
    "trainer__ranks": 2,
    "trainer__checkpoint_every": 2,
    "trainer__learning_rate": 1e-6,  # so that answers keep their length
    "weights__keep": KEEP,
    "eval__every": 10,
    "task__rewards": '[{kind="regex", pattern="(?:^|\\\\D)(\\\\d\\\\d)$"}]',
}


@dataclass
class Soak:
    """One run, its samples and their problems."""

    session: Session
    began: float = field(default_factory=time.monotonic)
    samples: list[Sample] = field(default_factory=list)
    life: int = 0

    def live(self, seconds: float, *, tell: Callable[[Sample], None]) -> None:
        """Start or resume the run, and watch it for a time."""
        self.life += 1
        self.session.start()
        until = time.monotonic() + seconds
        while (now := time.monotonic()) < until:
            if not self.session.is_alive():
                raise Unexpected(f"the run ended:\n{self.session.life.told()}")
            self.samples.append(self._look())
            tell(self.samples[-1])
            time.sleep(max(0.0, SAMPLE_S - (time.monotonic() - now)))  # the interval of sampling

    def _look(self) -> Sample:
        session = self.session
        assert session.folder is not None
        pid = session.life.process.pid
        steps, streams = -1, 0
        try:
            status = session.life.status()
            steps, streams = status["steps_trained"], sum(instance["residents"] for instance in status["instances"])
        except (OSError, AssertionError):
            pass  # it starts
        return Sample(
            at=round(time.monotonic() - self.began, 1),
            life=self.life,
            steps=steps,
            streams=streams,
            roles=look_at(session.targets("everything"), controller=pid),
            files={
                "files of the run": count_files(session.folder),
                "files in memory": count_files(session.memory_folder),
                "versions on disk": _count(session.folder / "versions", "v*"),
                "versions in memory": _count(session.memory_folder, "dora-*/v*"),
                "checkpoints": _count(session.folder / "checkpoints", "step-*"),
            },
            log_bytes=size_of_logs(session.folder),
        )

    def kill(self) -> None:
        self.session.hit("controller")
        self.session.end()

    def stop(self) -> None:
        """Stop the run by Ctrl-C, and check it."""
        self.session.life.interrupt()
        code = self.session.end()
        if code != 130:
            raise Unexpected(f"Ctrl-C ended the run with {code}:\n{self.session.life.told()}")
        if violations := self.session.judge().violations:
            raise Unexpected(f"the checker: {[str(v) for v in violations]}")


def _count(folder: Path, pattern: str) -> int:
    return len(list(folder.glob(pattern)))


@dataclass(frozen=True)
class Trend:
    """A figure over one life."""

    life: int
    what: str
    first: float  # medians of thirds
    last: float
    per_hour: float  # slope of a straight line through all samples
    allowed: float | None  # growth from the first to the last third

    @property
    def grows(self) -> bool:
        return self.allowed is not None and self.last - self.first > self.allowed

    def __str__(self) -> str:
        bound = "" if self.allowed is None else f"  (may grow by {self.allowed:.1f}){'  GROWS' if self.grows else ''}"
        return f"life {self.life}  {self.what:28} {self.first:9.1f} -> {self.last:9.1f}  {self.per_hour:+9.2f}/h{bound}"


def trends(samples: list[Sample]) -> Iterator[Trend]:
    """Return every figure of every life with enough samples."""
    for life in sorted({sample.life for sample in samples}):
        own = [sample for sample in samples if sample.life == life]
        answered = [sample for sample in own if sample.steps >= 0]
        begun = next((sample.at for sample in answered if sample.steps > answered[0].steps), math.inf)
        warm = [sample for sample in answered if sample.at - begun >= WARM_UP_S]
        if len(warm) < 6:
            continue
        for name in sorted({name for sample in warm for name in sample.roles}):
            for what, allowed in (("descriptors", GROWTH), ("threads", GROWTH), ("processes", 0), ("memory_mb", None)):
                yield _trend(f"{name} {what}", warm, _of(name, what), allowed=allowed)
        for what in warm[0].files:
            allowed = FILES if what.startswith("files") else 1
            yield _trend(what, warm, _files(what), allowed=allowed)


def _of(name: str, what: str) -> Callable[[Sample], float]:
    has_streams = what == "descriptors" and name in ("controller", "engine")

    def value(sample: Sample) -> float:
        held: float = getattr(sample.roles.get(name, Vitals()), what)
        return held - sample.streams if has_streams else held

    return value


def _files(what: str) -> Callable[[Sample], float]:
    return lambda sample: sample.files[what]


def _trend(what: str, samples: list[Sample], value: Callable[[Sample], float], *, allowed: float | None) -> Trend:
    values = [value(sample) for sample in samples]
    third = max(1, len(values) // 3)
    first, last = statistics.median(values[:third]), statistics.median(values[-third:])
    slope = statistics.linear_regression([sample.at / 3600 for sample in samples], values).slope
    if allowed is None:
        allowed = max(MEMORY_MB, MEMORY_SHARE * first)
    return Trend(samples[0].life, what, first, last, slope, allowed)


def problems(samples: list[Sample]) -> list[str]:
    """Return the figures that exceed their bounds."""
    found = [f"grows: {trend}" for trend in trends(samples) if trend.grows]
    for what, most in (("versions on disk", MOST_VERSIONS), ("checkpoints", MOST_CHECKPOINTS)):
        seen = max(sample.files[what] for sample in samples)
        if seen > most:
            found.append(f"{seen} {what}, at most {most} are kept or needed")
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=30.0)
    parser.add_argument("--folder", type=Path, help="where the job lies (default: a temporary folder)")
    parser.add_argument("--out", type=Path, help="all samples as JSON lines")
    parser.add_argument("--judge", type=Path, help="judge the samples of an earlier --out and run nothing")
    options = parser.parse_args()
    if options.judge:
        sys.exit(report([_sample(json.loads(line)) for line in options.judge.read_text().splitlines()]))
    heed_ctrl_c()
    base = options.folder or Path(tempfile.mkdtemp(prefix="soak-"))
    base.mkdir(parents=True, exist_ok=True)

    def tell(sample: Sample) -> None:
        memory = ", ".join(f"{name} {vitals.memory_mb:.0f} MB" for name, vitals in sorted(sample.roles.items()))
        print(f"{sample.at:7.1f} s, step {sample.steps}: {memory}; {sample.files}", flush=True)
        if options.out:
            with options.out.open("a") as file:
                file.write(json.dumps(asdict(sample)) + "\n")

    with Session(base, steps=100_000, changes=CHANGES) as session:
        soak = Soak(session)
        soak.live(30 * options.minutes, tell=tell)
        soak.kill()
        soak.live(30 * options.minutes, tell=tell)
        soak.stop()
    sys.exit(report(soak.samples))


def _sample(row: dict[str, Any]) -> Sample:
    return Sample(**{**row, "roles": {name: Vitals(**vitals) for name, vitals in row["roles"].items()}})


def report(samples: list[Sample]) -> int:
    """Print the figures; return the exit code."""
    print(f"\nsteps: {max(sample.steps for sample in samples)}, samples: {len(samples)}")
    for trend in trends(samples):
        print(trend)
    for what in samples[0].files:
        print(f"at most {max(sample.files[what] for sample in samples)} {what}")
    found = problems(samples)
    print("\n".join(found) or "nothing grows")
    return 1 if found else 0


if __name__ == "__main__":
    main()
