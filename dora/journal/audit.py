"""Proves C1, C2 and C3 from the journal alone.

There are two independent proofs. Tables (audit_fleet.py, audit_ledger.py) are built from the recorded events and
commands and compared with the token store; and a replay recomputes every decision and checks the core's invariants.
"""

from __future__ import annotations

import tomllib
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import replace
from itertools import islice
from pathlib import Path
from typing import Final

import msgspec
from msgspec import structs

from dora.core import events as ev
from dora.core.excerpt import RUN, Entry, excerpt
from dora.core.ids import TrajectoryId
from dora.core.invariants import check
from dora.core.strategies import Settings
from dora.errors import InvariantViolation, ProtocolError
from dora.journal import audit_calls, audit_fleet, audit_ledger, audit_lineage, audit_visits
from dora.journal.audit_choices import ChoicesAccount
from dora.journal.audit_report import AuditReport, Violation, lengths_of
from dora.journal.audit_tables import NO_END, OUTCOMES, AuditedVisits, AuditTables, Finding
from dora.journal.codec import Epoch
from dora.journal.frames import JournalError
from dora.journal.reader import Journal
from dora.journal.replay import EXCERPT_LINES, replay
from dora.journal.run_folder import RunFolder
from dora.journal.tokens import read_tokens

#: Maximum number of violations with an excerpt; each excerpt takes another pass over the journal.
MAX_EXCERPTS: Final = 10

#: Beginnings of the changes of settings that only alter how a trainer rounds, or the type of what it publishes.
_ROUNDING: Final = (
    "trainer.micro_batch_tokens: ",
    "trainer.ranks: ",
    "trainer.min_ranks: ",
    "trainer.parallel.",
    "trainer.threads: ",
    "trainer.compile: ",
    "trainer.shared_prompts: ",
    "trainer.publish_dtype: ",
)

#: The rule of a violation that is damage to a file.
DAMAGE: Final = "damage"


class _RunKeys(msgspec.Struct, frozen=True):
    seed: int = 0


class _PromptKeys(msgspec.Struct, frozen=True):
    revisit_share: float = 1.0


class _ObjectiveKeys(msgspec.Struct, frozen=True):
    router_replay: str = "off"


class _Told(msgspec.Struct, frozen=True):
    """What a configuration says that the journal's settings do not."""

    run: _RunKeys = _RunKeys()
    objective: _ObjectiveKeys = _ObjectiveKeys()
    prompts: _PromptKeys = msgspec.field(default=_PromptKeys(), name="task")


_HANDLERS: Final = (
    audit_fleet.HANDLERS,
    audit_calls.HANDLERS,
    audit_ledger.HANDLERS,
    audit_lineage.HANDLERS,
    audit_visits.HANDLERS,
)


def audit(folder: RunFolder) -> AuditReport:
    """Audit a run folder. Damage is a violation; the records before it are audited."""
    journal = Journal(folder.journal)
    entries = _UpToDamage(journal)
    told = _told(journal)
    account = ChoicesAccount() if told is not None and told.objective.router_replay != "off" else None
    counts: Mapping[TrajectoryId, int] | None = None
    damage: list[Violation] = []
    try:  # the token store is read after the journal was opened, so it can only be ahead
        counts = read_tokens(folder.tokens, wanted=(), account=account).counts
    except (JournalError, FileNotFoundError) as err:  # it is created before the journal
        damage.append(_damaged(folder.tokens, err))
    visits = AuditedVisits(told.prompts.revisit_share, told.run.seed) if told is not None else None
    report = audit_entries(
        _settings_of(journal), entries, token_counts=counts, visits=visits, choices=account if counts else None
    )
    if entries.damage is not None:
        damage.insert(0, _damaged(folder.journal, entries.damage))
    return replace(
        report,
        run_id=journal.header.run_id,
        torn_bytes=journal.torn_bytes,
        violations=(*damage, *report.violations),
    )


def _settings_of(journal: Journal) -> Settings:
    """Return the run's settings. After a change of how ranks compute, replays may round differently."""
    with suppress(JournalError, ProtocolError):  # damage is found later
        for record in journal.records():
            if isinstance(record, Epoch) and any(line.startswith(_ROUNDING) for line in record.changes):
                return structs.replace(journal.header.settings, deterministic=False)
    return journal.header.settings


def _told(journal: Journal) -> _Told | None:
    """Return what the first configuration says; None if there is none."""
    with suppress(JournalError, ProtocolError, ValueError, msgspec.ValidationError, RecursionError):  # found later
        for record in journal.records():
            if isinstance(record, Epoch) and record.config:
                return msgspec.convert(tomllib.loads(record.config), _Told)
    return None


def audit_entries(
    settings: Settings,
    entries: Iterable[Entry],
    *,
    token_counts: Mapping[TrajectoryId, int] | None = None,
    visits: AuditedVisits | None = None,
    choices: ChoicesAccount | None = None,
) -> AuditReport:
    """Audit events with their commands; `entries` is iterated several times. `visits` and `choices` (of experts, which
    are replayed): None to leave them out."""
    tables = AuditTables(settings, visits=visits)
    for tables.index, (event, commands) in enumerate(entries):
        is_ignored = tables.end != NO_END and not isinstance(event, ev.CheckpointSaved | ev.ControllerRestarted)
        for fact in commands if is_ignored else (event, *commands):  # the core takes in nothing after the end
            for handlers in _HANDLERS:
                if (handler := handlers.get(type(fact))) is not None:
                    handler(tables, fact)
    compared = _compare_tokens(tables, token_counts) if token_counts is not None else None
    finished = [trajectory for trajectory in tables.lengths if trajectory >= 0]
    chosen = choices.count(finished) if choices is not None else None
    findings = [*tables.findings, *_compare_replay(settings, tables, entries)]
    return AuditReport(
        run_id="",
        end=tables.end,
        num_events=tables.index + 1,
        restarts=tables.restarts,
        torn_bytes=0,
        groups=_group_counts(tables),
        reasons=dict(tables.reasons),
        steps=tables.trained_steps,
        staleness=dict(tables.staleness),
        lengths={
            "generated": lengths_of([n for t, n in tables.lengths.items() if t >= 0]),
            **{
                name: lengths_of([tables.lengths[t] for t in ids])
                for name, ids in tables.finished_ids.items()
                if ids or name != "discarded"
            },
        },
        broken_by_design=_broken_by_design(tables),
        max_live_versions=tables.max_live_versions,
        migrations=tables.migrations,
        recovered=tables.recovered,
        environment_failed=tables.environment_failed,
        episode_replays=tables.episode_replays,
        proofs=tables.proofs if settings.adapters else None,
        late_completions=tables.late_completions,
        evaluations=tuple(sorted(tables.reported)),
        replays_differ=tables.replays_differ,
        token_counts_checked=compared,
        choices=chosen,
        violations=tuple(_violations(findings, entries, group_size=settings.group_size)),
    )


def _compare_replay(settings: Settings, tables: AuditTables, entries: Iterable[Entry]) -> Iterator[Finding]:
    """Compare recomputed with recorded decisions, and check the core's invariants at the end."""
    replayed = replay(settings, entries)
    if replayed.difference is not None:
        difference = replayed.difference
        yield Finding("replay", difference.subject, str(difference), difference.index)
        return
    try:
        check(replayed.state)
    except InvariantViolation as err:
        yield Finding("invariants", RUN, str(err), tables.index)


def _group_counts(tables: AuditTables) -> dict[str, int]:
    """Count the groups by outcome; "admitted" is the sum of the others."""
    outcomes = Counter(tables.outcomes.values())
    ended = {name: outcomes[name] for name in OUTCOMES if name != "discarded" or outcomes[name]}
    return {"admitted": tables.admitted, **ended, "in flight": len(tables.groups)}


def _broken_by_design(tables: AuditTables) -> dict[str, str]:
    """Count the cases of each constraint that the strategy breaks by design."""
    rules = tables.settings.rules
    stale = sum(n for staleness, n in tables.staleness.items() if staleness > rules.max_staleness)
    discarded = Counter(tables.outcomes.values())["discarded"]
    lengths = [n for trajectory, n in tables.lengths.items() if trajectory >= 0]
    trained = [tables.lengths[t] for t in tables.finished_ids["trained"]]
    begun = [n for t, n in tables.aborted.items() if t not in tables.lengths]
    found = {
        "C1": f"{tables.mixed_answers} of {len(lengths)} answers have tokens of another version than their tag",
        "C2": f"{discarded} groups discarded, {len(tables.aborted)} of their answers unfinished; mean length "
        f"{lengths_of(trained).mean:.1f} of trained answers, {lengths_of([*lengths, *begun]).mean:.1f} of all, "
        "unfinished ones included",
        "C3": f"{stale} groups trained more than {rules.max_staleness} steps after their version",
    }
    return {name: found[name] for name in rules.broken_by_design}


def _compare_tokens(tables: AuditTables, stored: Mapping[TrajectoryId, int]) -> int:
    """Check that the token store has all tokens of finished answers, and at least the known ones of all others.

    Evaluation answers are compared only if they are stored. Return the number of trajectories compared.
    """
    compared = 0
    for trajectory, length in tables.lengths.items():
        if trajectory >= 0 or trajectory in stored:
            compared += 1
            if stored.get(trajectory, 0) != length:
                found = f"has {length} tokens in the journal, {stored.get(trajectory, 0)} in the token store"
                tables.find("token store", "trajectory", trajectory, found)
    for trajectory, answer in tables.answers.items():
        if trajectory >= 0 and not answer.finished:
            compared += 1
            if stored.get(trajectory, 0) < answer.num_tokens:
                found = f"has {answer.num_tokens} tokens so far, {stored.get(trajectory, 0)} in the token store"
                tables.find("token store", "trajectory", trajectory, found)
    return compared


def _violations(findings: Iterable[Finding], entries: Iterable[Entry], *, group_size: int) -> Iterator[Violation]:
    """Yield the findings as violations, in the order of their events; only the first ones have an excerpt."""
    for number, finding in enumerate(sorted(findings, key=lambda f: f.index)):
        lines: list[str] = []
        if number < MAX_EXCERPTS and finding.subject != RUN:
            lines = excerpt(islice(entries, finding.index + 1), finding.subject, group_size=group_size)
        yield Violation(finding.rule, str(finding.subject), finding.message, tuple(lines[-EXCERPT_LINES:]))


class _UpToDamage:
    """A journal's entries up to the first damage."""

    def __init__(self, journal: Journal) -> None:
        self._journal = journal
        self.damage: JournalError | ProtocolError | None = None

    def __iter__(self) -> Iterator[Entry]:
        try:
            yield from self._journal
        except (JournalError, ProtocolError) as err:
            self.damage = err


def _damaged(path: Path, err: Exception) -> Violation:
    return Violation(DAMAGE, path.name, "is missing" if isinstance(err, FileNotFoundError) else str(err), ())
