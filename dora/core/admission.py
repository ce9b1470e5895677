"""Admission: which groups may enter, and why not.

Invariant: an admission is refused by `why_not` (F, the window W, the strategy, the prompt source) or by `_why_no_room`
(space), and nowhere else. A group gets its version and its deadline here, once.
"""

from __future__ import annotations

import enum

from dora.core.commands import AdmitGroup
from dora.core.ids import VersionId
from dora.core.occupancy import begin, footprint_of
from dora.core.state import State
from dora.core.tables import Group, Server
from dora.core.versions import Version


class Refusal(enum.Enum):
    """Why no group is admitted now, in the order of the checks."""

    ENDED = "the run has ended"
    NO_VERSION = "no version is published yet"
    NO_PROMPT = "no prompt is available"
    WINDOW = "the admission window W is full of untrained groups"
    BASELINE = "version 0 is evaluated first"
    BLOCK = "the current batch is admitted but not yet committed"
    HOSTS = "the hosts of the environment are full"
    RULE_F = "another group might miss its deadline (rule F)"
    NO_INSTANCE = "no instance accepts requests for the newest version"
    YIELDS = "the newest version's instance makes room for an older version, which has none"
    NO_ROOM = "every instance of the newest version is full"
    SHARE = "the least loaded instance has its share; the newest version is being pushed to others"
    PUSHES = "a batch starts once no push is in flight"


def why_not(state: State, version: VersionId) -> Refusal | None:
    """Return the first reason other than space why no group of `version` may enter, or None if one may."""
    if state.finished:
        return Refusal.ENDED
    if not state.prompts:
        return Refusal.NO_PROMPT
    if state.ledger.num_untrained + 1 > state.window_size:
        return Refusal.WINDOW
    if is_baseline(state) and state.evaluation.waiting:
        return Refusal.BASELINE
    if state.settings.rules.batched and not state.block_left and state.formation.num_unconsumed:
        return Refusal.BLOCK
    if not state.hosts_have_room(state.settings.group_size):
        return Refusal.HOSTS
    return None if state.formation.may_admit(version) else Refusal.RULE_F


def why_not_admitted(state: State) -> Refusal | None:
    """Return the first reason why no group is admitted now, for display, or None. It looks at every instance."""
    version = state.admission_version()
    if version is None:
        return Refusal.ENDED if state.finished else Refusal.NO_VERSION
    entry = state.entry(version)
    takers = [instance for instance in entry.serving.values() if instance.takes_work(version)]
    roomiest = min(takers, key=lambda i: (i.load(), i.id), default=None)
    return why_not(state, version) or _why_no_room(state, entry, roomiest)


def _why_no_room(state: State, entry: Version, instance: Server | None) -> Refusal | None:
    """Return the first reason why the version's least loaded instance gets no new group; a prompt must be available."""
    if instance is None:
        return Refusal.NO_INSTANCE
    if instance is state.yielding:
        return Refusal.YIELDS
    if not instance.has_room(footprint_of(state, state.prompts[0], 0)):
        return Refusal.NO_ROOM
    if _has_its_share(state, instance, entry):
        return Refusal.SHARE
    if state.settings.rules.spreads and not state.formation.num_unconsumed and state.pushes:
        return Refusal.PUSHES
    return None


def num_admissible(state: State, version: VersionId) -> int:
    """Return the number of groups that F and W admit now."""
    return min(state.formation.slack(version), int(state.window_size) - state.ledger.num_untrained)


def is_baseline(state: State) -> bool:
    """Whether version 0 is under evaluation and nothing is admitted yet."""
    return state.evaluation.version == 0 and state.ledger.admitted == 0


def may_refill(state: State, entry: Version) -> bool:
    """Whether an old version may get new groups: not the oldest, and only while an instance serves the newest."""
    newest = state.window.newest
    oldest = state.window.live()[0]
    return newest is not None and bool(state.entry(newest).serving) and oldest < entry.number < newest


def _has_its_share(state: State, instance: Server, entry: Version) -> bool:
    """Whether an instance has its share of the requests of all versions that it serves; instances that are to load this
    one have shares, too."""
    if not entry.loading or state.settings.rules.batched or not state.settings.orchestration.tail_care:
        return False
    if instance.is_empty:
        return False
    servers = len(entry.serving) + entry.loading + len(state.vacant)  # no vacant instance serves this version
    sharing = state.window.entries.values() if instance.is_shared else (entry,)
    wanted = sum([e.unfinished for e in sharing]) + num_admissible(state, entry.number) * state.settings.group_size
    return instance.num_requests * servers >= wanted


def admit(state: State, entry: Version) -> None:
    """Admit groups of this version until one is refused or no slot is left."""
    version = entry.number
    while why_not(state, version) is None:
        instance = entry.roomiest()
        if instance is None or _why_no_room(state, entry, instance) is not None:
            return
        if state.settings.rules.batched and not state.formation.num_unconsumed:
            state.block_version, state.block_left = version, state.settings.groups_per_step
        _admit_one(state, entry, instance)
        if entry.num_waiting:
            return  # every slot is taken


def _admit_one(state: State, entry: Version, instance: Server) -> None:
    """Admit the next prompt as a group of this version, and dispatch as many of its siblings as there is room for."""
    group = _enter(state, entry)
    footprint = footprint_of(state, group.num_prompt_tokens, 0)
    waiting = group.trajectories[::-1]
    home: Server | None = instance
    while waiting and home is not None:
        if home.has_room(footprint):
            begin(state, waiting.pop(), home, footprint=footprint)
            if state.settings.rules.spreads:
                home = entry.roomiest()
        else:
            roomiest = entry.roomiest()
            home = roomiest if roomiest is not None and roomiest.has_room(footprint) else None
    if waiting:
        entry.enqueue(group, waiting)


def _enter(state: State, entry: Version) -> Group:
    """Create the group of the next prompt and count it in the ledger, in F and in its version."""
    size, deadline = state.settings.group_size, state.formation.deadline(entry.number)
    group = Group(
        state.next_group,
        version=entry.number,
        deadline=deadline,
        num_prompt_tokens=state.prompts.popleft(),
        group_size=size,
        admitted_at=state.now,
    )
    if not state.formation.num_unconsumed:
        state.progress_at = state.now  # no work was outstanding until now
    state.ledger.admit(group)
    state.formation.admit(deadline)
    if state.settings.rules.batched:
        state.block_left -= 1
    entry.groups += 1
    entry.unfinished += size
    state.out.append(AdmitGroup(group.id, entry.number, deadline))
    for trajectory in group.trajectories:
        state.trajectories[trajectory.id] = trajectory
    return group
