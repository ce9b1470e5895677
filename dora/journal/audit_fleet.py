"""The audit of servers and answers: C1, and the part of C2 that counts tokens.

C1: a request is sent only to an instance that has the version of its tag, by a confirmed push or because it was taken
over with a label that names the journaled bytes; weights are pushed only to an empty instance; and the server's spans
report the tag's version for every token. An adapter is loaded beside others, under a name that was not used before, and
unloaded when no answer of its version is unfinished. If the strategy updates weights in flight, versions may only rise
within an attempt, and answers that mix versions are counted. C2: an attempt begins with all known tokens, no token is
lost, and all attempts share one token budget. Between two attempts a call may add tokens that no version sampled
(audit_calls.py). Drain: a drained instance gets no work, and no instance is dismissed while a request runs on it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Final

from dora.core import commands as cmd
from dora.core import events as ev
from dora.core.ids import InstanceId, TrajectoryId, evaluation_index
from dora.core.versions import digest_of
from dora.journal.audit_tables import NO_END, AuditedAnswer, AuditedInstance, AuditTables

C1_SPANS: Final = "C1 spans"
C1_SERVING: Final = "C1 serving"
C1_TAG: Final = "C1 tag"
C2_TOKENS: Final = "C2 tokens"
C2_BUDGET: Final = "C2 budget"
DRAIN: Final = "drain"


# -- servers ------------------------------------------------------------------------------------------------------


def _on_instance_up(t: AuditTables, event: ev.InstanceUp) -> None:
    if event.instance in t.removed or event.incarnation <= t.instance(event.instance).incarnation:
        t.late_completions += 1
        return
    instance = t.instance(event.instance)
    instance.incarnation = event.incarnation
    instance.up = True
    instance.holds = _taken_over(t, event) if event.version is not None else set()


def _taken_over(t: AuditTables, event: ev.InstanceUp) -> set[int]:
    """Return the version with which a server was taken over, if it is needed and was published with these bytes.

    With adapters there is none, because it is not known which loads they came from.
    """
    assert event.version is not None
    files = t.published.get(event.version)
    journaled = digest_of(files) if files is not None else None
    if event.digest != journaled:
        known = f"it was published with '{journaled}'" if journaled is not None else "it was never published"
        found = f"is taken over with version {event.version} and digest '{event.digest}', but {known}"
        t.find(C1_SERVING, "instance", event.instance, found)
        return set()
    return t.stored & {event.version} if not t.settings.adapters else set()


def _on_instance_lost(t: AuditTables, event: ev.InstanceLost) -> None:
    instance = t.instance(event.instance)
    if not instance.up or event.incarnation != instance.incarnation:
        t.late_completions += 1
        return
    _lose(t, instance, event.num_tokens)


def _on_instance_drain_requested(t: AuditTables, event: ev.InstanceDrainRequested) -> None:
    instance = t.instance(event.instance)
    instance.was_barred, instance.barred = instance.barred, True


def _on_instance_recalled(t: AuditTables, event: ev.InstanceRecalled) -> None:
    instance = t.instance(event.instance)
    instance.was_barred, instance.barred = instance.barred, False


def _refuse_request(t: AuditTables, order: cmd.RefuseRequest) -> None:
    if order.instance is not None:
        t.instance(order.instance).barred = t.instance(order.instance).was_barred


def _dismiss_instance(t: AuditTables, order: cmd.DismissInstance) -> None:
    for trajectory in sorted(t.instance(order.instance).residents):
        t.find(DRAIN, "trajectory", trajectory, f"runs on instance {order.instance}, which is dismissed")


def _on_instance_removed(t: AuditTables, event: ev.InstanceRemoved) -> None:
    instance = t.instances.pop(event.instance, None)
    if instance is None:
        t.late_completions += 1
        return
    if instance.up:
        _lose(t, instance, {})
    t.removed.add(event.instance)


def _on_controller_restarted(t: AuditTables, event: ev.ControllerRestarted) -> None:
    t.restarts += 1
    t.end = NO_END
    t.open_step = None
    t.num_prompts, t.source_dry = t.admitted, False  # prompts are read again from the cursor
    for instance in t.instances.values():
        residents = [*instance.residents]
        _lose(t, instance, event.num_tokens)
        for trajectory in residents:
            if (answer := t.answers.get(trajectory)) is not None:
                answer.recovering = False  # nothing was lost: a new controller continues the run
        instance.barred = False
    t.removed.clear()
    for trajectory, num_tokens in event.num_tokens.items():
        answer = answer_of(t, trajectory)
        if answer is not None and not answer.finished and answer.calling is None:
            take_count(t, trajectory, answer, num_tokens)


def _lose(t: AuditTables, instance: AuditedInstance, num_tokens: dict[TrajectoryId, int]) -> None:
    instance.up = False
    instance.holds = set()
    for table in (instance.pushing, instance.adapters, instance.unloading):
        table.clear()
    for trajectory in sorted(instance.residents):
        answer = t.answers.get(trajectory)
        if answer is not None:
            take_count(t, trajectory, answer, num_tokens.get(trajectory, answer.num_tokens))
            _leave(t, trajectory, answer)
            answer.recovering = True
    instance.residents.clear()


def _push_weights(t: AuditTables, order: cmd.PushWeights) -> None:
    instance = t.instance(order.instance)
    pinned = [id for id in instance.residents if id < 0 or t.settings.rules.in_flight is None]
    if t.settings.adapters:
        _load_adapter(t, instance, order)
    elif pinned:
        some = min(pinned)
        tag = f" of version {t.answers[some].version}" if some in t.answers else ""
        found = f"is given version {order.version} while trajectory {some}{tag} runs on it"
        t.find(C1_SERVING, "instance", order.instance, found)
    if order.version not in t.stored:
        t.find("versions", "version", order.version, f"is pushed to instance {order.instance}, but not in the store")
    if instance.barred:
        t.find(DRAIN, "instance", order.instance, f"is given version {order.version} although it was drained")
    if not t.settings.adapters:
        instance.holds = set()
        instance.pushing.clear()
    instance.pushing[order.attempt] = order.version


def _load_adapter(t: AuditTables, instance: AuditedInstance, order: cmd.PushWeights) -> None:
    """Check the load of an adapter beside others."""
    found = f"is given version {order.version}"
    if order.version in instance.adapters.values():
        t.find(C1_SERVING, "instance", order.instance, f"{found}, which it has or may have already")
    if len(instance.adapters) >= t.settings.num_holdings:
        t.find(C1_SERVING, "instance", order.instance, f"{found} beside {len(instance.adapters)} others")
    _name(t, instance, order, f"{found} as load {order.attempt}")
    instance.adapters[order.attempt] = order.version


def _name(t: AuditTables, instance: AuditedInstance, order: cmd.PushWeights | cmd.UnloadVersion, found: str) -> None:
    """Check that no other load or unload of the server had this attempt: its name is made of it."""
    if order.attempt <= instance.attempt:
        t.find(C1_SERVING, "instance", order.instance, f"{found}, but that name was used before")
    instance.attempt = max(instance.attempt, order.attempt)


def _on_weight_push_finished(t: AuditTables, event: ev.WeightPushFinished) -> None:
    instance = t.instance(event.instance)
    version = instance.pushing.pop(event.attempt, None)
    if version is None:
        t.late_completions += 1
    elif version == event.version:  # else the push has failed
        instance.holds.add(version)
        instance.proved.add(event.attempt)
        t.proofs += t.settings.adapters


def _on_weight_push_failed(t: AuditTables, event: ev.WeightPushFailed) -> None:
    instance = t.instance(event.instance)
    if instance.pushing.pop(event.attempt, None) is None:
        t.late_completions += 1


def _unload_version(t: AuditTables, order: cmd.UnloadVersion) -> None:
    instance = t.instance(order.instance)
    found = f"unloads version {order.version}"
    unfinished = [id for id, a in t.answers.items() if a.version == order.version and not (a.finished or a.graded)]
    users = [id for id in unfinished if id in instance.residents]
    needed = [id for id in unfinished if t.is_wanted(id)] if order.version in instance.holds else []
    if users:
        t.find(C1_SERVING, "instance", order.instance, f"{found} while trajectory {min(users)} runs on it")
    elif needed:
        t.find(C1_SERVING, "instance", order.instance, f"{found} while trajectory {min(needed)} is unfinished")
    is_busy = order.load in instance.pushing or order.load in instance.unloading.values()
    if instance.adapters.get(order.load) != order.version or is_busy:
        found_load = "is under way" if is_busy else "has another version or is unknown"
        t.find(C1_SERVING, "instance", order.instance, f"{found}, but its load {order.load} {found_load}")
    _name(t, instance, order, f"{found} as attempt {order.attempt}")
    instance.holds.discard(order.version)
    instance.unloading[order.attempt] = order.load


def _on_version_unloaded(t: AuditTables, event: ev.VersionUnloaded) -> None:
    instance = t.instance(event.instance)
    load = instance.unloading.pop(event.attempt, None)
    if load is None:
        t.late_completions += 1
        return
    instance.adapters.pop(load, None)
    t.proofs += load in instance.proved
    instance.proved.discard(load)


def _on_version_unload_failed(t: AuditTables, event: ev.VersionUnloadFailed) -> None:
    instance = t.instance(event.instance)
    load = instance.unloading.pop(event.attempt, None)
    if load is None:
        t.late_completions += 1
    elif event.disproved:
        instance.proved.discard(load)  # what unloads it next asks for no proof
        found = f"answered under version {instance.adapters.get(load)} from another adapter: {event.reason}"
        t.find(C1_SERVING, "instance", event.instance, found)


# -- answers ------------------------------------------------------------------------------------------------------


def _generate(t: AuditTables, order: cmd.Generate) -> None:
    id = order.trajectory
    answer = answer_of(t, id)
    if answer is None:
        t.find("C2 ledger", "trajectory", id, "is generated, but belongs to no admitted group")
        return
    instance = t.instance(order.instance)
    carried_over = t.settings.rules.in_flight is not None and id >= 0 and order.version > answer.version
    if order.version != answer.version and not carried_over:
        t.find(C1_TAG, "trajectory", id, f"is to be generated by version {order.version}, its tag is {answer.version}")
    if order.version not in instance.holds:
        held = f"version {', '.join(map(str, sorted(instance.holds)))}" if instance.holds else "no confirmed version"
        found = f"of version {order.version} goes to instance {order.instance}, which holds {held}"
        t.find(C1_SERVING, "trajectory", id, found)
    if instance.barred:
        t.find(DRAIN, "trajectory", id, f"goes to instance {order.instance}, which was drained")
    if t.settings.own_prompts and not order.num_tokens:
        t.find(C2_TOKENS, "trajectory", id, "is generated without the prompt that its environment is to return")
    if order.num_tokens != answer.num_tokens:
        begin = f"continues from {order.num_tokens} tokens (attempt {order.attempt})"
        t.find(C2_TOKENS, "trajectory", id, f"{begin}, but {answer.num_tokens} are known: a scheduling abort")
    if order.num_tokens > t.settings.max_new_tokens:  # at the budget the answer is complete
        t.find(C2_BUDGET, "trajectory", id, f"continues with {order.num_tokens} tokens, more than its budget")
    if answer.instance is not None or answer.finished or answer.calling is not None:
        where = f"still runs on instance {answer.instance}" if answer.instance is not None else "its call is under way"
        where = "is finished" if answer.finished else where
        t.find(C2_TOKENS, "trajectory", id, f"is started on instance {order.instance}, but {where}")
    _count_resumption(t, id, answer, order.instance)
    if answer.instance is not None:
        t.instance(answer.instance).residents.discard(id)
    answer.attempt = order.attempt
    answer.instance = order.instance
    answer.started_from = order.num_tokens
    instance.residents.add(id)


def answer_of(t: AuditTables, id: TrajectoryId) -> AuditedAnswer | None:
    """Return the entry of a trajectory; an evaluation sample gets an entry when it first appears."""
    samples = len(t.settings.eval_prompt_tokens)
    if id < 0 and samples and id not in t.answers and id not in t.lengths:
        t.answers[id] = AuditedAnswer(evaluation_index(id, num_samples=samples)[0])
    return t.answers.get(id)


def _count_resumption(t: AuditTables, id: TrajectoryId, answer: AuditedAnswer, instance: InstanceId) -> None:
    """Count a migration (the controller stopped the answer, which continues elsewhere) or a recovery (after a loss)."""
    if answer.recovering:
        t.recovered += 1
    elif answer.left is not None and answer.left != instance:
        t.migrations += 1
    answer.recovering = False
    answer.left = None


def _on_progress_reported(t: AuditTables, event: ev.ProgressReported) -> None:
    residents = t.instance(event.instance).residents
    for trajectory, num_tokens in event.num_tokens.items():
        if trajectory in residents:
            answer = t.answers[trajectory]
            answer.num_tokens = max(answer.num_tokens, num_tokens)


def _on_generation_finished(t: AuditTables, event: ev.GenerationFinished) -> None:
    answer = end_request(t, event)
    if answer is None:
        return
    check_spans(t, event.trajectory, answer, event.spans)
    answer.finished = True
    t.mixed_answers += answer.mixed
    t.lengths[event.trajectory] = event.num_tokens


def _on_generation_stopped(t: AuditTables, event: ev.GenerationStopped) -> None:
    instance = t.answers[event.trajectory].instance if event.trajectory in t.answers else None
    answer = end_request(t, event)
    if answer is not None:
        check_spans(t, event.trajectory, answer, event.spans)
        answer.left = instance


def _on_generation_failed(t: AuditTables, event: ev.GenerationFailed) -> None:
    answer = end_request(t, event)
    if answer is None:
        return
    if event.server_gone:
        answer.recovering = True
    else:
        answer.failures += 1
    answer.is_given_up = event.final or answer.failures >= t.settings.max_attempts
    if event.trajectory < 0 and answer.is_given_up:
        t.evaluated[answer.version] += 1  # the sample counts as not graded
        del t.answers[event.trajectory]


def end_request(
    t: AuditTables, event: ev.GenerationFinished | ev.GenerationStopped | ev.GenerationFailed | ev.CallStarted
) -> AuditedAnswer | None:
    """End the request; None if this completion is late."""
    answer = t.answers.get(event.trajectory)
    if answer is None or answer.instance is None or answer.attempt != event.attempt:
        t.late_completions += 1
        return None
    take_count(t, event.trajectory, answer, event.num_tokens)
    t.instance(answer.instance).residents.discard(event.trajectory)
    _leave(t, event.trajectory, answer)
    return answer


def _leave(t: AuditTables, trajectory: TrajectoryId, answer: AuditedAnswer) -> None:
    """Mark an answer as not resident, and delete it if its group is gone."""
    answer.instance = None
    if trajectory in t.aborted:
        t.aborted[trajectory] = answer.num_tokens
    if not t.is_wanted(trajectory):
        del t.answers[trajectory]


def take_count(t: AuditTables, trajectory: TrajectoryId, answer: AuditedAnswer, num_tokens: int) -> None:
    """Check that no token is lost and that the budget is kept."""
    if num_tokens < answer.num_tokens:
        lost = answer.num_tokens - num_tokens
        t.find(C2_TOKENS, "trajectory", trajectory, f"had {answer.num_tokens} tokens, {lost} of them are lost")
    if num_tokens > t.settings.max_new_tokens:
        found = f"has {num_tokens} tokens over all attempts, but the budget is {t.settings.max_new_tokens}"
        t.find(C2_BUDGET, "trajectory", trajectory, found)
    answer.num_tokens = num_tokens


def check_spans(t: AuditTables, trajectory: TrajectoryId, answer: AuditedAnswer, spans: Sequence[ev.Span]) -> None:
    """Check C1: the spans cover the attempt's tokens without a gap, with the tag's version or, if the strategy updates
    weights in flight, with versions that never fall."""
    position, least, most = answer.started_from, answer.version, answer.version
    if t.settings.rules.in_flight is not None and trajectory >= 0 and t.newest is not None:
        most = t.newest
    for version, start, end in spans:
        if start != position or end < start:
            gap = f"attempt {answer.attempt}: a span from {start} to {end} follows token {position}"
            t.find(C1_SPANS, "trajectory", trajectory, gap)
        position = end
        if least <= version <= most:
            answer.mixed |= version != answer.version
            least = version
        else:
            source = f"tokens {start} to {end} of attempt {answer.attempt} came from version {version}"
            t.find(C1_SPANS, "trajectory", trajectory, f"{source}, but its tag is {answer.version}")
    if position != answer.num_tokens:
        covered, produced = position - answer.started_from, answer.num_tokens - answer.started_from
        found = f"attempt {answer.attempt} produced {produced} tokens, but its spans cover {covered}"
        t.find(C1_SPANS, "trajectory", trajectory, found)


HANDLERS: Final[dict[type, Callable[[AuditTables, Any], None]]] = {
    ev.InstanceUp: _on_instance_up,
    ev.InstanceLost: _on_instance_lost,
    ev.ControllerRestarted: _on_controller_restarted,
    ev.InstanceDrainRequested: _on_instance_drain_requested,
    ev.InstanceRecalled: _on_instance_recalled,
    cmd.RefuseRequest: _refuse_request,
    cmd.DismissInstance: _dismiss_instance,
    ev.InstanceRemoved: _on_instance_removed,
    cmd.PushWeights: _push_weights,
    ev.WeightPushFinished: _on_weight_push_finished,
    ev.WeightPushFailed: _on_weight_push_failed,
    cmd.UnloadVersion: _unload_version,
    ev.VersionUnloaded: _on_version_unloaded,
    ev.VersionUnloadFailed: _on_version_unload_failed,
    cmd.Generate: _generate,
    ev.ProgressReported: _on_progress_reported,
    ev.GenerationFinished: _on_generation_finished,
    ev.GenerationStopped: _on_generation_stopped,
    ev.GenerationFailed: _on_generation_failed,
}
