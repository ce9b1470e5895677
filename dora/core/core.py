"""`handle(state, event) -> commands`: the only function that changes the state.

The event's handler updates the tables; then `decide.settle` makes the decisions that are due. The controller, the
simulator, replay and the audit all drive this function.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

from dora.core import events as ev
from dora.core import on_calls, on_instances, on_requests, on_run, on_training, on_users
from dora.core.commands import Command
from dora.core.decide import settle
from dora.core.excerpt import lines_of
from dora.core.state import State
from dora.errors import InvariantViolation


def handle(state: State, event: ev.Event) -> list[Command]:
    """Process one event and return the commands that it leads to, in order.

    InvariantViolation if it breaks an invariant; its excerpt is this event with the commands up to then.
    """
    if isinstance(event, ev.ControllerRestarted) and (state.stalled or event.steps > state.settings.steps):
        state.finished = state.stalled = False
    out = state.out = []
    if state.finished and not isinstance(event, ev.CheckpointSaved):  # the last checkpoint may be saved after the end
        if isinstance(event, ev.UserRequest):
            on_users.refuse(state, event, ev.ENDED)
        return out
    state.now = event.at
    state.cause = kind = type(event)
    state.agenda.at_rest = False
    try:
        HANDLERS[kind](state, event)
        if not state.agenda.at_rest:
            settle(state)
    except InvariantViolation as err:
        err.excerpt = tuple(lines_of(event, out))
        raise
    return out


HANDLERS: Final[dict[type[ev.Event], Callable[[State, Any], None]]] = {
    ev.InstanceUp: on_instances.on_instance_up,
    ev.InstanceLost: on_instances.on_instance_lost,
    ev.InstanceRemoved: on_instances.on_instance_removed,
    ev.ProgressReported: on_instances.on_progress_reported,
    ev.PrefillReported: on_instances.on_prefill_reported,
    ev.KvPressureReported: on_instances.on_kv_pressure_reported,
    ev.WeightPushFinished: on_instances.on_weight_push_finished,
    ev.WeightPushFailed: on_instances.on_weight_push_failed,
    ev.VersionUnloaded: on_instances.on_version_unloaded,
    ev.VersionUnloadFailed: on_instances.on_version_unload_failed,
    ev.PromptsArrived: on_requests.on_prompts_arrived,
    ev.GenerationFinished: on_requests.on_generation_finished,
    ev.GenerationStopped: on_requests.on_generation_stopped,
    ev.GenerationFailed: on_requests.on_generation_failed,
    ev.CallStarted: on_calls.on_call_started,
    ev.CallFinished: on_calls.on_call_finished,
    ev.TrajectoryGraded: on_requests.on_trajectory_graded,
    ev.TrainerReady: on_training.on_trainer_ready,
    ev.TrainerLost: on_training.on_trainer_lost,
    ev.MicroBatchTrained: on_training.on_micro_batch_trained,
    ev.StepTrained: on_training.on_step_trained,
    ev.VersionPublished: on_training.on_version_published,
    ev.CheckpointSaved: on_training.on_checkpoint_saved,
    ev.InstanceDrainRequested: on_users.on_user_request,
    ev.InstanceRecalled: on_users.on_user_request,
    ev.ServerOffered: on_users.on_user_request,
    ev.EvaluationRequested: on_users.on_user_request,
    ev.StopRequested: on_users.on_user_request,
    ev.Ticked: on_run.on_ticked,
    ev.ControllerRestarted: on_run.on_controller_restarted,
}
