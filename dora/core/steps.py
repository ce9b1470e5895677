"""What is committed, closed, fed and trained.

Invariant: groups are committed earliest deadline first, then in completion order, and only as rule F allows.
"""

from __future__ import annotations

from typing import Final

from dora.core.commands import CloseStep, CommitGroup, ForgetGroups
from dora.core.endings import discard_surplus
from dora.core.ids import StepId
from dora.core.phases import GroupPhase
from dora.core.state import State, admissions_changed, fail
from dora.core.tables import Group

#: W moves by these factors (docs/ARCHITECTURE.md); it grows by the share of the step that the trainer has lost, within
#: these bounds.
WINDOW_GROW: Final = (1.06, 1.5)
WINDOW_SHRINK: Final = 0.985
#: Share of a step for which the trainer may wait before W grows.
NOTICEABLE_WAIT: Final = 0.02


def form(state: State) -> None:
    """Commit what can be committed; a full step is closed and the next one begun."""
    while _fill_step(state):
        close(state)


def _fill_step(state: State) -> bool:
    """Commit complete groups as far as F and the strategy allow; True once the step is full."""
    size = state.settings.groups_per_step
    if not (state.settings.rules.streamed and state.settings.orchestration.streaming):
        ready = sum(len(q) for q in state.complete.values())
        if ready + state.formation.committed < size and not _is_tail(state, ready):
            return False
    while state.formation.committed < size:
        group = _next_to_commit(state)
        if group is None:
            return False
        _commit(state, group)
    return True


def _is_tail(state: State, ready: int) -> bool:
    """The source is dry and every unconsumed group is complete."""
    return state.source_dry and not state.prompts and ready == state.formation.num_unconsumed


def _next_to_commit(state: State) -> Group | None:
    """Earliest deadline, then completion order, if F holds afterwards."""
    if not state.complete:
        return None
    deadline = min(state.complete)
    return state.complete[deadline][0] if state.formation.may_commit(deadline) else None


def _commit(state: State, group: Group) -> None:
    """The group has its place in the step."""
    queue = state.complete[group.deadline]
    queue.popleft()
    if not queue:
        del state.complete[group.deadline]
    step = state.formation.step
    if not state.formation.staleness_allowed(group.version, step=step):
        state.counters.staleness_violations += 1
        fail(state, f"C3: group {group.id} of version {group.version} committed to step {step}")
    else:
        state.counters.count_staleness(step - group.version)
    state.formation.commit(group.deadline)
    state.ledger.move(group, GroupPhase.COMMITTED)
    group.step = step
    state.feed.commit(group, step=step)
    state.agenda.feed()
    state.progress_at = state.now
    state.out.append(CommitGroup(group.id, group.version, step))


def close(state: State) -> None:
    """The step has all its groups: the next one is formed."""
    formation = state.formation
    if state.settings.rules.discards:
        discard_surplus(state)
    state.out.append(CloseStep(formation.step, formation.committed))
    state.feed.steps[formation.step].closed = True
    formation.close()
    state.agenda.feed()
    state.top_ups = 0
    state.top_up_rewards.clear()
    admissions_changed(state)


def feed_trainer(state: State) -> None:
    """Send the micro-batches that it should have now."""
    while (wave := state.feed.next_wave()) is not None:
        if state.feed.idle_since is not None:
            state.feed.idle_s += state.now - state.feed.idle_since
            state.feed.idle_since, state.feed.busy_since = None, state.now
        state.out.append(wave)


def step_trained(state: State, step: StepId) -> None:
    """Its groups leave the ledger, once."""
    state.feed.trained = StepId(step + 1)
    groups = state.feed.groups(step)
    for group in groups:
        state.ledger.move(group, GroupPhase.TRAINED)
        state.entry(group.current).groups -= 1
    state.out.append(ForgetGroups(tuple(g.id for g in groups)))
    _adapt_window(state)
    state.agenda.release()
    admissions_changed(state)


def _adapt_window(state: State) -> None:
    """W grows when the trainer waited noticeably, else shrinks slowly.

    Ranks that wait for the fullest one of a small micro-batch count: the trainer got it because there was no more.
    """
    duration, lost_s = state.now - state.step_trained_at, state.feed.idle_s + state.feed.uneven_s
    state.feed.idle_s = state.feed.uneven_s = 0.0
    state.step_trained_at = state.now
    if not state.adapts_window:
        return
    factor = WINDOW_SHRINK
    if lost_s > NOTICEABLE_WAIT * duration:
        least, most = WINDOW_GROW
        factor = min(max(least, 1 + lost_s / duration), most)
    size = min(factor * state.window_size, state.window_limit)
    state.window_size = max(state.settings.groups_per_step, size)
