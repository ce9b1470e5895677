"""The run in a terminal: a live view, or plain lines if the output is not a terminal."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path

from rich.console import Console, ConsoleOptions, RenderResult
from rich.live import Live
from rich.text import Text

from dora.errors import one_line
from dora.observe.scores import Score
from dora.observe.sentence import ENDED, duration
from dora.observe.snapshot import Snapshot
from dora.observe.steps import StepFacts
from dora.status.frame import frame, mean_text

REFRESH_S = 1.0
#: Minimum time between two plain lines about the start, seconds.
START_LINES_S = 5.0


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
    console.print("\n".join(map(one_line, lines)), highlight=False, markup=False, soft_wrap=True)
    with view(console, known=snapshot()) as show:
        async with _refreshed(show, snapshot):
            yield


@contextmanager
def view(console: Console, *, known: Snapshot | None = None) -> Iterator[Callable[[Snapshot], None]]:
    """Yield a function that shows a snapshot in place of the last one or, if the output is not a terminal, what is new.

    Lines about steps and evaluations in `known`, from before a resume, are not printed again.
    """
    if not console.is_terminal:
        yield PlainView(console, known=known).show
        return
    with Live(console=console, auto_refresh=False) as live:  # the caller draws, so that no thread is needed
        yield lambda now: live.update(LiveView(now, height=console.height), refresh=True)


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


class LiveView:
    """A frame of the live view, as wide as the terminal, and not higher than `height`."""

    def __init__(self, snapshot: Snapshot, *, height: int | None = None) -> None:
        self._snapshot = snapshot
        self._height = height

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        for line in frame(self._snapshot, options.max_width, self._height):
            text = Text(line.text, style=line.style, no_wrap=True)
            text.stylize("dim", 0, line.dim)
            yield text


class PlainView:
    """Prints lines about the start, each new step and each new evaluation; problems appear as log warnings."""

    def __init__(self, console: Console, *, known: Snapshot | None = None) -> None:
        self._console = console
        self._next_step = known.steps_trained if known is not None else 0
        self._num_scores = len(known.scores) if known is not None else 0
        self._started = ""
        self._started_at = -START_LINES_S

    def show(self, snapshot: Snapshot) -> None:
        """Print what is new since the last call."""
        for score in snapshot.scores[self._num_scores :]:
            self._print(score_line(score))
        self._num_scores = len(snapshot.scores)
        for step in snapshot.steps:
            if step.step >= self._next_step:
                self._print(step_line(step, snapshot))
                self._next_step = step.step + 1
        if not snapshot.groups_admitted and snapshot.phase not in ENDED:
            self._show_start(snapshot)

    def _show_start(self, snapshot: Snapshot) -> None:
        if snapshot.sentence != self._started and snapshot.uptime_s - self._started_at >= START_LINES_S:
            self._started, self._started_at = snapshot.sentence, snapshot.uptime_s
            self._print(snapshot.sentence)

    def _print(self, line: str) -> None:
        self._console.print(one_line(line), highlight=False, markup=False, soft_wrap=True)


def step_line(step: StepFacts, snapshot: Snapshot) -> str:
    """Format a step as one line; the line of the latest step also has the number of instances per live version."""
    duration_s = step.duration_s or 1e-9
    parts = [
        f"step {step.step + 1}/{snapshot.num_steps}",
        f"reward {step.reward_all_mean if step.reward_all_mean is not None else step.reward_mean:.3f}",
        f"{step.duration_s:.1f} s",
        f"{step.num_tokens / duration_s:,.0f} tokens/s",
        f"staleness {step.staleness_mean:.2f}",
        f"trainer idle {100 * step.idle_s / duration_s:.0f} %",
        *([f"turns {step.episodes.turns_mean:.1f}"] if step.episodes is not None else []),
    ]
    if step.step + 1 == snapshot.steps_trained and snapshot.phase not in ENDED:
        parts.append(", ".join(f"v{row.version} on {row.serving}" for row in snapshot.versions if row.is_live))
        parts += [f"about {duration(snapshot.eta_s)} left"] if snapshot.eta_s else []
    return "  ".join(parts)


def score_line(score: Score) -> str:
    """Format an evaluation as one line."""
    failed = f", {score.num_failed} failed" if score.num_failed else ""
    return f"version {score.version}: {score.name} reward: {mean_text(score)} ({score.num_samples} answers{failed})"
