"""Processes that are killed while a run goes on: an engine, the controller, a trainer rank."""

from __future__ import annotations

import json
import re
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

import pytest

from dora.core import commands as cmd
from dora.core import events as ev
from dora.core.ids import InstanceId, TrajectoryId
from dora.journal.frames import FrameReader
from dora.journal.run_folder import RunFolder
from dora.journal.tokens import _CHUNK, _HEAD
from tests.e2e.runs import (
    Run,
    assert_audit_clean,
    events_of,
    orders_of,
    slow,
    small,
    until,
    until_gone,
)

pytestmark = [pytest.mark.deep, pytest.mark.timeout(600)]

STEPS = 6
MAX_NEW_TOKENS = 320  # seconds even on a fast machine: the journal is read a second or two behind
#: An answer killed with so many tokens has something to lose.
MANY_TOKENS = 32
TRIES = 20


@dataclass
class Lost:
    """A run whose engine was killed, then its controller; then it was resumed."""

    folder: RunFolder
    instance: InstanceId
    counts: dict[TrajectoryId, int]  # tokens that the killed engine had streamed
    code: int = -1
    said: str = ""


@pytest.fixture(scope="module")
def lost(slow_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Lost:
    arguments = slow(
        tmp_path_factory.mktemp("runs"),
        slow_model,
        run__steps=STEPS,
        rollout__max_new_tokens=MAX_NEW_TOKENS,
        rollout__watchdog_s=30.0,  # with which progress is reported every second
        engine__instances=3,
        trainer__ranks=1,
        trainer__checkpoint_every=2,
    )
    with Run(*arguments) as run:
        instance, counts = freeze_an_engine_in_mid_answer(run)
        found = Lost(run.folder, instance, counts)
        run.engine(instance).kill()
        run.until_trained(run.status()["steps_trained"] + 2)  # with fewer instances than K + 1
        children = run.children()
        run.process.kill()
        run.end()
        until_gone(children)
    with Run("--resume", str(found.folder.root), "--set", "status.port=0") as run:
        found.code = run.end()
        found.said = "".join(run.out)
    return found


def freeze_an_engine_in_mid_answer(run: Run) -> tuple[InstanceId, dict[TrajectoryId, int]]:
    """Stops an engine (SIGSTOP) that has streamed many tokens of an answer; another one if it has ended just then."""
    for _ in range(TRIES):
        report = until(lambda: latest_long_answer(run.folder), what="a long answer")
        engine = run.engine(report.instance)
        engine.suspend()
        counts = settled_counts(run.folder, report.instance)
        if max(counts.values(), default=0) >= MANY_TOKENS:
            return report.instance, counts
        engine.resume()
    raise AssertionError(f"no answer of {MANY_TOKENS} tokens was under way in {TRIES} tries")


def latest_long_answer(folder: RunFolder) -> ev.ProgressReported | None:
    """The newest report, if it holds one."""
    reports = events_of(folder, ev.ProgressReported) if folder.journal.exists() else []
    return reports[-1] if reports and max(reports[-1].num_tokens.values(), default=0) >= MANY_TOKENS else None


def settled_counts(folder: RunFolder, instance: InstanceId) -> dict[TrajectoryId, int]:
    """Token counts of the residents of a frozen engine, as journaled two seconds later."""
    ticks = len(events_of(folder, ev.Ticked))
    until(lambda: len(events_of(folder, ev.Ticked)) >= ticks + 4, what="four ticks")
    reports = [r for r in events_of(folder, ev.ProgressReported) if r.instance == instance]
    ended = {e.trajectory for e in events_of(folder, ev.GenerationFinished)}  # before it froze, after its last report
    counts = reports[-1].num_tokens if reports else {}
    return {t: n for t, n in counts.items() if t >= 0 and t not in ended}


def test_a_killed_engine_costs_no_token_that_it_had_streamed(lost: Lost) -> None:
    """What is asked for next begins with the prompt and exactly the tokens that the store holds (`Generate`)."""
    stored = chunks(lost.folder)
    for trajectory, num_tokens in lost.counts.items():
        attempts = [o for o in orders_of(lost.folder, cmd.Generate) if o.trajectory == trajectory]
        killed = next(o for o in attempts if o.instance == lost.instance)
        after = next(o for o in attempts if o.attempt > killed.attempt)
        assert after.num_tokens == num_tokens
        assert sum(n for a, n in stored[trajectory].items() if a < after.attempt) == num_tokens
    assert max(lost.counts.values()) >= MANY_TOKENS
    assert next(e.incarnation for e in events_of(lost.folder, ev.InstanceLost) if e.instance == lost.instance) == 1


def chunks(folder: RunFolder) -> dict[int, Counter[int]]:
    """Tokens in the store, by trajectory and attempt."""
    found: dict[int, Counter[int]] = {}
    for _, payload in FrameReader(folder.tokens):
        kind, trajectory, _, attempt, _, count = _HEAD.unpack_from(payload)
        if kind == _CHUNK:
            found.setdefault(trajectory, Counter())[attempt] += count
    return found


def test_no_answer_exceeds_its_budget_over_all_attempts(lost: Lost) -> None:
    assert max(sum(by_attempt.values()) for by_attempt in chunks(lost.folder).values()) <= MAX_NEW_TOKENS


def test_a_run_that_lost_an_engine_and_its_controller_is_finished_by_a_resume(lost: Lost) -> None:
    assert lost.code == 0
    assert len(events_of(lost.folder, ev.ControllerRestarted)) == 1
    assert [o.reason for o in orders_of(lost.folder, cmd.FinishRun)] == [f"all {STEPS} steps are trained"]


def test_the_summary_of_the_resumed_run_counts_the_tokens_of_the_whole_run(lost: Lost) -> None:
    [numbers] = re.findall(r"([\d,]+) tokens sampled, ([\d,]+) trained", lost.said)
    sampled, trained = (number.replace(",", "") for number in numbers)
    rows = [json.loads(line) for line in lost.folder.metrics.read_text().splitlines()]
    assert int(trained) == sum(row["num_tokens"] for row in rows if row["kind"] == "step") <= int(sampled)


def test_every_group_is_trained_exactly_once(lost: Lost) -> None:
    trained = [g for order in orders_of(lost.folder, cmd.ForgetGroups) for g in order.groups]
    assert sorted(trained) == [order.group for order in orders_of(lost.folder, cmd.AdmitGroup)]
    assert_audit_clean(lost.folder)


def test_a_killed_engine_is_started_again(tmp_path: Path) -> None:
    with Run(*small(tmp_path, run__steps=5)) as run:
        run.until_trained(1)
        run.engine(0).kill()
        run.until_status(lambda s: s["instances"][0]["incarnation"] == 2, what="the engine is back")
        code = run.end()
    assert code == 0, run.told()
    [line] = "".join(run.err).splitlines()
    assert line.startswith("warning: instance_lost instance=0 reason=")  # its end, or a stream that broke off
