"""The run in a terminal: a live view, or one line per step and per evaluation if the output is not a terminal."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from pathlib import Path

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from dora.status.episodes import by_cause
from dora.status.facts import Score, StepFacts
from dora.status.snapshot import Snapshot, VersionRow

REFRESH_S = 1.0
#: Number of problems in the live view: the latest ones.
SHOWN_PROBLEMS = 3
_BAR_WIDTH = 32


@asynccontextmanager
async def show_progress(
    snapshot: Callable[[], Snapshot],
    *,
    status_url: str,
    folder: Path,
    token: Path | None = None,
    console: Console | None = None,
) -> AsyncIterator[None]:
    """Show the run while the context is open, and its state at the end. `token`: the file with the status token."""
    console = console or Console()
    lines = [f"run folder {folder}", f"status     {status_url}", *([f"token      {token}"] if token else [])]
    console.print("\n".join(lines), highlight=False, soft_wrap=True)
    if not console.is_terminal:
        async with _refreshed(PlainView(console).show, snapshot):
            yield
        return
    # The refresh task draws, so that no thread is needed.
    with Live(console=console, auto_refresh=False) as live:
        async with _refreshed(lambda now: live.update(draw(now), refresh=True), snapshot):
            yield


@asynccontextmanager
async def _refreshed(show: Callable[[Snapshot], None], snapshot: Callable[[], Snapshot]) -> AsyncIterator[None]:
    async def refresh() -> None:
        while True:
            await asyncio.sleep(REFRESH_S)
            show(snapshot())

    show(snapshot())
    task = asyncio.create_task(refresh(), name="progress-view")
    try:
        yield
    finally:
        task.cancel()
        await asyncio.wait({task})
        show(snapshot())
        if not task.cancelled():
            task.result()  # the task ends by itself only if drawing failed: raise that error


class PlainView:
    """Prints a line for each new step and each new evaluation; problems and alarms appear as log warnings."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._next_step = 0
        self._num_scores = 0

    def show(self, snapshot: Snapshot) -> None:
        """Print what is new since the last call."""
        for score in snapshot.scores[self._num_scores :]:
            self._print(score_line(score))
        self._num_scores = len(snapshot.scores)
        for step in snapshot.steps:
            if step.step >= self._next_step:
                self._print(step_line(step, snapshot))
                self._next_step = step.step + 1

    def _print(self, line: str) -> None:
        self._console.print(line, highlight=False, markup=False, soft_wrap=True)


def step_line(step: StepFacts, snapshot: Snapshot) -> str:
    """Format a step as one line."""
    versions = " ".join(f"{row.version}:{row.serving}" for row in snapshot.versions if row.is_live)
    parts = [
        f"step {step.step + 1}/{snapshot.num_steps}",
        f"reward {step.reward_mean:.3f}",
        f"{step.duration_s:.1f} s",
        f"{snapshot.tokens_per_s:.0f} tokens/s",
        f"live versions (version:instances) {versions}",
        f"staleness {step.staleness_mean:.2f}",
        f"trainer idle {_share(step.idle_s / step.duration_s if step.duration_s > 0 else None)}",
        *([f"turns {step.episodes.turns_mean:.1f}"] if step.episodes is not None else []),
        f"left {_duration(snapshot.eta_s)}",
    ]
    return "  ".join(parts)


def score_line(score: Score) -> str:
    """Format an evaluation as one line."""
    failed = f", {score.num_failed} failed" if score.num_failed else ""
    return f"version {score.version}: {score.name} {mean_text(score)} ({score.num_samples} answers{failed})"


def mean_text(score: Score) -> str:
    """Return the mean reward, or that there is none."""
    return "nothing was graded" if score.mean is None else f"{score.mean:.3f}"


def draw(snapshot: Snapshot) -> RenderableType:
    """Return the live view."""
    return Group(_title(snapshot), _progress(snapshot), _figures(snapshot), _versions(snapshot))


def _title(s: Snapshot) -> Text:
    title = Text.assemble((s.run_id, "bold"), f"  {s.strategy}, K = {s.max_staleness}, {s.phase}")
    if s.reason:
        title.append(f": {s.reason}")
    broken = {
        "C1": (s.counts.version_conflicts, "version conflicts"),
        "C2": (s.counts.scheduling_aborts, "scheduling aborts"),
        "C3": (s.counts.staleness_violations, "staleness violations"),
    }
    for constraint, (count, name) in broken.items():
        if constraint in s.by_design:
            title.append(f"\n{constraint} is broken by design: {s.by_design[constraint]}")
        elif count:
            title.append(f"\n{count} {name}", style="bold red")
    for alarm in s.alarms:
        if alarm.cleared is None:
            title.append(f"\ndrift: {alarm.text}", style="bold yellow")
    for problem in s.problems[-SHOWN_PROBLEMS:]:
        title.append(f"\n{problem}", style="yellow")
    return title


def _progress(s: Snapshot) -> Table:
    row = Table.grid(padding=(0, 2))
    row.add_row(
        ProgressBar(total=s.num_steps, completed=s.steps_trained, width=_BAR_WIDTH),
        f"step {s.steps_trained}/{s.num_steps}",
        f"{_duration(s.uptime_s)} elapsed, {_duration(s.eta_s)} left",
    )
    return row


def _figures(s: Snapshot) -> Table:
    table = Table.grid(padding=(0, 2))
    for name, value in (
        ("reward", " ".join(f"{step.reward_mean:.2f}" for step in s.steps[-8:]) or "-"),
        ("held-out", _held_out(s.scores)),
        ("tokens/s", f"{s.tokens_per_s:.0f} sampled, {s.trained_tokens_per_s:.0f} trained"),
        ("staleness", _staleness(s)),
        ("groups", f"{s.step_committed}/{s.groups_per_step} of step {s.step_forming + 1} committed; {_groups(s)}"),
        ("trainer", _trainer(s)),
        ("admission", f"closed: {s.not_admitting}" if s.not_admitting else "open"),
        ("instances", ", ".join(f"{n} {phase}" for phase, n in s.instances_by_phase.items() if n) or "none yet"),
        ("moves", f"{s.counts.migrations} migrations, {s.counts.recovered} recovered after a loss"),
        *_episodes(s),
    ):
        table.add_row(Text(name, style="dim"), value)
    return table


def _episodes(s: Snapshot) -> Iterator[tuple[str, str]]:
    if s.environment is None:
        return
    last = s.steps[-1].episodes if s.steps else None
    yield "episodes", last.text if last is not None else "-"
    yield "calls", f"{s.environment.calling} under way" + (f"; {last.calls_text}" if last is not None else "")
    if s.environment.failed:
        yield "environment", f"failed: {by_cause(s.environment.failed)}"


def _held_out(scores: tuple[Score, ...]) -> str:
    sets = dict.fromkeys(score.name for score in scores)
    lines = []
    for name in sets:
        own = [score for score in scores if score.name == name]
        after = f" -> {mean_text(own[-1])} (version {own[-1].version})" if len(own) > 1 else ""
        lines.append(f"{name} {mean_text(own[0])} (version {own[0].version}){after}")
    return "\n".join(lines) or "-"


def _staleness(s: Snapshot) -> str:
    if s.staleness_mean is None:
        return "-"
    groups = ", ".join(f"{count} at {i}" for i, count in enumerate(s.staleness))
    return f"mean {s.staleness_mean:.2f} ({groups})"


def _groups(s: Snapshot) -> str:
    shown = ("generating", "grading", "complete", "filtered", "failed")
    skipped = f" ({s.prompts_skipped} over the prompt limit)" if s.prompts_skipped else ""
    return ", ".join(f"{s.groups_by_phase[phase]} {phase}" for phase in shown) + skipped


def _trainer(s: Snapshot) -> str:
    now = f"waiting for {s.trainer.waits_for}" if s.trainer.waits_for else "working"
    if s.trainer.step is not None and s.trainer.step < s.num_steps:
        now += f" (step {s.trainer.step + 1})"
    because = f", waiting for {s.trainer.idle_reason}" if s.trainer.idle_reason else ""
    return f"{now}; idle for {_share(s.trainer.idle_share)} of the last step{because}"


def _versions(s: Snapshot) -> Table:
    table = Table(box=None, padding=(0, 2, 0, 0), header_style="dim")
    for heading in ("version", "instances", "groups", "unfinished", "queued", ""):
        table.add_column(heading, justify="left" if heading in ("instances", "") else "right")
    for row in s.versions:
        table.add_row(
            str(row.version),
            f"{'█' * row.serving}{'░' * row.loading} {row.serving}" + (f" + {row.loading}" if row.loading else ""),
            str(row.groups),
            str(row.unfinished),
            str(row.waiting),
            _notes(row),
        )
    return table


def _notes(row: VersionRow) -> str:
    notes = {"newest": row.is_newest, "evaluated": row.evaluating, "not live": not row.is_live}
    return ", ".join(name for name, holds in notes.items() if holds)


def _share(value: float | None) -> str:
    return "-" if value is None else f"{100 * value:.0f} %"


def _duration(seconds: float | None) -> str:
    if seconds is None:
        return "-"
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes} min" if hours else f"{minutes} min {rest} s" if minutes else f"{rest} s"
