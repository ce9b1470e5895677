"""Rows that teach nothing are passed over: which, how many, and what stays as it is."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from dora.config.schema import Config, SourceConfig, TaskConfig
from dora.core import commands as cmd
from dora.core import events as ev
from dora.core.ids import GroupId, StepId, VersionId
from dora.core.phases import GroupPhase
from dora.errors import ConfigError
from dora.journal.audit_tables import AuditedVisits, AuditTables
from dora.journal.audit_visits import HANDLERS
from dora.observe.visits import Visits
from dora.tasks.prompts import PromptStream, mix, nested_shares, open_stream
from tests.core.world import settings

SEED = 5
ENTRY = tuple[ev.Event, tuple[cmd.Command, ...]]

#: What becomes of a group: the outcome of the row (source, row) at its n-th group.
Fate = Callable[[tuple[int, int], int], str]


def write(path: Path, num_rows: int) -> SourceConfig:
    path.write_text("".join(f'{{"prompt": "a{i}b0=", "answer": "{i}"}}\n' for i in range(num_rows)))
    return SourceConfig(kind="jsonl", path=path)


@pytest.fixture
def opened(tokenizer, tmp_path: Path):
    def opened(*num_rows: int, weights: Sequence[float] = (), share: float = 0.25, **task) -> PromptStream:
        sources = [write(tmp_path / f"{i}-{n}.jsonl", n) for i, n in enumerate(num_rows)]
        sources = [one.model_copy(update={"weight": w}) for one, w in zip(sources, weights or [1] * 9, strict=False)]
        task = TaskConfig(sources=tuple(sources), revisit_share=share, **task)
        return open_stream(task, tokenizer=tokenizer, seed=SEED)

    return opened


def filtered(key: tuple[int, int], number: int) -> str:
    return "filtered"


def drop(group: int, outcome: GroupPhase) -> cmd.DropGroup:
    return cmd.DropGroup(GroupId(group), outcome, "", ())


def ended(group: int, fate: str) -> cmd.Command:
    if fate == "committed":
        return cmd.CommitGroup(GroupId(group), VersionId(0), StepId(0))
    return drop(group, GroupPhase(fate))


class Run:
    """A job whose groups all end before prompts are ordered again, ten at a time."""

    def __init__(self, stream: PromptStream, fate: Fate, *, journal: Sequence[ENTRY] = ()) -> None:
        self.stream, self.fate = stream, fate
        self.visits = Visits()
        self.journal: list[ENTRY] = []
        for entry in journal:
            self.handle(*entry)

    def handle(self, event: ev.Event, commands: tuple[cmd.Command, ...] = ()) -> None:
        self.journal.append((event, commands))
        self.visits.apply(event, commands)

    def fetch(self, count: int = 10) -> list[ev.Visit]:
        first = GroupId(len(self.visits))
        self.handle(ev.Ticked(0.0), (cmd.FetchPrompts(first, count),))
        found = self.stream.visit(first, count=count, visits=self.visits)
        self.handle(ev.PromptsArrived(0.0, first, (3,) * len(found), len(found) < count, tuple(found)))
        return found

    def go(self, fetches: int) -> list[ev.Visit]:
        found: list[ev.Visit] = []
        for _ in range(fetches):
            first, seen = len(self.visits), self.visits.counts.copy()
            arrived = self.fetch()
            ends = [
                ended(first + i, self.fate((v.source, v.row), seen[v.source, v.row])) for i, v in enumerate(arrived)
            ]
            self.handle(ev.Ticked(0.0), tuple(ends))
            found += arrived
        return found


# --- which rows come ------------------------------------------------------------------------------------------------


def test_a_row_that_was_not_seen_is_always_taken(opened) -> None:
    stream = opened(40)
    found = Run(stream, filtered).go(4)
    assert not any(visit.passed for visit in found)
    plain = [stream.at(position).text for position in range(40)]  # type: ignore[union-attr]
    assert [stream.of_visit(i, (v.source, v.row)).text for i, v in enumerate(found)] == plain


def test_rows_whose_rewards_were_equal_come_at_the_share_of_their_visits_and_others_always(opened) -> None:
    run = Run(opened(400), lambda key, number: "filtered" if key[1] % 2 else "committed")
    run.go(40)
    later = run.go(400)
    taken, passed = Counter(v.row % 2 for v in later), Counter(row % 2 for v in later for row in v.passed)
    assert passed[0] == 0
    assert 0.22 < taken[1] / (taken[1] + passed[1]) < 0.28  # of about 3,200 visits: four standard deviations
    assert {row for v in later for row in (*v.passed, v.row)} == set(range(400))


def test_a_row_comes_always_again_once_its_rewards_differ(opened) -> None:
    run = Run(opened(20), lambda key, number: "committed" if number >= 3 else "filtered")
    run.go(40)
    assert all(run.visits.counts[0, row] >= 4 for row in range(20))
    assert run.visits.equal == set()
    assert not any(visit.passed for visit in run.go(10))


@pytest.mark.parametrize("fate", ["failed", "discarded"])
def test_a_group_that_failed_or_was_discarded_says_nothing_of_its_row(opened, fate: str) -> None:
    run = Run(opened(20), lambda key, number: fate)
    assert not any(visit.passed for visit in run.go(20))
    run = Run(opened(20), lambda key, number: fate if number else "filtered")
    run.go(30)
    assert len(run.visits.equal) == 20


def test_the_mixture_stays_what_the_weights_say(opened) -> None:
    run = Run(opened(10, 30, weights=(3, 1)), lambda key, number: "filtered" if key[0] == 0 else "committed")
    found = run.go(40)
    assert [v.source for v in found] == [mix(i, shares=nested_shares([3, 1]))[0] for i in range(400)]
    assert run.visits.num_passed > 300
    assert not any(v.passed for v in found if v.source == 1)


def test_at_most_as_many_rows_are_passed_over_at_a_time_as_the_source_has(opened) -> None:
    found = Run(opened(4, share=0.05), filtered).go(60)
    assert max(len(visit.passed) for visit in found) == 4


def test_prompts_end_after_the_last_epoch_of_visits(opened) -> None:
    run = Run(opened(20, epochs=5), filtered)
    found = run.go(9)
    assert 20 < len(found) < 100
    assert run.fetch() == []
    assert 90 < run.visits.places[0] <= 100


# --- what a choice depends on ---------------------------------------------------------------------------------------


def test_the_same_journal_gives_the_same_choices(opened, tmp_path: Path) -> None:
    def fate(key: tuple[int, int], number: int) -> str:
        return "filtered" if (key[1] + number) % 3 else "committed"

    whole = Run(opened(15, 10), fate)
    whole.go(30)
    for cut in range(0, len(whole.journal), 7):
        resumed = Run(opened(15, 10), fate, journal=whole.journal[:cut])
        assert resumed.visits.places + Counter() == Run(opened(15, 10), fate, journal=whole.journal[:cut]).visits.places
        if isinstance(whole.journal[cut][0], ev.Ticked) and isinstance(whole.journal[cut][1][0], cmd.FetchPrompts):
            resumed.fetch()
            assert resumed.journal == whole.journal[: cut + 2]


def test_groups_that_end_while_prompts_are_read_do_not_affect_them(opened) -> None:
    stream = opened(10)
    run = Run(stream, filtered)
    run.fetch()
    run.handle(ev.Ticked(0.0), (cmd.FetchPrompts(GroupId(10), 10),))
    before = stream.visit(10, count=10, visits=run.visits)
    run.handle(ev.Ticked(0.0), tuple(drop(group, GroupPhase.FILTERED) for group in range(10)))
    assert stream.visit(10, count=10, visits=run.visits) == before
    run.handle(ev.Ticked(0.0), (cmd.FetchPrompts(GroupId(10), 10),))
    assert stream.visit(10, count=10, visits=run.visits) != before


def test_the_order_in_which_groups_end_does_not_matter(opened) -> None:
    stream = opened(10)
    found = []
    for order in (1, -1):
        run = Run(stream, filtered)
        run.fetch()
        run.handle(ev.Ticked(0.0), tuple(drop(group, GroupPhase.FILTERED) for group in [*range(10)][::order]))
        found.append(run.fetch())
    assert found[0] == found[1]


def test_what_was_chosen_stays_when_it_is_read_again_after_a_restart(opened) -> None:
    run = Run(opened(10), filtered)
    run.go(3)
    chosen = run.fetch()
    run.handle(ev.ControllerRestarted(0.0, 1, {}), (cmd.FetchPrompts(GroupId(34), 8),))
    again = run.stream.visit(34, count=8, visits=run.visits)
    assert [(v.source, v.row) for v in again[:6]] == [(v.source, v.row) for v in chosen[4:]]
    assert not any(v.passed for v in again[:6])
    places = run.visits.places.copy()
    run.handle(ev.PromptsArrived(0.0, GroupId(34), (3,) * 8, False, tuple(again)))
    assert len(run.visits) == 42
    assert run.visits.places[0] == places[0] + sum(len(v.passed) + 1 for v in again[6:])


# --- refusals -------------------------------------------------------------------------------------------------------


def test_endless_sources_are_refused(opened, tokenizer, tmp_path: Path) -> None:
    sources = (write(tmp_path / "rows.jsonl", 3), SourceConfig(kind="arithmetic"))
    with pytest.raises(ConfigError, match=r"^task\.revisit_share: task\.sources\.1 \(arithmetic\) is endless, so its"):
        open_stream(TaskConfig(sources=sources, revisit_share=0.5), tokenizer=tokenizer, seed=0)


def test_equal_rewards_that_are_trained_are_no_reason_to_pass_a_row_over() -> None:
    with pytest.raises(ValueError, match=r"task\.revisit_share: rollout\.filter_zero_variance = false trains groups"):
        Config.model_validate({"task": {"revisit_share": 0.5}, "rollout": {"filter_zero_variance": False}})


@pytest.mark.parametrize("share", [0.0, 0.04, 1.5])
def test_a_row_never_disappears(share: float) -> None:
    with pytest.raises(ValueError, match="revisit_share"):
        TaskConfig(revisit_share=share)


def test_other_sources_than_the_run_began_with_are_found(opened) -> None:
    stream = opened(10, 10)
    for key in ((0, 0), (1, 10)):  # the mixture gives position 0 to source 1
        with pytest.raises(
            ConfigError, match=r"^task\.sources: prompt 0 was row \d+ of source \d, which is not its row"
        ):
            stream.of_visit(0, key)


# --- the audit ------------------------------------------------------------------------------------------------------


def audited(journal: Sequence[ENTRY], *, share: float = 0.25, seed: int = SEED) -> list[str]:
    tables = AuditTables(settings(), visits=AuditedVisits(share, seed))
    for tables.index, (event, commands) in enumerate(journal):
        for fact in (event, *commands):
            if type(fact) in HANDLERS:
                HANDLERS[type(fact)](tables, fact)
    return [finding.message for finding in tables.findings]


@pytest.fixture
def run(opened) -> Run:
    run = Run(opened(8, 6), lambda key, number: "filtered" if (key[1] + number) % 4 else "committed")
    run.go(12)
    run.handle(ev.ControllerRestarted(0.0, 1, {}), (cmd.FetchPrompts(GroupId(117), 8),))
    again = run.stream.visit(117, count=8, visits=run.visits)
    run.handle(ev.PromptsArrived(0.0, GroupId(117), (3,) * 8, False, tuple(again)))
    return run


def arrival(run: Run, *, number: int) -> ev.PromptsArrived:
    return [event for event, _ in run.journal if isinstance(event, ev.PromptsArrived)][number]


def altered(run: Run, event: ev.PromptsArrived, *visits: ev.Visit) -> list[ENTRY]:
    new = ev.PromptsArrived(event.at, event.first, event.num_prompt_tokens, event.dry, visits)
    return [(new if fact is event else fact, commands) for fact, commands in run.journal]


def test_the_audit_derives_every_choice_again(run: Run) -> None:
    assert run.visits.num_passed > 50
    assert audited(run.journal) == []
    assert any("was passed over, but was due" in found for found in audited(run.journal, seed=SEED + 1))
    assert any("which was not due" in found for found in audited(run.journal, share=0.05))


def test_the_audit_of_rows_that_are_passed_over_to_the_bound_is_clean(opened) -> None:
    run = Run(opened(4, share=0.05), filtered)
    run.go(60)
    assert audited(run.journal, share=0.05) == []
    event = next(
        e for e, _ in run.journal if isinstance(e, ev.PromptsArrived) and any(len(v.passed) == 4 for v in e.visits)
    )
    visits = [v if len(v.passed) < 4 else ev.Visit(v.source, v.row, (*v.passed, v.passed[0])) for v in event.visits]
    assert any("passed over 5 of 4 rows" in found for found in audited(altered(run, event, *visits), share=0.05))


def test_the_audit_finds_rows_that_were_passed_over_although_they_taught(run: Run) -> None:
    event = arrival(run, number=0)
    first, *others = event.visits
    found = audited(altered(run, event, ev.Visit(first.source, first.row, (first.row,)), *others))
    assert found[0] == f"row {first.row} of source {first.source} was passed over, but was due"


def test_the_audit_finds_a_row_that_changed_over_a_restart(run: Run) -> None:
    event = arrival(run, number=-1)
    first, *others = event.visits
    [found] = audited(altered(run, event, ev.Visit(first.source, first.row + 1), *others))
    assert found == f"had row {(first.source, first.row)} before a restart, and has {(first.source, first.row + 1)} now"


def test_the_audit_finds_prompts_without_visits_and_visits_without_the_key(run: Run) -> None:
    assert "10 prompts have 0 visits" in audited(altered(run, arrival(run, number=3)))
    assert "10 prompts have 10 visits" in audited(run.journal, share=1.0)
