"""Processes that are killed while a run goes on: an engine, the controller, a trainer rank."""

from __future__ import annotations

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
    settings,
    small,
    until,
    until_gone,
)

pytestmark = [pytest.mark.e2e, pytest.mark.slow, pytest.mark.timeout(600)]

#: More than are trained while an engine starts.
STEPS = 12
MAX_NEW_TOKENS = 128
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


@pytest.fixture(scope="module")
def lost(tmp_path_factory: pytest.TempPathFactory) -> Lost:
    """Long sums, so that answers are long: the policy works most of them out term by term."""
    arguments = settings(
        run__folder=tmp_path_factory.mktemp("runs"),
        run__steps=STEPS,
        rollout__groups_per_step=16,
        rollout__filter_zero_variance=False,
        rollout__max_new_tokens=MAX_NEW_TOKENS,
        task__sources="[{options={min_terms=20, max_terms=32}}]",
        engine__instances=3,
        trainer__checkpoint_every=2,
        eval__sets="[]",
        status__port=0,
    )
    with Run(*arguments) as run:
        instance, counts = freeze_an_engine_in_mid_answer(run)
        found = Lost(run.folder, instance, counts)
        run.engine(instance).kill()
        run.until_status(lambda s: s["instances"][instance]["incarnation"] == 2, what="the engine is started again")
        children = run.children()
        run.process.kill()
        run.end()
        until_gone(children)
    with Run("--resume", str(found.folder.root), "--set", "status.port=0") as run:
        found.code = run.end()
    return found


def freeze_an_engine_in_mid_answer(run: Run) -> tuple[InstanceId, dict[TrajectoryId, int]]:
    """Stops an engine (SIGSTOP) that has streamed many tokens of an answer; another moment if it has not."""
    for _ in range(TRIES):
        busy = run.until_status(
            lambda s: any(i["residents"] >= 4 for i in s["instances"]), what="an instance with requests"
        )
        row = max(busy["instances"], key=lambda i: (i["residents"], -i["instance"]))
        engine = run.engine(row["instance"])
        engine.suspend()
        counts = settled_counts(run.folder, InstanceId(row["instance"]))
        if max(counts.values(), default=0) >= MANY_TOKENS:
            return InstanceId(row["instance"]), counts
        engine.resume()
    raise AssertionError(f"no answer of {MANY_TOKENS} tokens was under way in {TRIES} tries")


def settled_counts(folder: RunFolder, instance: InstanceId) -> dict[TrajectoryId, int]:
    """Token counts of the residents of a frozen engine, as journaled after two more ticks."""
    ticks = len(events_of(folder, ev.Ticked))
    until(lambda: len(events_of(folder, ev.Ticked)) >= ticks + 3, what="three ticks")
    reports = [r for r in events_of(folder, ev.ProgressReported) if r.instance == instance]
    return {t: n for t, n in (reports[-1].num_tokens if reports else {}).items() if t >= 0}


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
        kind, trajectory, attempt, count = _HEAD.unpack_from(payload)
        if kind == _CHUNK:
            found.setdefault(trajectory, Counter())[attempt] += count
    return found


def test_no_answer_exceeds_its_budget_over_all_attempts(lost: Lost) -> None:
    assert max(sum(by_attempt.values()) for by_attempt in chunks(lost.folder).values()) <= MAX_NEW_TOKENS


def test_a_run_that_lost_an_engine_and_its_controller_is_finished_by_a_resume(lost: Lost) -> None:
    assert lost.code == 0
    assert len(events_of(lost.folder, ev.ControllerRestarted)) == 1
    assert [o.reason for o in orders_of(lost.folder, cmd.FinishRun)] == [f"all {STEPS} steps are trained"]


def test_every_group_is_trained_exactly_once(lost: Lost) -> None:
    trained = [g for order in orders_of(lost.folder, cmd.ForgetGroups) for g in order.groups]
    assert sorted(trained) == [order.group for order in orders_of(lost.folder, cmd.AdmitGroup)]
    assert_audit_clean(lost.folder)


def test_a_killed_rank_ends_the_run_with_its_reason_and_no_orphan(tmp_path: Path) -> None:
    with Run(*small(tmp_path, trainer__ranks=2, run__steps=50)) as run:
        run.until_trained(1)
        children = run.children()
        run.ranks()[1].kill()
        code = run.end()
    assert code == 1, run.told()
    (line,) = "".join(run.err).splitlines()
    assert line.startswith("dora: trainer")
    until_gone(children)
