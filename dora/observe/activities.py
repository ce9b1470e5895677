"""What an instance does, and what the trainer waits for, in one word: the activities of spans.jsonl.

Invariant: pure, and never undecided: an instance always has exactly one activity, and the waiting trainer one cause.
"""

from __future__ import annotations

from typing import Final

from dora.core.admission import Refusal, why_not_admitted
from dora.core.ids import VersionId
from dora.core.phases import PUSHING, GroupPhase, TrajectoryPhase, WeightsPhase
from dora.core.state import State
from dora.core.tables import Holding, Server

_CALLING: Final = TrajectoryPhase.CALLING  # globals: see core/tables.py

#: What a rank does.
RANK: Final = {
    "start": "from the beginning of the run, or a loss: its process starts, loads the model and joins the others; also "
    "as long as the others train without it (`trainer.min_ranks`)",
    "packing": "takes a micro-batch apart, computes advantages, and lays out rows",
    "forward_backward": "computes; a model that is gathered layer by layer also waits for other ranks in its passes",
    "optimizer": "closes an update: clipping, the update itself, and the sums of metrics",
    "copying": "gathers the weights of the next version, and refreshes copies for reference and proximal policy",
    "saving": "writes a checkpoint, and waits for the other ranks to do so",
    "waiting:<cause>": "has nothing to do; see below",
    "unreported": "did something that it had not reported when the controller ended",
}
#: What an instance does.
INSTANCE: Final = {
    "decoding": "at least one request gets tokens",
    "prefill": "has requests, none of which has got a token yet",
    "push:wait": "a push is ordered, and waits for its turn or for the version to be complete",
    "push:drain": "is checked to be empty, and paused",
    "push:load": "loads the weights",
    "push:verify": "its weights are read back, and then it resumes",
    "empty:<cause>": "has no request that it could decode; see below",
    "down": "is lost, or not up yet",
}
#: Why an instance decodes nothing, besides the refusals of admission (`dora.core.admission.Refusal`, in lower case).
EMPTY: Final = {
    "drained": "a user has drained it",
    "new": "it is up and waits for its first version",
    "quarantined": "its last push failed, and the next push is not due yet",
    "old_version": "it holds an older version, which gets no new groups, and waits for a push",
    "calls": "all its answers are calling their environment",
    "admitting": "a group may be admitted, and will be at once",
}
#: Why the trainer waits for a message.
WAITING: Final = {
    "start": "for its ranks",
    "evaluation": "for the evaluation of version 0",
    "generation": "for answers, which keep the instances busy",
    "tail": "for the last answers: none is queued, and more than half of the slots are free",
    "grading": "for graders: the answers that they have would fill the step",
    "publishing": "for the version that the last step made: to be complete, or written before its weights change",
    "push": "for the newest version to reach an instance",
    "admission": "for a group to be admitted",
    "delivery": "for a micro-batch that is on its way: for the journal to be on the disk, and the network",
    "slowest_rank": "for other ranks to end the same micro-batch, or to begin the same collective",
    "end": "for the run to end",
}


def instance_activity(state: State, instance: Server, *, stage: str, is_sampling: bool, refusal: str) -> str:
    """Return what an instance does.

    `stage`: of its push, if one is under way. `is_sampling`: whether a resident got a token of its present request.
    `refusal`: why no group is admitted now (`admission_refusal`).
    """
    if instance.is_lost:
        return "down"
    if instance.is_updating or (not instance.residents and any(h.phase in PUSHING for h in instance.holdings)):
        return f"push:{stage}"
    if instance.residents:
        if is_sampling:
            return "decoding"
        is_calling = all(t.phase is _CALLING for t in instance.residents.values())
        return "empty:calls" if is_calling else "prefill"
    return f"empty:{_why_empty(state, instance, refusal)}"


def shown(instance: Server) -> Holding:
    """Return the holding to show: of several, that of the newest version, confirmed or else under way or in doubt."""
    return max(instance.holdings, key=lambda h: (_number(h.version), _number(h.pushing), _number(h.adapter)))


def _number(version: VersionId | None) -> int:
    return -1 if version is None else version


def _why_empty(state: State, instance: Server, refusal: str) -> str:
    if not instance.is_member:
        return "drained"
    if refusal == Refusal.ENDED.name.lower():
        return refusal
    holding = shown(instance)
    if holding.phase is WeightsPhase.BLANK:
        return "new"
    if holding.phase is WeightsPhase.QUARANTINED:
        return "quarantined"
    return refusal if holding.version == state.window.newest else "old_version"


def admission_refusal(state: State) -> str:
    """Return why no group is admitted now, or `admitting`; it looks at every instance of the newest version."""
    if state.feed.trained >= state.settings.steps:
        return Refusal.ENDED.name.lower()
    refusal = why_not_admitted(state)
    return refusal.name.lower() if refusal is not None else "admitting"


def waiting_cause(state: State) -> str:
    """Return what the trainer would wait for now if it had nothing to train; O(K)."""
    feed = state.feed
    if state.finished or feed.trained >= state.settings.steps:
        return "end"
    if feed.open_step is None:
        return "start"
    if feed.idle_since is None:
        return "delivery"
    if state.ledger.admitted == 0 and state.evaluation.version == 0:
        return "evaluation"
    counts, formation = state.ledger.counts, state.formation
    grading, generating = counts[GroupPhase.GRADING], counts[GroupPhase.GENERATING]
    if grading and (not generating or formation.committed + grading >= formation.step_size):
        return "grading"
    if generating:
        return _generation(state)
    newest = state.window.newest
    if newest is None or newest < formation.step - state.settings.rules.max_staleness:
        return "publishing"
    return "admission" if state.entry(newest).serving else "push"


def _generation(state: State) -> str:
    """Return what answers wait for."""
    running = queued = 0
    for entry in state.window.entries.values():
        queued += entry.num_waiting
        running += entry.unfinished - entry.num_waiting
        if entry.num_waiting and not entry.serving:
            return "push"
    return "generation" if queued or 2 * running >= state.num_slots else "tail"


def trainer_waits_for(state: State) -> str:
    """Describe what the trainer waits for; "" while it works, and at the end."""
    counts = state.ledger.counts
    match waiting_cause(state):
        case "end" | "delivery":
            return ""
        case "start":
            return "its ranks"
        case "evaluation":
            return "the evaluation of version 0"
        case "grading":
            return f"the grading of {_groups(counts[GroupPhase.GRADING])}"
        case "publishing":
            return "a new version"
        case "push" if not counts[GroupPhase.GENERATING]:
            return f"version {state.window.newest} on an instance"
        case "admission":
            refusal = why_not_admitted(state)
            return f"a new prompt group: {refusal.value}" if refusal is not None else "a new prompt group"
    return _unfinished(state)


def _unfinished(state: State) -> str:
    entries = state.window.entries.values()
    unfinished = sum(e.unfinished for e in entries)
    waiting = sum(e.num_waiting for e in entries)
    queued = f" ({_answers(waiting)} queued)" if waiting else ""
    return f"{_answers(unfinished)} of {_groups(state.ledger.counts[GroupPhase.GENERATING])}{queued}"


def _answers(count: int) -> str:
    return f"{count:,} answer{'s' * (count != 1)}"


def _groups(count: int) -> str:
    return f"{count:,} group{'s' * (count != 1)}"
