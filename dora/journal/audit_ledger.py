"""The audit of groups, steps and versions: C2 as a ledger, C3, and the version window.

C2: every admitted group is trained exactly once with all its graded siblings, each in exactly one micro-batch, or is
filtered, failed or discarded for a reason that the journal confirms. C3: 0 ≤ step - version ≤ K when a group is
committed, and a step does not close before all groups that are due at it are committed.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

import msgspec

from dora.core import commands as cmd
from dora.core import events as ev
from dora.core.ids import GroupId, TrajectoryId, VersionId, deadline, group_of
from dora.journal.audit_tables import AuditedAnswer, AuditedGroup, AuditedStep, AuditTables

C2_LEDGER: Final = "C2 ledger"
C2_SIBLINGS: Final = "C2 siblings"
C2_MICRO_BATCH: Final = "C2 micro-batch"
C2_DROP: Final = "C2 drop"
C3_COMMIT: Final = "C3 commit"
C3_CLOSE: Final = "C3 close"
VERSIONS: Final = "versions"
EVALUATION: Final = "evaluation"


# -- groups -------------------------------------------------------------------------------------------------------


def _on_prompts_arrived(t: AuditTables, event: ev.PromptsArrived) -> None:
    if event.first != t.num_prompts:
        t.late_completions += 1  # it answers a fetch of an earlier controller
        return
    t.num_prompts += len(event.num_prompt_tokens)
    t.source_dry = event.dry


def _admit_group(t: AuditTables, order: cmd.AdmitGroup) -> None:
    id, version = order.group, order.version
    if id != t.admitted or id >= t.num_prompts:
        t.find(C2_LEDGER, "group", id, f"is admitted, but {t.admitted} is next, of {t.num_prompts} prompts so far")
    if version not in t.stored:
        t.find(VERSIONS, "group", id, f"is admitted at version {version}, which is not in the store")
    last = _last_step(t, version)
    if order.deadline != last or last < t.forming:
        found = f"of version {version} is due at step {last + 1}, not {order.deadline + 1} (forming {t.forming + 1})"
        t.find(C3_COMMIT, "group", id, found)
    t.admitted = max(t.admitted, id + 1)
    t.groups[id] = AuditedGroup(version, last)
    t.untrained[version] += 1
    for trajectory in t.siblings(id):
        t.answers[trajectory] = AuditedAnswer(version)
    _check_window(t)


def _last_step(t: AuditTables, version: VersionId) -> int:
    """Return the last step that may train a group of this version."""
    return deadline(VersionId(version), max_staleness=t.settings.max_lag, steps=t.settings.steps)


def _on_controller_restarted(t: AuditTables, event: ev.ControllerRestarted) -> None:
    if event.steps > t.settings.steps:
        t.settings = msgspec.structs.replace(t.settings, steps=event.steps)
        if not t.settings.rules.bounded:  # all groups are due at the end of the job, which is later now
            for group in t.groups.values():
                group.deadline = _last_step(t, VersionId(group.version))


def _grade_trajectory(t: AuditTables, order: cmd.GradeTrajectory) -> None:
    answer = t.answers.get(order.trajectory)
    if answer is None or not answer.finished or answer.graded:
        t.find(C2_LEDGER, "trajectory", order.trajectory, "is sent to grading, but is not a finished, ungraded answer")
    else:
        answer.grading = order.attempt


def _on_trajectory_graded(t: AuditTables, event: ev.TrajectoryGraded) -> None:
    answer = t.answers.get(event.trajectory)
    if answer is None or answer.graded or answer.grading != event.attempt:
        t.late_completions += 1
        return
    take_reward(t, event.trajectory, answer, event.reward)


def take_reward(t: AuditTables, trajectory: TrajectoryId, answer: AuditedAnswer, reward: float | None) -> None:
    """Add the rewards of the turns to that of grading, in this order; None: the answer gets no reward."""
    answer.graded = True
    answer.reward = reward if reward is None else sum(answer.turn_rewards, reward)
    if trajectory < 0:
        t.evaluated[answer.version] += 1
        del t.answers[trajectory]


def _commit_group(t: AuditTables, order: cmd.CommitGroup) -> None:
    id, staleness = order.group, order.step - order.version
    group = t.groups.get(id)
    if group is None or group.step is not None:
        t.find(C2_LEDGER, "group", id, f"is committed to step {order.step + 1}, but was {_fate_of(t, id)}")
        return
    if group.version != order.version:
        t.find("C1 tag", "group", id, f"is committed as version {order.version}, but its tag is {group.version}")
    if not 0 <= staleness <= t.settings.max_lag:
        found = f"of version {order.version} is committed to step {order.step + 1} with staleness {staleness}"
        t.find(C3_COMMIT, "group", id, found)
    if order.step != t.forming:
        t.find(C3_COMMIT, "group", id, f"is committed to step {order.step + 1} while step {t.forming + 1} is formed")
    ungraded = [s for s in t.siblings(id) if s not in t.answers or not t.answers[s].graded]
    if ungraded:
        t.find(C2_SIBLINGS, "group", id, f"is committed without its siblings {ungraded}, which are not graded")
    t.staleness[staleness] += 1
    group.step = order.step
    step = t.steps.setdefault(order.step, AuditedStep())
    step.groups[id] = len(step.groups)
    step.due.update(s for s in t.siblings(id) if s in t.answers and t.answers[s].reward is not None)


def _drop_group(t: AuditTables, order: cmd.DropGroup) -> None:
    group = t.groups.get(order.group)
    if group is None or group.step is not None:
        t.find(C2_LEDGER, "group", order.group, f"is {order.outcome.value}, but was {_fate_of(t, order.group)}")
        return
    if not _is_confirmed(t, order):
        found = f"is {order.outcome.value} for '{order.reason}', which the journal does not show"
        t.find(C2_DROP, "group", order.group, found)
    t.reasons[order.why] += 1
    _retire(t, order.group, order.outcome.value)


def _fate_of(t: AuditTables, id: GroupId) -> str:
    group = t.groups.get(id)
    if group is not None and group.step is not None:
        return f"committed to step {group.step + 1}"
    return t.outcomes.get(id, "never admitted")


def _is_confirmed(t: AuditTables, order: cmd.DropGroup) -> bool:
    """Return whether the journal confirms the reason: equal rewards, failed grading or generation, or a full step."""
    outcome = order.outcome.value
    if outcome == "discarded":
        step = t.steps.get(t.forming)
        return t.settings.rules.discards and step is not None and len(step.groups) == t.settings.groups_per_step
    answers = [t.answers[s] for s in t.siblings(order.group)]
    if outcome == "failed" and order.reason.startswith("generation: "):
        return any(a.is_given_up for a in answers)
    if not all(a.graded for a in answers) or order.rewards != tuple(a.reward for a in answers):
        return False
    rewards = [a.reward for a in answers if a.reward is not None]
    if outcome == "failed":
        return order.reason == "grading" and len(rewards) < 2
    return t.settings.filter_zero_variance and len(rewards) >= 2 and len(set(rewards)) == 1


def _retire(t: AuditTables, id: GroupId, outcome: str) -> None:
    """Remove a group from the ledger; its running answers are removed when they end."""
    group = t.groups.pop(id)
    t.untrained[group.version] -= 1
    t.outcomes[id] = outcome
    for trajectory in t.siblings(id):
        answer = t.answers.get(trajectory)
        if answer is None:
            continue
        if outcome == "discarded" and not answer.finished:
            t.aborted[trajectory] = answer.num_tokens
        if answer.finished and (outcome != "trained" or answer.reward is not None):
            t.finished_ids.setdefault(outcome, []).append(trajectory)
        if answer.instance is None and answer.calling is None:
            del t.answers[trajectory]


# -- steps --------------------------------------------------------------------------------------------------------


def _close_step(t: AuditTables, order: cmd.CloseStep) -> None:
    step = t.steps.setdefault(order.step, AuditedStep())
    size = len(step.groups)
    unconsumed = {id: g for id, g in t.groups.items() if g.step is None}
    for id, group in unconsumed.items():
        if group.deadline <= order.step:
            found = f"is due at step {group.deadline + 1}, but step {order.step + 1} closes without it"
            t.find(C3_CLOSE, "group", id, found)
    is_last = t.source_dry and not unconsumed and t.admitted == t.num_prompts
    full = t.settings.groups_per_step
    if order.num_groups != size or (size != full and not is_last):
        found = f"closes with {order.num_groups} groups; {size} were committed, and a step has {full}"
        t.find(C3_CLOSE, "step", order.step, found)
    if order.step != t.forming:
        t.find(C3_CLOSE, "step", order.step, f"closes while step {t.forming + 1} is formed")
    step.closed = True
    t.forming = order.step + 1


def _on_trainer_ready(t: AuditTables, event: ev.TrainerReady) -> None:
    if event.step > t.trained_steps:
        found = f"is where the trainer starts, but only {t.trained_steps} steps were trained"
        t.find(C2_LEDGER, "step", event.step, found)
    t.open_step = event.step


def _train_micro_batch(t: AuditTables, order: cmd.TrainMicroBatch) -> None:
    step = t.steps.get(order.step)
    if step is None:
        found = "is fed, but no group was committed to it since the oldest kept checkpoint"
        t.find(C2_MICRO_BATCH, "step", order.step, found)
        return
    if 0 <= order.index < len(step.waves):
        if order != step.waves[order.index]:
            t.find(C2_MICRO_BATCH, "step", order.step, f"micro-batch {order.index} is fed again, and differs")
        return
    if order.index != len(step.waves) or len(order.ranks) != t.settings.num_ranks:
        found = f"micro-batch {order.index} has {len(order.ranks)} ranks or follows a gap"
        t.find(C2_MICRO_BATCH, "step", order.step, found)
    if order.update != sum(wave.closes for wave in step.waves):
        t.find(C2_MICRO_BATCH, "step", order.step, f"micro-batch {order.index} belongs to the wrong update")
    step.waves.append(order)
    for rank in order.ranks:
        for trajectory in rank:
            _feed(t, step, trajectory, order)
    if order.last:
        if not step.closed:
            t.find(C2_MICRO_BATCH, "step", order.step, "gets its last micro-batch before it is closed")
        for trajectory in sorted(step.due):
            found = f"is in no micro-batch of its step {order.step + 1}: not trained"
            t.find(C2_MICRO_BATCH, "trajectory", trajectory, found)
        step.due.clear()


def _feed(t: AuditTables, step: AuditedStep, trajectory: TrajectoryId, order: cmd.TrainMicroBatch) -> None:
    if trajectory in step.due:
        step.due.remove(trajectory)
        step.trajectories.append(trajectory)
    else:
        again = "a second time" if trajectory in step.trajectories else "without being due there"
        t.find(C2_MICRO_BATCH, "trajectory", trajectory, f"is trained in step {order.step + 1} {again}")
    group = group_of(trajectory, group_size=t.settings.group_size)
    if group in step.groups and step.groups[group] // t.settings.groups_per_update != order.update:
        t.find(C2_MICRO_BATCH, "trajectory", trajectory, f"is trained in update {order.update}, which is not its own")


def _on_step_trained(t: AuditTables, event: ev.StepTrained) -> None:
    if event.step != t.open_step:
        t.late_completions += 1
        return
    t.open_step = event.step + 1
    if event.step < t.trained_steps:
        return  # a replay: its groups are already trained
    t.trained_steps = event.step + 1
    step = t.steps.get(event.step)
    if step is None or not step.waves or not step.waves[-1].last:
        t.find(C2_MICRO_BATCH, "step", event.step, "is trained before its last micro-batch was sent")
    for id in step.groups if step is not None else ():
        if id in t.groups:
            _retire(t, id, "trained")


def _drop_checkpoint(t: AuditTables, order: cmd.DropCheckpoint) -> None:
    for old in [s for s in t.steps if s <= order.step]:
        del t.steps[old]


# -- versions and the run -----------------------------------------------------------------------------------------


def _on_version_published(t: AuditTables, event: ev.VersionPublished) -> None:
    if t.newest is not None and event.version <= t.newest:
        return  # a replayed step: the store kept the bytes that were published first
    if event.version != (0 if t.newest is None else t.newest + 1) or event.version > t.trained_steps:
        found = f"is published after {t.newest}, with {t.trained_steps} steps trained"
        t.find(VERSIONS, "version", event.version, found)
    t.newest = event.version
    t.stored.add(event.version)
    _check_window(t)


def _release_version(t: AuditTables, order: cmd.ReleaseVersion) -> None:
    version = order.version
    held = [id for id, i in sorted(t.instances.items()) if version in (*i.pushing.values(), *i.adapters.values())]
    sampled = any(a.version == version for id, a in t.answers.items() if id < 0)
    in_use = (t.untrained[version] and t.settings.rules.in_flight is None) or held or sampled
    if version not in t.stored or version == t.newest or in_use:
        where = f", on instances {', '.join(map(str, held))}" if held else ""
        found = f"is released, but still needed (untrained groups: {t.untrained[version]}{where})"
        t.find(VERSIONS, "version", version, found)
    t.stored.discard(version)


def _check_window(t: AuditTables) -> None:
    """Check that at most K + 1 versions are live: the newest, and those with an untrained group. If the strategy
    updates weights in flight, groups with an old tag keep no version live."""
    live = {v for v in t.untrained if t.untrained[v]} | ({t.newest} if t.newest is not None else set())
    if t.settings.rules.in_flight is not None:
        live = {max(live)}
    if len(live) > max(t.max_live_versions, t.settings.rules.max_staleness + 1):
        t.find(VERSIONS, "version", min(live), f"is the oldest of {len(live)} live versions: more than K + 1")
    t.max_live_versions = max(t.max_live_versions, len(live))


def _report_evaluation(t: AuditTables, order: cmd.ReportEvaluation) -> None:
    samples = len(t.settings.eval_prompt_tokens)
    if t.evaluated[order.version] != samples or order.version in t.reported:
        found = f"is reported with {t.evaluated[order.version]} of {samples} samples"
        t.find(EVALUATION, "version", order.version, found)
    t.reported.add(order.version)


def _finish_run(t: AuditTables, order: cmd.FinishRun) -> None:
    t.end = f"finished: {order.reason}"
    for id, group in t.groups.items():
        t.find(C2_LEDGER, "group", id, f"of version {group.version} was admitted, but is not trained when the run ends")


def _fail_run(t: AuditTables, order: cmd.FailRun) -> None:
    t.end = f"failed: {order.reason}"


HANDLERS: Final[dict[type, Callable[[AuditTables, Any], None]]] = {
    ev.ControllerRestarted: _on_controller_restarted,
    ev.PromptsArrived: _on_prompts_arrived,
    cmd.AdmitGroup: _admit_group,
    cmd.GradeTrajectory: _grade_trajectory,
    ev.TrajectoryGraded: _on_trajectory_graded,
    cmd.CommitGroup: _commit_group,
    cmd.DropGroup: _drop_group,
    cmd.CloseStep: _close_step,
    ev.TrainerReady: _on_trainer_ready,
    cmd.TrainMicroBatch: _train_micro_batch,
    ev.StepTrained: _on_step_trained,
    cmd.DropCheckpoint: _drop_checkpoint,
    ev.VersionPublished: _on_version_published,
    cmd.ReleaseVersion: _release_version,
    cmd.ReportEvaluation: _report_evaluation,
    cmd.FinishRun: _finish_run,
    cmd.FailRun: _fail_run,
}
