"""A run under attack by a local user without keys, beside an undisturbed run of the same seed.

    python -m tests.chaos.hostile --seconds 60              paced servers and a paced trainer
    python -m tests.chaos.hostile --seconds 60 --job real   embedded engines and torchrun ranks; no bound on step time

Every TCP port on which a process of the run listens is attacked (attacks.py). The run must do the same as the
undisturbed one: no event of trouble, no answer with another length or reward, no violation in checker or audit, no
request granted without a key, and the controller's memory within MEMORY_SHARE, steps within STEP_SHARE and logs within
LOG_BYTES of the undisturbed run. Exit code 1 if a bound is exceeded.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path

import psutil

from tests.chaos.checker import check
from tests.chaos.recorded import Follower, Record, read_frames, unpack
from tests.chaos.session import ROOT
from tests.chaos.vitals import Vitals, look_at
from tests.e2e.runs import command, environment, heed_ctrl_c, run_to_end, small

SEED = 3
PACED = ROOT / "launch" / "workloads" / "paced-8.toml"
PACED_S = 120.0  # duration of that workload
MEMORY_SHARE = 0.05
STEP_SHARE = 0.10
LOG_BYTES = 1_000_000
SAMPLE_S = 0.5
END_S = 600.0
#: Events that occur only in case of trouble.
TROUBLE = frozenset(
    {"InstanceLost", "GenerationFailed", "WeightPushFailed", "InstanceDrainRequested", "InstanceRecalled"}
    | {"InstanceRemoved", "ControllerRestarted", "KvPressureReported"}
)


class Broken(AssertionError):
    """A run did not end as expected."""


@dataclass
class Seen:
    """The observations of one run."""

    folder: Path
    ports: dict[int, str] = field(default_factory=dict)  # port -> role of the process that listens
    peaks: dict[str, Vitals] = field(default_factory=dict)  # by role
    log_bytes: int = 0
    attacks: dict[str, dict[str, int]] = field(default_factory=dict)
    breaches: list[str] = field(default_factory=list)
    violations: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._records: list[Record] | None = None

    def facts(self, *kinds: str) -> list[Record]:
        if self._records is None:
            self._records = [unpack(record) for record in read_frames(self.folder / "journal.msgpack").records]
        events = (r["event"] for r in self._records if r["type"] == "Handled")
        return [event for event in events if event["type"] in kinds]

    @property
    def steps(self) -> int:
        return len(self.facts("StepTrained"))

    @property
    def step_s(self) -> float:
        """Mean seconds between steps, in the workload's time."""
        gaps: list[float] = [after["at"] - before["at"] for before, after in pairwise(self.facts("StepTrained"))]
        return sum(gaps) / len(gaps)

    @property
    def answers(self) -> dict[int, tuple[int, float | None]]:
        """Length and reward by trajectory, of those that the trainer may have seen."""
        lengths = {e["trajectory"]: e["num_tokens"] for e in self.facts("GenerationFinished")}
        rewards = {e["trajectory"]: e["reward"] for e in self.facts("TrajectoryGraded")}
        return {t: (lengths[t], rewards[t]) for t in lengths.keys() & rewards.keys() if t >= 0}


def paced_job(base: Path, *, workload: Path, time_scale: float) -> list[str]:
    options = ("--seed", str(SEED), "--time-scale", f"{time_scale:g}", "--processes", "4", "--folder", str(base))
    return command("pace", str(workload), *options)


def real_job(base: Path, *, steps: int) -> list[str]:
    values = {"run__steps": steps, "run__seed": SEED, "engine__instances": 2, "trainer__ranks": 2}
    return command("run", *small(base, **values, rollout__max_staleness=1, weights__keep=2))


def watch(line: list[str], base: Path, *, attack_s: float) -> Seen:
    """Run a command to its end, under attack from its first step on if `attack_s` is not 0."""
    base.mkdir(parents=True)
    printed = base / "printed.log"
    with printed.open("wb") as out:
        process = subprocess.Popen(
            line, stdout=out, stderr=out, env=environment(), cwd=ROOT, start_new_session=True, preexec_fn=heed_ctrl_c
        )
    attacker: subprocess.Popen[bytes] | None = None
    try:
        seen = Seen(_until_training(process, base))
        if attack_s:
            seen.ports = listening(process.pid)
            attacker = _attack(seen.ports, seconds=attack_s)
        _follow(process, seen)
        if process.returncode != 0:
            raise Broken(f"the run ended with {process.returncode}:\n{printed.read_text()[-3000:]}")
        if attacker is not None:
            _take_result(attacker, seen)
    finally:
        for started in (process, attacker):
            if started is not None and started.poll() is None:
                started.kill()
                started.wait()
    seen.log_bytes = sum(path.stat().st_size for path in (*base.rglob("*.log"), *base.rglob("log.jsonl")))
    seen.violations = [str(violation) for violation in check(seen.folder).violations]
    audit = run_to_end("audit", str(seen.folder))
    if audit.returncode or not audit.stdout.endswith("audit: C1, C2 and C3 hold\n"):
        seen.violations.append(f"dora audit: {audit.stdout}{audit.stderr}")
    return seen


def _until_training(process: subprocess.Popen[bytes], base: Path) -> Path:
    """Wait until a step is trained; return the run folder."""
    deadline = time.monotonic() + END_S
    follower: Follower | None = None
    while process.poll() is None and time.monotonic() < deadline:
        if follower is None:
            found = list(base.glob("*/journal.msgpack"))
            follower = Follower(found[0]) if found else None
        elif any(r["type"] == "Handled" and r["event"]["type"] == "StepTrained" for r in follower.poll()):
            return follower.path.parent
        time.sleep(0.05)
    raise Broken(f"no step was trained:\n{(base / 'printed.log').read_text()[-3000:]}")


def listening(controller: int) -> dict[int, str]:
    """Return every TCP port of the run's processes, with the role."""
    found = {}
    for process in _processes(controller):
        try:
            [name] = look_at([process], controller=controller)
            for connection in process.net_connections("tcp"):
                if connection.status == psutil.CONN_LISTEN:
                    found[connection.laddr.port] = name
        except (psutil.Error, ValueError):
            continue
    return found


def _processes(controller: int) -> list[psutil.Process]:
    try:
        root = psutil.Process(controller)
        return [root, *root.children(recursive=True)]
    except psutil.NoSuchProcess:
        return []


def _attack(ports: Iterable[int], *, seconds: float) -> subprocess.Popen[bytes]:
    line = [sys.executable, "-m", "tests.chaos.attacks", "--seconds", str(seconds), *map(str, ports)]
    return subprocess.Popen(line, stdout=subprocess.PIPE, cwd=ROOT, env=environment())


def _follow(process: subprocess.Popen[bytes], seen: Seen) -> None:
    """Follow the run to its end, and record peaks by role."""
    deadline = time.monotonic() + END_S
    while process.poll() is None:
        if time.monotonic() > deadline:
            raise Broken(f"the run did not end within {END_S:g} s")
        for name, now in look_at(_processes(process.pid), controller=process.pid).items():
            peak = seen.peaks.setdefault(name, Vitals())
            for what in ("processes", "memory_mb", "descriptors", "threads"):
                setattr(peak, what, max(getattr(peak, what), getattr(now, what)))
        time.sleep(SAMPLE_S)


def _take_result(attacker: subprocess.Popen[bytes], seen: Seen) -> None:
    out, _ = attacker.communicate(timeout=END_S)
    if attacker.returncode:
        raise Broken(f"the attacker failed with {attacker.returncode}")
    result = json.loads(out.splitlines()[-1])
    seen.attacks, seen.breaches = result["attacks"], result["breaches"]


# -- judgement ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Bound:
    """One comparison."""

    what: str
    undisturbed: str
    attacked: str
    bound: str
    holds: bool


def state_bounds(calm: Seen, hit: Seen) -> list[Bound]:
    """Compare the states and decisions of both runs."""
    both = calm.answers.keys() & hit.answers.keys()
    differ = [t for t in both if calm.answers[t] != hit.answers[t]]
    troubles = [Counter(event["type"] for event in seen.facts(*TROUBLE)) for seen in (calm, hit)]
    worse = sorted({*hit.violations} - {*calm.violations})  # paced ranks write checkpoints without a manifest
    new = {kind: count for kind, count in troubles[1].items() if kind not in troubles[0]}
    return [
        Bound("steps trained", str(calm.steps), str(hit.steps), "the same", calm.steps == hit.steps),
        Bound("answers that differ", "", f"{len(differ)} of {len(both)} in both", "0", bool(both) and not differ),
        Bound("facts of trouble", str(dict(troubles[0])), str(dict(troubles[1])), "no new kind", not new),
        Bound("violations", str(len(calm.violations)), str(worse), "none besides", not worse),
        Bound("open doors", "", str(hit.breaches), "none", not hit.breaches),
    ]


def memory_bound(calm: Seen, hit: Seen) -> Bound:
    before, after = (seen.peaks["controller"].memory_mb for seen in (calm, hit))
    holds = after <= before * (1 + MEMORY_SHARE)
    return Bound("controller memory, peak", f"{before:.1f} MB", f"{after:.1f} MB", f"+{MEMORY_SHARE:.0%}", holds)


def log_bound(calm: Seen, hit: Seen) -> Bound:
    before, after = (f"{seen.log_bytes:,} bytes" for seen in (calm, hit))
    return Bound("logs", before, after, f"+{LOG_BYTES:,}", hit.log_bytes - calm.log_bytes <= LOG_BYTES)


def step_bound(calm: Seen, hit: Seen) -> Bound:
    holds = abs(hit.step_s / calm.step_s - 1) <= STEP_SHARE
    return Bound("step time, mean", f"{calm.step_s:.2f} s", f"{hit.step_s:.2f} s", f"±{STEP_SHARE:.0%}", holds)


def _print(calm: Seen, hit: Seen, bounds: list[Bound]) -> None:
    print(f"\nports: {dict(sorted(Counter(hit.ports.values()).items()))}, load {os.getloadavg()[0]:.1f}\n")
    for attack, outcomes in sorted(hit.attacks.items()):
        found = ", ".join(f"{outcome} {count}" for outcome, count in sorted(outcomes.items()))
        print(f"{sum(outcomes.values()):7}  {attack:48} {found}")
    print()
    for name in sorted(calm.peaks.keys() & hit.peaks.keys()):
        for what in ("memory_mb", "descriptors", "threads"):
            before, after = (getattr(seen.peaks[name], what) for seen in (calm, hit))
            print(f"{name + ' ' + what + ', peak':40} {before:9.1f} {after:9.1f}")
    print()
    for bound in bounds:
        held = "" if bound.holds else "   MISSED"
        print(f"{bound.what:40} {bound.undisturbed:24} {bound.attacked:24} {bound.bound}{held}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--job", choices=("paced", "real"), default="paced")
    parser.add_argument("--folder", type=Path, help="folder of the runs (default: a temporary folder)")
    options = parser.parse_args()
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)
    base = options.folder or Path(tempfile.mkdtemp(prefix="hostile-"))
    seen = []
    for name, attack_s in (("undisturbed", 0.0), ("attacked", options.seconds)):
        if options.job == "paced":
            line = paced_job(base / name, workload=PACED, time_scale=PACED_S / options.seconds)
        else:
            line = real_job(base / name, steps=max(4, int(options.seconds)))
        seen.append(watch(line, base / name, attack_s=attack_s))
    calm, hit = seen
    bounds = [*state_bounds(calm, hit), memory_bound(calm, hit), log_bound(calm, hit)]
    if options.job == "paced":
        bounds.append(step_bound(calm, hit))
    else:
        bounds = [bound for bound in bounds if not bound.what.startswith("answers")]  # they depend on timing
    _print(calm, hit, bounds)
    sys.exit(0 if all(bound.holds for bound in bounds) else 1)


if __name__ == "__main__":
    main()
