"""Metrics, kept trajectories, and the facts for the status of a run.

Invariant: a row in metrics.jsonl has the core's counters at the time when the step was trained, or trained again if the
row was lost. Rows are written once their event is on the disk, and no step has two.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import structlog

from dora import files, foreign
from dora.controller.evaluations import Evaluations
from dora.controller.graded import GradedGroups
from dora.controller.line_files import LineFiles
from dora.controller.loop import Outcome
from dora.controller.samples import SampleFile, Samples
from dora.controller.spans import SpanRecorder
from dora.controller.trainer_link import StepReport
from dora.controller.trajectories import Trajectories
from dora.controller.turns import Turns
from dora.core import commands as cmd
from dora.core import events as ev
from dora.core.ids import GroupId, InstanceId, TrajectoryId, VersionId
from dora.core.state import State
from dora.core.tables import Group
from dora.environments.renderer import Renderer
from dora.errors import DoraError, one_line
from dora.files import LineFile
from dora.journal.deep import KeptTrajectory
from dora.status.drift import Alarm, DriftWatch
from dora.status.episodes import EpisodeStats
from dora.status.facts import Down, Score, ShellFacts, StepFacts
from dora.status.snapshot import Snapshot, snapshot, trainer_waits_for
from dora.tasks.tokenizer import Tokenizer

log = structlog.get_logger(__name__)


class RunObserver:
    """Writer of metrics.jsonl and trajectories.jsonl, and keeper of the facts for the status."""

    def __init__(
        self,
        *,
        lines: LineFiles,
        facts: ShellFacts,
        state: State,
        trajectories: Trajectories,
        evaluations: Evaluations,
        tokenizer: Tokenizer,
        drift: DriftWatch,
        keep_per_step: int,
        max_kept_bytes: int,
        spans: SpanRecorder,
        urls: Mapping[InstanceId, str],
        down: Mapping[InstanceId, Down],
        then: Callable[[int, Callable[[], None]], None],
        renderer: Renderer | None = None,
    ) -> None:
        """`urls`: of the instances that are up; `down`: those that are not. `renderer`: of episodes, if there are any.
        `then`: calls a function once a journal position is on the disk."""
        self.facts = facts
        self._lines = lines
        self._state = state
        self._trajectories = trajectories
        self._evaluations = evaluations
        self._drift = drift
        self._spans = spans
        self._urls = urls
        self._down = down
        self._then = then
        self._rows: list[tuple[LineFile, bytes]] = []  # to be written with the next StepTrained
        for eval_set in evaluations.sets:
            if eval_set.num_skipped:
                what = "rows without a prompt from the environment, or with one" if facts.has_environment else "prompts"
                skipped = f"skipped {eval_set.num_skipped} {what} over task.max_prompt_tokens"
                self._note_problem("evaluation_shortened", f"{eval_set.name}: {skipped}")
        self._metrics, metrics = lines.metrics, lines.metrics.path
        self._kept = SampleFile(lines.trajectories, max_bytes=max_kept_bytes)
        self._told = {row.get("step") for row in read_rows(metrics, kind="step")}  # steps that have a row
        facts.scores += earlier_scores(metrics)
        facts.starting = {*state.instances}
        for step in earlier_steps(metrics):
            facts.note_step(step)
        facts.num_trained_tokens = earlier_trained_tokens(metrics)
        recall_alarms(drift, metrics)
        facts.alarms = [*drift.alarms.values()]
        self._graded = GradedGroups(state)
        self._turns = Turns()
        self.samples = Samples(
            trajectories,
            evaluations=evaluations,
            tokenizer=tokenizer,
            turns=self._turns,
            tags={group.id: group.version for group in state.ledger.groups.values()},
            keep=keep_per_step,
            renderer=renderer,
        )
        self._waited_for = ""
        self._num_overtaken = len(state.evaluation.overtaken)  # an earlier controller has reported them
        self._step_began_at = state.now
        self._num_filtered = _num_filtered(state)
        self._fleet_busy_s = 0.0  # slot-seconds in use since the last step
        self._fleet_slots_s = 0.0
        self._seen_at = state.now
        self._cpu_s = time.process_time()  # of this process, when the last step was trained

    def snapshot(self) -> Snapshot:
        """Return the current state of the run."""
        self.facts.urls = dict(self._urls)
        self.facts.down = dict(self._down)
        self.facts.num_tokens = self._trajectories.num_tokens
        self.facts.account = self._trajectories.ledger.account
        self.facts.rank_s, self.facts.instance_s = self._spans.seconds()
        return snapshot(self._state, self.facts)

    def end(self, outcome: Outcome) -> None:
        """Note how the run ended."""
        self.facts.phase = "finished" if outcome.finished else "interrupted"
        self.facts.reason = outcome.reason

    def fail(self, error: DoraError) -> None:
        """Note why the run failed."""
        self.facts.phase, self.facts.reason = "failed", one_line(error)

    def close(self) -> None:
        """Close the files."""
        for file in (self._metrics, self._kept.file):
            file.close()

    # -- events ---------------------------------------------------------------------------------------------------

    def on_event(self, event: ev.Event, commands: list[cmd.Command], *, position: int) -> None:
        """Update the facts for the status, and write the rows of a trained step."""
        self._spans.on_event(event, commands, position=position)
        self._trajectories.ledger.note(event, commands)
        self._graded.on_event(event, commands)
        self.samples.on_commands(commands)
        if self._rows and isinstance(event, ev.StepTrained):
            rows, self._rows = self._rows, []
            self._then(position, partial(_write, rows))
        if isinstance(event, ev.CheckpointSaved):
            self._then(position, self._lines.soon)  # the steps before the checkpoint are not trained again
        if isinstance(event, ev.InstanceUp | ev.InstanceLost | ev.InstanceRemoved):
            self.facts.starting.discard(event.instance)
        if isinstance(event, ev.Ticked):
            self._on_tick(event.at)
        self.facts.durations.note(event, commands)
        if self.facts.has_environment:
            self._turns.note(event, commands)
        if len(self._state.evaluation.overtaken) > self._num_overtaken:
            self._report_overtaken(position)
        if isinstance(event, ev.TrajectoryGraded) and event.reason:
            self._note_problem("not_graded", event.reason.removeprefix("error: "))
        if isinstance(event, ev.CallFinished) and event.failed:
            self._note_problem("environment_failed", event.failed)
        if isinstance(event, ev.PromptsArrived) and not all(event.num_prompt_tokens):
            self._note_skipped(event)
        self._waited_for = trainer_waits_for(self._state) or self._waited_for
        if self.facts.phase == "starting" and self._state.ledger.admitted:
            self.facts.phase = "running"
        for command in commands:
            if isinstance(command, cmd.FailRun):
                self.facts.phase, self.facts.reason = "failed", command.reason

    def _note_skipped(self, event: ev.PromptsArrived) -> None:
        for group in range(event.first, event.first + len(event.num_prompt_tokens)):
            prompt = self._trajectories.prompts.get(GroupId(group))
            if prompt is not None and prompt.skipped:
                self._note_problem("prompt_skipped", prompt.skipped)

    def _note_problem(self, name: str, reason: str) -> None:
        """Show a problem in the status and, the first time, log a warning."""
        if self.facts.note_problem(f"{name.replace('_', ' ')}: {reason}"):
            log.warning(name, reason=reason)

    def _on_tick(self, at: float) -> None:
        self.facts.tokens.note(self._trajectories.num_tokens, at=at)
        elapsed = at - self._seen_at
        self._seen_at = at
        for instance in self._state.instances.values():
            self._fleet_slots_s += instance.slots * elapsed
            self._fleet_busy_s += len(instance.residents) * elapsed

    def on_full(self, reason: str) -> None:
        """Report that the journal waits for space on the disk."""
        self.facts.note_problem(f"disk full: {reason}; the run waited for space")
        log.warning("disk_full", reason=reason, waits_for="space")

    def on_lag(self, seconds: float) -> None:
        """Note a measurement of the event loop's lag."""
        self.facts.note_lag(seconds)

    def on_ready(self, num_ranks: int) -> None:
        """Note how many trainer ranks are ready."""
        self.facts.ranks_ready = num_ranks

    def on_step(self, report: StepReport) -> None:
        """Prepare the rows of a trained step; called just before its StepTrained is emitted."""
        state = self._state
        if report.step in self._told:
            return  # trained again
        self._told.add(report.step)
        is_new = report.step >= state.feed.trained
        groups = state.feed.groups(report.step)
        trajectories = [t for g in groups for t in g.trajectories]
        rewards = [t.reward for t in trajectories if t.reward is not None]
        num_tokens = sum(t.num_tokens for t in trajectories)
        duration_s = state.now - self._step_began_at
        self._step_began_at = state.now
        facts = StepFacts(
            step=report.step,
            reward_mean=sum(rewards) / len(rewards) if rewards else 0.0,
            num_groups=len(groups),
            num_tokens=num_tokens,
            staleness_mean=sum(report.step - g.version for g in groups) / len(groups) if groups else 0.0,
            duration_s=duration_s,
            idle_s=min(state.feed.idle_s, duration_s),
            waited_for=self._waited_for,
            **(self._graded.take().shares() if is_new else {}),
            **_lengths([t.num_tokens for t in trajectories if t.reward is not None]),
            episodes=self._episodes([t.id for t in trajectories if t.reward is not None]),
        )
        self._waited_for = ""
        if not self.facts.steps or report.step > self.facts.steps[-1].step:
            self.facts.note_step(facts)
        self._trajectories.ledger.train(report.step)
        self.facts.num_trained_tokens += num_tokens
        self.facts.trainer_metrics = report.metrics
        self._watch_drift(report)
        row = self._step_row(facts, report) | {"zero_variance_groups": self._zero_variance(groups)}
        self._rows.append((self._metrics, _line(row)))
        self._rows += self._keep(self.samples.of_step(groups, step=report.step))
        self._turns.forget(self._trajectories.records)

    def _episodes(self, trajectories: Sequence[TrajectoryId]) -> EpisodeStats | None:
        records = self._trajectories.records
        return self._turns.stats({t: records[t] for t in trajectories}) if self.facts.has_environment else None

    def _zero_variance(self, trained: Sequence[Group]) -> int:
        """Return the number of groups with equal rewards: filtered since the last step, or trained in this one."""
        before, self._num_filtered = self._num_filtered, _num_filtered(self._state)
        equal = sum(len({reward for reward in group.rewards if reward is not None}) == 1 for group in trained)
        return self._num_filtered - before + equal

    def _watch_drift(self, report: StepReport) -> None:
        """Log the drift alarms that this step raises or clears, and show them in the status."""
        log_changes(self._drift.note(report.step, report.metrics))
        self.facts.alarms = [*self._drift.alarms.values()]

    def _step_row(self, facts: StepFacts, report: StepReport) -> dict[str, Any]:
        state, now = self._state, self.snapshot()
        slot_load = self._fleet_busy_s / self._fleet_slots_s if self._fleet_slots_s else 0.0
        self._fleet_busy_s = self._fleet_slots_s = 0.0
        cpu_before_s, self._cpu_s = self._cpu_s, time.process_time()
        return {
            "kind": "step",
            "at": state.now,
            **{name: value for name, value in asdict(facts).items() if value is not None},
            "rollout_idle_share": 1.0 - slot_load,
            "tokens_per_s": now.tokens_per_s,
            "staleness": list(now.staleness),
            "live_versions": sum(v.is_live for v in now.versions),
            "window": state.window_size,
            "dropped": now.dropped,
            **asdict(now.counts),
            **({"environment_failed": now.environment.failed} if now.environment is not None else {}),
            "lag_p99_s": now.lag_p99_s,
            "controller_cpu_s": self._cpu_s - cpu_before_s,
            "alarms": self._drift.active,
            **self._spans.step_seconds(),
            "tokens": asdict(self._trajectories.ledger.account),
            "trainer": report.metrics,
        }

    def _keep(self, kept: Iterable[KeptTrajectory]) -> list[tuple[LineFile, bytes]]:
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
            self._then(position, partial(self._metrics.write, _line(row)))

    def on_evaluation(self, version: VersionId, *, position: int) -> None:
        """Write the scores of a version, whose samples are all graded."""
        records, ids = self._trajectories.records, self._evaluations.ids(version)
        outcomes = [(records[t].reward, len(records[t].tokens)) for t in ids]
        for index, score in enumerate(self._evaluations.scores(outcomes)):
            self.facts.scores.append(
                Score(
                    name=score.name,
                    version=version,
                    mean=score.mean,
                    pass_at_n=score.pass_at_n,
                    num_samples=score.num_samples,
                    num_failed=score.num_failed,
                    is_accuracy=score.is_accuracy,
                )
            )
            row = {"kind": "evaluation", "at": self._state.now, "version": version, **asdict(score)}
            row["pass_at_n"] = score.pass_at_n
            own = [t for t in ids if self._evaluations.set_index(t) == index and records[t].reward is not None]
            if (episodes := self._episodes(own)) is not None:
                row["episodes"] = asdict(episodes)
            self._then(position, partial(self._metrics.write, _line(row)))
        kept = self._keep(self.samples.of_evaluation(version, trained=self._state.feed.trained))
        self._then(position, partial(_write, kept))


def log_changes(alarms: Sequence[Alarm]) -> None:
    """Log the alarms that a step raised or cleared; the console shows them, too."""
    for alarm in alarms:
        log.warning("drift_alarm" if alarm.cleared is None else "drift_cleared", alarm=alarm.text)


def _lengths(lengths: Sequence[int]) -> dict[str, float]:
    """Return the fields of StepFacts; none without an answer."""
    if not lengths:
        return {}
    return {
        "response_len_mean": sum(lengths) / len(lengths),
        "response_len_p90": sorted(lengths)[-(-9 * len(lengths) // 10) - 1],
        "response_len_max": max(lengths),
    }


def _num_filtered(state: State) -> int:
    return state.ledger.reasons.get("filtered: zero variance", 0)


def _line(row: dict[str, Any]) -> bytes:
    """Return a row as JSON, which has no NaN and no infinity: they are null."""
    return msgspec.json.encode(row) + b"\n"


def _write(rows: list[tuple[LineFile, bytes]]) -> None:
    for file, line in rows:
        file.write(line)


class _StepMetrics(msgspec.Struct):
    """The values in a step's row that the drift alarms need."""

    step: int
    trainer: dict[str, float | None]  # None: it was not finite


class _StepTokens(msgspec.Struct):
    """How many response tokens a step trained."""

    num_tokens: int


def read_rows(metrics: Path, *, kind: str) -> Iterator[dict[str, Any]]:
    """Yield the rows of a kind; torn ones are ignored."""
    if not metrics.is_file():
        return
    for line in foreign.read_lines(metrics, max_bytes=files.MAX_ROW_BYTES):
        with suppress(ValueError, TypeError, LookupError, RecursionError):  # a crash may tear a row
            row = json.loads(line)
            if row["kind"] == kind:
                yield row


def recall_alarms(drift: DriftWatch, metrics: Path) -> None:
    """Take in the steps from before a resume; torn rows are ignored."""
    for row in read_rows(metrics, kind="step"):
        with suppress(ValueError):
            earlier = msgspec.convert(row, _StepMetrics)
            drift.note(earlier.step, {name: value for name, value in earlier.trainer.items() if value is not None})


def earlier_trained_tokens(metrics: Path) -> int:
    """Count the response tokens trained before a resume; torn rows are ignored."""
    total = 0
    for row in read_rows(metrics, kind="step"):
        with suppress(ValueError):
            total += msgspec.convert(row, _StepTokens).num_tokens
    return total


def earlier_steps(metrics: Path) -> Iterator[StepFacts]:
    """Yield the steps from before a resume; torn rows are ignored."""
    for row in read_rows(metrics, kind="step"):
        with suppress(ValueError):
            yield msgspec.convert(row, StepFacts)


def earlier_scores(metrics: Path) -> list[Score]:
    """Read the scores from before a resume; a torn last line is ignored."""
    scores = []
    for row in read_rows(metrics, kind="evaluation"):
        with suppress(ValueError):
            scores.append(msgspec.convert(row, Score))
    return scores
