"""Resources of a run, measured from outside: memory, descriptors, threads of its processes, and files in its folders.

Processes are grouped by role, so that a restarted one (a grader, a server) is compared with its predecessor.
"""

from __future__ import annotations

import os
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path

import psutil

MB = 2**20
#: Words in the command line of a role; the first match counts.
_WORDS = {
    "torchrun": "torch.distributed.run",
    "grader": "dora.tasks.grader",
    "guard": "dora.tasks.guard",
    "environment host": "dora.environments.host",
    "rank": "train",
    "engine": "serve",
    "paced servers": "pace-servers",
    "paced ranks": "pace-ranks",
}


@dataclass
class Vitals:
    """The resources of all processes of one role at one moment."""

    processes: int = 0
    memory_mb: float = 0.0  # resident
    descriptors: int = 0
    threads: int = 0


@dataclass
class Sample:
    """One measurement of a run."""

    at: float  # seconds since the first one
    life: int
    steps: int  # trained, by the status endpoint; -1: it does not answer
    streams: int  # answers in flight: each needs a descriptor at both ends
    roles: dict[str, Vitals] = field(default_factory=dict)
    files: dict[str, int] = field(default_factory=dict)  # counts by kind
    log_bytes: int = 0


def role(process: psutil.Process, *, controller: int) -> str:
    """Return the role of a process."""
    if process.pid == controller:
        return "controller"
    words = process.cmdline()
    for name, word in _WORDS.items():
        if word in words:
            return name
    return "other"


def look_at(processes: Iterable[psutil.Process], *, controller: int) -> dict[str, Vitals]:
    """Measure processes by role; one that ends meanwhile is left out."""
    found: dict[str, Vitals] = defaultdict(Vitals)
    for process in processes:
        try:
            with process.oneshot():
                name = role(process, controller=controller)
                memory, descriptors, threads = process.memory_info().rss, process.num_fds(), process.num_threads()
        except psutil.Error:
            continue
        vitals = found[name]
        vitals.processes += 1
        vitals.memory_mb += memory / MB
        vitals.descriptors += descriptors
        vitals.threads += threads
    return dict(found)


def count_files(folder: Path) -> int:
    """Count the files below a folder, hidden ones included; one that is deleted meanwhile may or may not count."""
    return sum(len(names) for _, _, names in os.walk(folder))


def size_of_logs(folder: Path) -> int:
    """Return the bytes of the logs of the run and its processes."""
    total = 0
    for path in (folder / "log.jsonl", *(folder / "logs").glob("*")):
        try:
            total += path.stat().st_size
        except OSError:
            continue
    return total
