"""A snapshot agrees with the core's tables at every moment of a job."""

from __future__ import annotations

import dataclasses
import json
from collections import Counter

import pytest

from dora.core.admission import Refusal
from dora.core.ids import InstanceId
from dora.core.state import State
from dora.errors import ProtocolError
from dora.observe.facts import RECENT_STEPS, Down, ShellFacts
from dora.observe.load import RATE_SPAN_S, Rate
from dora.observe.snapshot import MAX_DOWN, MAX_REWARDS, HoldingRow, Snapshot, decode, encode, snapshot
from tests.core.builders import published, unloading
from tests.core.world import Faults, settings
from tests.status.conftest import Watched, step_facts


def test_groups_by_phase_add_up_to_those_admitted_at_every_moment(job: Watched):
    assert all(sum(s.groups_by_phase.values()) == s.groups_admitted for s in job.snapshots)
    assert job.snapshots[-1].groups_by_phase["trained"] == 32


def test_versions_count_the_instances_that_serve_them(job: Watched):
    for s in job.snapshots:
        for row in s.versions:
            holders = [i for i in s.instances if i.version == row.version and i.phase in ("serving", "draining")]
            assert row.serving == len(holders)
            assert row.loading == sum(i.pushing == row.version for i in s.instances)


def test_every_adapter_of_an_instance_has_its_phase_and_its_requests():
    core = unloading(instances=2)
    core.lost(1)
    [busy, lost] = snapshot(core.state, ShellFacts(run_id="r", strategy="dora")).instances
    assert busy.holdings == (
        HoldingRow(version=0, phase="unloading", requests=0),
        HoldingRow(version=1, phase="serving", requests=2),
    )
    assert (busy.version, busy.pushing, busy.phase, busy.running) == (1, None, "serving", (1,))
    assert (lost.holdings, lost.version, lost.phase, lost.running) == ((), None, "lost", ())


def test_adapters_in_doubt_and_under_way_are_listed_and_full_weights_are_not(job: Watched):
    core = published()
    core.load_failed(0, 1)
    [row] = snapshot(core.state, ShellFacts(run_id="r", strategy="dora")).instances
    assert [(h.version, h.phase) for h in row.holdings] == [(0, "serving"), (1, "quarantined")]
    [row] = snapshot(published().state, ShellFacts(run_id="r", strategy="dora")).instances
    assert [(h.version, h.phase) for h in row.holdings] == [(0, "serving"), (1, "loading")]
    assert not any(row.holdings for s in job.snapshots for row in s.instances)


def test_adapters_agree_with_the_versions_and_with_the_requests_at_every_moment():
    world = Watched(settings(adapters=True), seed=5, num_instances=2, faults=Faults(push_fails=0.1, instance_dies=0.05))
    world.run()
    for s in world.snapshots:
        held = Counter((h.version, h.phase) for i in s.instances for h in i.holdings)
        for v in s.versions:
            counts = tuple(held[v.version, phase] for phase in ("serving", "loading", "unloading"))
            assert counts == (v.serving, v.loading, v.unloading)
        assert all(sum(h.requests for h in i.holdings) == i.residents for i in s.instances)
    assert any(v.unloading for s in world.snapshots for v in s.versions)
    assert max(len(i.running) for s in world.snapshots for i in s.instances) >= 3


def test_live_versions_are_at_most_k_plus_1_and_more_than_one_in_this_job(job: Watched):
    most = max(sum(v.is_live for v in s.versions) for s in job.snapshots)
    assert 2 <= most <= 3


def test_a_version_that_only_an_evaluation_needs_is_not_live():
    state = State(settings())
    state.window.publish(0).evaluating = True
    state.window.publish(1)
    rows = snapshot(state, ShellFacts(run_id="r", strategy="dora")).versions
    assert [(row.version, row.is_live, row.is_newest, row.evaluating) for row in rows] == [
        (0, False, False, True),
        (1, True, True, False),
    ]


def test_the_newest_version_is_marked_and_listed_last(job: Watched):
    published = [s for s in job.snapshots if s.newest_version is not None]
    assert all([v.version for v in s.versions if v.is_newest] == [s.newest_version] for s in published)
    assert job.snapshots[0].newest_version is None


def test_instances_by_phase_add_up_to_all_instances(job: Watched):
    assert all(sum(s.instances_by_phase.values()) == len(s.instances) for s in job.snapshots)
    assert any(s.instances_by_phase["lost"] for s in job.snapshots)
    assert any(s.instances_by_phase["quarantined"] for s in job.snapshots)


def test_progress_goes_from_0_to_1(job: Watched):
    shares = [s.progress for s in job.snapshots]
    assert (shares[0], shares[-1]) == (0.0, 1.0)
    assert shares == sorted(shares)


def test_the_time_left_is_the_mean_step_times_the_steps_left_minus_the_time_in_this_one(job: Watched):
    state, facts = State(settings(steps=10)), ShellFacts(run_id="r", strategy="dora")
    assert snapshot(state, facts).eta_s is None
    facts.steps.append(step_facts(0, duration_s=100.0))
    assert snapshot(state, facts).eta_s is None, "the first step has the start in it"
    facts.steps.clear()
    facts.steps.extend(step_facts(i, duration_s=d) for i, d in enumerate((100.0, 1.0, 2.0, 3.0, 4.0, 5.0)))
    state.feed.trained, state.step_trained_at, state.now = 6, 20.0, 21.0
    assert snapshot(state, facts).eta_s == pytest.approx(3.0 * 4 - 1.0)
    state.now = 100.0
    assert snapshot(state, facts).eta_s == 0.0
    assert job.snapshots[-1].eta_s == 0.0


def test_staleness_is_a_histogram_of_committed_groups_and_its_mean(job: Watched):
    last = job.snapshots[-1]
    assert sum(last.staleness) == 32
    assert last.staleness_mean == pytest.approx(sum(i * n for i, n in enumerate(last.staleness)) / 32)
    assert job.snapshots[0].staleness_mean is None


def test_dropped_groups_are_counted_by_reason(job: Watched):
    last = job.snapshots[-1]
    assert set(last.dropped) == {"filtered: zero variance"}
    assert sum(last.dropped.values()) == last.groups_by_phase["filtered"] > 0


def test_what_the_trainer_waits_for_is_the_stage_of_the_pending_work(job: Watched):
    idle = {wait for works, wait in job.waits if not works}
    assert "the evaluation of version 0" in idle
    assert any("queued" in wait for wait in idle)
    assert {wait.lstrip("0123456789 ").split(" ")[0] for wait in idle} >= {"the", "answers"}


def test_the_reason_for_not_admitting_is_shown(job: Watched):
    reasons = {s.not_admitting for s in job.snapshots}
    assert reasons <= {"", *(refusal.value for refusal in Refusal)}
    assert {Refusal.BASELINE.value, Refusal.RULE_F.value} <= reasons
    assert job.snapshots[-1].not_admitting == Refusal.ENDED.value


def test_a_trainer_that_works_waits_for_nothing(job: Watched):
    assert {wait for works, wait in job.waits if works} == {""}


def test_before_its_ranks_are_ready_the_trainer_waits_for_them():
    before = snapshot(State(settings()), ShellFacts(run_id="r", strategy="dora")).trainer
    assert (before.step, before.waits_for, before.idle_share) == (None, "its ranks", None)


def test_after_the_last_step_the_trainer_waits_for_nothing(job: Watched):
    assert job.snapshots[-1].trainer.waits_for == ""


def test_the_evaluation_under_way_counts_its_graded_samples(job: Watched):
    rows = [s.evaluation for s in job.snapshots if s.evaluation is not None]
    assert {(row.version, row.samples) for row in rows} == {(0, 8), (4, 8), (8, 8)}
    assert {row.graded for row in rows} == set(range(8))


def test_the_idle_share_is_that_of_the_last_step(middle: Snapshot):
    assert middle.trainer.idle_share == pytest.approx(0.5 / middle.steps[-1].duration_s)
    assert middle.trainer.idle_reason == "3 answers of 2 groups"


def test_the_mean_idle_share_leaves_out_the_first_step():
    facts = ShellFacts(run_id="r", strategy="dora")
    facts.note_step(step_facts(0, duration_s=100.0, idle_s=90.0))
    assert snapshot(State(settings()), facts).trainer.mean_idle_share is None
    for step in range(1, 3 * RECENT_STEPS):
        facts.note_step(step_facts(step, duration_s=2.0, idle_s=0.5 if step < RECENT_STEPS else 0.0))
    assert snapshot(State(settings()), facts).trainer.mean_idle_share == pytest.approx(0.25 * 99 / 299)


@pytest.mark.parametrize("num_steps", [1, 100, 255, 256, 1_000, 10_001])
def test_rewards_go_from_the_first_step_to_the_latest_however_long_the_run_is(num_steps: int):
    facts = ShellFacts(run_id="r", strategy="dora")
    for step in range(num_steps):
        facts.note_step(step_facts(step))
    rewards = snapshot(State(settings()), facts).rewards
    assert (rewards[0], rewards[-1]) == (facts.rewards[0], facts.rewards[-1])
    assert min(num_steps, 100) <= len(rewards) <= MAX_REWARDS
    assert list(rewards) == sorted(set(rewards))


def test_a_server_that_is_down_is_shown_with_its_time_and_reason_and_what_is_done():
    state, facts = State(settings()), ShellFacts(run_id="r", strategy="dora", phase="running")
    facts.down[InstanceId(2)] = Down(5.0, "connection refused", "being restarted")
    facts.down[InstanceId(3)] = Down(0.0, "", "being restarted")
    state.now = 17.0
    assert snapshot(state, facts).down == (
        "server 2 has been down for 12 s (being restarted): connection refused",
        "server 3 has not come up for 17 s",
    )
    facts.phase = "starting"
    assert len(snapshot(state, facts).down) == 1, "a server that starts is no problem"
    facts.phase = "finished"
    assert snapshot(state, facts).down == ()


def test_of_many_servers_that_are_down_the_first_are_named():
    facts = ShellFacts(run_id="r", strategy="dora", phase="running")
    facts.down = {InstanceId(i): Down(0.0, "died", "being restarted") for i in range(1000)}
    *named, rest = snapshot(State(settings()), facts).down
    assert (len(named), rest) == (MAX_DOWN, "996 more servers are down")


def test_counters_that_must_stay_0_are_shown(job: Watched):
    counts = job.snapshots[-1].counts
    assert (counts.version_conflicts, counts.scheduling_aborts, counts.staleness_violations) == (0, 0, 0)
    assert counts.recovered == job.state.counters.recovered > 0
    job.state.counters.version_conflicts = 7
    assert snapshot(job.state, job.facts).counts.version_conflicts == 7
    job.state.counters.version_conflicts = 0


def test_tokens_per_second_are_those_of_the_last_seconds():
    rate = Rate()
    assert rate.per_s == 0.0
    for second in range(31):
        rate.note(100 * second if second < 20 else 2000 + 10 * (second - 20), at=float(second))
    assert rate.per_s == pytest.approx(10.0)
    assert RATE_SPAN_S == 10.0


def test_trained_tokens_per_second_are_averaged_over_the_last_steps(middle: Snapshot):
    recent = middle.steps[-5:]
    assert middle.trained_tokens_per_s == pytest.approx(100 * len(recent) / sum(s.duration_s for s in recent))


def test_lag_is_reported_as_median_p99_and_maximum():
    facts = ShellFacts(run_id="r", strategy="dora")
    state = State(settings())
    assert snapshot(state, facts).lag_p99_s == 0.0
    facts.lag.note(9.0)
    for i in range(1200):
        facts.lag.note(i / 1200)
    now = snapshot(state, facts)
    assert (now.lag_p50_s, now.lag_p99_s, now.lag_max_s) == (599 / 1200, 1187 / 1200, 9.0)


def test_an_instance_row_has_address_and_capacity(middle: Snapshot):
    row = middle.instances[0]
    assert (row.url, row.slots, row.kv_tokens) == ("u0", 4, 4096)
    assert middle.instances[1].url == ""


def test_a_snapshot_survives_json(job: Watched):
    for s in job.snapshots[::50]:
        assert decode(encode(s)) == s
    names = {field.name for field in dataclasses.fields(Snapshot)}
    assert set(json.loads(encode(job.snapshots[-1]))) == names


@pytest.mark.parametrize("body", [b"<html>", b"{}", b'{"run_id": 1}'])
def test_a_body_that_is_not_a_status_is_a_protocol_error(body: bytes):
    with pytest.raises(ProtocolError, match="not the status of a run"):
        decode(body)
