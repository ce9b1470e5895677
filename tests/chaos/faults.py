"""Faults, drawn from a seed, and a driver that injects them until the run has ended.

A plan is a sequence of rounds. A round has a few faults that the run must survive, then one that kills it, then damage
to its files as by a crash or a bad disk, and then a resume, which may be disturbed as well.
"""

from __future__ import annotations

import json
import random
import signal
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import psutil

from tests.chaos.checker import Verdict, check
from tests.chaos.phases import until_asked, wait_for
from tests.chaos.recorded import read_frames, unpack
from tests.chaos.session import DEADLY, LIVE, Session, Unexpected, intrude

AGENT = json.dumps([sys.executable, str(Path(__file__).with_name("agent.py"))])
MIXTURE = Path(__file__).parents[1] / "e2e" / "policies" / "qwen3_moe"
LOOKUP = Path(__file__).parents[2] / "launch" / "agents" / "lookup_mcp.py"
ROWS = f'{{kind = "function", name = "{LOOKUP}:rows", options = {{first = %d, count = 256}}}}'
#: Settings of jobs by name; a driver takes one after the other.
JOBS: Mapping[str, Mapping[str, object]] = {
    "ranks": {"trainer__ranks": 2},
    "on-policy": {"engine__instances": 1, "rollout__max_staleness": 0},
    "merged": {"trainer__ranks": 2, "trainer__lora__rank": 4},
    "adapters": {"engine__instances": 1, "trainer__lora__rank": 4, "engine__adapters": True},
    "experts": {"model__path": MIXTURE, "trainer__ranks": 2, "objective__router_replay": "r3"},
    "agents": {
        "model__path": "seed-tools",
        "environment__name": "dora.environments.agent:Agent",
        "environment__options": f"{{command = {AGENT}, warm = true, replays = true}}",
        "environment__episode_timeout_s": 300,
        "task__sources": '[{kind = "seeds"}]',
        "eval__sets": '[{prompts = 6, source = {kind = "seeds"}}]',
    },
    "mcp": {
        "model__path": "seed-tools",
        "environment__mcp": f'[{{command = ["{sys.executable}", "{LOOKUP}"], arguments = {{seed = "{{seed}}"}}}}]',
        "environment__options": "{replays = true}",
        "task__sources": f"[{ROWS % 0}]",
        "eval__sets": f"[{{prompts = 6, source = {ROWS % 1_000}}}]",
    },
}
#: Moments for faults that the run must survive; its end comes only once.
MOMENTS = ("generating", "grading", "committing", "training", "publishing", "pushing", "checkpointing")
STOPPED = ("controller", "trainer rank", "torchrun", "an engine", "grader")
#: Progress of a resume at which it is killed.
BEGUN = ("a child", "an epoch", "a rank", "a server", "a trainer")


@dataclass(frozen=True)
class Round:
    """Faults in order, with the moments of those that need one."""

    live: tuple[tuple[str, str], ...]  # what, when
    deadly: tuple[str, str]
    damage: tuple[str, ...]
    resume: tuple[str, ...]  # "two resumes", or the progress at which a resume is killed


def plan(seed: int) -> Iterator[Round]:
    """Yield rounds without end; all kinds occur before any occurs again."""
    dice = random.Random(seed)

    def deal(kinds: list[str]) -> Iterator[str]:
        while True:
            yield from dice.sample(kinds, len(kinds))

    live = deal([*LIVE, *(f"stop {name}" for name in STOPPED), "stop trainer rank for good"])
    deadly, damage, moments = (
        deal([*DEADLY, "controller over stopped children"]),
        deal(list(DAMAGE)),
        deal(list(MOMENTS)),
    )
    resume = deal(["two resumes", *BEGUN])
    while True:
        yield Round(
            live=tuple((next(live), next(moments)) for _ in range(dice.randint(1, 4))),
            deadly=(next(deadly), next(moments)),
            damage=tuple(next(damage) for _ in range(dice.randint(1, 3))),
            resume=tuple(next(resume) for _ in range(dice.choice((0, 0, 1, 2)))),
        )


# -- damage to files ---------------------------------------------------------------------------------------------------


def _tear(session: Session, name: str, dice: random.Random) -> bool:
    """Append a torn record, or truncate the last one."""
    assert session.folder is not None
    path = session.folder / name
    if name.endswith(".jsonl"):
        data = path.read_bytes()
        if dice.random() < 0.5:
            path.write_bytes(data[: -dice.randint(1, 40)])
        else:
            path.write_bytes(data + data[: dice.randint(1, 40)])
        return bool(data)
    whole = path.read_bytes()
    torn = whole[: dice.randint(1, 60)] if dice.random() < 0.5 else dice.randbytes(dice.randint(1, 60))
    path.write_bytes(whole + torn)
    return True


def _flip(path: Path, dice: random.Random) -> None:
    data = bytearray(path.read_bytes())
    data[dice.randrange(len(data))] ^= 1 << dice.randrange(8)
    path.write_bytes(data)


def _facts(session: Session, kind: str) -> list[dict[str, object]]:
    assert session.folder is not None
    records = map(unpack, read_frames(session.folder / "journal.msgpack").records)
    return [r["event"] for r in records if r["type"] == "Handled" and r["event"]["type"] == kind]


def _flip_version(session: Session, dice: random.Random) -> bool:
    """Flip a bit of the newest version, which is always needed."""
    assert session.folder is not None
    newest = max((int(str(e["version"])) for e in _facts(session, "VersionPublished")), default=-1)
    path = session.folder / "versions" / f"v{newest:06d}"
    if not (path / "manifest.json").exists():
        return False
    _flip(min(path.rglob("*.safetensors")), dice)  # of an adapter, in a folder of its own
    return True


def _newest_checkpoint(session: Session) -> Path | None:
    """Return the newest checkpoint, if there is another one to fall back on."""
    assert session.folder is not None
    known = [Path(str(e["folder"])).name for e in _facts(session, "CheckpointSaved")]
    folder = session.folder / "checkpoints"
    whole = sorted(name for name in set(known) if _is_whole(folder / name))
    return folder / whole[-1] if len(whole) > 1 else None


def _is_whole(path: Path) -> bool:
    try:
        manifest = json.loads((path / "manifest.json").read_text())
        sizes = [(path / f"rank-{r}.safetensors").stat().st_size for r in range(manifest["world_size"])]
        return bool(sizes == manifest["num_bytes"])
    except (OSError, ValueError):
        return False


def _hurt_checkpoint(session: Session, hurt: Callable[[Path], None]) -> bool:
    path = _newest_checkpoint(session)
    if path is not None:
        hurt(path)
    return path is not None


def _delete(path: Path) -> None:
    for file in path.iterdir():
        file.unlink()
    path.rmdir()


DAMAGE: Mapping[str, Callable[[Session, random.Random], bool]] = {
    "torn journal": lambda s, dice: _tear(s, "journal.msgpack", dice),
    "torn tokens": lambda s, dice: _tear(s, "tokens.bin", dice),
    "torn metrics": lambda s, dice: _tear(s, "metrics.jsonl", dice),
    "torn trajectories": lambda s, dice: _tear(s, "trajectories.jsonl", dice),
    "flipped version": _flip_version,
    "flipped checkpoint": lambda s, dice: _hurt_checkpoint(s, lambda p: _flip(p / "rank-0.safetensors", dice)),
    "deleted checkpoint": lambda s, dice: _hurt_checkpoint(s, _delete),
    "rank file missing": lambda s, dice: _hurt_checkpoint(s, lambda p: (p / "rank-0.safetensors").unlink()),
}
#: At most one of these between two lives: two would damage both checkpoints.
CHECKPOINT_DAMAGE = ("flipped checkpoint", "deleted checkpoint", "rank file missing")


# -- the driver --------------------------------------------------------------------------------------------------------


@dataclass
class Report:
    """The faults and their results."""

    faults: Counter[str] = field(default_factory=Counter)
    lives: int = 0
    recovery_s: list[float] = field(default_factory=list)  # from the resume command to the first request
    found_s: list[float] = field(default_factory=list)  # from the stop of a rank to its loss
    alarms: int = 0  # ranks that were lost because of their pulse
    verdicts: list[Verdict] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)

    @property
    def num_faults(self) -> int:
        return self.faults.total()

    @property
    def false_alarms(self) -> int:
        """Number of losses by a pulse of ranks that were not stopped."""
        return self.alarms - len(self.found_s)

    @property
    def violations(self) -> list[str]:
        return [*self.problems, *(str(v) for verdict in self.verdicts for v in verdict.violations)]


@dataclass
class Driver:
    """Injects faults drawn from a seed, over as many runs as necessary."""

    base: Path
    seed: int
    jobs: Sequence[str] = tuple(JOBS)
    report: Report = field(default_factory=Report)
    tell: Callable[[str], None] = lambda line: None

    def drive(self, num_faults: int, *, steps: int) -> Report:
        """Inject at least `num_faults` faults; each run is completed and judged."""
        rounds = plan(self.seed)
        dice = random.Random(~self.seed)
        for number in range(num_faults):
            if self.report.num_faults >= num_faults:
                break
            base = self.base / f"job-{self.seed}-{number}"
            base.mkdir(parents=True)
            with Session(base, steps=steps, changes=dict(JOBS[self.jobs[number % len(self.jobs)]])) as session:
                try:
                    self._attack(session, rounds, dice, until=num_faults)
                    session.finish()
                    self.report.verdicts.append(session.judge())
                    self.report.alarms += sum(map(_is_alarm, _facts(session, "TrainerLost")))
                except Unexpected as err:
                    self.report.problems.append(str(err))
                    self.tell(f"UNEXPECTED {err}")
                self.report.lives += len(session.codes)
                found = [str(v) for v in self.report.verdicts[-1].violations] if self.report.verdicts else []
                self.tell(f"{session.folder}: exit codes {session.codes}, violations {found}")
        return self.report

    def _attack(self, session: Session, rounds: Iterator[Round], dice: random.Random, *, until: int) -> None:
        session.start()
        while self.report.num_faults < until and session.is_alive():
            now = next(rounds)
            for what, when in now.live:
                if not wait_for(session, when):
                    break
                self._hit_live(session, what, when, dice)
            if not wait_for(session, now.deadly[1]):
                return  # it has ended
            self._count(now.deadly[0], now.deadly[1])
            session.hit(now.deadly[0])
            session.end()
            self._judge_between(session)
            self._damage(session, now.damage, dice)
            self._resume(session, now.resume)

    def _judge_between(self, session: Session) -> None:
        """Check what a killed run has left."""
        assert session.folder is not None
        if found := check(session.folder).violations:
            raise Unexpected(f"after a kill: {[str(v) for v in found]}")

    def _hit_live(self, session: Session, what: str, when: str, dice: random.Random) -> None:
        self._count(what, when)
        if not what.startswith("stop "):
            session.hit(what)
            return
        if what.endswith("for good"):
            return self._stop_for_good(session)
        for process in session.targets(what.removeprefix("stop ")):
            try:
                process.suspend()
                time.sleep(dice.uniform(0.1, 2.0))  # the injected fault
                process.send_signal(signal.SIGCONT)
            except psutil.NoSuchProcess:
                continue

    def _stop_for_good(self, session: Session) -> None:
        """Stop a rank that is ready, and wait until the controller finds it by its pulse."""
        if not session.wait(lambda: _are_ready(session), what="the ranks are ready"):
            return
        session.look()
        begin, began = len(session.seen), time.monotonic()
        session.ranks()[0].suspend()

        def is_found() -> bool:
            session.look()
            return any(map(_is_alarm, session.seen[begin:]))

        if session.wait(is_found, what="the loss of a stopped rank"):
            self.report.found_s.append(time.monotonic() - began)

    def _damage(self, session: Session, kinds: tuple[str, ...], dice: random.Random) -> None:
        is_hurt = False
        for kind in kinds:
            if is_hurt and kind in CHECKPOINT_DAMAGE:
                continue
            if DAMAGE[kind](session, dice):
                self._count(kind, "before the resume")
                is_hurt |= kind in CHECKPOINT_DAMAGE

    def _resume(self, session: Session, how: tuple[str, ...]) -> None:
        for begun in how:
            session.start()
            if begun == "two resumes":
                self._intrude(session)
            elif session.wait(lambda begun=begun: _has_begun(session, begun), what=begun):  # type: ignore[misc]
                self._count("killed resume", begun)
            session.kill_everything()
            session.end()
        began = time.monotonic()
        session.start()
        if until_asked(session):
            self.report.recovery_s.append(time.monotonic() - began)
        session.wake()

    def _intrude(self, session: Session) -> None:
        """Resume a second time, which must be rejected in one line without effect."""
        assert session.folder is not None
        if session.wait(lambda: bool(session.children()), what="a child of the resume"):
            self._count("two resumes", "during the resume")
            second = intrude(session.folder)
            lines = second.stderr.strip().splitlines()
            if session.is_alive() and (second.returncode != 2 or len(lines) != 1):
                raise Unexpected(f"a second resume: {second.returncode} {second.stderr}")

    def _count(self, what: str, when: str) -> None:
        self.report.faults[what] += 1
        self.tell(f"{self.report.num_faults:4} {what} ({when})")


def _are_ready(session: Session) -> bool:
    try:
        trainer = session.life.status()["trainer"]
    except (OSError, AssertionError):
        return False  # it starts, or ends
    return bool(trainer["ranks_ready"] == trainer["ranks"])


def _is_alarm(fact: Mapping[str, object]) -> bool:
    """Whether ranks were lost because of their pulse."""
    reason = str(fact.get("reason", ""))
    return fact["type"] == "TrainerLost" and ("has been silent for" in reason or "has made progress for" in reason)


def _has_begun(session: Session, what: str) -> bool:
    session.look()
    match what:
        case "a child":
            return bool(session.children())
        case "an epoch":
            return session.counts["Epoch"] > 0
        case "a rank":
            return bool(session.ranks())
        case "a server":
            return session.counts["InstanceUp"] > 0
        case _:
            return session.counts["TrainerReady"] > 0
