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
    if entry.num_waiting:
        _fill_waiting(state, entry)
    if not entry.num_waiting:
        _admit(state, entry)


def fill_shared(state: State) -> None:
    """Fill the free slots of servers that hold several versions, in the order of the module's first line.

    Queued trajectories of an older version have earlier deadlines. Nothing overtakes what only lacks room, since a
    server that is shared may never be empty, and only an empty one has room for everything.
    """
    entries, evaluation = state.window.entries, state.evaluation
    evaluated = evaluation.version
    if evaluated is not None and evaluation.waiting and not _fill_evaluation(state, entries[evaluated]):
        return
    for entry in entries.values():
        _fill_waiting(state, entry)
        if _only_lacks_room(entry):
            return
    for entry in reversed(entries.values()):
        _admit(state, entry)
        if _only_lacks_room(entry):
            return


def _only_lacks_room(entry: Version) -> bool:
    """Whether a trajectory of the version is queued although servers take its work."""
    return entry.num_waiting > 0 and entry.roomiest() is not None


def _fill_waiting(state: State, entry: Version) -> None:
    """Dispatch the queued trajectories of a version, until the next one lacks room."""
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


def _admit(state: State, entry: Version) -> None:
    """Admit groups of the version of new groups or, with refill, of an older one."""
    is_newest = entry.number == state.admission_version()
    if is_newest or (state.settings.orchestration.refill and may_refill(state, entry)):
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


def _fill_evaluation(state: State, entry: Version) -> bool:
    """Dispatch evaluation samples to their share of the slots, or to all slots that training could not use.

    If an older version has a single instance, and no training work for it, samples may fill that instance. Return False
    if the instances that take work lack room for the next sample although it is within the share.
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
        has_share = evaluation.num_resident + evaluation.away < limit
        if instance is None or not instance.has_room(footprint):
            return instance is None or not has_share
        is_apart = is_older and instance.id in state.vacant and len(entry.serving) == 1 and not entry.num_waiting
        if not has_share and not is_apart:
            return True
        if not trajectory.attempt:
            if not state.hosts_have_room(1):
                return True
            evaluation.num_new -= 1
        evaluation.waiting.pop()
        begin(state, trajectory, instance, footprint=footprint)
    return True


def _training_wants_slots(state: State) -> bool:
    version = state.admission_version()
    return any(e.num_waiting for e in state.window.entries.values()) or (
        version is not None and why_not(state, version) is None
    )
