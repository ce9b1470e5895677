"""The result of an audit, and its text for a terminal."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass

import numpy as np

from dora.errors import one_line
from dora.journal.audit_choices import ChoicesCount


@dataclass(frozen=True, slots=True)
class Violation:
    """A broken rule."""

    rule: str  #: for example "C1 spans"
    id: str  #: what it is about: "group 7", "trajectory 31", "instance 2", "journal.msgpack"
    message: str
    excerpt: tuple[str, ...]  #: the last lines about it until then


@dataclass(frozen=True, slots=True)
class Lengths:
    """A distribution of answer lengths, in tokens."""

    count: int
    mean: float
    median: int
    p90: int
    p99: int
    longest: int


def lengths_of(tokens: Collection[int]) -> Lengths:
    """Return the quantiles of token counts; all zero if there are none."""
    if not tokens:
        return Lengths(0, 0.0, 0, 0, 0, 0)
    values = np.fromiter(tokens, np.int64, len(tokens))
    median, p90, p99 = (int(q) for q in np.quantile(values, (0.5, 0.9, 0.99), method="inverted_cdf"))
    return Lengths(len(values), float(values.mean()), median, p90, p99, int(values.max()))


@dataclass(frozen=True, slots=True)
class AuditReport:
    """Counts of a whole journal and every violation of C1, C2, C3 or of the journal itself."""

    run_id: str
    end: str  #: why the run ended, according to the journal
    num_events: int
    restarts: int  #: of the controller
    torn_bytes: int  #: of an incomplete last record, ignored
    groups: Mapping[str, int]  #: admitted, trained, filtered, failed, in flight; discarded if there are any
    reasons: Mapping[str, int]  #: "filtered: ...", "failed: ..." or "discarded: ..." -> groups
    steps: int  #: trained
    staleness: Mapping[int, int]  #: step - version -> groups committed
    lengths: Mapping[str, Lengths]  #: by outcome: generated, trained, filtered, failed, discarded (if finished)
    broken_by_design: Mapping[str, str]  #: constraint that the strategy breaks by design -> how often
    max_live_versions: int
    migrations: int  #: trajectories (evaluation samples, too) stopped and continued on another instance
    recovered: int  #: trajectories that continued after their instance was lost
    environment_failed: int  #: trajectories without a reward because their environment could not go on
    episode_replays: int  #: of lost environments
    proofs: int | None  #: of adapters, after loads and before unloads; None: versions are full weights
    late_completions: int  #: completions of an old attempt, ignored; micro-batches are not counted
    evaluations: tuple[int, ...]  #: versions evaluated
    replays_differ: int  #: versions that a replay computed with other bytes (0 if the trainer is deterministic)
    token_counts_checked: int | None  #: trajectories compared with the token store; None: it is missing or damaged
    violations: tuple[Violation, ...]
    choices: ChoicesCount | None = None  #: None: choices of experts are not replayed

    @property
    def ok(self) -> bool:
        """Whether every constraint that the strategy keeps holds."""
        return not self.violations


def render(report: AuditReport, *, max_violations: int = 20) -> str:
    """Return the report as lines for a terminal."""
    counts = ", ".join(f"{n} {name}" for name, n in report.groups.items())
    staleness = ", ".join(f"{s}: {n}" for s, n in sorted(report.staleness.items())) or "none committed"
    tokens = "not compared" if report.token_counts_checked is None else f"{report.token_counts_checked} compared"
    lines = [
        f"run {report.run_id}, {report.end}",
        f"  events       {report.num_events}, controller restarts {report.restarts}, torn bytes {report.torn_bytes}",
        f"  steps        {report.steps} trained",
        f"  groups       {counts}",
        *(f"               {n} {reason}" for reason, n in report.reasons.items()),
        f"  staleness    {staleness} (groups by step - version)",
        *(_length_line(name, lengths) for name, lengths in report.lengths.items()),
        f"  versions     at most {report.max_live_versions} live, evaluated {list(report.evaluations)}",
        f"  moves        {report.migrations} answers moved, {report.recovered} recovered after a loss, "
        f"{report.late_completions} late completions ignored",
        *(
            [f"  adapters     {report.proofs} proofs; servers do not report which one answered, so C1 is of requests"]
            * (report.proofs is not None)
        ),
        f"  token store  {tokens}",
        *([_choices_line(report.choices)] if report.choices is not None else []),
        *(
            [f"  environments {report.environment_failed} trajectories failed, {report.episode_replays} replays"]
            * (report.environment_failed + report.episode_replays > 0)
        ),
        *(
            [f"  replays      {report.replays_differ} versions recomputed with other bytes"]
            * (report.replays_differ > 0)
        ),
        *(f"  {name:<12} broken by design: {count}" for name, count in report.broken_by_design.items()),
    ]
    for violation in report.violations[:max_violations]:
        lines += [f"VIOLATION {violation.rule}: {violation.id} {violation.message}"]
        lines += [f"    {line}" for line in violation.excerpt]
    if len(report.violations) > max_violations:
        lines.append(f"... and {len(report.violations) - max_violations} more")
    verdict = _verdict(report) if report.ok else f"{len(report.violations)} violations"
    return "\n".join(map(one_line, [*lines, f"audit: {verdict}"]))


def _choices_line(choices: ChoicesCount) -> str:
    return (
        f"  experts      chosen for {choices.known} tokens, {choices.read_again} of them read again by another server; "
        f"not known for {choices.missing}"
    )


def _verdict(report: AuditReport) -> str:
    kept = [name for name in ("C1", "C2", "C3") if name not in report.broken_by_design]
    broken = "".join(f"; {name} is broken by design" for name in report.broken_by_design)
    listed = " and ".join([", ".join(kept[:-1]), kept[-1]] if kept[:-1] else kept)
    return f"{listed} {'hold' if len(kept) > 1 else 'holds'}{broken}"


def _length_line(name: str, lengths: Lengths) -> str:
    return (
        f"  {name:<12} {lengths.count} answers, tokens: mean {lengths.mean:.1f}, median {lengths.median}, "
        f"p90 {lengths.p90}, p99 {lengths.p99}, longest {lengths.longest}"
    )
