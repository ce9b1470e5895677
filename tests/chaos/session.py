"""A small job for fault injection: start it, watch it, inject faults, and resume it until it ends.

Everything is observed from outside: processes, files, the status endpoint, and the journal with an independent reader.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import time
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

import psutil

from tests.chaos.checker import Verdict, check
from tests.chaos.recorded import Follower, Record
from tests.e2e.runs import Run, alive, command, environment, run_to_end, settings

ROOT = Path(__file__).parents[2]
POLL_S = 0.01
END_S = 300.0
GONE_S = 60.0
REWARDS = '[{kind="regex", pattern="(?:^|\\\\D)(\\\\d\\\\d)$"}, {kind="function", name="tests.chaos.pace:score"}]'


class Unexpected(AssertionError):
    """A run did not react to a fault as it must."""


@dataclass
class Session:
    """One job, over as many lives as necessary."""

    base: Path  # an empty folder
    steps: int
    grade_s: float = 0.03
    changes: dict[str, object] = field(default_factory=dict)
    run: Run | None = None
    follower: Follower | None = None
    folder: Path | None = None
    memory: Path | None = None
    seen: list[Record] = field(default_factory=list)  # events and commands of this life
    counts: Counter[str] = field(default_factory=Counter)  # of them, by type; `Epoch` as well
    codes: list[int] = field(default_factory=list)  # exit codes of all lives
    told: list[str] = field(default_factory=list)  # output of the lives that failed
    is_over: bool = False  # this life is over, and its exit code is in `codes`
    stopped: list[psutil.Process] = field(default_factory=list)  # of earlier lives, by SIGSTOP

    def arguments(self) -> list[str]:
        values: dict[str, object] = {
            "run__folder": self.base / "runs",
            "run__steps": self.steps,
            "rollout__groups_per_step": 4,
            "rollout__group_size": 4,
            "rollout__max_new_tokens": 48,
            "rollout__max_staleness": 1,
            "rollout__filter_zero_variance": False,
            "engine__instances": 2,
            "trainer__ranks": 1,
            "trainer__checkpoint_every": 1,
            "eval__sets": "[{prompts=6}]",
            "status__port": 0,
            "weights__memory_folder": self.memory_folder,
            "task__rewards": REWARDS,
        }
        return settings(**(values | self.changes))

    @property
    def memory_folder(self) -> Path:
        """The memory store of this job, which no other run deletes."""
        return Path("/dev/shm") / f"chaos-{self.base.name}-{os.getpid()}"

    def __enter__(self) -> Session:
        self.memory_folder.mkdir(parents=True, exist_ok=True)
        self.busy_folder.mkdir(parents=True, exist_ok=True)
        return self

    def __exit__(self, *_: object) -> None:
        if self.run is not None:
            self.kill_everything()
            self.run.__exit__()
        for process in self.stopped:
            with suppress(psutil.NoSuchProcess):
                process.kill()
        for name in ("CHAOS_FOLDER", "CHAOS_GRADE_S"):
            os.environ.pop(name, None)
        shutil.rmtree(self.memory_folder, ignore_errors=True)

    @property
    def busy_folder(self) -> Path:
        return self.base / "busy"

    # -- lives --------------------------------------------------------------------------------------------------------

    def start(self, *more: str) -> Run:
        """Start the run or, later, a resume."""
        os.environ["CHAOS_FOLDER"] = str(self.busy_folder)
        os.environ["CHAOS_GRADE_S"] = str(self.grade_s)
        for path in self.busy_folder.iterdir():
            path.unlink()
        self.seen, self.counts = [], Counter()
        self.is_over = False
        if self.folder is None:
            self.run = Run(*self.arguments(), *more, cwd=ROOT)
            self.folder = self.run.folder.root
            self.follower = Follower(self.folder / "journal.msgpack")
        else:
            assert self.follower is not None
            self.follower.poll()
            self.run = Run("--resume", str(self.folder), *settings(status__port=0), *more, cwd=ROOT)
        return self.run

    @property
    def life(self) -> Run:
        """The current life, or the last one."""
        assert self.run is not None
        return self.run

    def is_alive(self) -> bool:
        return self.run is not None and self.run.process.poll() is None

    def look(self) -> None:
        """Read what this life has written to the disk so far."""
        assert self.follower is not None
        for record in self.follower.poll():
            facts = [record["event"], *record["commands"]] if record["type"] == "Handled" else [record]
            self.seen += facts
            self.counts.update(fact["type"] for fact in facts)

    def wait(self, holds: Callable[[], bool], *, what: str, timeout_s: float = 120.0) -> bool:
        """Poll until `holds`; False if the run ends first."""
        deadline = time.monotonic() + timeout_s
        while not holds():
            if not self.is_alive():
                return False
            if time.monotonic() > deadline:
                raise Unexpected(f"not within {timeout_s:g} s: {what}\n{self.life.told()}")
            time.sleep(POLL_S)
        return True

    def end(self) -> int:
        """Wait for the end of this life, which no child may outlive; return its exit code."""
        children = self.children()
        code = self.life.end(timeout_s=END_S)
        self._require_gone([child for child in children if child not in self.stopped])
        self.codes.append(code)
        self.is_over = True
        if code:
            self.told.append(self.life.told())
        return code

    def wake(self) -> None:
        """Continue the processes that were stopped while their controller died; they must exit at once."""
        for process in self.stopped:
            with suppress(psutil.NoSuchProcess):
                process.resume()
        self._require_gone(self.stopped)
        self.stopped = []

    def _require_gone(self, processes: Sequence[psutil.Process]) -> None:
        deadline = time.monotonic() + GONE_S
        while (left := alive(processes)) and time.monotonic() < deadline:
            time.sleep(0.05)
        if left:
            raise Unexpected(f"processes outlive their run: {left}")

    def finish(self) -> None:
        """Complete the job, with this life or, if that has ended, with one undisturbed resume."""
        if self.is_over:
            if self.codes[-1] == 0:
                return
            self.start()
        if self.end() != 0:
            raise Unexpected(f"an undisturbed life ended with {self.codes[-1]}:\n{self.told[-1]}")

    # -- processes ----------------------------------------------------------------------------------------------------

    def children(self) -> list[psutil.Process]:
        try:
            return self.life.children()
        except psutil.NoSuchProcess:
            return []

    def named(self, *words: str) -> list[psutil.Process]:
        """Return the children whose command line has all of these words."""
        found = []
        for child in self.children():
            try:
                line = child.cmdline()
            except psutil.Error:
                continue
            if all(any(word in part for part in line) for word in words):
                found.append(child)
        return found

    def engines(self) -> list[psutil.Process]:
        return self.named("dora", "serve")

    def graders(self) -> list[psutil.Process]:
        """Return the graders; each is the fork of a fork of a guard, and these end with it."""
        forks = {process.pid: process.ppid() for process in self.named("dora.tasks.guard")}
        return [psutil.Process(pid) for pid, parent in forks.items() if forks.get(parent) in forks]

    def torchrun(self) -> list[psutil.Process]:
        return self.named("torch.distributed.run")

    def ranks(self) -> list[psutil.Process]:
        known = {process.pid for process in self.torchrun()}
        return [process for process in self.named("dora", "train") if process.pid not in known]

    def targets(self, name: str) -> list[psutil.Process]:
        """Return the processes of a kind, the oldest engine first."""
        match name:
            case "controller":
                return [psutil.Process(self.life.process.pid)]
            case "trainer rank":
                return self.ranks()[:1]
            case "torchrun":
                return self.torchrun()[:1]
            case "an engine":
                return self.engines()[:1]
            case "all engines":
                return self.engines()
            case "grader":
                return self.graders()[:1]
            case _:
                return [psutil.Process(self.life.process.pid), *self.children()]

    def hit(self, name: str) -> int:
        """Send SIGKILL to processes; return their number. All are stopped first, so that none sees another die."""
        if name == "controller over stopped children":
            self.stopped += self.children()
            for child in self.stopped:
                child.suspend()
            name = "controller"
        processes = self.targets(name)
        for number in (signal.SIGSTOP, signal.SIGKILL) if len(processes) > 1 else (signal.SIGKILL,):
            for process in processes:
                with suppress(psutil.NoSuchProcess):
                    process.send_signal(number)
        if name == "everything and the memory store":
            self.life.process.wait(GONE_S)
            shutil.rmtree(self.memory_folder)
            self.memory_folder.mkdir()
        return len(processes)

    def kill_everything(self) -> None:
        if self.is_alive():
            self.hit("everything")
            self.life.process.wait(GONE_S)

    # -- judgement ----------------------------------------------------------------------------------------------------

    def judge(self) -> Verdict:
        """Return the checker's verdict; the run's own audit must succeed too."""
        assert self.folder is not None
        verdict = check(self.folder)
        audit = run_to_end("audit", str(self.folder))
        if audit.returncode or not audit.stdout.endswith("audit: C1, C2 and C3 hold\n"):
            raise Unexpected(f"dora audit: {audit.stdout}{audit.stderr}")
        if verdict.finished and verdict.trained != 4 * self.steps:
            raise Unexpected(f"{verdict.trained} groups are trained, an undisturbed run trains {4 * self.steps}")
        return verdict


def intrude(folder: Path) -> subprocess.CompletedProcess[str]:
    """Try to resume a run that is alive."""
    line = [*command("run", "--resume", str(folder)), *settings(status__port=0)]
    return subprocess.run(line, capture_output=True, text=True, check=False, timeout=120, env=environment(), cwd=ROOT)


DEADLY: Sequence[str] = ("controller", "everything", "everything and the memory store")
LIVE: Sequence[str] = ("trainer rank", "torchrun", "an engine", "all engines", "grader")
