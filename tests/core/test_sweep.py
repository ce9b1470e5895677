"""Whole jobs in virtual time, drawn by seed: every strategy, K 0-4, small fleets, all faults at once.

Run as a program it prints a digest of the journals of some of them: what another process makes of the same seeds.
"""

from __future__ import annotations

import hashlib
import os
import random
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Final

import msgspec
import pytest

from dora.core import commands as cmd
from dora.core import events as ev
from dora.core.phases import GroupPhase
from dora.core.state import State
from dora.journal.audit import audit_entries
from tests.core.world import Faults, World, draw_orchestration, replay, settings

CALLS: Final = ("keep", "pinned", "release")
IN_FLIGHT = ["partial", "partial_bounded", "partial_sync"]
_ROOT = Path(__file__).parents[2]
_RUNS = 200
_ANY_NUMBER = pytest.mark.parametrize("runs", [72, pytest.param(_RUNS, marks=pytest.mark.deep)])
_SAMPLE = range(0, _RUNS, 40)
#: What the sweep would be blind without.
_KINDS = {
    "CondemnInstance",
    "ControllerRestarted",
    "DropGroup",
    "FailRun",
    "FinishRun",
    "GenerationFailed",
    "GenerationStopped",
    "InstanceLost",
    "ReportEvaluation",
    "WeightPushFailed",
}


def world(seed: int, *, shared_prompts: bool = False, calls: bool = False) -> World:
    """A job, its fleet and its faults, all from the seed; with shared prompts, the largest possible number of
    updates."""
    r = random.Random(seed)
    strategy = r.choice(["dora", "dora", "dora", "sync", "periodic", "one_step_off", *IN_FLIGHT, "oversample"])
    job = settings(
        strategy,
        max_staleness=r.randint(0, 4),
        steps=r.randint(2, 8),
        groups_per_step=r.randint(1, 5),
        group_size=r.randint(2, 4),
        num_ranks=r.randint(1, 3),
        micro_batch_tokens=r.choice([32, 256]),
        filter_zero_variance=r.random() < 0.8,
        max_top_up=r.choice([1.0, 10.0]),
        orchestration=draw_orchestration(r),
        eval_prompt_tokens=(3,) * r.choice([0, 0, 1, 6]),
        eval_every=r.randint(0, 2),
        no_progress_s=3600.0,
    )
    if shared_prompts:
        updates = 2 if job.groups_per_step == 4 and seed % 2 else job.groups_per_step
        job = msgspec.structs.replace(job, updates=updates, shared_prompts=True)
    faults = Faults(
        push_fails=r.choice([0.0, 0.0, 0.3, 0.9]),
        request_fails=r.choice([0.0, 0.0, 0.05]),
        instance_dies=r.choice([0.0, 0.0, 0.02, 0.1]),
        grading_fails=r.choice([0.0, 0.0, 0.05]),
        zero_variance=r.choice([0.0, 0.0, 0.5]),
        controller_restarts=r.choice([0.0, 0.0, 0.02]),
        late_completion=r.choice([0.0, 0.2]),
    )
    drawn = World(
        job,
        seed=seed,
        num_instances=r.randint(1, 6),
        slots=r.randint(1, 6),
        kv_tokens=r.choice([70, 150, 4096]),
        faults=faults,
        prompts=r.choice([None, None, None, 0, 1, 7, 15]),
        train_s=r.choice([0.1, 1.0, 5.0]),
        push_s=r.choice([0.05, 0.3, 2.0]),
        store=r.choice([1, 2, 1000]),
    )
    if calls:
        _add_calls(drawn, r)
    return drawn


def _add_calls(w: World, r: random.Random) -> None:
    orchestration = msgspec.structs.replace(w.settings.orchestration, calls=r.choice(CALLS))
    job = msgspec.structs.replace(w.settings, orchestration=orchestration, call_limit_s=60.0, watchdog_s=12.0)
    w.settings, w.state = job, State(job)
    w.calls, w.call_s = r.choice([0.2, 0.6, 0.9]), r.choice([0.01, 0.5, 5.0, 30.0])
    w.faults.call_fails = r.choice([0.0, 0.0, 0.02, 0.2])
    w.faults.call_ends = r.choice([0.0, 0.1, 0.5])
    w.faults.replayable = r.choice([0.0, 0.5, 1.0])


def digest(seed: int) -> str:
    """Of every event and command of a job."""
    w = world(seed)
    w.run()
    return hashlib.sha256(repr(w.journal).encode()).hexdigest()


@_ANY_NUMBER
def test_every_job_ends_with_all_it_admitted_trained_once_or_dropped_for_a_reason(runs: int) -> None:
    seen: Counter[str] = Counter()
    for seed in range(runs):
        w = world(seed)
        try:
            _run_to_the_end(w)
        except BaseException as err:
            err.add_note(f"in the job of seed {seed}")
            raise
        seen.update(type(fact).__name__ for event, orders in w.journal for fact in (event, *orders))
        seen["migrations"] += w.state.counters.migrations
        seen["mixed"] += w.state.counters.version_conflicts
        seen["discarded"] += w.state.ledger.counts[GroupPhase.DISCARDED]
    assert seen.keys() >= _KINDS
    assert min(seen["migrations"], seen["mixed"], seen["discarded"]) > 0


def test_so_does_every_job_with_several_updates_a_step_and_shared_prompts() -> None:
    sizes = Counter[int]()
    for seed in range(80):
        w = world(seed, shared_prompts=True)
        _run_to_the_end(w)
        sizes[w.settings.updates] += 1
    assert sizes.keys() == {1, 2, 3, 4, 5}


def _run_with_calls(w: World, *, seed: int) -> None:
    try:
        _run_to_the_end(w)
        report = audit_entries(w.settings, w.journal)
        assert report.environment_failed == sum(w.state.counters.environment_failed.values())
    except BaseException as err:
        err.add_note(f"in the job of seed {seed}")
        raise


@_ANY_NUMBER
def test_so_does_every_job_with_calls(runs: int) -> None:
    seen: Counter[str] = Counter()
    for seed in range(runs):
        w = world(seed, calls=True)
        _run_with_calls(w, seed=seed)
        for event, orders in w.journal:
            seen.update(type(fact).__name__ for fact in (event, *orders))
            if isinstance(event, ev.ControllerRestarted):
                seen["repeated"] += len(event.replayable)
        seen["environment_failed"] += sum(w.state.counters.environment_failed.values())
    assert seen.keys() >= _KINDS | {"CallStarted", "CallEnvironment", "CallFinished"}
    assert min(seen["environment_failed"], seen["repeated"]) > 0


@pytest.mark.parametrize("runs", [40, pytest.param(400, marks=pytest.mark.deep)])
def test_so_does_every_job_whose_trajectories_begin_with_a_call(runs: int) -> None:
    begun: Counter[str] = Counter()
    for seed in range(runs):
        w = world(seed, calls=True)
        samples = tuple(0 for _ in w.settings.eval_prompt_tokens)
        w.settings = msgspec.structs.replace(w.settings, own_prompts=True, eval_prompt_tokens=samples)
        w.state = State(w.settings)
        _run_with_calls(w, seed=seed)
        for _, orders in w.journal:
            begun.update(order.num_tokens > 0 for order in orders if isinstance(order, cmd.Generate))
    assert begun.keys() == {True}


@pytest.mark.parametrize("runs", [20, pytest.param(80, marks=pytest.mark.deep)])
def test_so_does_every_job_whose_hosts_have_little_room(runs: int) -> None:
    """`invariants.check` counts the episodes after every event."""
    for seed in range(runs):
        w = world(seed, calls=True)
        room = w.settings.group_size * random.Random(seed).choice([1, 2, 3]) + seed % 2
        w.settings = msgspec.structs.replace(w.settings, max_episodes=room)
        w.state = State(w.settings)
        try:
            _run_to_the_end(w)
        except BaseException as err:
            err.add_note(f"in the job of seed {seed}")
            raise


def _run_to_the_end(w: World) -> None:
    outcome = w.run()  # every event is followed by invariants.check; silence is a deadlock
    if isinstance(outcome, cmd.FailRun):
        assert "had to top up" in outcome.reason
    else:
        _all_accounted_for(w)
    replay(w.settings, w.journal)
    report = audit_entries(w.settings, w.journal)
    assert report.ok, report.violations


def _all_accounted_for(w: World) -> None:
    orders = [order for _, commands in w.journal for order in commands]
    admitted = [o.group for o in orders if isinstance(o, cmd.AdmitGroup)]
    committed = [o.group for o in orders if isinstance(o, cmd.CommitGroup)]
    dropped = [o.group for o in orders if isinstance(o, cmd.DropGroup)]
    assert Counter(committed + dropped) == Counter(admitted) == Counter(range(len(admitted)))
    assert {t // w.settings.group_size for t in w.trained_lengths} == set(committed)
    assert all(w.trained_lengths[t] == w.totals[t] for t in w.trained_lengths)
    assert w.state.ledger.counts[GroupPhase.TRAINED] == len(committed)
    assert not w.state.trajectories
    assert not w.running
    sizes = [o.num_groups for o in orders if isinstance(o, cmd.CloseStep)]
    if w.prompts is None:
        assert sizes == [w.settings.groups_per_step] * w.settings.steps
    else:
        assert all(size == w.settings.groups_per_step for size in sizes[:-1])


def test_the_same_seed_gives_the_same_journal_in_any_process() -> None:
    here = [digest(seed) for seed in _SAMPLE]
    assert len(set(here)) == len(here)
    for hash_seed in ("1", "4711"):
        env = {**os.environ, "PYTHONHASHSEED": hash_seed, "PYTHONPATH": str(_ROOT)}
        there = subprocess.run([sys.executable, __file__], env=env, capture_output=True, check=True, timeout=60)
        assert there.stdout.decode().split() == here


if __name__ == "__main__":
    for some in _SAMPLE:
        sys.stdout.write(digest(some) + "\n")
