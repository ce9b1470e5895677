"""The state of a run as lines of text of a given width: the same number of lines from the start to the end of a run.

Invariant: pure; no line is wider than asked, and none has a control character, whatever the names in the snapshot.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from textwrap import wrap
from typing import Final

from rich.cells import cell_len, set_cell_size

from dora.errors import one_line
from dora.observe.episodes import by_cause
from dora.observe.scores import Score
from dora.observe.sentence import ENDED, duration, with_observations
from dora.observe.snapshot import Snapshot, VersionRow

#: Lines kept for the sentence, below and from WIDE columns on.
SENTENCE_LINES: Final = (3, 2)
WIDE: Final = 100
#: Maximum number of versions and held-out sets, and number of problems, that have a line.
SHOWN_VERSIONS: Final = 4
SHOWN_SETS: Final = 3
SHOWN_PROBLEMS: Final = 2
_LABEL: Final = 11
_BAR: Final = (20, 40)  # below and from WIDE columns on
_SERVER_CELLS: Final = 8
_SPARKS: Final = "▁▂▃▄▅▆▇█"
_COLUMNS: Final = (9, 21, -7, -12, -8, 11, 12)  # widths; negative: aligned to the right


@dataclass(frozen=True, slots=True)
class Line:
    """One line."""

    text: str
    style: str = ""
    dim: int = 0  #: width of its leading part that is only a label
    is_optional: bool = False  #: it is left out of a terminal that is too low


def frame(s: Snapshot, width: int, height: int | None = None) -> list[Line]:
    """Return the lines. Their number is the same throughout a run, and at most `height` if possible."""
    is_over = s.phase in ENDED
    lines = [*_sentence(s, width, is_over=is_over), Line(_progress(s, width)), *_learning(s, width)]
    lines += [_tokens(s, is_over=is_over), _row("staleness", _staleness(s), is_optional=True)]
    lines += [_row("trainer", f"idle {idle_text(s) or '-'}"), _left_out(s)] if is_over else [*_work(s), *_versions(s)]
    lines += [_checks(s), *_problems(s), *([_row("task", s.task, is_optional=True)] if s.task else [])]
    lines += [_row("run", f"{s.strategy}, K = {s.max_staleness}  {s.run_id}")]
    surplus = len(lines) - height if height is not None else 0
    optional = [i for i, line in enumerate(lines) if line.is_optional]
    left_out = set(optional[-surplus:]) if surplus > 0 else set()
    return [
        replace(line, text=_fit(one_line(line.text), width).rstrip())
        for i, line in enumerate(lines)
        if i not in left_out
    ]


def sparkline(values: Sequence[float], width: int) -> str:
    """Draw values from their lowest to their highest; of more than `width` values, the means of neighbours."""
    if len(values) > width:
        edges = [i * len(values) // width for i in range(width + 1)]
        values = [sum(values[a:b]) / (b - a) for a, b in pairwise(edges)]
    low, high = min(values, default=0.0), max(values, default=0.0)
    top = len(_SPARKS) - 1
    return "".join(_SPARKS[round(top * (v - low) / (high - low)) if high > low else top // 2] for v in values)


def by_set(scores: Sequence[Score]) -> dict[str, list[Score]]:
    """Return the scores of each held-out set."""
    found: dict[str, list[Score]] = {}
    for score in scores:
        found.setdefault(score.name, []).append(score)
    return found


def mean_text(score: Score) -> str:
    """Return the mean reward, or that there is none."""
    return "nothing was graded" if score.mean is None else f"{score.mean:.3f}"


def moves(s: Snapshot) -> str:
    """Return how many answers were moved to another server, and how many recovered."""
    moved = f"{s.counts.migrations:,} answer{'s' * (s.counts.migrations != 1)} moved"
    return f"{moved}, {s.counts.recovered:,} recovered after a loss"


def idle_text(s: Snapshot) -> str:
    """Return the share of the steps in which the trainer was idle; "" before the second step.

    The first step is left out: it includes the start of the servers and the first evaluation.
    """
    share = s.trainer.mean_idle_share
    return "" if share is None else f"{100 * share:.0f} % of steps 2 to {s.steps_trained:,}"


def _sentence(s: Snapshot, width: int, *, is_over: bool) -> Iterator[Line]:
    num_lines = SENTENCE_LINES[width >= WIDE]
    lines = wrap(one_line(s.sentence), width, max_lines=None if is_over else num_lines, placeholder=" …")
    for text in lines + [""] * (0 if is_over else num_lines - len(lines)):
        yield Line(text, "bold red" if s.phase == "failed" else "bold")


def _progress(s: Snapshot, width: int) -> str:
    left = f", about {duration(s.eta_s)} left" if s.eta_s and s.phase not in ENDED else ""
    done = f"{s.steps_trained:,} of {s.num_steps:,} steps" if s.num_steps else f"{s.progress:.0%} of the answers graded"
    text = f"  {done}  {duration(s.uptime_s)} elapsed{left}"
    bar = _BAR[width >= WIDE]
    filled = round(bar * min(1.0, max(0.0, s.progress)))
    return f"{'━' * filled}{'─' * (bar - filled)}{text}"


def _learning(s: Snapshot, width: int) -> Iterator[Line]:
    sparks = (width - _LABEL) // 3
    trained = f", {s.steps[-1].reward_mean:.3f} in trained groups" if s.steps else ""
    known = s.rewards
    trend = f"{sparkline(known, sparks)}  {known[0]:.3f} → {known[-1]:.3f}{trained}" if known else "-"
    yield _row("reward", trend)
    own = by_set(s.scores)
    names = s.held_out or tuple(own)
    for name in names[: SHOWN_SETS if len(names) <= SHOWN_SETS else SHOWN_SETS - 1]:
        yield _row(name, _held_out(own.get(name, []), sparks))
    if len(names) > SHOWN_SETS:
        yield _row("held-out", f"and {len(names) - SHOWN_SETS + 1} more sets: they are in metrics.jsonl")


def _held_out(scores: Sequence[Score], sparks: int) -> str:
    if not scores:
        return "-"
    last = f" → {mean_text(scores[-1])} (v{scores[-1].version})" if len(scores) > 1 else ""
    curve = sparkline([score.mean for score in scores if score.mean is not None], sparks)
    return f"{curve}  {mean_text(scores[0])} (v{scores[0].version}){last} held-out"


def _tokens(s: Snapshot, *, is_over: bool) -> Line:
    if is_over:
        return _row("tokens", f"{s.num_tokens:,} sampled, {s.num_trained_tokens:,} trained{with_observations(s)}")
    speed = f"{s.tokens_per_s:,.0f} sampled, {s.trained_tokens_per_s:,.0f} trained"
    several = f"; {s.accept_length:.2f} tokens a step" if s.accept_length is not None else ""
    return _row("tokens/s", speed + several, is_optional=True)


def _left_out(s: Snapshot) -> Line:
    passed = [f"{s.rows_passed:,} rows passed over"] if s.rows_passed else []
    groups = [f"{count:,} {reason}" for reason, count in s.dropped.items()]
    return _row("left out", ", ".join([*(groups or ["no group"]), *passed]))


def _staleness(s: Snapshot) -> str:
    if s.staleness_mean is None:
        return "-"
    groups = ", ".join(f"{count:,} at {i}" for i, count in enumerate(s.staleness))
    return f"mean {s.staleness_mean:.2f}; groups: {groups}"


def _work(s: Snapshot) -> Iterator[Line]:
    """What the trainer did last, the step that is being formed, and why nothing more is admitted."""
    mean, share = idle_text(s), s.trainer.idle_share
    waited = f", waiting for {s.trainer.idle_reason}" if s.trainer.idle_reason else ""
    idle = "" if share is None else f"{100 * share:.0f} % of the last {'one' if mean else 'step'}{waited}"
    yield _row("trainer", f"idle {'; '.join(filter(None, (mean, idle)))}" if idle else "-")
    forming = f"step {s.step_forming + 1:,}: {s.step_committed:,} of {s.groups_per_step:,} groups"
    yield _row("forming", forming if s.step_forming < s.num_steps else "-")
    shown = ("generating", "grading", "complete", "filtered", "failed")
    counts = ", ".join(f"{s.groups_by_phase.get(phase, 0):,} {phase}" for phase in shown)
    yield _row("groups", counts, is_optional=True)
    yield _row("admission", f"closed: {s.not_admitting}" if s.not_admitting else "open")
    if s.environment is not None:
        last = s.steps[-1].episodes if s.steps else None
        calls = f"{s.environment.calling:,} under way" + (f"; {last.calls_text}" if last else "")
        yield _row("episodes", last.text if last is not None else "-", is_optional=True)
        yield _row("calls", calls, is_optional=True)
    if s.judges is not None:
        yield _row("judges", s.judges.text, is_optional=True)


def _versions(s: Snapshot) -> Iterator[Line]:
    """The versions, oldest first, which is also the order in which the trainer needs their answers."""
    yield Line(_cells(("version", "servers", "groups", "unfinished", "queued", " train by", "")), "dim")
    num_lines = min(s.max_staleness + 2, SHOWN_VERSIONS)
    rows = [_version(row, s) for row in s.versions]
    if len(rows) > num_lines:
        inner = s.versions[num_lines - 2 : -1]
        rows = [*rows[: num_lines - 2], _folded(inner, s), rows[-1]]
    yield from rows
    yield from [Line("")] * (num_lines - len(rows))


def _version(row: VersionRow, s: Snapshot) -> Line:
    deadline = f" step {min(row.version + s.max_staleness, s.num_steps - 1) + 1:,}" if row.groups else ""
    is_now = s.evaluation is not None and s.evaluation.version == row.version
    note = "evaluating" if is_now else "to evaluate" if row.evaluating else "newest" if row.is_newest else ""
    note = note or ("unloading" if row.unloading else "")
    return Line(_cells((f"v{row.version}", _held_by([row], s), *_counts([row]), deadline, note)))


def _folded(rows: Sequence[VersionRow], s: Snapshot) -> Line:
    return Line(_cells((f"{len(rows)} more", _held_by(rows, s), *_counts(rows), "", "")))


def _held_by(rows: Sequence[VersionRow], s: Snapshot) -> str:
    """Return a bar of cells, one for a server or, of many servers, for a share of them."""
    serving, loading = sum(row.serving for row in rows), sum(row.loading for row in rows)
    scale = min(1.0, _SERVER_CELLS / max(1, len(s.instances)))
    full, light = (min(_SERVER_CELLS, max(1, round(scale * n))) if n else 0 for n in (serving, loading))
    return f"{'█' * full}{'░' * light} {serving:,}".strip() + (f" + {loading:,} loading" if loading else "")


def _counts(rows: Sequence[VersionRow]) -> list[str]:
    sums = (sum(row.groups for row in rows), sum(row.unfinished for row in rows), sum(row.waiting for row in rows))
    return [f"{value:,}" for value in sums]


def _cells(values: Sequence[str]) -> str:
    cells = (_fit(v, w - 1) if w > 0 else _fit(v.rjust(-w - 1), -w - 1) for v, w in zip(values, _COLUMNS, strict=True))
    return " ".join(cells)


def _checks(s: Snapshot) -> Line:
    broken = {
        "C1": (s.counts.version_conflicts, "version conflicts"),
        "C2": (s.counts.scheduling_aborts, "scheduling aborts"),
        "C3": (s.counts.staleness_violations, "staleness violations"),
    }
    design = [f"{name} broken by design: {counts}" for name, counts in s.by_design.items()]
    wrong = [f"{count:,} {what}" for name, (count, what) in broken.items() if count and name not in s.by_design]
    kept = ", ".join(name for name in broken if name not in s.by_design)
    fine = [f"{kept} {'hold' if ',' in kept else 'holds'}"] if kept and not wrong else []
    line = _row("checks", "; ".join([*wrong, *fine, *design, moves(s)]))
    return Line(line.text, "bold red", line.dim) if wrong else line


def _problems(s: Snapshot) -> Iterator[Line]:
    """The servers that are down, the raised alarms and the latest problems, in the same number of lines throughout."""
    found = [*s.down, *(f"drift: {alarm.text}" for alarm in s.alarms if alarm.cleared is None)]
    if s.environment is not None and s.environment.failed:
        found.append(f"environment failed: {by_cause(s.environment.failed)}")
    found += reversed(s.problems)
    if len(found) > SHOWN_PROBLEMS:
        found[SHOWN_PROBLEMS - 1 :] = [f"and {len(found) - SHOWN_PROBLEMS + 1} more: they are in log.jsonl"]
    for label, text in zip(("problems", *[""] * SHOWN_PROBLEMS), found or ["none"], strict=False):
        line = _row(label, text)
        yield Line(line.text, "yellow" if found else "", line.dim)
    yield from [Line("")] * (0 if s.phase in ENDED else SHOWN_PROBLEMS - max(1, len(found)))


def _row(label: str, text: str, *, is_optional: bool = False) -> Line:
    return Line(f"{_fit(label, _LABEL - 1)} {text}", dim=_LABEL, is_optional=is_optional)


def _fit(text: str, width: int) -> str:
    """Cut or fill a text to a number of terminal columns."""
    return set_cell_size(text, width) if cell_len(text) <= width else set_cell_size(text, width - 1) + "…"
