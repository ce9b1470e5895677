"""Handlers of events of the trainer and the version store."""

from __future__ import annotations

from typing import Final

from dora.core import events as ev
from dora.core.commands import DropCheckpoint, RestartTrainer
from dora.core.dispatch import want_evaluation
from dora.core.ids import StepId
from dora.core.pushes import carry_over
from dora.core.state import State, admissions_changed, fail
from dora.core.steps import step_trained
from dora.core.versions import digest_of

#: Pauses before the ranks are started again, by the number of starts lost without a newly trained step: the first is
#: short, as most losses are of one process; one more loss ends the run, which can be resumed.
RESTART_PAUSES_S: Final = (0.0, 5.0, 15.0, 30.0)


def on_trainer_ready(state: State, event: ev.TrainerReady) -> None:
    if event.step > state.formation.step:
        fail(state, f"the trainer starts at step {event.step + 1}, but only {state.formation.step} steps are closed")
        return
    if event.step < min(state.feed.checkpoints):
        oldest = min(state.feed.checkpoints)
        kept = f"what it would train again is kept from step {oldest + 1} on"
        fail(state, f"the trainer starts at step {event.step + 1}, but {kept}")
        return
    while state.feed.trained < event.step:
        step_trained(state, state.feed.trained)  # its event was lost with an earlier controller
    state.feed.restart(event.step)
    state.agenda.feed = True
    state.feed.idle_since = state.now


def on_trainer_lost(state: State, event: ev.TrainerLost) -> None:
    feed = state.feed
    if event.incarnation != feed.incarnation:
        state.counters.late_completions += 1
        return
    feed.lost()
    state.counters.trainer_losses += 1
    state.progress_at = state.now
    if state.stopping:
        return
    if feed.losses > len(RESTART_PAUSES_S):
        state.stalled = True
        fail(state, f"the trainer was lost {feed.losses} times without training a step: {event.reason}")
        return
    state.out.append(RestartTrainer(feed.incarnation, RESTART_PAUSES_S[feed.losses - 1]))


def on_micro_batch_trained(state: State, event: ev.MicroBatchTrained) -> None:
    feed = state.feed
    if event.step != feed.open_step or event.index != feed.waves_done:
        state.counters.late_completions += 1
        return
    step = feed.steps.get(event.step)
    if step is None or event.index >= len(step.waves):
        fail(state, f"the trainer says that it trained micro-batch {event.index} of step {event.step + 1}: it has none")
        return
    feed.uneven_s += step.slack[feed.waves_done] * (state.now - feed.busy_since)
    feed.busy_since = state.now
    feed.waves_done += 1
    state.agenda.feed = True
    state.progress_at = state.now
    if feed.waves_done == step.sent and not step.waves[-1].last:
        feed.idle_since = state.now


def on_step_trained(state: State, event: ev.StepTrained) -> None:
    feed = state.feed
    if event.step != feed.open_step:
        state.counters.late_completions += 1
        return
    feed.open_step = StepId(event.step + 1)
    feed.waves_done = 0
    state.progress_at = state.now
    feed.idle_since = state.now
    state.agenda.feed = True
    if event.step == feed.trained:  # else it was trained again, and its groups have left the ledger
        step_trained(state, event.step)


def on_version_published(state: State, event: ev.VersionPublished) -> None:
    state.missing.discard(event.version)
    if state.window.newest is not None and event.version <= state.window.newest:
        return  # the step was trained again; the store keeps the bytes published first
    state.window.publish(event.version, digest=digest_of(event.files))
    if state.settings.rules.in_flight is not None:
        carry_over(state, event.version)
    if state.evaluation.wants(event.version, is_last=event.version == state.settings.steps):
        want_evaluation(state, event.version)
    state.agenda.release = True
    admissions_changed(state)


def on_checkpoint_saved(state: State, event: ev.CheckpointSaved) -> None:
    state.agenda.at_rest = True
    for step, folder in state.feed.checkpointed(event.step, event.folder):
        if folder:
            state.out.append(DropCheckpoint(step, folder))
