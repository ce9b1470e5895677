"""Steps: committing groups, closing a step, feeding the trainer, adapting the window W.

Invariant: groups are committed earliest deadline first, then in completion order, and only if rule F allows it.
"""

from __future__ import annotations

from typing import Final

from dora.core.commands import CloseStep, CommitGroup, ForgetGroups
from dora.core.endings import discard_surplus
from dora.core.ids import StepId
from dora.core.phases import GroupPhase
from dora.core.state import State, admissions_changed, fail
from dora.core.tables import Group

#: Bounds of the factor by which W grows, which is 1 + the share of the step that the trainer was idle.
WINDOW_GROW: Final = (1.06, 1.5)
WINDOW_SHRINK: Final = 0.985
#: Share of a step that the trainer may be idle before W grows.
NOTICEABLE_WAIT: Final = 0.02


def form(state: State) -> None:
    """Commit complete groups, and close each full step."""
    while _fill_step(state):
        close(state)


def _fill_step(state: State) -> bool:
    """Commit complete groups as far as F and the strategy allow; True once the step is full."""
    formation, size = state.formation, state.settings.groups_per_step
    if not (state.settings.rules.streamed and state.settings.orchestration.streaming):
        ready = sum(len(q) for q in state.complete.values())
        is_tail = state.source_dry and not state.prompts and ready == formation.num_unconsumed
        if ready + formation.committed < size and not is_tail:
            return False
    while formation.committed < size:
        deadline = min(state.complete, default=None)
        if deadline is None or not formation.may_commit(deadline):
            return False
        _commit(state, state.complete[deadline].popleft())
        if not state.complete[deadline]:
            del state.complete[deadline]
    return True


def _commit(state: State, group: Group) -> None:
    """Assign a group to the step."""
    step, staleness = state.formation.step, state.counters.staleness
    if not state.formation.staleness_allowed(group.version, step=step):
        state.counters.staleness_violations += 1
        fail(state, f"C3: group {group.id} of version {group.version} committed to step {step + 1}")
    else:
        staleness += [0] * (step - group.version + 1 - len(staleness))
        staleness[step - group.version] += 1
    state.formation.commit(group.deadline)
    state.ledger.move(group, GroupPhase.COMMITTED, state.cause)
    group.step = step
    state.feed.commit(group, step=step)
    state.agenda.feed = True
    state.progress_at = state.now
    state.out.append(CommitGroup(group.id, group.version, step))


def close(state: State) -> None:
    """End the step and form the next one."""
    formation = state.formation
    if state.settings.rules.discards:
        discard_surplus(state)
    state.out.append(CloseStep(formation.step, formation.committed))
    state.feed.steps[formation.step].closed = True
    formation.close()
    state.agenda.feed = True
    state.top_ups = 0
    state.top_up_rewards.clear()
    admissions_changed(state)


def feed_trainer(state: State) -> None:
    """Send the trainer the micro-batches that are due."""
    while (wave := state.feed.next_wave()) is not None:
        if state.feed.idle_since is not None:
            state.feed.idle_s += state.now - state.feed.idle_since
            state.feed.idle_since, state.feed.busy_since = None, state.now
        state.out.append(wave)


def step_trained(state: State, step: StepId) -> None:
    """Remove the groups of a trained step from the ledger."""
    state.feed.trained = StepId(step + 1)
    state.feed.losses = 0
    groups = state.feed.groups(step)
    for group in groups:
        state.ledger.move(group, GroupPhase.TRAINED, state.cause)
        state.entry(group.current).groups -= 1
    state.out.append(ForgetGroups(tuple(g.id for g in groups)))
    _adapt_window(state)
    state.agenda.release = True
    admissions_changed(state)


def _adapt_window(state: State) -> None:
    """Grow W if the trainer was idle noticeably, else shrink it slowly.

    Idle time includes the waiting of ranks for the fullest rank, in waves that are small for lack of groups.
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
