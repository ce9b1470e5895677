"""How long each test computes and waits, in a file; and the limit for tests outside the deep set.

A test over the limit is named at the end. Only one that takes twice as long fails the run: on a shared machine the same
test took 1.6 times as long on one day as on another.

A pytest plugin (`--durations-file=FILE`). CPU seconds are those of the test's process and of all processes below it.
The setup is counted separately, since the first test of a file also pays for what others share: imports, models,
servers. A test idles while it neither computes nor waits for a core: its wall time less its CPU time, but at most the
time for which cores were idle meanwhile.

A core computes at about half its speed while its hyperthread sibling is busy, or its host is. A loop of known length is
therefore timed again and again between tests, and the limits apply to what the tests would take if the longer ones of
these times were that of a quiet core.
"""

from __future__ import annotations

import os
import time
from collections.abc import Generator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Final, NamedTuple

import psutil
import pytest

LIMIT_S: Final = 5.0  #: CPU seconds, and seconds idle, of a test outside the deep set
SETUP_S: Final = 10.0  #: CPU seconds of its setup
FAILS_AT: Final = 2.0  #: times the limit
WHOLE_RUN: Final = "tests/e2e/test_run.py"  #: the one whole run outside it, which its tests share
WHOLE_RUN_S: Final = 90.0  #: CPU seconds of all of them together

_LOOP: Final = 200_000
_LOOP_S: Final = 0.014  #: CPU seconds of that many rounds on a quiet core (AMD EPYC, Python 3.11)
_LOOP_EVERY_S: Final = 3.0  #: of a worker

_TICK_S: Final = 1 / os.sysconf("SC_CLK_TCK")
_IDLE: Final = 4  #: place of the idle ticks in the first line of /proc/stat


class Clock(NamedTuple):
    """Seconds since some moment in the past."""

    wall: float
    cpu: float  #: of this process and of those below it, also of those that have ended
    idle: float  #: of all cores together

    @classmethod
    def now(cls) -> Clock:
        cores = Path("/proc/stat").read_text().partition("\n")[0]
        return cls(time.monotonic(), _cpu_s(), int(cores.split()[_IDLE]) * _TICK_S)


def _cpu_s() -> float:
    """CPU time of this process and of all below it, with that of the children that each has waited for."""
    me, total = psutil.Process(), 0.0
    for process in (me, *me.children(recursive=True)):
        with suppress(psutil.NoSuchProcess):
            total += sum(process.cpu_times()[:4])
    return total


def _loop_s() -> float:
    """CPU seconds of the loop now."""
    before, total = time.process_time(), 0
    for i in range(_LOOP):
        total += i * i % 7
    return time.process_time() - before


@dataclass(frozen=True, slots=True)
class Duration:
    test: str
    deep: bool
    setup_s: float
    cpu_s: float  #: after the setup
    wall_s: float
    idle_s: float

    def line(self) -> str:
        figures = (self.setup_s, self.cpu_s, self.wall_s, self.idle_s)
        return "\t".join([*(f"{figure:.2f}" for figure in figures), "deep" if self.deep else "", self.test])

    def times_limit(self, *, slowness: float = 1.0) -> float:
        """The longest of its times as a multiple of its limit; 0 if it has none. `slowness`: how much longer computing
        takes than on a quiet core."""
        if self.deep or self.test.startswith(WHOLE_RUN):
            return 0.0
        return max(self.cpu_s / slowness / LIMIT_S, self.idle_s / LIMIT_S, self.setup_s / slowness / SETUP_S)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--durations-file",
        type=Path,
        help=f"write what each test takes: CPU seconds of the setup and of the rest, wall and idle seconds; "
        f"name those outside the deep set that take over {LIMIT_S:g} s, and fail if one takes {FAILS_AT:g} times that",
    )


def pytest_configure(config: pytest.Config) -> None:
    if (path := config.getoption("durations_file")) is not None:
        config.pluginmanager.register(Recorder(path), "dora-durations")


class Recorder:
    def __init__(self, path: Path) -> None:
        self._path = path
        self._durations: list[Duration] = []
        self._loops_s: list[float] = []
        self._next_loop_at = 0.0

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Generator[None, object, object]:
        item.stash[_BEGAN] = Clock.now()
        return (yield)

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_makereport(self, item: pytest.Item) -> Generator[None, pytest.TestReport, pytest.TestReport]:
        """Note the figures in the report of the teardown, with which they get from a worker to the main process."""
        report = yield
        if report.when == "setup":
            item.stash[_SET_UP] = Clock.now()
        if report.when == "teardown":
            before, between, now = item.stash[_BEGAN], item.stash[_SET_UP], Clock.now()
            wall, cpu = now.wall - before.wall, now.cpu - before.cpu
            idle = max(0.0, min(wall - cpu, now.idle - before.idle))
            deep = item.get_closest_marker("deep") is not None
            setup = between.cpu - before.cpu
            report.user_properties.append((_PROPERTY, (deep, setup, cpu - setup, wall, idle)))
            if now.wall > self._next_loop_at:
                report.user_properties.append((_LOOP_TIME, _loop_s()))
                self._next_loop_at = now.wall + _LOOP_EVERY_S
        return report

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        for name, value in report.user_properties if report.when == "teardown" else ():
            if name == _LOOP_TIME:
                self._loops_s.append(value)
            elif name == _PROPERTY:
                test = report.nodeid.rsplit("@", 1)[0] if hasattr(report, "node") else report.nodeid  # less its group
                self._durations.append(Duration(test, *value))

    @pytest.hookimpl(wrapper=True)
    def pytest_sessionfinish(self, session: pytest.Session) -> Generator[None, None, None]:
        yield
        if not hasattr(session.config, "workerinput"):
            longest = sorted(self._durations, key=lambda each: -each.setup_s - each.cpu_s)
            self._path.write_text("".join(f"{each.line()}\n" for each in longest))
            if any(times > FAILS_AT for times, _ in self._complaints()) and session.exitstatus == pytest.ExitCode.OK:
                session.exitstatus = pytest.ExitCode.TESTS_FAILED

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        for times, line in self._complaints():
            terminalreporter.line(f"{'TOO LONG' if times > FAILS_AT else 'LONG'} {line}")

    def _complaints(self) -> list[tuple[float, str]]:
        """How many times its limit each takes that is over it, and the line about it."""
        loops_s = sorted(self._loops_s) or [_LOOP_S]
        slowness = max(1.0, loops_s[int(0.9 * (len(loops_s) - 1))] / _LOOP_S)
        run_s = sum(each.setup_s + each.cpu_s for each in self._durations if each.test.startswith(WHOLE_RUN))
        found = [
            (
                each.times_limit(slowness=slowness),
                f"{each.test}: {each.setup_s:.1f} s of CPU for its setup (the limit is {SETUP_S * slowness:.1f} on a "
                f"core that is {slowness:.2f} times as slow as a quiet one), then {each.cpu_s:.1f} "
                f"({LIMIT_S * slowness:.1f}); {each.idle_s:.1f} s idle ({LIMIT_S:g}); make it shorter, or deep",
            )
            for each in self._durations
        ]
        limit_s = WHOLE_RUN_S * slowness
        found.append((run_s / limit_s, f"{WHOLE_RUN}: {run_s:.1f} s of CPU; the limit is {limit_s:.1f}"))
        return [(times, line) for times, line in found if times > 1.0]


_BEGAN: Final = pytest.StashKey[Clock]()
_SET_UP: Final = pytest.StashKey[Clock]()
_PROPERTY: Final = "dora durations"
_LOOP_TIME: Final = "dora loop"
