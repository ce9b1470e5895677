"""The audit of calls of environments: the part of C2 by which a call is made at most once.

The intent of a call, the CallStarted with which a turn ended, is in the journal before the call is ordered; the call
for the own prompt of a trajectory, before all turns, needs none. A call is ordered once, and once more only if a new
controller reports that the environment can be replayed. No turn or grading begins while a call is under way, and the
tokens that a call appends follow all tokens known before. Replays are counted.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

from dora.core import commands as cmd
from dora.core import events as ev
from dora.core.ids import TrajectoryId
from dora.journal.audit_fleet import answer_of, check_spans, end_request, take_count
from dora.journal.audit_ledger import take_reward
from dora.journal.audit_tables import AuditedAnswer, AuditTables

C2_CALLS: Final = "C2 calls"


def _on_call_started(t: AuditTables, event: ev.CallStarted) -> None:
    answer = end_request(t, event)
    if answer is not None:
        check_spans(t, event.trajectory, answer, event.spans)
        answer.intent = t.is_wanted(event.trajectory)


def _call_environment(t: AuditTables, order: cmd.CallEnvironment) -> None:
    answer = answer_of(t, order.trajectory)
    if answer is None or not (answer.intent or _has_no_prompt(t, answer)):
        found = f"calls its environment (attempt {order.attempt}) without an intent in the journal"
        t.find(C2_CALLS, "trajectory", order.trajectory, found)
    if answer is not None:
        answer.intent = False
        answer.calling = order.attempt


def _has_no_prompt(t: AuditTables, answer: AuditedAnswer) -> bool:
    """Whether the first call is due, which returns the trajectory's own prompt."""
    is_begun = answer.num_tokens or answer.calling is not None or answer.finished
    return t.settings.own_prompts and not is_begun


def _on_call_finished(t: AuditTables, event: ev.CallFinished) -> None:
    answer = t.answers.get(event.trajectory)
    if answer is None or answer.calling is None or answer.calling != event.attempt:
        t.late_completions += 1
        return
    answer.calling = None
    if answer.num_tokens or not t.settings.own_prompts:  # else it was the call for its prompt
        answer.turn_rewards.append(event.reward)
    t.episode_replays += event.replays
    take_count(t, event.trajectory, answer, event.num_tokens)
    if not t.is_wanted(event.trajectory):
        _forget(t, event.trajectory, answer)
    elif event.failed:
        _fail(t, event.trajectory, answer)
    elif event.ended:
        answer.finished = True
        t.mixed_answers += answer.mixed
        t.lengths[event.trajectory] = event.num_tokens
        if event.graded:
            take_reward(t, event.trajectory, answer, 0.0)


def _on_controller_restarted(t: AuditTables, event: ev.ControllerRestarted) -> None:
    for trajectory, answer in [(id, a) for id, a in t.answers.items() if a.calling is not None]:
        answer.calling = None
        if not t.is_wanted(trajectory):
            _forget(t, trajectory, answer)
        elif trajectory in event.replayable:
            answer.intent = True
        else:
            _fail(t, trajectory, answer)


def _fail(t: AuditTables, trajectory: TrajectoryId, answer: AuditedAnswer) -> None:
    """Count an answer as graded without a reward, because its environment failed."""
    t.environment_failed += 1
    take_reward(t, trajectory, answer, None)


def _forget(t: AuditTables, trajectory: TrajectoryId, answer: AuditedAnswer) -> None:
    if trajectory in t.aborted:
        t.aborted[trajectory] = answer.num_tokens
    del t.answers[trajectory]


HANDLERS: Final[dict[type, Callable[[AuditTables, Any], None]]] = {
    ev.CallStarted: _on_call_started,
    cmd.CallEnvironment: _call_environment,
    ev.CallFinished: _on_call_finished,
    ev.ControllerRestarted: _on_controller_restarted,
}
