"""The audit of the rows that were passed over (`task.revisit_share`): each choice is derived again from the journal.

A row may be passed over only if its last group had equal rewards, as far as the journal showed it when the prompts were
ordered, and only if the draw says so. A source that passes over more rows than it has takes the next one. Like the
other tables, these share no code with what they check.
"""

from __future__ import annotations

from typing import Any, Final

from dora.core import commands as cmd
from dora.core import events as ev
from dora.core.ids import GroupId
from dora.journal.audit_tables import AuditedVisits, AuditTables

VISITS: Final = "visits"


def _on_prompts_arrived(t: AuditTables, event: ev.PromptsArrived) -> None:
    v = t.visits
    if v is None:
        return
    if len(event.visits) != (len(event.num_prompt_tokens) if v.share < 1 else 0):
        t.find(VISITS, "group", event.first, f"{len(event.num_prompt_tokens)} prompts have {len(event.visits)} visits")
        return
    for group, visit in enumerate(event.visits, start=event.first):
        if group < len(v.rows):
            if (visit.source, visit.row) != v.rows[group] or visit.passed:
                found = f"had row {v.rows[group]} before a restart, and has {(visit.source, visit.row)} now"
                t.find(VISITS, "group", group, found)
            continue
        _check(t, v, GroupId(group), visit)
        v.rows.append((visit.source, visit.row))


def _check(t: AuditTables, v: AuditedVisits, group: GroupId, visit: ev.Visit) -> None:
    """Check the rows that a source came to for a group, and count them."""
    rows = v.of_source[visit.source]
    for row in visit.passed:
        if not v.is_left(visit.source, row):
            t.find(VISITS, "group", group, f"row {row} of source {visit.source} was passed over, but was due")
        rows[row] += 1
    if len(visit.passed) > len(rows):
        t.find(VISITS, "group", group, f"source {visit.source} passed over {len(visit.passed)} of {len(rows)} rows")
    elif v.is_left(visit.source, visit.row) and len(visit.passed) < len(rows):
        t.find(VISITS, "group", group, f"has row {visit.row} of source {visit.source}, which was not due")
    rows[visit.row] += 1


def _drop_group(t: AuditTables, order: cmd.DropGroup) -> None:
    if order.outcome.value == "filtered":
        _note(t, order.group, "filtered")


def _commit_group(t: AuditTables, order: cmd.CommitGroup) -> None:
    _note(t, order.group, "committed")


def _note(t: AuditTables, group: GroupId, outcome: str) -> None:
    if t.visits is not None and group < len(t.visits.rows):
        t.visits.outcomes[t.visits.rows[group]] = outcome


def _fetch_prompts(t: AuditTables, order: cmd.FetchPrompts) -> None:
    if t.visits is not None and t.visits.share < 1:
        t.visits.known.update(t.visits.outcomes)
        t.visits.outcomes.clear()


HANDLERS: Final[dict[type, Any]] = {
    ev.PromptsArrived: _on_prompts_arrived,
    cmd.DropGroup: _drop_group,
    cmd.CommitGroup: _commit_group,
    cmd.FetchPrompts: _fetch_prompts,
}
