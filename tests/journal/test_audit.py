"""The audit finds nothing in real journals, and in altered ones it finds every alteration and names the id."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest

from dora.core import commands as cmd
from dora.core import events as ev
from dora.core.core import handle
from dora.core.ids import GroupId, InstanceId
from dora.core.phases import GroupPhase
from dora.core.versions import digest_of
from dora.journal.audit import audit, audit_entries
from dora.journal.audit_report import render
from dora.journal.reader import Journal
from dora.journal.replay import replay
from dora.journal.run_folder import RunFolder
from dora.journal.tokens import TokenWriter
from tests.core.builders import PROMPT, Core, generate, packing, started, stop
from tests.core.world import Faults, World, run
from tests.journal.recorded import (
    RECORDS_PER_FRAME,
    Entries,
    first_command,
    first_event,
    full_run,
    new_folder,
    with_command,
    with_commands,
    with_event,
    without_command,
    write,
)

#: "rule: id" -> messages, of every violation.
Found = Callable[[Entries], dict[str, str]]


@pytest.fixture(scope="module")
def world() -> World:
    return full_run()


@pytest.fixture
def entries(world: World) -> Entries:
    return list(world.journal)


@pytest.fixture
def folder(tmp_path: Path) -> RunFolder:
    return new_folder(tmp_path)


@pytest.fixture
def found(folder: RunFolder, world: World) -> Found:
    """Audit entries as a run folder on disk."""

    def find(entries: Entries) -> dict[str, str]:
        folder.journal.unlink(missing_ok=True)
        written = write(folder, world.settings, entries, with_tokens=False)
        report = audit_entries(world.settings, Journal(written.journal))
        assert not report.ok
        assert f"VIOLATION {report.violations[0].rule}: {report.violations[0].id}" in render(report)
        messages: dict[str, str] = {}
        for v in report.violations:
            key = f"{v.rule}: {v.id}"
            messages[key] = f"{messages[key]}; {v.message}" if key in messages else v.message
        return messages

    return find


# -- what really happened -------------------------------------------------------------------------------------------


def test_a_real_journal_is_clean_and_its_counts_are_those_of_the_core(
    world: World, entries: Entries, folder: RunFolder
) -> None:
    report = audit(write(folder, world.settings, entries))
    assert report.violations == ()
    counters, ledger = world.state.counters, world.state.ledger
    assert report.migrations == counters.migrations > 0
    assert report.recovered == counters.recovered > 0
    assert report.late_completions == counters.late_completions > 0
    assert report.groups["filtered"] > 0
    assert report.groups["admitted"] == ledger.admitted == report.groups["trained"] + report.groups["filtered"]
    assert sum(report.staleness.values()) == report.groups["trained"] == 10 * world.settings.groups_per_step
    assert set(report.staleness) == {0, 1, 2}
    assert report.max_live_versions == 3
    assert report.evaluations == (0, 4, 8, 10)
    assert report.steps == 10
    assert report.token_counts_checked == len(world.totals)
    assert report.run_id == folder.run_id
    assert "audit: C1, C2 and C3 hold" in render(report)


def moved(core: Core) -> tuple[int, int]:
    """The answers moved, as the core and the audit count them."""
    return core.state.counters.migrations, audit_entries(core.state.settings, core.journal).migrations


def test_an_evaluation_sample_that_moves_is_counted_as_any_other_answer() -> None:
    core = started(instances=2, source=1, eval_prompt_tokens=(PROMPT,) * 5)
    assert core.drain(0) == [stop(-4, on=0)]
    assert core.stopped(-4, tokens=7) == [generate(-4, on=1, version=0, attempt=2, tokens=7)]
    assert moved(core) == (1, 1)


def test_an_answer_that_was_stopped_and_queued_has_moved_once_another_instance_continues_it() -> None:
    core = packing()
    core.tick(1.0)
    core.pressed(0)
    assert core.stopped(22, tokens=7) == []
    assert moved(core) == (0, 0)
    assert core.relieved(0) == [generate(22, on=0, version=0, attempt=2, tokens=7)]
    assert moved(core) == (1, 1)


def test_what_arrives_after_the_end_of_a_run_is_no_part_of_it() -> None:
    """It was queued as the run failed; the core takes nothing of it in, and the next controller does it again."""
    core = started(instances=2, slots=2)
    core.finished(0)
    assert isinstance(core.tick(2_000.0)[-1], cmd.FailRun)
    core.graded(0, 1.0)
    core.finished(1)
    core.lost(1)
    core.up(1)
    core.restarted({0: 1, 1: 1, 2: 0, 3: 0})
    core.ready()
    core.incarnations[1] = 1
    for instance in (0, 1):
        core.up(instance, slots=2)
        core.pushed(instance, 0)
    assert core.graded(0, 1.0) == []
    core.lost(1, {2: 0, 3: 0})
    assert {t.instance.id for t in core.state.trajectories.values() if t.instance is not None} == {0}
    assert audit_entries(core.state.settings, core.journal).violations == ()


def test_lengths_trained_are_those_generated_minus_the_dropped_ones(world: World) -> None:
    lengths = audit_entries(world.settings, world.journal).lengths
    assert lengths["trained"].count == len(world.trained_lengths)
    assert lengths["trained"].longest == max(world.trained_lengths.values())
    assert lengths["generated"].count == lengths["trained"].count + lengths["filtered"].count


@pytest.mark.parametrize("strategy", ["dora", "sync", "periodic", "one_step_off"])
def test_every_strategy_is_clean_under_faults_and_restarts(strategy: str) -> None:
    faults = Faults(
        push_fails=0.1,
        request_fails=0.05,
        refused_for_good=0.2,
        instance_dies=0.05,
        grading_fails=0.05,
        zero_variance=0.2,
        controller_restarts=0.15,
        late_completion=0.1,
        kept=0.5,
    )
    restarts = failed = taken_over = 0
    for seed in range(4):
        world = run(strategy, seed=seed, faults=faults, max_attempts=3, max_top_up=1000.0, prompts=40, checked=False)
        report = audit_entries(world.settings, world.journal)
        assert report.violations == ()
        restarts += report.restarts
        failed += report.groups["failed"]
        taken_over += sum(isinstance(e, ev.InstanceUp) and e.version is not None for e, _ in world.journal)
    assert restarts
    assert failed
    assert taken_over


def test_a_journal_that_breaks_off_is_clean_and_counts_what_is_in_flight(world: World, entries: Entries) -> None:
    report = audit_entries(world.settings, entries[: len(entries) // 2])
    assert report.violations == ()
    assert report.groups["in flight"] > 0
    assert report.end == "no end recorded"


def test_a_violation_carries_the_excerpt_of_its_id_up_to_the_event_at_which_it_showed(
    world: World, entries: Entries
) -> None:
    at, event = first_event(entries, ev.GenerationFinished, lambda e: e.trajectory >= 0)
    report = audit_entries(world.settings, with_event(entries, at, spans=()))
    violation = next(v for v in report.violations if v.rule == "C1 spans")
    assert "AdmitGroup" in violation.excerpt[1]
    assert any("Generate " in line for line in violation.excerpt)
    assert any("GenerationFinished" in line and f"trajectory={event.trajectory}" in line for line in violation.excerpt)
    assert not any("CommitGroup" in line for line in violation.excerpt)


def test_a_conflict_that_the_core_also_saw_is_found_although_the_replay_agrees(
    world: World, entries: Entries, found: Found
) -> None:
    at, event = first_event(entries, ev.GenerationFinished, lambda e: e.num_tokens > 1)
    conflict = msgspec.structs.replace(event, spans=((99, 0, event.num_tokens),))
    core = replay(world.settings, entries[:at]).state
    messages = found([*entries[:at], (conflict, handle(core, conflict))])
    assert set(messages) == {f"C1 spans: trajectory {event.trajectory}", "invariants: run 0"}


# -- C1 -------------------------------------------------------------------------------------------------------------


def test_tokens_of_another_version_are_named(entries: Entries, found: Found) -> None:
    at, event = first_event(entries, ev.GenerationFinished, lambda e: e.num_tokens > 1)
    ((version, start, end),) = event.spans
    spans = ((version, start, end - 1), (version + 1, end - 1, end))
    assert f"C1 spans: trajectory {event.trajectory}" in found(with_event(entries, at, spans=spans))


def test_tokens_without_a_span_are_named(entries: Entries, found: Found) -> None:
    at, event = first_event(entries, ev.GenerationStopped, lambda e: e.num_tokens > e.spans[0][1])
    assert f"C1 spans: trajectory {event.trajectory}" in found(with_event(entries, at, spans=()))


def test_a_request_on_an_instance_without_a_confirmed_push_is_named(entries: Entries, found: Found) -> None:
    at, push = first_event(entries, ev.WeightPushFinished, lambda e: e.version == 2)
    _, order = first_command(entries[at:], cmd.Generate, lambda c: c.instance == push.instance)
    messages = found(with_event(entries, at, attempt=push.attempt + 1))
    assert "holds no confirmed version" in messages[f"C1 serving: trajectory {order.trajectory}"]


def test_a_request_on_an_instance_of_another_version_is_named(entries: Entries, found: Found) -> None:
    at, order = first_command(entries, cmd.Generate, lambda c: c.version == 3)
    holds = {e.instance: e.version for e, _ in entries[: at[0]] if isinstance(e, ev.WeightPushFinished)}
    other = next(instance for instance, version in holds.items() if version != 3 and instance != order.instance)
    messages = found(with_command(entries, at, instance=other))
    assert f"goes to instance {other}" in messages[f"C1 serving: trajectory {order.trajectory}"]


@pytest.fixture(scope="module")
def taken_over() -> Core:
    """A new controller takes instance 0 over with version 0, which is needed."""
    core = started()
    core.restarted(dict.fromkeys(range(4), 0))
    core.up(0, holds=0)
    return core


TAKEN_OVER = "C1 serving: instance 0 is taken over with version"


def taken_over_as(core: Core, **changes: object) -> set[str]:
    """Violations if the server had come with these; every answer of version 0 continues there."""
    at, _ = first_event(core.journal, ev.InstanceUp, lambda e: e.version is not None)
    found = audited(core, lambda entries: with_event(entries, at, **changes))
    work = {v for v in found if "goes to instance 0, which holds no confirmed version" in v}
    assert {v.split()[3] for v in work} == {"0", "1", "2", "3"}
    return found - work


def test_a_server_taken_over_with_a_needed_version_may_serve_it(taken_over: Core) -> None:
    report = audit_entries(taken_over.state.settings, taken_over.journal)
    assert report.violations == ()
    assert taken_over.state.instances[InstanceId(0)].residents


def test_work_for_a_server_that_was_taken_over_without_a_version_is_named(taken_over: Core) -> None:
    assert not any(v.startswith(TAKEN_OVER) for v in taken_over_as(taken_over, version=None, digest=""))


@pytest.mark.parametrize("digest", ["", "00000000"])
def test_a_server_taken_over_with_other_bytes_than_the_journaled_ones_is_named(taken_over: Core, digest: str) -> None:
    known = digest_of({"weights": "0"})
    named = f"{TAKEN_OVER} 0 and digest '{digest}', but it was published with '{known}'"
    assert named in taken_over_as(taken_over, digest=digest)


def test_a_server_taken_over_with_a_version_that_was_never_published_is_named(taken_over: Core) -> None:
    digest = digest_of({"weights": "1"})
    named = f"{TAKEN_OVER} 1 and digest '{digest}', but it was never published"
    assert named in taken_over_as(taken_over, version=1, digest=digest)


def test_a_server_taken_over_with_a_version_that_nothing_needs_holds_none() -> None:
    core = started(groups_per_step=1, slots=2, max_staleness=0)
    core.answer(0)
    core.train(0)
    core.publish(1)
    core.restarted()
    core.up(0, holds=0)
    assert audit_entries(core.state.settings, core.journal).violations == ()
    work = [cmd.AdmitGroup(GroupId(1), 1, 1), generate(2, on=0, version=1)]
    found = audited(core, lambda entries: with_commands(entries, len(entries) - 1, work))
    assert any("goes to instance 0, which holds no confirmed version" in v for v in found)


def test_a_push_onto_a_busy_instance_is_named(entries: Entries, found: Found) -> None:
    (at, _), order = first_command(entries, cmd.Generate, lambda c: c.version == 1)
    push = cmd.PushWeights(order.instance, 99, 1)
    assert f"C1 serving: instance {order.instance}" in found(with_commands(entries, at, [*entries[at][1], push]))


def test_a_sibling_with_another_tag_is_named(entries: Entries, found: Found) -> None:
    at, order = first_command(entries, cmd.Generate, lambda c: c.version == 2)
    assert f"C1 tag: trajectory {order.trajectory}" in found(with_command(entries, at, version=1))


# -- C2 -------------------------------------------------------------------------------------------------------------


def test_a_sibling_that_is_not_trained_is_named(entries: Entries, found: Found) -> None:
    at, order = first_command(entries, cmd.TrainMicroBatch, lambda c: bool(c.ranks[1]))
    missing, *rest = order.ranks[1]
    messages = found(with_command(entries, at, ranks=(order.ranks[0], tuple(rest))))
    assert "not trained" in messages[f"C2 micro-batch: trajectory {missing}"]


def test_a_group_committed_with_an_ungraded_sibling_is_named(world: World, entries: Entries, found: Found) -> None:
    trained = min(world.trained_lengths)
    at, event = first_event(entries, ev.TrajectoryGraded, lambda e: e.trajectory == trained)
    group = trained // world.settings.group_size
    assert f"C2 siblings: group {group}" in found(with_event(entries, at, attempt=event.attempt + 1))


def test_a_group_trained_twice_is_named(world: World, entries: Entries) -> None:
    _, order = first_command(entries, cmd.CommitGroup, lambda c: c.step == 2)
    for step, was in ((2, "committed to step 3"), (4, "trained")):
        (later, _), _ = first_command(entries, cmd.CloseStep, lambda c, step=step: c.step == step)
        again = cmd.CommitGroup(order.group, order.version, step)
        changed = with_commands(entries, later, [*entries[later][1], again])
        report = audit_entries(world.settings, changed)
        messages = [v.message for v in report.violations if (v.rule, v.id) == ("C2 ledger", f"group {order.group}")]
        assert messages == [f"is committed to step {step + 1}, but was {was}"]


def test_a_group_that_is_never_trained_is_named(entries: Entries, found: Found) -> None:
    at, order = first_command(entries, cmd.CommitGroup)
    messages = found(without_command(entries, at))
    assert "not trained when the run ends" in messages[f"C2 ledger: group {order.group}"]


@pytest.mark.parametrize(
    ("outcome", "reason", "rewards"),
    [
        ("failed", "too late", (0.0, 1.0)),
        ("failed", "grading", (None, 1.0)),
        ("failed", "generation: refused", (0.0, 1.0)),
        ("filtered", "zero variance", (1.0, 1.0)),
    ],
)
def test_a_group_dropped_for_a_reason_that_the_journal_does_not_confirm_is_named(
    entries: Entries, found: Found, outcome: str, reason: str, rewards: tuple[float | None, ...]
) -> None:
    (at, place), order = first_command(entries, cmd.CommitGroup)
    commands = list(entries[at][1])
    commands[place] = cmd.DropGroup(order.group, GroupPhase(outcome), reason, rewards)
    assert f"C2 drop: group {order.group}" in found(with_commands(entries, at, commands))


def test_a_group_that_nobody_fetched_is_named(entries: Entries, found: Found) -> None:
    (at, _), order = first_command(entries, cmd.AdmitGroup, lambda c: c.version == 3)
    forged = cmd.AdmitGroup(GroupId(10_000), 3, order.deadline)
    messages = found(with_commands(entries, at, [*entries[at][1], forged]))
    assert "is admitted, but" in messages["C2 ledger: group 10000"]


def test_tokens_lost_at_a_migration_are_named(entries: Entries, found: Found) -> None:
    at, order = first_command(entries, cmd.Generate, lambda c: c.num_tokens > 0 and c.trajectory >= 0)
    messages = found(with_command(entries, at, num_tokens=order.num_tokens - 1))
    assert "a scheduling abort" in messages[f"C2 tokens: trajectory {order.trajectory}"]


def test_tokens_reported_and_then_lost_are_named(entries: Entries, found: Found) -> None:
    at, event = first_event(entries, ev.GenerationFinished, lambda e: e.num_tokens > 40)
    messages = found(with_event(entries, at, num_tokens=1, spans=((event.spans[0][0], 0, 1),)))
    assert "are lost" in messages[f"C2 tokens: trajectory {event.trajectory}"]


def test_a_trajectory_in_two_micro_batches_is_named(entries: Entries, found: Found) -> None:
    at, order = first_command(entries, cmd.TrainMicroBatch, lambda c: c.index == 1)
    _, before = first_command(entries, cmd.TrainMicroBatch, lambda c: c.step == order.step)
    twice = before.ranks[0][0]
    messages = found(with_command(entries, at, ranks=((*order.ranks[0], twice), order.ranks[1])))
    assert "a second time" in messages[f"C2 micro-batch: trajectory {twice}"]


def test_a_replayed_step_with_another_split_is_named(entries: Entries, found: Found) -> None:
    (at, _), order = first_command(entries, cmd.TrainMicroBatch, lambda c: c.index == 0)
    again = msgspec.structs.replace(order, ranks=order.ranks[::-1])
    messages = found(with_commands(entries, at, [*entries[at][1], again]))
    assert "is fed again, and differs" in messages[f"C2 micro-batch: step {order.step + 1}"]


def test_an_answer_over_the_token_budget_is_named(entries: Entries, found: Found) -> None:
    at, event = first_event(entries, ev.GenerationFinished, lambda e: e.length_capped)
    ((version, start, end),) = event.spans
    changed = with_event(entries, at, num_tokens=event.num_tokens + 1, spans=((version, start, end + 1),))
    assert f"C2 budget: trajectory {event.trajectory}" in found(changed)


def test_a_token_store_that_disagrees_is_named(world: World, entries: Entries, folder: RunFolder) -> None:
    write(folder, world.settings, entries)
    _, event = first_event(entries, ev.GenerationFinished, lambda e: e.trajectory >= 0)
    with TokenWriter(folder.tokens) as tokens:
        tokens.append(event.trajectory, event.attempt, [1], [-1.0], start=event.num_tokens)
    report = audit(folder)
    assert [(v.rule, v.id) for v in report.violations] == [("token store", f"trajectory {event.trajectory}")]


def test_tokens_known_of_an_unfinished_answer_and_not_stored_are_named(
    world: World, entries: Entries, folder: RunFolder
) -> None:
    at, event = first_event(entries, ev.ProgressReported, lambda e: any(t >= 0 and n for t, n in e.num_tokens.items()))
    write(folder, world.settings, entries[: at + 1])
    trajectory = next(t for t, n in event.num_tokens.items() if t >= 0 and n)
    report = audit(folder)
    assert ("token store", f"trajectory {trajectory}") in {(v.rule, v.id) for v in report.violations}
    assert {v.rule for v in report.violations} == {"token store"}


# -- C3 -------------------------------------------------------------------------------------------------------------


def test_a_commit_beyond_the_bound_is_named(world: World, entries: Entries, folder: RunFolder) -> None:
    _, order = first_command(entries, cmd.CommitGroup, lambda c: c.step - c.version == 2)
    rules = msgspec.structs.replace(world.settings.rules, max_staleness=1)
    report = audit(write(folder, msgspec.structs.replace(world.settings, rules=rules), entries))
    stale = [v.id for v in report.violations if v.message.endswith("staleness 2")]
    assert stale[0] == f"group {order.group}"
    assert len(stale) == 1 + sum(
        isinstance(c, cmd.CommitGroup) and c.step - c.version == 2 and c != order for _, cs in entries for c in cs
    )


def test_a_due_group_left_outside_a_closed_step_is_named(entries: Entries, found: Found) -> None:
    at, order = first_command(entries, cmd.CommitGroup, lambda c: c.step - c.version == 2)
    (closes, _), _ = first_command(entries, cmd.CloseStep, lambda c: c.step == order.step)
    changed = without_command(entries, at)
    late = cmd.CommitGroup(order.group, order.version, order.step + 1)
    messages = found(with_commands(changed, closes, [*changed[closes][1], late]))
    assert f"C3 close: group {order.group}" in messages
    assert "staleness 3" in messages[f"C3 commit: group {order.group}"]


# -- one altered order or fact each, and the message about it ---------------------------------------------------------

#: kind, change, id, part of the message. The first order of the kind that trains something is changed or followed.
ALTERED: list[tuple[type[cmd.Command], dict[str, object], str, str]] = [
    (cmd.PushWeights, {"version": 99}, "versions: version 99", "not in the store"),
    (cmd.Generate, {"num_tokens": 65}, "C2 budget: trajectory {trajectory}", "more than its budget"),
    (cmd.AdmitGroup, {"version": 99}, "versions: group {group}", "is admitted at version 99"),
    (cmd.AdmitGroup, {"deadline": 1}, "C3 commit: group {group}", "is due at step 3, not 2"),
    (cmd.CommitGroup, {"version": 1}, "C1 tag: group {group}", "is committed as version 1, but its tag is 0"),
    (cmd.CommitGroup, {"step": 1}, "C3 commit: group {group}", "while step 1 is formed"),
    (cmd.CloseStep, {"num_groups": 3}, "C3 close: step {nth}", "closes with 3 groups; 4 were committed"),
    (cmd.CloseStep, {"step": 1}, "C3 close: step 2", "closes while step 1 is formed"),
    (cmd.TrainMicroBatch, {"step": 99}, "C2 micro-batch: step 100", "no group was committed to it"),
    (cmd.TrainMicroBatch, {"index": 5}, "C2 micro-batch: step {nth}", "follows a gap"),
    (cmd.TrainMicroBatch, {"ranks": ()}, "C2 micro-batch: step {nth}", "has 0 ranks"),
    (cmd.TrainMicroBatch, {"update": 1}, "C2 micro-batch: step {nth}", "belongs to the wrong update"),
    (cmd.TrainMicroBatch, {"last": True}, "C2 micro-batch: step {nth}", "before it is closed"),
]


@pytest.mark.parametrize(("kind", "change", "key", "said"), ALTERED)
def test_an_altered_order_is_named_by_the_rule_that_it_breaks(
    entries: Entries, found: Found, kind: type[cmd.Command], change: dict[str, object], key: str, said: str
) -> None:
    at, order = first_command(entries, kind, lambda c: getattr(c, "trajectory", 0) >= 0)
    fields = msgspec.structs.asdict(order)
    assert said in found(with_command(entries, at, **change))[key.format(**fields, nth=fields.get("step", 0) + 1)]


def test_an_order_given_twice_or_to_nobody_is_named(entries: Entries, found: Found) -> None:
    (at, _), order = first_command(entries, cmd.Generate, lambda c: c.trajectory >= 0)
    id = f"trajectory {order.trajectory}"
    _, trained = first_command(entries, cmd.CommitGroup)
    last = len(entries) - 1
    for index, extra, key, said in (
        (at, order, f"C2 tokens: {id}", "still runs on instance"),
        (last, order, f"C2 ledger: {id}", "belongs to no admitted group"),
        (at, cmd.GradeTrajectory(order.trajectory, 9), f"C2 ledger: {id}", "is not a finished, ungraded answer"),
        (
            last,
            cmd.DropGroup(trained.group, GroupPhase.FAILED, "grading", ()),
            f"C2 ledger: group {trained.group}",
            "was trained",
        ),
    ):
        assert said in found(with_commands(entries, index, [*entries[index][1], extra]))[key]


def test_a_step_trained_without_its_last_micro_batch_is_named(entries: Entries, found: Found) -> None:
    at, order = first_command(entries, cmd.TrainMicroBatch, lambda c: c.last)
    messages = found(with_command(entries, at, last=False))
    assert "before its last micro-batch was sent" in messages[f"C2 micro-batch: step {order.step + 1}"]


def test_a_trainer_that_starts_ahead_of_what_is_trained_is_named(entries: Entries, found: Found) -> None:
    at, _ = first_event(entries, ev.TrainerReady)
    assert "is where the trainer starts" in found(with_event(entries, at, step=2))["C2 ledger: step 3"]


def test_a_version_out_of_turn_is_named(entries: Entries, found: Found) -> None:
    at, _ = first_event(entries, ev.VersionPublished, lambda e: e.version == 3)
    assert "is published after 2" in found(with_event(entries, at, version=7))["versions: version 7"]


# -- versions, replay, the file ---------------------------------------------------------------------------------------


def test_more_live_versions_than_the_window_allows_are_named(entries: Entries, found: Found) -> None:
    at, event = first_event(entries, ev.StepTrained, lambda e: e.step == 4)
    messages = found(with_event(entries, at, step=99))
    oldest = min(c.version for _, cs in entries for c in cs if isinstance(c, cmd.CommitGroup) and c.step == event.step)
    assert "is the oldest of 4 live versions" in messages[f"versions: version {oldest}"]


def test_a_version_released_while_it_is_needed_is_named(entries: Entries, found: Found) -> None:
    (at, _), _ = first_command(entries, cmd.AdmitGroup, lambda c: c.version == 3)
    changed = with_commands(entries, at, [*entries[at][1], cmd.ReleaseVersion(3)])
    assert "is released, but still needed" in found(changed)["versions: version 3"]


def test_an_evaluation_reported_before_its_last_sample_is_named(entries: Entries, found: Found) -> None:
    at, event = first_event(entries, ev.TrajectoryGraded, lambda e: e.trajectory < 0)
    assert "evaluation: version 0" in found(with_event(entries, at, attempt=event.attempt + 1))


def test_a_removed_event_is_named_by_the_ledger_and_by_replay(world: World, entries: Entries, found: Found) -> None:
    trained = min(world.trained_lengths)
    at, _ = first_event(entries, ev.TrajectoryGraded, lambda e: e.trajectory == trained)
    messages = found(entries[:at] + entries[at + 1 :])
    group = trained // world.settings.group_size
    assert f"group {group}" in {key.split(": ")[1] for key in messages}
    assert any(key.startswith("replay: ") for key in messages)


def test_an_altered_command_that_breaks_no_rule_is_named_by_replay(entries: Entries, found: Found) -> None:
    at, order = first_command(entries, cmd.TrainMicroBatch, lambda c: c.step == 5)
    messages = found(with_command(entries, at, ranks=order.ranks[::-1]))
    assert list(messages) == ["replay: step 6"]
    assert "recorded TrainMicroBatch" in messages["replay: step 6"]


def test_damaged_bytes_are_named_with_their_place(world: World, entries: Entries, folder: RunFolder) -> None:
    write(folder, world.settings, entries)
    data = bytearray(folder.journal.read_bytes())
    data[len(data) // 2] ^= 1
    folder.journal.write_bytes(data)
    report = audit(folder)
    assert [(v.rule, v.id) for v in report.violations] == [("damage", "journal.msgpack")]
    assert "the record at byte" in report.violations[0].message
    assert 0 < report.num_events < len(entries)


def test_a_damaged_token_store_is_named(world: World, entries: Entries, folder: RunFolder) -> None:
    write(folder, world.settings, entries)
    data = bytearray(folder.tokens.read_bytes())
    data[len(data) // 2] ^= 1
    folder.tokens.write_bytes(data)
    assert [(v.rule, v.id) for v in audit(folder).violations] == [("damage", "tokens.bin")]


def test_a_missing_token_store_is_named(world: World, entries: Entries, folder: RunFolder) -> None:
    write(folder, world.settings, entries, with_tokens=False)
    assert [(v.rule, v.id, v.message) for v in audit(folder).violations] == [("damage", "tokens.bin", "is missing")]


def test_a_torn_last_record_is_reported_and_is_no_violation(world: World, entries: Entries, folder: RunFolder) -> None:
    write(folder, world.settings, entries)
    folder.journal.write_bytes(folder.journal.read_bytes()[:-5])
    report = audit(folder)
    assert report.ok
    assert report.torn_bytes > 0
    assert len(entries) - RECORDS_PER_FRAME <= report.num_events < len(entries)


# -- requests of people -----------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def drained() -> Core:
    """Instance 0 is drained and leaves; its requests continue on instance 1, for which the same is refused."""
    core = started(instances=2, source=2)
    core.drain(0, leave=True)
    for t in range(4):
        core.stopped(t, tokens=1)
    core.drain(1)
    core.failed(0, tokens=2)  # and is tried again there
    core.removed(0)
    return core


def audited(core: Core, change: Callable[[Entries], Entries]) -> set[str]:
    entries = change([(event, list(orders)) for event, orders in core.journal])
    return {f"{v.rule}: {v.id} {v.message}" for v in audit_entries(core.state.settings, entries).violations}


def test_a_drain_a_refusal_and_a_departure_are_in_order(drained: Core) -> None:
    report = audit_entries(drained.state.settings, drained.journal)
    assert report.violations == ()
    assert report.migrations == 4


def test_work_for_a_drained_instance_is_found(drained: Core) -> None:
    place, _ = first_command(drained.journal, cmd.Generate, lambda o: o.attempt == 2)
    found = audited(drained, lambda entries: with_command(entries, place, instance=InstanceId(0)))
    assert "drain: trajectory 0 goes to instance 0, which was drained" in found


def test_an_instance_dismissed_with_work_on_it_is_found(drained: Core) -> None:
    index, _ = first_event(drained.journal, ev.InstanceDrainRequested)
    found = audited(drained, lambda e: with_commands(e, index, [*e[index][1], cmd.DismissInstance(InstanceId(0))]))
    assert {f"drain: trajectory {t} runs on instance 0, which is dismissed" for t in range(4)} <= found
