"""`calls = "release"`: while all trajectories of a version are calling, its last instance may serve another version.

The version keeps its last instance for a while, its patience: the time of two pushes (of the other version, and of its
own again) and of the prefill of all its trajectories without a slot. Then the instance may be given to a version that
has work for it. When a call ends afterwards, the trajectory's version is in need, and gets the next vacant instance. If
the wait is long, the least loaded instance of the newest version stops admitting groups; otherwise it would be filled
again and again, and never become vacant.
"""

from __future__ import annotations

from dora.core.admission import why_not
from dora.core.ids import VersionId
from dora.core.occupancy import footprint_of, freed
from dora.core.phases import WeightsPhase
from dora.core.state import State
from dora.core.tables import Server
from dora.core.versions import Version


def patience_s(state: State, entry: Version) -> float:
    """Return how long a version without requests keeps its last instance, and a version in need waits for another."""
    return 2 * state.push_s + entry.away_tokens * state.settings.prefill_s_per_token


def may_be_given_away(state: State, entry: Version, *, needs: list[VersionId], newest: VersionId | None) -> bool:
    """Whether the last instance of a version with unfinished trajectories may be given to another version."""
    if state.settings.orchestration.calls != "release" or entry.unfinished != entry.away or state.num_up < 2:
        return False
    if state.now - entry.quiet_since < patience_s(state, entry):
        return False
    return bool(needs) or (newest is not None and newest != entry.number and _wants_more(state, newest))


def _wants_more(state: State, newest: VersionId) -> bool:
    """Whether the newest version would admit a group, and has no room for it."""
    entry = state.entry(newest)
    if entry.loading or why_not(state, newest) is not None:
        return False
    roomiest = entry.roomiest()
    return roomiest is None or not roomiest.has_room(footprint_of(state, state.prompts[0], 0))


def make_room(state: State, *, needs: list[VersionId], newest: VersionId | None) -> None:
    """Have an instance of the newest version stop admitting groups while a version in need waits for too long."""
    is_urgent = newest is not None and any(_is_urgent(state, state.entry(v)) for v in needs)
    held = state.yielding
    if held is not None and not (is_urgent and held.full.version == newest and held.is_member and not held.condemned):
        _stop_yielding(state, held)
    if not is_urgent or newest is None:
        return
    takers = state.entry(newest).roomiest_few(2)
    if state.yielding is None and takers:
        state.yielding = takers[0]
    held = state.yielding
    if held is not None and held.full.phase is WeightsPhase.SERVING and any(i is not held for i in takers):
        # Queued and returning trajectories have another instance.
        held.full.move(WeightsPhase.DRAINING, state.cause, instance=held)
        state.num_draining += 1


def _is_urgent(state: State, entry: Version) -> bool:
    """Whether a version that has given its last instance away must soon get another."""
    if entry.number not in state.given_away:
        return False
    since = state.given_away[entry.number]
    if since is None:
        since = state.given_away[entry.number] = state.now
    is_due = state.formation.deadline(entry.number) <= state.formation.step
    return is_due or state.now - since >= patience_s(state, entry)


def _stop_yielding(state: State, instance: Server) -> None:
    """Let an instance admit again, unless it is empty or has left its version."""
    state.yielding = None
    holding = instance.full
    if holding.phase is WeightsPhase.DRAINING and instance.is_member and not instance.is_empty:
        holding.move(WeightsPhase.SERVING, state.cause, instance=instance)
        state.num_draining -= 1
        freed(state, instance)
    elif holding.version is not None:
        state.agenda.fill(holding.version)
