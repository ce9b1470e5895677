"""Dispatch of work to free slots: evaluation samples first, then queued trajectories, then new groups."""

from __future__ import annotations

from dora.core.admission import admit, is_baseline, may_refill, why_not
from dora.core.ids import VersionId
from dora.core.occupancy import begin, footprint_of
from dora.core.state import State
from dora.core.tables import Group, Server
from dora.core.versions import Version


def fill(state: State, version: VersionId) -> None:
    """Fill the free slots of a version."""
    entry = state.window.entries.get(version)
    if entry is None:
        return
    if state.evaluation.version == version and state.evaluation.waiting:
        _fill_evaluation(state, entry)
    while entry.num_waiting:
        group = entry.first_waiting()
        trajectory = group.waiting[-1]
        footprint = footprint_of(state, trajectory.num_prompt_tokens, trajectory.num_tokens)
        instance = _room_for(state, group, entry, footprint=footprint)
        if instance is None:
            return
        entry.dequeue(group)
        trajectory.last = None
        begin(state, trajectory, instance, footprint=footprint)
    if version == state.admission_version() or (state.settings.orchestration.refill and may_refill(state, entry)):
        admit(state, entry)


def _room_for(state: State, group: Group, entry: Version, *, footprint: int) -> Server | None:
    """Return an instance with room for the group's next trajectory, or None.

    The trajectory's last turn is cached where it was decoded, and the prompt where the latest sibling was dispatched;
    if that instance has no room, the roomiest one is taken.
    """
    last = group.waiting[-1].last
    home = last if last is not None and last.holding_of(entry.number) is not None else group.home
    if home is not None and home.takes_work(entry.number) and home.has_room(footprint):
        return home
    instance = entry.roomiest()
    return instance if instance is not None and instance.has_room(footprint) else None


def want_evaluation(state: State, version: VersionId) -> None:
    """Have a version evaluated next, and keep it until then. It replaces a version whose evaluation has not begun."""
    replaced = state.evaluation.want(version)
    state.entry(version).evaluating = True
    if replaced is not None:
        state.entry(replaced).evaluating = False
        state.agenda.release = True


def start_evaluation(state: State) -> None:
    """Start the evaluation that is due, unless another one is in progress."""
    if state.evaluation.version is not None or state.evaluation.due is None:
        return
    version = state.evaluation.start()
    state.trajectories.update(state.evaluation.trajectories)
    state.agenda.fill(version)
    state.agenda.place = True


def _fill_evaluation(state: State, entry: Version) -> None:
    """Dispatch evaluation samples to their share of the slots, or to all slots that training could not use.

    If an older version has a single instance, and no training work for it, samples may fill that instance.
    """
    evaluation = state.evaluation
    limit = max(1, int(state.settings.max_eval_share * state.num_slots))
    if is_baseline(state) or not _training_wants_slots(state):
        limit = state.num_slots
    is_older = entry.number != state.admission_version()
    while evaluation.waiting:
        trajectory = evaluation.waiting[-1]
        footprint = footprint_of(state, trajectory.num_prompt_tokens, trajectory.num_tokens)
        instance = entry.roomiest()
        if instance is None or not instance.has_room(footprint):
            return
        is_apart = is_older and instance.id in state.vacant and len(entry.serving) == 1 and not entry.num_waiting
        if evaluation.num_resident + evaluation.away >= limit and not is_apart:
            return
        if not trajectory.attempt:
            if not state.hosts_have_room(1):
                return
            evaluation.num_new -= 1
        evaluation.waiting.pop()
        begin(state, trajectory, instance, footprint=footprint)


def _training_wants_slots(state: State) -> bool:
    version = state.admission_version()
    return any(e.num_waiting for e in state.window.entries.values()) or (
        version is not None and why_not(state, version) is None
    )
