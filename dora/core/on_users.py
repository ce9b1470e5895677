"""The handler of what users ask for.

Invariant: a request is granted, or refused with one reason and without an effect. What comes again under the same id is
refused, also by the next controller.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

from dora.core import events as ev
from dora.core.commands import RefuseRequest, StopRun
from dora.core.dispatch import want_evaluation
from dora.core.moves import drain, recall
from dora.core.phases import Membership
from dora.core.state import State

_STOPPING: Final = "the run is being stopped: nothing was changed"
_KNOWN: Final = "this request was answered before: nothing was changed again"
_NO_INSTANCE: Final = "there is no such instance, or it has not come up yet"


def on_user_request(state: State, event: ev.UserRequest) -> None:
    """Grant or refuse a request."""
    if state.stopping:
        refuse(state, event, _STOPPING)
    elif event.request.id and event.request.id in state.requests:
        refuse(state, event, _KNOWN)
    else:
        if event.request.id:
            state.requests.append(event.request.id)
        if reason := _GRANT[type(event)](state, event):
            refuse(state, event, reason)


def refuse(state: State, event: ev.UserRequest, reason: str) -> None:
    """Refuse a request."""
    instance = getattr(event, "instance", None)
    state.out.append(RefuseRequest(instance, reason if instance is None else f"instance {instance}: {reason}"))
    state.agenda.at_rest = True


def _drain(state: State, event: ev.InstanceDrainRequested) -> str:
    instance = state.instances.get(event.instance)
    if instance is None:
        return _NO_INSTANCE
    if instance.is_member and state.num_up - (not instance.is_lost) < 1:
        return "no other instance is there to take its work; add one first"
    if instance.is_member:
        drain(state, instance)
    if event.leave and instance.membership is Membership.DRAINED:
        instance.change(Membership.LEAVING, state.cause)
        state.leaving[instance.id] = instance
    return ""


def _recall(state: State, event: ev.InstanceRecalled) -> str:
    instance = state.instances.get(event.instance)
    if instance is None:
        return _NO_INSTANCE
    if instance.is_member:
        return "it takes part already"
    if instance.membership is Membership.DISMISSED:
        return "it is leaving the run just now"
    recall(state, instance)
    return ""


def _add(state: State, event: ev.ServerOffered) -> str:
    """It takes part from its InstanceUp on."""
    return ""


def _evaluate(state: State, event: ev.EvaluationRequested) -> str:
    evaluation, newest = state.evaluation, state.window.newest
    if not evaluation.prompt_tokens:
        return "the run has no held-out set (eval.sets)"
    if newest is None:
        return "no version is published yet"
    if newest in (evaluation.version, evaluation.due):
        return f"version {newest} is being evaluated, or is next"
    if newest == state.evaluated:
        return f"version {newest}, the newest, is evaluated already"
    want_evaluation(state, newest)
    return ""


def _stop(state: State, event: ev.StopRequested) -> str:
    state.stopping = True
    state.out.append(StopRun())
    return ""


#: What a request changes; returns why it is refused, or "".
_GRANT: Final[dict[type[ev.UserRequest], Callable[[State, Any], str]]] = {
    ev.InstanceDrainRequested: _drain,
    ev.InstanceRecalled: _recall,
    ev.ServerOffered: _add,
    ev.EvaluationRequested: _evaluate,
    ev.StopRequested: _stop,
}
