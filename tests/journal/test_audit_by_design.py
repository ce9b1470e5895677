"""Strategies that break a constraint by design: the audit counts and reports this, and still proves everything else."""

from __future__ import annotations

import msgspec
import pytest

from dora.core import commands as cmd
from dora.core import events as ev
from dora.core.phases import GroupPhase
from dora.core.strategies import rules_of
from dora.journal.audit import audit_entries
from dora.journal.audit_report import AuditReport, render
from tests.core.world import Faults, World, run
from tests.journal.recorded import Entries, first_command, first_event, with_commands, with_event


def job(strategy: str, **changes: object) -> World:
    faults = Faults(push_fails=0.1, request_fails=0.03, instance_dies=0.03, controller_restarts=0.05)
    return run(strategy, max_staleness=1, steps=8, train_s=0.3, faults=faults, **changes)


@pytest.fixture(scope="module")
def partial() -> World:
    return job("partial", length=lambda r: 60 if r.random() < 0.2 else 3)


@pytest.fixture(scope="module")
def oversample() -> World:
    return job("oversample")


def report_of(world: World, entries: Entries | None = None) -> AuditReport:
    return audit_entries(world.settings, world.journal if entries is None else entries)


def rules_broken(world: World, entries: Entries) -> set[str]:
    return {v.rule for v in report_of(world, entries).violations}


def test_answers_that_mix_versions_are_counted_and_are_no_violation(partial: World) -> None:
    report = report_of(partial)
    mixed = partial.state.counters.version_conflicts
    assert report.violations == ()
    assert mixed > 0
    assert report.broken_by_design["C1"].startswith(f"{mixed} of {report.lengths['generated'].count} answers")
    stale = sum(n for staleness, n in report.staleness.items() if staleness > 1)
    assert report.broken_by_design["C3"].startswith(f"{stale} groups trained more than 1 steps")
    assert render(report).endswith("audit: C2 holds; C1 is broken by design; C3 is broken by design")


def test_the_bounded_variant_is_held_to_its_bound() -> None:
    report = report_of(job("partial_bounded"))
    assert report.violations == ()
    assert max(report.staleness) <= 1
    assert render(report).endswith("audit: C2 and C3 hold; C1 is broken by design")


def test_discarded_groups_are_counted_and_the_ledger_adds_up(oversample: World) -> None:
    report = report_of(oversample)
    assert report.violations == ()
    groups = dict(report.groups)
    assert groups["discarded"] > 0
    assert groups.pop("admitted") == sum(groups.values())
    assert report.lengths["trained"].mean < report.lengths["generated"].mean
    aborted = oversample.state.counters.scheduling_aborts
    told = f"{groups['discarded']} groups discarded, {aborted} of their answers unfinished; mean length "
    assert report.broken_by_design["C2"].startswith(told)
    assert render(report).endswith("audit: C1 and C3 hold; C2 is broken by design")


def spread(entries: Entries) -> tuple[int, ev.GenerationFinished]:
    return first_event(entries, ev.GenerationFinished, lambda e: len(e.spans) == 2 and e.spans[0][0] < e.spans[1][0])


def test_spans_that_leave_a_gap_are_found(partial: World) -> None:
    index, event = spread(partial.journal)
    (v, a, b), second = event.spans
    entries = with_event(partial.journal, index, spans=((v, a, b - 1), second))
    assert "C1 spans" in rules_broken(partial, entries)


def test_an_answer_whose_version_falls_is_found(partial: World) -> None:
    index, event = spread(partial.journal)
    (old, a, b), (new, c, d) = event.spans
    entries = with_event(partial.journal, index, spans=((new, a, b), (old, c, d)))
    assert "C1 spans" in rules_broken(partial, entries)


def test_an_answer_of_a_version_that_is_not_published_is_found(partial: World) -> None:
    index, event = spread(partial.journal)
    first, (_, c, d) = event.spans
    entries = with_event(partial.journal, index, spans=(first, (99, c, d)))
    assert "C1 spans" in rules_broken(partial, entries)


def test_a_group_that_is_discarded_before_its_step_is_full_is_found(oversample: World) -> None:
    (index, place), order = first_command(oversample.journal, cmd.CommitGroup)
    commands: list[cmd.Command] = list(oversample.journal[index][1])
    commands[place] = cmd.DropGroup(order.group, GroupPhase.DISCARDED, "over-sampled", (0.0, 1.0))
    assert "C2 drop" in rules_broken(oversample, with_commands(oversample.journal, index, commands))


def test_a_strategy_that_keeps_a_constraint_is_not_excused(partial: World, oversample: World) -> None:
    for world, rule in ((partial, "C1 spans"), (oversample, "C2 drop")):
        kept = msgspec.structs.replace(world.settings, rules=rules_of("dora", max_staleness=7))
        found = {v.rule for v in audit_entries(kept, world.journal).violations}
        assert rule in found
