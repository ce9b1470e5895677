"""What a run tells the outside: metrics, kept trajectories and the facts behind its status.

Invariant: it watches and decides nothing; a row in metrics.jsonl holds the core's counters at the moment the step was
trained. Called by the controller loop and the trainer link.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from dataclasses import asdict
from typing import Any, TextIO

from dora.controller.evaluations import Evaluations
from dora.controller.loop import Outcome
from dora.controller.trainer_link import StepReport
from dora.controller.trajectories import Trajectories
from dora.core import commands as cmd
from dora.core import events as ev
from dora.core.groups import Group
from dora.core.ids import InstanceId
from dora.core.state import ControllerState
from dora.journal.deep import KeptTrajectory, encode_kept
from dora.journal.run_folder import RunFolder
from dora.status.facts import Score, ShellFacts, StepFacts
from dora.status.snapshot import Snapshot, snapshot, trainer_waits_for
from dora.tasks.tokenizer import Tokenizer


class RunObserver:
    """Writes metrics.jsonl and trajectories.jsonl, and keeps the facts of the status."""

    def __init__(
        self,
        *,
        folder: RunFolder,
        facts: ShellFacts,
        state: ControllerState,
        trajectories: Trajectories,
        evaluations: Evaluations,
        tokenizer: Tokenizer,
        keep_per_step: int,
        urls: Callable[[], dict[InstanceId, str]],
    ) -> None:
        self.facts = facts
        self._state = state
        self._trajectories = trajectories
        self._evaluations = evaluations
        self._tokenizer = tokenizer
        self._keep_per_step = keep_per_step
        self._urls = urls
        facts.scores += _earlier_scores(folder)
        self._metrics: TextIO = folder.metrics.open("a", encoding="utf-8", buffering=1)
        self._kept = folder.trajectories.open("ab")
        self._waited_for = ""
        self._step_began_at = state.now
        self._fleet_busy_s = 0.0  # slot-seconds in use since the last step
        self._fleet_slots_s = 0.0
        self._seen_at = state.now
        self._cpu_s = time.process_time()  # of this process, when the last step was trained

    def snapshot(self) -> Snapshot:
        """The run as it stands."""
        self.facts.urls = dict(self._urls())
        self.facts.num_tokens = self._trajectories.num_tokens
        return snapshot(self._state, self.facts)

    def end(self, outcome: Outcome) -> None:
        """How it ended."""
        self.facts.phase = "finished" if outcome.finished else "interrupted"
        self.facts.reason = outcome.reason

    def close(self) -> None:
        """Close the files."""
        self._metrics.close()
        self._kept.close()

    # -- what happens ---------------------------------------------------------------------------------------------

    def on_event(self, event: ev.Event, commands: list[cmd.Command]) -> None:
        """Keep what the status needs."""
        if isinstance(event, ev.Ticked):
            self._on_tick(event.at)
        waits_for = trainer_waits_for(self._state)
        if waits_for:
            self._waited_for = waits_for
        if self.facts.phase == "starting" and self._state.ledger.admitted:
            self.facts.phase = "running"
        for command in commands:
            if isinstance(command, cmd.FailRun):
                self.facts.phase, self.facts.reason = "failed", command.reason

    def _on_tick(self, at: float) -> None:
        self.facts.tokens.note(self._trajectories.num_tokens, at=at)
        elapsed = at - self._seen_at
        self._seen_at = at
        for instance in self._state.instances.values():
            self._fleet_slots_s += instance.slots * elapsed
            self._fleet_busy_s += len(instance.residents) * elapsed

    def on_lag(self, seconds: float) -> None:
        """One measurement of the event loop's lag."""
        self.facts.note_lag(seconds)

    def on_step(self, report: StepReport) -> None:
        """A step is trained; called just before the core learns of it."""
        state = self._state
        if report.step < state.feed.trained:
            return  # a replay: it was told when it was trained first
        groups = state.feed.step(report.step).groups
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
        )
        self._waited_for = ""
        self.facts.steps.append(facts)
        self.facts.num_trained_tokens += num_tokens
        self._write(self._step_row(facts, report))
        self._keep(groups, step=report.step)

    def _step_row(self, facts: StepFacts, report: StepReport) -> dict[str, Any]:
        state, now = self._state, self.snapshot()
        slot_load = self._fleet_busy_s / self._fleet_slots_s if self._fleet_slots_s else 0.0
        self._fleet_busy_s = self._fleet_slots_s = 0.0
        cpu_before_s, self._cpu_s = self._cpu_s, time.process_time()
        return {
            "kind": "step",
            "at": state.now,
            **asdict(facts),
            "rollout_idle_share": 1.0 - slot_load,
            "tokens_per_s": now.tokens_per_s,
            "staleness": list(now.staleness),
            "live_versions": sum(v.is_live for v in now.versions),
            "window": state.window_size,
            "dropped": now.dropped,
            **asdict(now.counts),
            "lag_p99_s": now.lag_p99_s,
            "controller_cpu_s": self._cpu_s - cpu_before_s,
            "trainer": report.metrics,
        }

    def _keep(self, groups: list[Group], *, step: int) -> None:
        """A few of the step's trajectories in full: the first sibling of evenly spread groups."""
        if not groups or not self._keep_per_step:
            return
        stride = max(1, len(groups) // self._keep_per_step)
        for group in groups[::stride][: self._keep_per_step]:
            trajectory = next(t for t in group.trajectories if t.reward is not None)
            record = self._trajectories.records[trajectory.id]
            kept = KeptTrajectory(
                step=step,
                group=group.id,
                trajectory=trajectory.id,
                version=group.version,
                reward=trajectory.reward,
                length_capped=record.length_capped,
                prompt=record.prompt.text,
                text=self._tokenizer.decode(record.tokens.tolist()),
                prompt_tokens=record.prompt.tokens,
                tokens=tuple(record.tokens),
                logprobs=tuple(record.logprobs),
            )
            self._kept.write(encode_kept(kept))
        self._kept.flush()

    def on_evaluation(self, version: int) -> None:
        """All samples of a version are graded."""
        records = self._trajectories.records
        outcomes = [(records[t].reward, len(records[t].tokens)) for t in self._evaluations.ids(version)]
        for score in self._evaluations.scores(outcomes):
            self.facts.scores.append(
                Score(
                    name=score.name,
                    version=version,
                    mean=score.mean,
                    pass_at_n=score.pass_at_n,
                    num_samples=score.num_samples,
                )
            )
            row = {"kind": "evaluation", "at": self._state.now, "version": version, **asdict(score)}
            self._write({**row, "pass_at_n": score.pass_at_n})

    def _write(self, row: dict[str, Any]) -> None:
        self._metrics.write(json.dumps(row) + "\n")


def _earlier_scores(folder: RunFolder) -> list[Score]:
    """What the run scored before it was resumed."""
    if not folder.metrics.is_file():
        return []
    with folder.metrics.open(encoding="utf-8") as lines:
        rows = [json.loads(line) for line in lines if line.endswith("\n")]
    names = Score.__dataclass_fields__
    return [Score(**{n: row[n] for n in names}) for row in rows if row["kind"] == "evaluation"]
