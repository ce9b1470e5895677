"""A fleet of managed and external servers that changes while the run goes on: one freezes and thaws, one is drained and
removed, one joins, leaves and joins again; then the run is interrupted and resumed with the configured fleet."""

from __future__ import annotations

import re
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import psutil
import pytest

from dora.core import commands as cmd
from dora.core import events as ev
from dora.core.ids import InstanceId, TrajectoryId
from dora.journal.run_folder import RunFolder
from tests.e2e.runs import (
    Run,
    alive,
    assert_audit_clean,
    assert_one_clear_error,
    command,
    environment,
    events_of,
    orders_of,
    run_to_end,
    slow,
    until,
)

pytestmark = [pytest.mark.deep, pytest.mark.timeout(600)]

STEPS = 1000  # it is interrupted
MAX_NEW_TOKENS = 512
#: Answers with so many tokens have something to lose.
MANY_TOKENS = 16
WATCHDOG_S = 6.0
FROZEN = InstanceId(0)
CONFIGURED = (InstanceId(0), InstanceId(1), InstanceId(2))
#: Managed instances are numbered after the external one.
REMOVED = InstanceId(1)
JOINED = InstanceId(3)
REJOINED = InstanceId(4)


@contextmanager
def serving(model: Path, log: Path, *options: str) -> Iterator[tuple[str, psutil.Process]]:
    """A server that somebody else started."""
    arguments = ("serve", "--model", str(model), "--port", "0", "--incremental-streaming-output", *options)
    with log.open("wb") as output:
        process = subprocess.Popen(command(*arguments), stdout=output, stderr=subprocess.STDOUT, env=environment())
    try:
        yield until(lambda: re.findall(r"^ready (\S+)$", log.read_text(), re.MULTILINE), what="a server")[0], \
            psutil.Process(process.pid)  # fmt: skip
    finally:
        process.kill()
        process.wait()


@dataclass
class Story:
    """What was done to one run, and what it said."""

    folder: RunFolder
    counts: dict[TrajectoryId, int]  # tokens that the frozen server had streamed
    said: dict[str, str] = field(default_factory=dict)
    refused: dict[str, subprocess.CompletedProcess[str]] = field(default_factory=dict)
    left_running: bool = False  # the external server that was removed
    warned: str = ""  # by the resume
    code: int = -1


@pytest.fixture(scope="module")
def story(slow_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Story:
    folder = tmp_path_factory.mktemp("runs")
    with serving(slow_model, folder / "a.log") as (url, server), serving(slow_model, folder / "b.log") as (late, other):
        arguments = slow(
            folder,
            slow_model,
            run__steps=STEPS,
            rollout__max_new_tokens=MAX_NEW_TOKENS,
            rollout__max_staleness=1,
            rollout__watchdog_s=WATCHDOG_S,
            engine__urls=f'["{url}"]',
            engine__instances=2,
            trainer__ranks=1,
        )
        with Run(*arguments) as run:
            found = Story(run.folder, freeze_in_mid_answer(run, server))
            run.until_status(lambda s: instance(s, FROZEN)["phase"] == "lost", what="the frozen server is lost")
            lost = instance(run.status(), FROZEN)["incarnation"]
            run.until_trained(run.status()["steps_trained"] + 1)
            server.resume()
            run.until_status(lambda s: instance(s, FROZEN)["incarnation"] > lost, what="it is back")
            change_the_fleet(run, found, late)
            found.left_running = bool(alive([other]))
            run.interrupt()
            run.end()
        with Run("--resume", str(found.folder.root), "--set", "status.port=0") as run:
            run.until_status(lambda s: all(serves(s, i) for i in CONFIGURED), what="the configured fleet")
            run.until_trained(run.status()["steps_trained"] + 1)
            run.interrupt()
            found.code = run.end()
            found.warned = run.err[0]
    return found


def freeze_in_mid_answer(run: Run, server: psutil.Process) -> dict[TrajectoryId, int]:
    """SIGSTOP a server that has streamed many tokens of an answer; try again if the answer has just ended."""

    def freeze() -> dict[TrajectoryId, int] | None:
        if not run.folder.journal.exists() or max(latest_counts(run.folder).values(), default=0) < MANY_TOKENS:
            return None
        server.suspend()
        ticks = len(events_of(run.folder, ev.Ticked))
        until(lambda: len(events_of(run.folder, ev.Ticked)) >= ticks + 2, what="two ticks")
        counts = latest_counts(run.folder)
        if max(counts.values(), default=0) >= MANY_TOKENS:
            return counts
        server.resume()
        return None

    return until(freeze, what="a long answer on the external server")


def latest_counts(folder: RunFolder) -> dict[TrajectoryId, int]:
    """Tokens of what is resident on the server that is to freeze, as last reported."""
    reports = [e.num_tokens for e in events_of(folder, ev.ProgressReported) if e.instance == FROZEN]
    ended = {e.trajectory for e in events_of(folder, ev.GenerationFinished)}
    return {t: n for t, n in (reports[-1] if reports else {}).items() if t not in ended}


def change_the_fleet(run: Run, found: Story, late: str) -> None:
    def ask(*words: str) -> subprocess.CompletedProcess[str]:
        return run_to_end("instances", run.url, "--token-file", str(run.folder.status_token), *words)

    found.refused["token"] = run_to_end("instances", run.url, "drain", "1")
    found.said["drain"] = ask("drain", str(REMOVED)).stdout
    run.until_status(lambda s: not instance(s, REMOVED)["residents"], what="the drained instance is empty")
    found.said["add"] = ask("add", late).stdout
    run.until_status(lambda s: instance(s, JOINED)["version"] is not None, what="the new server holds a version")
    found.said["remove"] = ask("remove", str(REMOVED)).stdout
    run.until_status(lambda s: instance(s, REMOVED)["phase"] == "gone", what="the instance has left")
    found.refused["gone"] = ask("drain", str(REMOVED))
    found.said["list"] = ask("list").stdout
    found.said["remove joined"] = ask("remove", late).stdout
    run.until_status(lambda s: instance(s, JOINED)["phase"] == "gone", what="the joined server has left")
    found.said["add again"] = ask("add", late).stdout
    run.until_status(lambda s: instance(s, REJOINED)["phase"] != "gone", what="it has joined again")


def instance(status: dict[str, object], id: InstanceId) -> dict[str, object]:
    """Its row."""
    rows = {row["instance"]: row for row in status["instances"]}  # type: ignore[attr-defined,index]
    return rows.get(id, {"phase": "gone", "residents": 0, "version": None, "incarnation": 0})


def serves(status: dict[str, object], id: InstanceId) -> bool:
    return instance(status, id)["version"] is not None


def test_a_server_that_answers_nothing_is_lost_by_its_token_counter(story: Story) -> None:
    lost = next(e for e in events_of(story.folder, ev.InstanceLost) if e.instance == FROZEN)
    assert re.fullmatch(rf"none of its \d+ requests got a token for {WATCHDOG_S:g} s", lost.reason)
    assert max(story.counts.values()) >= MANY_TOKENS


def test_what_it_had_streamed_goes_on_elsewhere_and_what_it_says_later_is_fenced(story: Story) -> None:
    for trajectory, num_tokens in story.counts.items():
        attempts = [o for o in orders_of(story.folder, cmd.Generate) if o.trajectory == trajectory]
        frozen = next(o for o in attempts if o.instance == FROZEN)
        after = next(o for o in attempts if o.attempt > frozen.attempt)
        assert after.num_tokens == num_tokens
        ends = [e for e in events_of(story.folder, ev.GenerationFinished) if e.trajectory == trajectory]
        assert [e.attempt for e in ends] == [attempts[-1].attempt]


def test_a_drained_instance_gets_nothing_more_and_a_removed_one_is_forgotten(story: Story) -> None:
    assert story.said["drain"].startswith(f"instance {REMOVED} drains: ")
    assert story.said["remove"].startswith(f"instance {REMOVED} leaves when it is empty: ")
    asked = next(e.at for e in events_of(story.folder, ev.InstanceDrainRequested))
    restarted = next(e.at for e in events_of(story.folder, ev.ControllerRestarted))
    assert [e.instance for e in events_of(story.folder, ev.InstanceRemoved)] == [REMOVED, JOINED, REJOINED]
    ups = [e for e in events_of(story.folder, ev.InstanceUp) if e.instance == REMOVED]
    assert not [e for e in ups if asked < e.at < restarted]


def test_a_server_that_joins_gets_work_and_is_left_running_when_it_leaves(story: Story) -> None:
    assert story.said["add"].startswith(f"instance {JOINED} joins: http://127.0.0.1:")
    assert {o.instance for o in orders_of(story.folder, cmd.PushWeights)} >= {FROZEN, REMOVED, JOINED}
    assert [line.split()[0] for line in story.said["list"].splitlines()] == ["instance", "0", "2", "3"]
    assert story.left_running
    assert story.said["add again"].startswith(f"instance {REJOINED} joins: ")


def test_a_resumed_run_begins_with_the_configured_fleet(story: Story) -> None:
    assert (
        story.warned
        == f"dora: instance {REJOINED} had joined at run time and is no longer in the fleet; add it again\n"
    )
    restarted = next(e.at for e in events_of(story.folder, ev.ControllerRestarted))
    ups = events_of(story.folder, ev.InstanceUp)
    # A slow machine may lose the external server more often than it is frozen.
    last = {e.instance: e.incarnation for e in ups if e.at < restarted}
    back = {e.instance: e.incarnation for e in reversed(ups) if e.at > restarted}
    assert back == {FROZEN: last[FROZEN] + 1, REMOVED: 1, InstanceId(2): last[InstanceId(2)] + 1}


def test_requests_that_cannot_be_granted_are_refused_in_one_line(story: Story) -> None:
    assert_one_clear_error(story.refused["token"], code=2, says="the run's token is needed: give --token-file")
    assert_one_clear_error(story.refused["gone"], code=2, says="instance 1: there is no such instance")
    assert story.folder.status_token.stat().st_mode & 0o777 == 0o600


def test_nothing_was_lost_and_the_run_ended_well(story: Story) -> None:
    assert story.code == 130
    assert_audit_clean(story.folder)
