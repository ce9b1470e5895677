"""In which order decisions are made: after every fact, bring the tables to rest.

Invariant: settled tables are left alone by a second call at the same time.
"""

from __future__ import annotations

from dora.core.commands import FetchPrompts, FinishRun, ReleaseVersion
from dora.core.dispatch import fill, start_evaluation
from dora.core.ids import GroupId, VersionId
from dora.core.moves import dismiss
from dora.core.repartition import consolidate, place
from dora.core.state import State
from dora.core.steps import close, feed_trainer, form


def settle(state: State) -> None:
    """Make every decision that is due, in this order."""
    agenda = state.agenda
    while True:
        if agenda.take_form():
            form(state)
        if agenda.take_feed():
            feed_trainer(state)
        if state.evaluation.due:
            start_evaluation(state)
        while agenda.wants_slots:
            while (version := agenda.take_fill()) is not None:
                fill(state, version)
            if agenda.take_place():
                place(state)
        if agenda.take_repack(state.now):
            consolidate(state)
        if agenda.take_release():
            _release(state)
        if state.leaving:
            dismiss(state)
        if not state.fetching and len(state.prompts) < state.settings.groups_per_step:
            _fetch(state)
        is_last = state.source_dry or state.formation.step >= state.settings.steps
        if not (is_last and _conclude(state)):
            return


def _release(state: State) -> None:
    """Let go of the versions that nothing needs."""
    for version in state.window.releasable():
        del state.window.entries[version]
        state.out.append(ReleaseVersion(version))


def _fetch(state: State) -> None:
    """Ask for prompts, for two steps at most."""
    if state.source_dry or state.finished:
        return
    state.fetching = True
    first = GroupId(state.next_group + len(state.prompts))
    state.out.append(FetchPrompts(first, 2 * state.settings.groups_per_step - len(state.prompts)))


def _conclude(state: State) -> bool:
    """End the job once everything admitted is trained, published and evaluated; True if it began an evaluation."""
    formation = state.formation
    if formation.num_unconsumed or state.finished:
        return False
    if formation.step < state.settings.steps:
        if state.prompts or not state.source_dry:
            return False
        if formation.committed:
            close(state)  # the source is dry: the last step is short
            if state.agenda.take_feed():
                feed_trainer(state)
    result = VersionId(formation.step)
    if state.feed.trained < formation.step or state.window.newest != result:
        return False
    if result in state.missing:
        return False  # the result was lost: it is made again first
    if state.evaluation.version is not None or state.evaluation.due or state.trajectories:
        return False  # (a sibling of a failed group may still be on its way out)
    if state.evaluation.wants(result, is_last=True) and state.evaluated != result:
        state.evaluation.want(result)
        start_evaluation(state)
        return True
    if (state.feed.open_step or 0) < formation.step:
        return False  # a trainer that started again has to get there again: the result's checkpoint may be missing
    _finish(state)
    return False


def _finish(state: State) -> None:
    step, steps = state.formation.step, state.settings.steps
    state.finished = True
    dry = f"the prompt source is dry after step {step} of {steps}"
    state.out.append(FinishRun(f"all {step} steps are trained" if step == steps else dry))
