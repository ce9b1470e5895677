"""Handlers of events about calls of environments, between the turns of a trajectory.

Invariant: a call is ordered once for each CallStarted, and once for a prompt of its own; and again only after a restart
of the controller, for an environment that can be replayed. An event of an old attempt changes nothing.
"""

from __future__ import annotations

from heapq import heappop, heappush
from typing import Final

from dora.core import events as ev
from dora.core.endings import abandon, end_generation, finish, forget_discarded, go_on, grade, is_abandoned
from dora.core.moves import move_call
from dora.core.occupancy import begin, call, end, footprint_of, hold, take_count, unhold, unreserve, wait
from dora.core.on_requests import check_spans, decoding, graded
from dora.core.phases import TrajectoryPhase
from dora.core.state import State
from dora.core.tables import Server, Trajectory

_STOPPING: Final = TrajectoryPhase.STOPPING
_CALLING: Final = TrajectoryPhase.CALLING
_GRADING: Final = TrajectoryPhase.GRADING
#: Cause of the failure of an episode whose call was under way when the controller ended.
RESTARTED: Final = "restart"


def on_call_started(state: State, event: ev.CallStarted) -> None:
    trajectory = decoding(state, event.trajectory, event.attempt)
    if trajectory is None:
        return
    check_spans(state, trajectory, event.spans)
    take_count(state, trajectory, event.num_tokens)
    target = unreserve(state, trajectory)
    instance = end(state, trajectory)
    instance.progress_at = state.now
    if is_abandoned(trajectory):
        go_on(state, trajectory)
        return
    trajectory.last = instance
    kept = target if trajectory.phase is _STOPPING else instance  # none of its requests runs, so a move ends here
    call(state, trajectory)
    if state.settings.orchestration.calls == "keep":
        hold(state, trajectory, kept)
    else:
        _hold_for_a_while(state, trajectory, kept)


def _hold_for_a_while(state: State, trajectory: Trajectory, instance: Server | None) -> None:
    """Keep the slot for as long as a prefill on another instance would cost, times the chance that one is necessary.

    All slots of an instance wait for a prefill, so its cost in slot-seconds is its duration times the slots. How long
    the call will take is not known; this rule costs at most twice what the better choice would (Karlin et al., 1988,
    "Competitive snoopy caching").
    """
    until = state.now
    if instance is not None:
        context = trajectory.num_prompt_tokens + trajectory.num_tokens
        elsewhere = 1 - 1 / max(1, len(state.entry(trajectory.version).serving))
        until += context * state.settings.prefill_s_per_token * instance.slots * elsewhere
    hold(state, trajectory, instance if until > state.now else None)
    if trajectory.instance is not None:
        heappush(state.holds, (until, trajectory.id, trajectory.attempt))


def let_slots_go(state: State) -> None:
    """Free the slots that calling trajectories have kept for long enough."""
    while state.holds and state.holds[0][0] <= state.now:
        _, id, attempt = heappop(state.holds)
        trajectory = state.trajectories.get(id)
        if trajectory is not None and trajectory.attempt == attempt and trajectory.instance is not None:
            move_call(state, trajectory, None)


def on_call_finished(state: State, event: ev.CallFinished) -> None:
    trajectory = state.trajectories.get(event.trajectory)
    if trajectory is None or trajectory.attempt != event.attempt or trajectory.phase is not _CALLING:
        state.counters.late_completions += 1
        return
    if trajectory.num_tokens or not state.settings.own_prompts:  # else no turn came before
        trajectory.turn_rewards += (event.reward,)
    take_count(state, trajectory, event.num_tokens)
    trajectory.truncated, trajectory.repeated = event.truncated, event.repeated
    trajectory.turn_tokens = event.turn_tokens
    state.counters.replays += event.replays
    state.called_at = state.now
    if is_abandoned(trajectory):
        _abandon(state, trajectory)
        return
    instance = unhold(state, trajectory)
    if event.failed:
        _environment_failed(state, trajectory, cause=event.failed.partition(":")[0])
    elif event.ended:
        finish(state, trajectory)
        if event.graded:
            trajectory.move(_GRADING, state.cause)
            graded(state, trajectory, 0.0)
        else:
            grade(state, trajectory)
    elif instance is not None and instance.serves(trajectory.version):
        _next_turn(state, trajectory, instance)
    else:
        wait(state, trajectory)


def _next_turn(state: State, trajectory: Trajectory, instance: Server) -> None:
    """Continue on the instance that kept the slot."""
    if all(t.phase is _CALLING for t in instance.residents.values()):
        instance.progress_at = state.now  # nothing was to be decoded there
    footprint = footprint_of(state, trajectory.num_prompt_tokens, trajectory.num_tokens)
    begin(state, trajectory, instance, footprint=footprint)


def _abandon(state: State, trajectory: Trajectory) -> None:
    """End a calling trajectory whose group is given up; it no longer counts as unfinished."""
    assert trajectory.group is not None
    abandon(state, trajectory)
    forget_discarded(state, trajectory.group)


def _environment_failed(state: State, trajectory: Trajectory, *, cause: str) -> None:
    """End a trajectory without a reward, because its environment cannot go on."""
    failed = state.counters.environment_failed
    failed[cause] = failed.get(cause, 0) + 1
    if trajectory.group is not None:
        end_generation(state, trajectory.group, trajectory)
    trajectory.move(_GRADING, state.cause)
    graded(state, trajectory, None)


def restart_call(state: State, trajectory: Trajectory, *, replayable: bool) -> None:
    """Order a call again, or end the trajectory: a new controller will not get the result of the call under way."""
    if is_abandoned(trajectory):
        _abandon(state, trajectory)
    elif replayable:
        call(state, trajectory)
    else:
        unhold(state, trajectory)
        _environment_failed(state, trajectory, cause=RESTARTED)
