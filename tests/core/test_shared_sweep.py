"""Servers of adapters in surroundings that answer in any order, late, twice, or not at all.

Whole jobs are drawn by seed, and anything that `Outside` knows may happen; it refuses what breaks a rule, and the job
must end.
"""

from __future__ import annotations

import random
from collections import Counter
from typing import Final

import msgspec
import pytest

from dora.core.orchestration import SWITCHES, orchestration_of
from dora.core.strategies import Settings, rules_of
from dora.journal.audit import audit_entries
from tests.core.outside import DIGEST, Outside
from tests.core.test_sweep import CALLS

_STRATEGIES: Final = ("dora", "dora", "dora", "dora", "sync", "periodic", "one_step_off", "oversample")
#: What the sweep would be blind without.
_KINDS: Final = {
    "CondemnInstance",
    "ControllerRestarted",
    "DismissInstance",
    "FinishRun",
    "GenerationStopped",
    "InstanceDrainRequested",
    "InstanceLost",
    "KvPressureReported",
    "ReleaseVersion",
    "ReportEvaluation",
    "UnloadVersion",
    "VersionUnloadFailed",
    "VersionUnloaded",
    "WeightPushFailed",
}


def job_of(r: random.Random) -> Settings:
    """A job that serves adapters."""
    return Settings(
        rules=rules_of(r.choice(_STRATEGIES), max_staleness=r.randint(0, 4)),
        adapters=True,
        steps=r.randint(3, 8),
        groups_per_step=r.choice([1, 3, 6]),
        group_size=r.choice([2, 2, 3]),
        max_new_tokens=40,
        num_ranks=r.randint(1, 2),
        micro_batch_tokens=r.choice([16, 64]),
        orchestration=orchestration_of(
            r.choice(["dora", "dora", "paper"]),
            without=r.sample(list(SWITCHES), r.choice([0, 0, 1, 3])),
            refill=r.random() < 0.3,
            calls=r.choice(CALLS),
        ),
        watchdog_s=30.0,
        no_progress_s=1e9,
        max_attempts=r.randint(1, 3),
        max_episodes=r.choice([0, 0, 0, 4, 9]),
        eval_prompt_tokens=tuple(r.randint(1, 5) for _ in range(r.choice([0, 1, 4]))),
        eval_every=r.randint(0, 2),
        max_eval_share=r.choice([0.1, 0.5]),
    )


def disturb(o: Outside, r: random.Random) -> None:
    """Something that work and its mishaps do not bring about."""
    up = [i for i, s in o.servers.items() if s.up]
    down = [i for i, s in o.servers.items() if not s.up and i not in o.dismissed]
    acts = [o.evaluate, lambda: o.tick(r.choice([0.2, 4.0, 31.0, 70.0]))]
    acts += [lambda: o.drain(r.choice(list(o.servers)), leave=r.random() < 0.5)]
    acts += [lambda: o.lose(r.choice(up))] if up else []
    acts += (
        [lambda: o.come_up(r.choice(down), slots=r.randint(1, 4), kv_tokens=r.choice([30, 100, 400]))] if down else []
    )
    acts += [lambda: o.take_over(r.choice(down), digest=DIGEST)] if down else []
    acts += [lambda: o.recall(r.choice(sorted(o.barred)))] if o.barred else []
    acts += [o.join] if len(o.servers) < 6 else []  # type: ignore[list-item]
    acts += [lambda: o.lose_trainer(back=r.randint(0, 3))] if o.starting and o.state.feed.losses < 3 else []
    if len(o.journal) > o.restarted_at + 25:
        acts.append(lambda: o.restart_controller(back=r.randint(0, 3), replays=r.random() < 0.5))
    r.choice(acts)()


def run(seed: int, *, own_prompts: bool = False) -> Outside:
    """A job with everything in it; it ends."""
    r = random.Random(seed)
    o = Outside(
        msgspec.structs.replace(job_of(r), own_prompts=own_prompts),
        seed=seed,
        num_servers=r.choice([1, 1, 2, 4]),
        prompts=r.choice([None, None, r.randint(0, 24)]),
        calls=r.choice([0.0, 0.0, 0.2, 0.6]),
    )
    for instance in list(o.servers):
        o.come_up(instance, slots=1 + instance % 3, kv_tokens=300)
    mishap_share = r.choice([0.0, 0.03, 0.1, 0.3])
    for _ in range(r.randint(0, 12)):
        oldest = min([q.order.version for q in o.requests.values()], default=0)
        o.work(r.randint(1, 120), mishap_share=mishap_share, stalled=(oldest,) if r.random() < 0.3 else ())
        if o.outcome is None:
            disturb(o, r)
    o.conclude()
    return o


@pytest.mark.parametrize("runs", [60, pytest.param(1000, marks=pytest.mark.deep)])
def test_every_job_with_adapters_ends_whatever_its_surroundings_do(runs: int) -> None:
    seen: Counter[str] = Counter()
    for seed in range(runs):
        try:
            o = run(seed)
            report = audit_entries(o.first_settings, o.journal)
            assert report.ok or o.settings.rules.discards, report.violations
        except BaseException as err:
            err.add_note(f"in the job of seed {seed}")
            raise
        seen.update(type(fact).__name__ for event, orders in o.journal for fact in (event, *orders))
    assert seen.keys() >= _KINDS


def test_a_group_of_an_older_version_does_not_overtake_what_was_admitted_a_moment_before() -> None:
    run(560)


@pytest.mark.parametrize("runs", [30, pytest.param(300, marks=pytest.mark.deep)])
def test_so_does_every_job_whose_trajectories_begin_with_a_call(runs: int) -> None:
    for seed in range(runs):
        try:
            o = run(seed, own_prompts=True)
            report = audit_entries(o.first_settings, o.journal)
            assert report.ok or o.settings.rules.discards, report.violations
        except BaseException as err:
            err.add_note(f"in the job of seed {seed}")
            raise
