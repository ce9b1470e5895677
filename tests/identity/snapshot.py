"""A state as plain values, with names that do not change when the code of the core does.

It contains everything that a decision may depend on. When fields of the core move, adapt this module, so that the
digests stay the same.
"""

from __future__ import annotations

from typing import Any

from dora.core.phases import Membership, WeightsPhase
from dora.core.state import State
from dora.core.tables import Group, Server, Trajectory
from dora.core.training import StepFeed
from dora.core.versions import Version

#: Counted since the digests were first recorded.
_LATER = ("environment_failed", "replays", "trainer_losses")


def snapshot(state: State) -> dict[str, Any]:
    """Return everything, in order."""
    return {
        "now": state.now,
        "group_size": state.settings.group_size,
        "groups": [_group(g) for g in state.ledger.groups.values()],
        "trajectories": [_trajectory(t) for t in state.trajectories.values()],
        "instances": [_instance(i) for i in state.instances.values()],
        "versions": [_version(v) for v in state.window.entries.values()],
        "newest": state.window.newest,
        "ledger": [state.ledger.admitted, {p.value: n for p, n in state.ledger.counts.items()}, state.ledger.reasons],
        "formation": [state.formation.step, state.formation.committed, state.formation.due, state.formation.steps],
        "complete": {deadline: [g.id for g in queue] for deadline, queue in state.complete.items()},
        "feed": _feed(state),
        "evaluation": _evaluation(state),
        "admission": [
            list(state.prompts),
            state.fetching,
            state.source_dry,
            state.block_version,
            state.block_left,
            state.window_size,
            state.window_limit,
            state.top_ups,
            [[reward, n] for reward, n in state.top_up_rewards.items()],
        ],
        "fleet": [
            state.num_up,
            state.num_slots,
            state.num_kv_tokens,
            state.num_draining,
            state.pushes,
            list(state.vacant),
            list(state.drained),
            list(state.leaving),
            sorted(state.removed),
        ],
        "lengths": [state.length_sum, state.length_count, state.mean_length, state.kv_reserve],
        "liveness": [state.progress_at, state.step_trained_at, state.finished, state.stalled, sorted(state.missing)],
        "counters": {
            name: getattr(state.counters, name) for name in sorted(state.counters.__slots__) if name not in _LATER
        },
        **_calls(state),
    }


def _calls(state: State) -> dict[str, Any]:
    """Return what calls of environments add, if there were any."""
    away = [v.away for v in state.window.entries.values()]
    last = [[t.id, t.last.id] for t in state.trajectories.values() if t.last is not None]
    failed = sum(state.counters.environment_failed.values())
    called = [state.called_at, state.evaluation.away, away, last, failed]
    return {"calls": called} if state.called_at else {}


def _group(g: Group) -> list[Any]:
    home = g.home.id if g.home is not None else None
    siblings, waiting = [t.id for t in g.trajectories], [t.id for t in g.waiting]
    tags = [g.version, g.current, g.deadline, g.step]
    return [g.id, g.phase.value, tags, g.admitted_at, home, siblings, waiting, g.unfinished, g.ungraded]


def _trajectory(t: Trajectory) -> list[Any]:
    where = [one.id if one is not None else None for one in (t.instance, t.target)]
    counts = [t.num_prompt_tokens, t.num_tokens, t.attempt, t.failures, t.footprint]
    group = t.group.id if t.group is not None else None
    return [t.id, group, t.version, t.phase.value, where, counts, t.seen_at, t.reward, t.is_mixed]


def _instance(i: Server) -> list[Any]:
    leaves = i.membership in (Membership.LEAVING, Membership.DISMISSED)
    facts = [i.pressed, i.condemned, not i.is_member, leaves]
    h = i.full
    weights = [_phase(i), i.incarnation, h.version, h.pushing, h.attempt, h.failures, h.retry_at]
    room = [i.slots, i.kv_tokens, i.kv_load, i.num_requests, i.num_training]
    held = [list(i.residents), list(i.reserved), list(i.reported.items())]
    times = [i.check_at, i.progress_at]
    return [i.id, weights, facts, room, held, *times, i.takes_work(h.version), i.is_empty, i.may_be_paused]


def _phase(i: Server) -> str:
    """Return weights phase and membership as the one phase with which the digests were recorded."""
    if i.full.phase is WeightsPhase.BLANK:
        return "loading"
    return "draining" if i.full.phase is WeightsPhase.SERVING and not i.is_member else i.full.phase.value


def _version(v: Version) -> list[Any]:
    return [v.number, v.groups, v.unfinished, v.num_waiting, v.evaluating, v.kv_load, v.loading, list(v.serving)]


def _feed(state: State) -> list[Any]:
    feed = state.feed
    steps = {number: _step(step) for number, step in feed.steps.items() if step.groups or step.waves or step.closed}
    times = [feed.idle_since, feed.busy_since, feed.idle_s, feed.uneven_s]
    return [feed.open_step, feed.trained, feed.waves_done, feed.checkpoints, times, steps]


def _step(step: StepFeed) -> list[Any]:
    groups = [g.id for g in step.groups]
    pending = [(a.trajectory, a.size) for update in step.pending.values() for a in update.answers]
    num_tokens = sum(update.num_tokens for update in step.pending.values())
    return [groups, pending, num_tokens, step.closed, len(step.waves), step.slack, step.sent]


def _evaluation(state: State) -> list[Any]:
    e = state.evaluation
    samples = [list(e.trajectories), [t.id for t in e.waiting], e.num_resident, e.ungraded]
    return [e.version, False if e.due is None else e.due, state.evaluated, samples]
