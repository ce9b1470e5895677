"""What the controller costs: paced runs of 8 to 64 instances against the simulator on the same workload and seed.

Run: python bench/overhead.py [--full] [--only 8 16 32 64 64x64]. `dora pace` is the real controller over real HTTP and
ZeroMQ; servers and trainer take the times of the simulator's models, `scale` times faster than the wall clock, so that
any difference is caused by the shell: sockets, effects, graders, files, the event loop. The workload has 22 ms per
token, and more with the batch, regime D at a tenth of its lengths, groups of 4, K = 3, the servers in at most 4
processes, and 64 tokens per chunk. An instance has 16 slots, and a step 16 answers per instance; the case 64x64 has 64
slots per instance, 4,096 streams at once, and 8,192 answers per step, as many as the paper. Step times are means over
all steps but the first, in seconds of the workload. A millisecond decides which of two answers is first, and so changes
the step time of a short run by up to 3 %. Therefore the simulator is run five times, with answers 0 to 4 ms late, and
the paced run is compared with the run of the median step; the range is given. Servers and controller share this
machine's cores, so that the shell is charged for the servers' work too.

The figures are:
  step        paced step / simulated step. A scale of s makes every second of the shell s seconds of the workload, so
              this ratio charges the controller s times what it costs in a run that is not scaled.
  added       (paced - simulated) / s: real seconds that the shell adds to a step, divided by the simulated step, which
              is the duration of an unscaled step. The shell does the same work for a step at any scale.
  decisions   CPU seconds per step of `handle`, replaying the run's own events, divided likewise.
  process     CPU seconds per step of the whole controller process, streams and journal included, divided likewise. They
              are spent on a core beside the fleet and delay no step unless the loop lags, so they have no bar.
  staleness   mean over the second half of the steps (a run starts slower than a simulation), beside the simulator's;
              and all migrations likewise.
Ceiling: the simulator, whose controller costs nothing.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from statistics import mean
from typing import NamedTuple

from result import Report, parser

from dora.core import commands as cmd
from dora.core import events as ev
from dora.core.core import handle
from dora.core.state import State
from dora.journal.reader import Journal
from dora.journal.run_folder import RunFolder
from dora.sim.workload import Workload, load
from dora.sim.world import World

SEED = 1
TIMEOUT_S = 600.0
LATE_S = (0.0, 0.001, 0.002, 0.003, 0.004)


class Case(NamedTuple):
    """A fleet, and how fast it is run: as fast as a machine of two cores, servers included, can be."""

    instances: int
    scale: float
    slots: int = 16  #: of an instance
    answers: int = 16  #: of an instance, in a step
    tokens_s_per_device: float = 3000.0  #: of the trainer
    steps: tuple[int, int] = (6, 16)  #: of the short and of the full profile


CASES = {
    "8": Case(8, scale=4.0),
    "16": Case(16, scale=4.0),
    "32": Case(32, scale=2.0),
    "64": Case(64, scale=2.0),
    "64x64": Case(64, scale=1.0, slots=64, answers=128, tokens_s_per_device=12_000.0, steps=(4, 12)),
}

WORKLOAD = """
[job]
max_staleness = 3
steps = {steps}
groups_per_step = {groups}
group_size = 4
[lengths]
regime = "D"
scale = 0.1
cap = 1000
prompt_tokens = 200
[fleet]
devices = {devices}
rollout_devices = {instances}
push_fixed_s = 0.5
weight_bytes = 8e9
report_s = 1.0
[fleet.server]
slots = {slots}
kv_tokens = 40_000
prefill_s_per_token = 7.3e-5
decode = {{ base_s = 0.0219, per_request_s = 4e-5, per_token_s = 5.58e-8 }}
[train]
tokens_s_per_device = {tokens_s_per_device}
devices_per_rank = 4
micro_batch_tokens = 32_768
"""


def write_workload(path: Path, case: Case, *, steps: int) -> Workload:
    """Everything grows with the fleet; the trainer has half as many devices."""
    instances = case.instances
    text = WORKLOAD.format(
        steps=steps,
        groups=case.answers * instances // 4,
        devices=instances + instances // 2,
        instances=instances,
        slots=case.slots,
        tokens_s_per_device=case.tokens_s_per_device,
    )
    path.write_text(text)
    return load(path)


class Seen:
    """What a run's events say, live or simulated; both are in seconds of the workload."""

    def __init__(self) -> None:
        self.trained: list[float] = []
        self.staleness: list[tuple[int, int]] = []  # step, s - v
        self.most_open = 0
        self._open = 0  # requests
        self._open_s = 0.0  # seconds of all of them together, until `_at`
        self._at = 0.0

    def take(self, event: ev.Event, orders: Sequence[cmd.Command]) -> None:
        self._open_s += self._open * (event.at - self._at)
        self._at = event.at
        if isinstance(event, ev.StepTrained):
            self.trained.append(event.at)
        elif isinstance(event, ev.GenerationFinished | ev.GenerationStopped | ev.GenerationFailed):
            self._open -= 1
        for order in orders:
            if isinstance(order, cmd.CommitGroup):
                self.staleness.append((order.step, order.step - order.version))
            elif isinstance(order, cmd.Generate):
                self._open += 1
        self.most_open = max(self.most_open, self._open)

    @property
    def mean_open(self) -> float:
        return self._open_s / self._at

    @property
    def step_s(self) -> float:
        return mean(after - before for before, after in pairwise(self.trained))

    @property
    def mean_staleness(self) -> float:
        return mean(stale for step, stale in self.staleness if step >= len(self.trained) / 2)


def pace(path: Path, case: Case, *, home: Path) -> RunFolder:
    """A whole run; its folder."""
    options = ("--seed", str(SEED), "--time-scale", str(case.scale), "--folder", str(home))
    command = [sys.executable, "-m", "dora", "pace", str(path), *options]
    done = subprocess.run(command, capture_output=True, text=True, timeout=TIMEOUT_S, check=False)
    if done.returncode or "audit of C1, C2, C3: clean" not in done.stdout:
        raise SystemExit(f"the paced run of {case} failed:\n{done.stdout[-2000:]}\n{done.stderr}")
    [journal] = home.glob("*/journal.msgpack")
    return RunFolder.open(journal.parent)


def simulate(workload: Workload) -> list[tuple[Seen, World]]:
    """Runs that differ in how late answers are, by the step time."""
    found = []
    for late_s in LATE_S:
        seen = Seen()
        world = World(workload.with_changes(fleet={"answer_s": late_s}), seed=SEED, sink=seen.take)
        world.run()
        found.append((seen, world))
    return sorted(found, key=lambda run: run[0].step_s)


def measure(report: Report, case: Case, *, full: bool) -> None:
    scale, steps = case.scale, case.steps[full]
    with tempfile.TemporaryDirectory() as temporary:
        path = Path(temporary) / "workload.toml"
        workload = write_workload(path, case, steps=steps)
        folder = pace(path, case, home=Path(temporary) / "runs")
        rows = [json.loads(line) for line in folder.metrics.read_text().splitlines()]
        journal = Journal(folder.journal)
        live = Seen()
        events = []
        for event, orders in journal:
            live.take(event, orders)
            events.append(event)
        settings = journal.header.settings
    runs = simulate(workload)
    model, world = runs[len(runs) // 2]
    alone = State(settings)
    begun = time.process_time()
    for event in events:
        handle(alone, event)
    decisions_s = (time.process_time() - begun) / steps
    process_s = mean(row["controller_cpu_s"] for row in rows[1:])
    slots = "" if case.slots == 16 else f" of {case.slots} slots"
    name, step_s = f"{case.instances} instances{slots}", model.step_s

    def share(what: str, seconds: float, *, bar: str = "") -> None:
        report.row(f"{name}: {what}", round(100 * seconds / step_s, 3), "% of an unscaled step", bar=bar)

    report.row(
        f"{name}, 1 s as {scale:g} s: step", round(live.step_s, 2), "s",
        against=f"simulator, {runs[0][0].step_s:.2f} to {runs[-1][0].step_s:.2f} s",
        ratio=live.step_s / step_s, bar="ratio <= 1.05",
    )  # fmt: skip
    share("added by the controller", (live.step_s - step_s) / scale, bar="figure <= 1")
    share("decisions", decisions_s, bar="figure <= 1")
    share("process, streams included", process_s)
    opened, theirs = live.mean_open, model.mean_open
    report.row(
        f"{name}: open streams, mean (at most {live.most_open:,})",
        opened,
        "",
        against="simulator",
        ratio=opened / theirs,
    )
    report.row(f"{name}: event-loop lag p99", 1e3 * rows[-1]["lag_p99_s"], "ms")
    stale, expected = live.mean_staleness, model.mean_staleness
    report.row(f"{name}: mean staleness", round(stale, 3), "steps", against="simulator", ratio=stale / expected)
    moves, theirs = alone.counters.migrations, world.state.counters.migrations
    report.row(f"{name}: migrations", moves, "", against=f"simulator: {theirs}", ratio=moves / max(theirs, 1))


def main() -> None:
    arguments = parser(__doc__)
    arguments.add_argument("--only", nargs="+", choices=CASES, default=list(CASES), help="which fleets; all without it")
    options = arguments.parse_args()
    sizes = f"{'16 (64x64: 12)' if options.full else '6 (64x64: 4)'} steps, seed {SEED}"
    report = Report(__doc__, full=options.full, sizes=sizes)
    for name in options.only:
        measure(report, CASES[name], full=options.full)
    report.print()


if __name__ == "__main__":
    main()
