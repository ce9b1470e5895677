"""The order in which decisions are made after each event.

Invariant: a second call of `settle` at the same time changes nothing.
"""

from __future__ import annotations

from typing import Final

from dora.core.commands import FetchPrompts, FinishRun, ReleaseVersion
from dora.core.dispatch import fill, fill_shared, start_evaluation, want_evaluation
from dora.core.ids import GroupId, VersionId
from dora.core.moves import dismiss
from dora.core.phases import Decision
from dora.core.repartition import consolidate, place
from dora.core.state import State
from dora.core.steps import close, feed_trainer, form

_COMMIT: Final = Decision.COMMIT  # globals: see tables.py
_DISPATCH: Final = Decision.DISPATCH
_PLACE: Final = Decision.PLACE


def settle(state: State) -> None:
    """Make every decision that is due; `state.cause` is the one being made."""
    agenda = state.agenda
    while True:
        if agenda.form:
            agenda.form = False
            state.cause = _COMMIT
            form(state)
        if agenda.feed:
            agenda.feed = False
            feed_trainer(state)
        start_evaluation(state)
        while agenda.versions or agenda.place:
            state.cause = _DISPATCH
            while agenda.versions:
                if state.settings.adapters:
                    agenda.versions.clear()
                    fill_shared(state)
                else:
                    fill(state, agenda.versions.popitem()[0])
            if agenda.place:
                agenda.place = False
                state.cause = _PLACE
                place(state)
        if agenda.repack and state.now >= agenda.repack_not_before:
            agenda.repack = False
            state.cause = Decision.CONSOLIDATE
            consolidate(state)
            if state.agenda.place or state.agenda.versions:
                continue  # `consolidate` moves calling trajectories at once
        if agenda.release:
            agenda.release = False
            for unneeded in state.window.releasable():
                del state.window.entries[unneeded]
                state.given_away.pop(unneeded, None)
                state.out.append(ReleaseVersion(unneeded))
        if state.leaving:
            state.cause = Decision.DISMISS
            dismiss(state)
        if not state.fetching and len(state.prompts) < state.settings.groups_per_step:
            _fetch(state)
        is_last = state.source_dry or state.formation.step >= state.settings.steps
        if not (is_last and _conclude(state)):
            return


def _fetch(state: State) -> None:
    """Order prompts for up to two steps."""
    if state.source_dry or state.finished or not state.settings.steps:
        return
    state.fetching = True
    first = GroupId(state.next_group + len(state.prompts))
    state.out.append(FetchPrompts(first, 2 * state.settings.groups_per_step - len(state.prompts)))


def _conclude(state: State) -> bool:
    """End the job once every admitted group is trained, published and evaluated; True if an evaluation was started."""
    formation = state.formation
    if formation.num_unconsumed or state.finished:
        return False
    if formation.step < state.settings.steps:
        if state.prompts or not state.source_dry:
            return False
        if formation.committed:
            close(state)  # the last step is short, as the source is dry
            state.agenda.feed = False
            feed_trainer(state)
    result = VersionId(formation.step)
    if state.feed.trained < formation.step or state.window.newest != result:
        return False
    if result in state.missing:
        return False  # the final version was lost, and the trainer has to write it again
    if state.evaluation.version is not None or state.evaluation.due is not None or state.trajectories:
        return False  # siblings of a failed group may still be running
    if state.evaluation.wants(result, is_last=True) and state.evaluated != result:
        want_evaluation(state, result)
        start_evaluation(state)
        return True
    if (state.feed.open_step or 0) < formation.step:
        return False  # a restarted trainer has to catch up first: the final checkpoint may be missing
    step, steps = formation.step, state.settings.steps
    state.finished = True
    state.out.append(FinishRun(_reason(step, of=steps)))
    return False


def _reason(step: int, *, of: int) -> str:
    if not of:
        return "the model is evaluated"
    if step < of:
        return f"the prompt source is dry after step {step} of {of}"
    return "the only step is trained" if of == 1 else f"all {of} steps are trained"
