"""A run whose trainer is killed at each of its moments, and which goes on without a resume.

    python -m tests.chaos.lost_ranks --out FILE.json      runs what FILE.json does not have
    python -m tests.chaos.lost_ranks --table FILE.json    prints it for docs/RELIABILITY.md

A row is one run, whose trainer is killed once at each moment: a rank stops itself there (tests/chaos/rank.py), and
then it, torchrun, or all processes of its node get SIGKILL. In the last row, `nothing`, the rank is not killed, and
must be found by its pulse. The run must end by itself, with the chain of each step and the bytes of each version of a
run without kills. This can be compared because the time at which anything happens decides nothing in these runs:
`one_step_off` admits and trains whole batches, and one server with one slot samples one answer after the other.

A cell has the seconds from the kill until the journal on the disk says that the new ranks are ready, and until it has
a micro-batch of theirs, and the number of tokens that it gets between the loss of the ranks and the readiness of the
new ones. Ranks that were killed while they waited wait again, for answers that are still being sampled. `loading`: the
ranks are killed while they wait, and the new ones while they load; the seconds count from the second kill, the tokens
from the first loss.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import signal
import sys
import tempfile
import time
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import psutil

from dora.journal.run_folder import RunFolder
from tests.chaos.checker import check
from tests.chaos.rank import REACHED
from tests.chaos.recorded import Follower, Record
from tests.cluster.cluster import SMALL, Cluster
from tests.cluster.network import network_at
from tests.e2e.runs import Run, assert_audit_clean, make_slow_policy, settings, until

TARGETS = ("rank 0", "rank 1", "torchrun", "node")
#: The row of ranks that are not killed.
NOTHING = "nothing"
MOMENTS = ("waiting", "forward", "close", "publish", "checkpoint", "probe", "loading")
FIGURES = ("s to ready", "s to training", "tokens meanwhile")
#: Ranks that do not end, and why they are lost.
FOUND = {"stopped": "has been silent for", "wedged": "no trainer rank has made progress for"}
#: Limits of each wait, and of the end of a run.
PATIENCE_S, END_S = 300.0, 1200.0
#: Files in /dev/shm of a host: the versions of a run.
SHM_MB = 256

TORCHRUN = (sys.executable, "-m", "torch.distributed.run")
#: As dora/node/plan.py starts them; nodes are told their place by the environment.
ON_ONE_HOST = ("--rdzv-backend=c10d", "--rdzv-conf=store_type=file", "--local-addr=127.0.0.1", "--nproc-per-node=2")
ON_NODES = ("--rdzv-backend=static", "--nproc-per-node=1")
RANK = ("-m", "tests.chaos.rank")

JOB: dict[str, object] = {
    "rollout__strategy": "one_step_off",
    "rollout__groups_per_step": 2,
    "rollout__group_size": 2,
    "rollout__max_new_tokens": 128,
    "rollout__filter_zero_variance": False,
    "engine__instances": 1,
    "engine__slots": 1,
    "trainer__ranks": 2,
    "trainer__threads": 1,
    "trainer__checkpoint_every": 2,
    "trainer__probe_every": 1,
    "trainer__learning_rate": 1e-3,
    "eval__sets": "[]",
    "status__port": 0,
    "task__rewards": '[{kind="function", name="tests.chaos.pace:varied"}]',
}

Cell = dict[str, object]
#: The chain of each step and the files of each version, with their checksums.
History = tuple[dict[int, str], dict[int, dict[str, str]]]


@dataclass
class Watched:
    """A run under way: what it has recorded, and the moments at which its ranks stop."""

    run: Run
    moments: Path
    cluster: Cluster | None = None
    numbers: Iterator[int] = field(default_factory=lambda: itertools.count(3))  # of nodes that replace others
    facts: list[Record] = field(default_factory=list)
    follower: Follower = field(init=False)

    def __post_init__(self) -> None:
        self.follower = Follower(self.run.folder.journal)

    def until_recorded(self, *kinds: str, begin: int) -> int:
        """Wait for these events, one after the other; return the number of facts up to the last one."""
        for kind in kinds:
            begin = until(lambda kind=kind, begin=begin: self._find(kind, begin), what=kind, timeout_s=PATIENCE_S)  # type: ignore[misc]
        return begin

    def _find(self, kind: str, begin: int) -> int | None:
        assert self.run.process.poll() is None, self.run.told()
        self.look()
        return next((n for n, fact in enumerate(self.facts[begin:], begin + 1) if fact["type"] == kind), None)

    def look(self) -> None:
        self.facts += [record["event"] for record in self.follower.poll() if record["type"] == "Handled"]

    def kill_at(self, moment: str, target: str) -> Cell:
        """Kill a target while a rank of it is at this moment; return the figures once a new step is trained.

        Only ranks of the first node write versions.
        """
        if moment == "loading":
            self.until_recorded("CheckpointSaved", begin=0)
        rank = int(target == "rank 1" or (target == "node" and moment in ("forward", "checkpoint", "loading")))
        moments = ("waiting", "loading") if moment == "loading" else (moment,)
        for each in moments:
            (self.moments / f"{each}-{rank}").touch()
        self.look()
        first = lost = len(self.facts)
        for _ in moments:
            stopped = self._until_stopped()
            began = time.monotonic()
            self._kill(target, *stopped)
            lost = self.until_recorded("TrainerLost", begin=lost)
        ready = self.until_recorded("TrainerReady", begin=lost)
        cell: Cell = {"s to ready": round(time.monotonic() - began, 1)}
        self.until_recorded("MicroBatchTrained", begin=ready)
        cell["s to training"] = round(time.monotonic() - began, 1)
        before = self.until_recorded("TrainerLost", begin=first)
        cell["tokens meanwhile"] = num_tokens(self.facts[:ready]) - num_tokens(self.facts[:before])
        self.until_as_before()
        return cell

    def find(self, how: str) -> Cell:
        """Let a rank be stopped or wedged within a pass; return the figures once a new step is trained."""
        (self.moments / "forward-1").write_text(how)
        self.look()
        begin = len(self.facts)
        self._until_stopped()
        began = time.monotonic()
        lost = self.until_recorded("TrainerLost", begin=begin)
        seconds = round(time.monotonic() - began, 1)
        reason = self.facts[lost - 1]["reason"]
        assert FOUND[how] in reason, reason
        self.until_as_before()
        return {"s to the loss": seconds, "reason": reason}

    def until_as_before(self) -> None:
        """Wait until a new step is trained, and answers for the next one are sampled, for which training waits."""
        step = len(history(self.facts)[0])
        while step not in history(self.facts)[0]:
            end = self.until_recorded("StepTrained", begin=len(self.facts))
        self.until_recorded("GenerationFinished", begin=end)

    def _until_stopped(self) -> tuple[int, str]:
        """Wait until a rank has stopped at its moment; return its process id and host."""
        reached = self.moments / REACHED

        def has_stopped() -> bool:
            assert self.run.process.poll() is None, self.run.told()
            return reached.exists()

        until(has_stopped, what=f"one of {list(self.moments.iterdir())}", timeout_s=PATIENCE_S)
        pid, host = reached.read_text().split()
        reached.unlink()
        return int(pid), host

    def _kill(self, target: str, pid: int, host: str) -> None:
        if self.cluster is not None:
            for process in self.cluster.network.hosts[host].processes():
                process.kill()
            self.cluster.nodes.pop(host)
            self.cluster.node(self.cluster.network.host(f"node-{next(self.numbers)}", shm_mb=SHM_MB))
            return
        rank = psutil.Process(pid)
        (rank.parent() if target == "torchrun" else rank).send_signal(signal.SIGKILL)  # type: ignore[union-attr]


def moments_of(target: str) -> Collection[str]:
    """Return the moments of a row. Ranks on several nodes probe nothing."""
    if target == NOTHING:
        return FOUND
    return [moment for moment in MOMENTS if target != "node" or moment != "probe"]


def num_tokens(facts: Sequence[Record]) -> int:
    """Return how many tokens are known to be sampled."""
    known: dict[int, int] = {}
    for fact in facts:
        if fact["type"] == "ProgressReported":
            known |= fact["num_tokens"]
        elif fact["type"] == "GenerationFinished":
            known[fact["trajectory"]] = fact["num_tokens"]
    return sum(known.values())


def history(facts: Sequence[Record]) -> History:
    """Return what all trainings of a step and all publications of a version agree on; AssertionError if they do not."""
    chains: dict[int, str] = {}
    versions: dict[int, dict[str, str]] = {}
    for fact in facts:
        if fact["type"] == "StepTrained":
            assert chains.setdefault(fact["step"], fact["chain"]) == fact["chain"], fact
        elif fact["type"] == "VersionPublished":
            assert versions.setdefault(fact["version"], fact["files"]) == fact["files"], fact
            assert not fact["differs"], fact
    return chains, versions


def steps_for(moments: Collection[str]) -> int:
    """Return the length of a run in which all of these moments come."""
    return 3 * len(moments) + 4


@contextmanager
def local(base: Path, job: Mapping[str, object], moments: Path) -> Iterator[Watched]:
    """A run whose ranks are on its own host."""
    command = json.dumps([*TORCHRUN, *ON_ONE_HOST, *RANK])
    values = {**job, "run__folder": base, "trainer__command": command}
    with Run(*settings(**values), patience_s=PATIENCE_S) as run:
        yield Watched(run, moments)


@contextmanager
def on_nodes(base: Path, job: Mapping[str, object], moments: Path) -> Iterator[Watched]:
    """A run with two nodes of a rank each, and one with the server."""
    command = json.dumps([*TORCHRUN, *ON_NODES, *RANK])
    changes = {**SMALL, **job, "nodes__train": 2, "trainer__command": command}
    with network_at(base / "net") as network:
        cluster = Cluster(network, {key: value for key, value in changes.items() if key != "engine__instances"})
        with cluster.run(network.host("controller", shm_mb=SHM_MB)) as run:
            for number in range(3):
                cluster.node(network.host(f"node-{number}", shm_mb=SHM_MB))
            yield Watched(run, moments, cluster)


class LostRanks:
    """The cells; the file is written after each one."""

    def __init__(self, base: Path, out: Path) -> None:
        self.base = base
        self.out = out
        self.cells: dict[str, dict[str, Cell]] = json.loads(out.read_text()) if out.exists() else {}
        self.model = make_slow_policy(base / "model")

    def left(self, target: str) -> list[str]:
        """Return the cells of a row that are missing."""
        return [moment for moment in moments_of(target) if moment not in self.cells.get(target, {})]

    def fill(self, target: str, *, steps: int, reference: History | None = None) -> History:
        """Run what is missing of a row, or the reference if there is none; return what the run has trained."""
        base, moments = self.base / target.replace(" ", "-"), self.base / f"moments-{target.replace(' ', '-')}"
        for folder in (base, moments):
            folder.mkdir()
        os.environ["CHAOS_MOMENTS"] = str(moments)
        job = {**JOB, "run__steps": steps, "model__path": self.model}
        with (on_nodes if target == "node" else local)(base, job, moments) as watched:
            if reference is not None:
                watched.until_as_before()
                for moment in self.left(target):
                    cell = watched.find(moment) if target == NOTHING else watched.kill_at(moment, target)
                    self._write(target, moment, cell)
            assert watched.run.end(timeout_s=END_S) == 0, watched.run.told()
            watched.look()
            found = history(watched.facts)
            self._require_right(watched.run.folder)
        if reference is not None:
            chains, versions = found
            assert chains == {step: reference[0][step] for step in chains}, target
            assert versions == {version: reference[1][version] for version in versions}, target
            self._write(target, "the end", {"history": "that of the reference", "steps": len(found[0])})
        return found

    def _require_right(self, folder: RunFolder) -> None:
        verdict = check(folder.root)
        assert not verdict.violations, [str(violation) for violation in verdict.violations]
        assert_audit_clean(folder)

    def _write(self, target: str, moment: str, cell: Cell) -> None:
        self.cells.setdefault(target, {})[moment] = cell | {"load": round(os.getloadavg()[0], 1)}
        self.out.write_text(json.dumps(self.cells, indent=1) + "\n")
        print(target, moment, cell, flush=True)


def table(cells: dict[str, dict[str, Cell]]) -> str:
    """Return a Markdown table; a cell has the seconds until ready, to training, and the tokens meanwhile."""
    lines = ["| killed | " + " | ".join(MOMENTS) + " |", "|---" * (len(MOMENTS) + 1) + "|"]
    for target in TARGETS:
        row = cells.get(target, {})
        texts = [
            " / ".join(f"{row[moment][figure]:,g}" for figure in FIGURES) if moment in row else "–"
            for moment in MOMENTS
        ]
        lines.append(f"| {target} | " + " | ".join(texts) + " |")
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, help="the cells; those that are there are not run again")
    parser.add_argument("--table", type=Path, help="print the table of this file and do nothing else")
    rows = [*TARGETS, NOTHING]
    parser.add_argument("--targets", nargs="*", default=rows, choices=rows)
    parser.add_argument("--folder", type=Path, help="where the runs lie (default: a temporary folder)")
    options = parser.parse_args()
    if options.table:
        print(table(json.loads(options.table.read_text())), end="")
        return
    base = options.folder or Path(tempfile.mkdtemp(prefix="lost-ranks-"))
    base.mkdir(parents=True, exist_ok=True)
    lost = LostRanks(base, options.out)
    steps = {target: steps_for(left) for target in options.targets if (left := lost.left(target))}
    reference = lost.fill("reference", steps=max(steps.values(), default=0))
    for target in steps:
        lost.fill(target, steps=steps[target], reference=reference)


if __name__ == "__main__":
    main()
