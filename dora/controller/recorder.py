"""The recorder of a run: it passes events and reports to what observes (`dora/observe`), and writes what that returns.

Invariant: rows and lines are written once their event is on the disk, and no step has two rows. Nothing else writes
into metrics.jsonl, trajectories.jsonl, spans.jsonl and timeline.jsonl.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import structlog

from dora import files, foreign
from dora.controller.evaluations import Evaluations
from dora.controller.line_files import LineFiles
from dora.controller.loop import Outcome
from dora.controller.samples import SampleFile, Samples
from dora.controller.trainer_link import StepReport
from dora.controller.trajectories import Trajectories
from dora.core import commands as cmd
from dora.core import events as ev
from dora.core.ids import GroupId, InstanceId, VersionId
from dora.core.state import State
from dora.errors import DoraError, one_line
from dora.files import LineFile
from dora.journal.deep import KeptTrajectory
from dora.observe.drift import Alarm
from dora.observe.facts import Down
from dora.observe.observed import Observed
from dora.observe.scores import Score
from dora.observe.snapshot import Snapshot
from dora.transport.messages import RankSpans

log = structlog.get_logger(__name__)

#: Lines to be appended to a file.
Lines = tuple[LineFile, bytes]


class Recorder:
    """The recorder of one run."""

    def __init__(
        self,
        observed: Observed,
        *,
        state: State,
        lines: LineFiles,
        trajectories: Trajectories,
        evaluations: Evaluations,
        samples: Samples,
        max_kept_bytes: int,
        urls: Mapping[InstanceId, str],
        down: Mapping[InstanceId, Down],
        now: Callable[[], float],
        then: Callable[..., None],
    ) -> None:
        """`urls`: of the instances that are up; `down`: those that are not. `then`: calls a function once a journal
        position is on the disk."""
        self.observed = observed
        self.samples = samples
        self._facts = observed.facts
        self._state = state
        self._lines = lines
        self._trajectories = trajectories
        self._evaluations = evaluations
        self._kept = SampleFile(lines.trajectories, max_bytes=max_kept_bytes)
        self._urls = urls
        self._down = down
        self._now = now
        self._then = then
        self._num_overtaken = len(state.evaluation.overtaken)  # an earlier controller has reported them
        self._row: list[Lines] = []  # of the step that the present event trains
        for row in read_rows(lines.metrics.path):
            observed.recall(row)
        for eval_set in evaluations.sets:
            if eval_set.num_skipped:
                self._note_skipped_samples(eval_set.name, eval_set.num_skipped)
            if eval_set.unreadable:
                rows = f"{eval_set.name}: skipped {len(eval_set.unreadable)} rows that cannot be read"
                self._note_problem("evaluation_shortened", f"{rows}; {eval_set.unreadable[0]}")

    def _note_skipped_samples(self, name: str, count: int) -> None:
        what = "rows whose first messages cannot be rendered, or are" if self._facts.has_environment else "prompts"
        self._note_problem("evaluation_shortened", f"{name}: skipped {count} {what} over task.max_prompt_tokens")

    # -- events -------------------------------------------------------------------------------------------------------

    def before(self, event: ev.Event) -> None:
        """Make the row of a step that the event trains, before the core handles it."""
        if isinstance(event, ev.StepTrained):
            groups = self._state.feed.groups(event.step)
            row = self.observed.before(event, cpu_s=time.process_time())
            if row is not None:
                log_changes(self.observed.changed_alarms)
                if self._state.settings.updates == 1:  # else fresh tokens may be trained under other weights
                    self._facts.mismatches |= self.samples.mismatches(groups, step=event.step)
                kept = self._keep(self.samples.of_step(groups, step=event.step))
                self._row = [(self._lines.metrics, _line(row)), *kept]

    def on_event(self, event: ev.Event, commands: list[cmd.Command], *, position: int) -> None:
        """Observe an event and the commands it led to, and write what is complete with it."""
        self.observed.apply(event, commands)
        self.samples.on_commands(commands)
        spans, timeline = self.observed.lanes.take()
        if spans or timeline:
            lines = [(self._lines.spans, spans), (self._lines.timeline, timeline)]
            self._then(position, partial(_write, lines), is_urgent=False)
        if self._row:
            row, self._row = self._row, []
            self._then(position, partial(_write, row))
        if isinstance(event, ev.CheckpointSaved):
            self._then(position, self._lines.soon)  # the steps before the checkpoint are not trained again
        self._note_problems(event)
        if len(self._state.evaluation.overtaken) > self._num_overtaken:
            self._report_overtaken(position)

    def _note_problems(self, event: ev.Event) -> None:
        match event:
            case ev.TrajectoryGraded(reason=reason) if reason:
                self._note_problem("not_graded", reason.removeprefix("error: "), is_failure=True)
            case ev.TrainerLost(incarnation=incarnation, reason=reason):
                log.warning("trainer_lost", incarnation=incarnation, reason=reason)
                self._facts.note_problem(f"trainer lost: {reason}", is_failure=True)
            case ev.CallFinished(failed=failed) if failed:
                self._note_problem("environment_failed", failed, is_failure=True)
            case ev.PromptsArrived(first=first, num_prompt_tokens=counts) if not all(counts):
                for group in range(first, first + len(counts)):
                    prompt = self._trajectories.prompts.get(GroupId(group))
                    if prompt is not None and prompt.skipped:
                        self._note_problem("prompt_skipped", prompt.skipped)

    def _note_problem(self, name: str, reason: str, *, is_failure: bool = False) -> None:
        """Show a problem in the status and, the first time, log a warning."""
        if self._facts.note_problem(f"{name.replace('_', ' ')}: {reason}", is_failure=is_failure):
            log.warning(name, reason=reason)

    def _keep(self, kept: Iterator[KeptTrajectory]) -> list[Lines]:
        """Return the lines of the trajectories for which the file has room."""
        lines = self._kept.lines(kept)
        if self._kept.is_full:
            self._note_problem("trajectories_full", "trajectories.jsonl has reached log.trajectories_mb")
        return [(self._kept.file, line) for line in lines]

    def _report_overtaken(self, position: int) -> None:
        """Report versions whose evaluation was skipped."""
        versions = self._state.evaluation.overtaken[self._num_overtaken :]
        self._num_overtaken += len(versions)
        for version in versions:
            log.warning("evaluation_skipped", version=version, reason="a newer version was due before its turn")
            row = {"kind": "evaluation_skipped", "at": self._state.now, "version": version}
            self._then(position, partial(self._lines.metrics.write, _line(row)))

    # -- reports ------------------------------------------------------------------------------------------------------

    def on_step(self, report: StepReport) -> None:
        """Take in the trainer's report of a step, which comes before its StepTrained."""
        self.observed.on_report(report.step, report.metrics)

    def on_rank_spans(self, rank: int, message: RankSpans) -> None:
        """Take in what a rank did."""
        self.observed.lanes.on_rank_spans(rank, message, at=self._now())

    def on_wave_done(self, rank: int) -> None:
        """Note that a rank has ended a micro-batch."""
        self.observed.lanes.on_wave_done(rank, at=self._now())

    def on_push_stage(self, instance: InstanceId, stage: str) -> None:
        """Note the stage that a push has reached."""
        self.observed.lanes.on_push_stage(instance, stage, at=self._now())

    def on_ready(self, num_ready: int, num_ranks: int) -> None:
        """Note how many trainer ranks are ready, of how many."""
        self._facts.ranks_ready, self._facts.num_ranks = num_ready, num_ranks
        self.observed.lanes.on_ranks(num_ranks)

    def on_lag(self, seconds: float) -> None:
        """Note a measurement of the event loop's lag."""
        self._facts.lag.note(seconds)

    def on_steps(self, num_tokens: int, num_steps: int) -> None:
        """Note tokens of an answer, and in how many steps a server with speculative decoding made them."""
        self._facts.acceptance.note(num_tokens, num_steps)

    def on_full(self, reason: str) -> None:
        """Report that the journal waits for space on the disk."""
        self._facts.note_problem(f"disk full: {reason}; the run waited for space")
        log.warning("disk_full", reason=reason, waits_for="space")

    def on_evaluation(self, version: VersionId, *, position: int) -> None:
        """Write the scores of a version, whose samples are all graded."""
        records, ids = self._trajectories.records, self._evaluations.ids(version)
        scores = self._evaluations.scores([(records[t].reward, len(records[t].tokens)) for t in ids])
        for index, score in enumerate(scores):
            row = {"kind": "evaluation", "at": self._state.now, "version": version, **asdict(score)}
            row["pass_at_n"] = score.pass_at_n
            own = [t for t in ids if self._evaluations.set_index(t) == index and records[t].reward is not None]
            if (episodes := self.observed.episode_stats(own)) is not None:
                row["episodes"] = asdict(episodes)
            self._facts.scores.append(msgspec.convert(row, Score))
            self._then(position, partial(self._lines.metrics.write, _line(row)))
        kept = self._keep(self.samples.of_evaluation(version, trained=self._state.feed.trained))
        self._then(position, partial(_write, kept))

    # -- results ------------------------------------------------------------------------------------------------------

    def snapshot(self) -> Snapshot:
        """Return the current state of the run."""
        self._facts.urls = dict(self._urls)
        self._facts.down = dict(self._down)
        return self.observed.snapshot()

    def end(self, outcome: Outcome) -> None:
        """Note how the run ended."""
        self._facts.phase = "finished" if outcome.finished else "interrupted"
        self._facts.reason = outcome.reason

    def close(self) -> None:
        """End all spans, and write the last lines."""
        self.observed.lanes.end()
        with suppress(DoraError):  # these lines are not essential
            for file, lines in zip((self._lines.spans, self._lines.timeline), self.observed.lanes.take(), strict=True):
                file.write(lines)

    def fail(self, error: DoraError) -> None:
        """Note why the run failed."""
        self._facts.phase, self._facts.reason = "failed", one_line(error)


def log_changes(alarms: Sequence[Alarm]) -> None:
    """Log the alarms that a step raised or cleared; the console shows them, too."""
    for alarm in alarms:
        log.warning("drift_alarm" if alarm.cleared is None else "drift_cleared", alarm=alarm.text)


def read_rows(metrics: Path, *, kind: str = "") -> Iterator[dict[str, Any]]:
    """Yield the rows of metrics.jsonl, or those of a kind; torn ones are left out."""
    if not metrics.is_file():
        return
    for line in foreign.read_lines(metrics, max_bytes=files.MAX_ROW_BYTES):
        with suppress(ValueError, TypeError, LookupError, RecursionError):  # a crash may tear a row
            row = json.loads(line)
            if row["kind"] == (kind or row["kind"]):
                yield row


def last_step_at(metrics: Path) -> float:
    """Return when the last step that has a row was trained; 0 without one."""
    times = [row.get("at") for row in read_rows(metrics, kind="step")]
    return next((at for at in reversed(times) if isinstance(at, int | float)), 0.0)


def _line(row: dict[str, Any]) -> bytes:
    """Return a row as JSON, which has no NaN and no infinity: they are null."""
    return msgspec.json.encode(row) + b"\n"


def _write(rows: list[Lines]) -> None:
    for file, line in rows:
        file.write(line)
