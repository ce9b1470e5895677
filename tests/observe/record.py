"""Runs a `dora` command and records what its observers are given: `python -m tests.observe.record FILE -- run ...`.

The entry points of the observers are wrapped, so that each appends its input to the file; calls among the observers are
not inputs. `--after-step N ACTION` does something to the run in the middle of the step after the N-th: `kill` and
`interrupt` end the controller, `lose-engine` kills the first engine as soon as it has requests, and `lose-trainer`
kills the trainer.
"""

from __future__ import annotations

import argparse
import math
import os
import signal
import sys
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Final

import psutil

from dora.app import resume
from dora.cli.app import main as command_line
from dora.controller import loop
from dora.controller import observer as observer_module
from dora.controller.evaluations import Evaluations
from dora.controller.line_files import LineFiles
from dora.controller.loop import Outcome
from dora.controller.observer import RunObserver
from dora.controller.spans import SpanRecorder
from dora.controller.token_ledger import TokenLedger
from dora.controller.trainer_link import StepReport
from dora.controller.trajectories import Trajectories, TrajectoryRecord
from dora.core import events as ev
from dora.core.commands import Command
from dora.core.ids import InstanceId, TrajectoryId, VersionId
from dora.core.state import State
from dora.core.tables import Instance
from dora.errors import DoraError, one_line
from dora.journal.codec import Handled
from dora.journal.commits import Commits
from dora.journal.reader import Journal
from dora.journal.run_folder import RunFolder
from dora.journal.tokens import TokenStore
from dora.status.drift import DriftWatch
from dora.status.facts import ShellFacts
from dora.status.snapshot import Snapshot
from dora.status.snapshot import encode as encode_snapshot
from dora.transport.messages import RankSpans
from tests.observe import recording as kept

#: Number of inputs between the end of the step and the action.
DELAY: Final = 100


class Recorder:
    """The file of one controller, and what the wrappers have to remember."""

    def __init__(self, path: Path, *, after_step: int, action: str) -> None:
        self._file = path.open("xb", buffering=0)
        self._step = after_step
        self._action = action
        self._num_inputs = 0
        self._due_at = math.inf  # number of inputs before the action
        self._instances: Mapping[InstanceId, Instance] = {}  # the core's table
        self._is_inside = False  # of a call that is recorded: the calls that it makes are not
        self._written: dict[str, Path] = {}
        self._found: dict[str, Any] = {}  # of Opened
        self._drift: dict[str, Any] = {}  # of the latest DriftWatch
        self._stored: TokenStore
        self._servers = kept.Servers(urls={}, down={})
        self._now: Callable[[], float] = time.monotonic
        self._at: float | None = None  # the clock, if the call under way has read it
        self._cpu_s: float | None = None

    # -- the file -----------------------------------------------------------------------------------------------------

    def write(self, record: Handled | kept.Input) -> None:
        self._file.write(kept.encode(record))
        self._num_inputs += 1
        if self._num_inputs >= self._due_at and self._has_something_to_lose():
            self._due_at = math.inf
            self._act()

    def finish(self) -> None:
        """Record what is in the run folder now."""
        self.write(kept.Left(files=self._contents()))

    def _has_something_to_lose(self) -> bool:
        return self._action != "lose-engine" or len(self._instances[InstanceId(0)].residents) > 1

    def _act(self) -> None:
        match self._action:
            case "kill":
                self.finish()
                os.kill(os.getpid(), signal.SIGKILL)
            case "interrupt":
                os.kill(os.getpid(), signal.SIGINT)
            case "lose-engine" | "lose-trainer":
                word = "serve" if self._action == "lose-engine" else "torch.distributed.run"
                children = psutil.Process().children(recursive=True)
                next(child for child in children if word in child.cmdline()).kill()

    # -- wrapping -----------------------------------------------------------------------------------------------------

    def install(self) -> None:
        """Wrap the observers' entry points, for the rest of this process."""
        self._wrap_opening()
        vars(observer_module)["time"] = SimpleNamespace(process_time=self._read_cpu)
        self._wrap(resume, "restore", self._restored)
        self._wrap(loop, "handle", self._handled)
        self._wrap(Commits, "_reached", lambda _, commits, position: kept.Durable(position=commits.position))
        self._wrap(TokenLedger, "append", _sampled)
        self._wrap(SpanRecorder, "on_first_token", self._first_token)
        self._wrap(SpanRecorder, "on_push_stage", self._push_stage)
        self._wrap(SpanRecorder, "on_wave_done", self._wave_done)
        self._wrap(SpanRecorder, "on_rank_spans", self._rank_spans)
        self._wrap(SpanRecorder, "close", lambda *_: kept.Closed())
        self._wrap(RunObserver, "__init__", self._began)
        self._wrap(RunObserver, "on_event", self._noted)
        self._wrap(RunObserver, "on_step", self._stepped)
        self._wrap(RunObserver, "on_evaluation", self._evaluated)
        self._wrap(RunObserver, "on_lag", lambda _, observer, seconds: kept.Lag(seconds=seconds))
        self._wrap(RunObserver, "on_ready", lambda _, observer, num_ranks: kept.Ready(num_ranks=num_ranks))
        self._wrap(RunObserver, "on_full", lambda _, observer, reason: kept.Full(reason=reason))
        self._wrap(RunObserver, "end", _ended)
        self._wrap(RunObserver, "fail", _failed)
        self._wrap(RunObserver, "snapshot", self._shown)

    def _wrap(self, owner: Any, name: str, describe: Callable[..., Handled | kept.Input]) -> None:
        """Record each call of `name` after it; `describe` takes what it has returned, and its arguments."""
        call = getattr(owner, name)

        def wrapper(*args: Any, **kwargs: Any) -> Any:
            if self._is_inside:
                return call(*args, **kwargs)
            self._is_inside, self._at, self._cpu_s = True, None, None
            try:
                result = call(*args, **kwargs)
            finally:
                self._is_inside = False
            self.write(describe(result, *args, **kwargs))
            return result

        setattr(owner, name, wrapper)

    def _wrap_opening(self) -> None:
        """Wrap what is read and made before there is an observer."""
        open_files, make_spans, make_drift = LineFiles.__init__, SpanRecorder.__init__, DriftWatch.__init__
        read_tokens = vars(resume)["read_tokens"]

        def lines(files: LineFiles, folder: RunFolder, state: State) -> None:
            self._look(folder, state)
            open_files(files, folder, state)

        def spans(recorder: SpanRecorder, *args: Any, now: Callable[[], float], **kwargs: Any) -> None:
            self._now = now
            make_spans(recorder, *args, now=self._read_clock, **kwargs)
            self.write(kept.Opened(**self._found, num_ranks=kwargs["num_ranks"], time_scale=kwargs["time_scale"]))

        def drift(watch: DriftWatch, **kwargs: Any) -> None:
            self._drift = {"clips_many": False, **kwargs}
            make_drift(watch, **kwargs)

        def tokens(*args: Any, **kwargs: Any) -> TokenStore:
            self._stored = read_tokens(*args, **kwargs)
            return self._stored

        vars(resume)["read_tokens"] = tokens
        for part, wrapper in ((LineFiles, lines), (SpanRecorder, spans), (DriftWatch, drift)):
            setattr(part, "__init__", wrapper)  # noqa: B010

    # -- clocks -------------------------------------------------------------------------------------------------------

    def _read_clock(self) -> float:
        assert self._at is None, "an observer reads the clock once for an input"
        self._at = self._now()
        return self._at

    def _read_cpu(self) -> float:
        assert self._cpu_s is None, "an observer reads the time of its process once for an input"
        self._cpu_s = time.process_time()
        return self._cpu_s

    def _time(self) -> float:
        """Return the time that the observer has read or, if it has read none, the present one."""
        return self._at if self._at is not None else self._now()

    # -- the beginning ------------------------------------------------------------------------------------------------

    def _look(self, folder: RunFolder, state: State) -> None:
        """Take in the folder as an earlier controller has left it."""
        self._instances = state.instances
        paths = (folder.metrics, folder.spans, folder.timeline, folder.status)
        self._written = {path.name: path for path in paths}
        journal = Journal(folder.journal) if folder.journal.stat().st_size else None
        self._found = {
            "settings": journal.header.settings if journal is not None else state.settings,
            "earlier": tuple(Handled(*entry) for entry in journal or ()),  # type: ignore[arg-type]
            "files": self._contents(),
        }

    def _contents(self) -> dict[str, bytes]:
        return {name: path.read_bytes() for name, path in self._written.items() if path.is_file()}

    def _restored(self, _: object, *args: Any, trajectories: Trajectories, **kwargs: Any) -> kept.Restored:
        return kept.Restored(num_tokens=trajectories.num_tokens, sampled=dict(self._stored.sampled))

    def _began(
        self,
        _: None,
        observer: RunObserver,
        *,
        facts: ShellFacts,
        evaluations: Evaluations,
        keep_per_step: int,
        max_kept_bytes: int,
        **others: Any,
    ) -> kept.Began:
        assert self._cpu_s is not None
        return kept.Began(
            run_id=facts.run_id,
            strategy=facts.strategy,
            task=facts.task,
            has_environment=facts.has_environment,
            num_servers=facts.num_servers,
            num_ranks=facts.num_ranks,
            held_out=tuple(
                kept.HeldOut(name=one.name, prompts=len(one.prompts), samples=one.samples, skipped=one.num_skipped)
                for one in evaluations.sets
            ),
            **self._drift,
            keep_per_step=keep_per_step,
            max_kept_bytes=max_kept_bytes,
            cpu_s=self._cpu_s,
        )

    # -- events and lanes ---------------------------------------------------------------------------------------------

    def _handled(self, commands: list[Command], state: State, event: ev.Event) -> Handled:
        return Handled(event, tuple(commands))  # type: ignore[arg-type]

    def _noted(
        self, _: None, observer: RunObserver, event: ev.Event, commands: list[Command], *, position: int
    ) -> kept.Noted:
        skipped = {}
        if isinstance(event, ev.StepTrained) and event.step + 1 == self._step:
            self._due_at = self._num_inputs + DELAY
        if isinstance(event, ev.PromptsArrived):
            prompts, last = observer._trajectories.prompts, event.first + len(event.num_prompt_tokens)
            skipped = {g: p.skipped for g, p in prompts.items() if event.first <= g < last and p.skipped}
        return kept.Noted(position=position, skipped=skipped)

    def _first_token(self, _: None, spans: SpanRecorder, trajectory: TrajectoryId) -> kept.FirstToken:
        return kept.FirstToken(trajectory=trajectory, at=self._time())

    def _push_stage(self, _: None, spans: SpanRecorder, id: InstanceId, stage: str) -> kept.PushStage:
        return kept.PushStage(instance=id, stage=stage, at=self._time())

    def _wave_done(self, _: None, spans: SpanRecorder, rank: int) -> kept.WaveDone:
        return kept.WaveDone(rank=rank, at=self._time())

    def _rank_spans(self, _: None, spans: SpanRecorder, rank: int, message: RankSpans) -> kept.Spans:
        return kept.Spans(rank=rank, until=message.until, spans=message.spans, at=self._time())

    # -- results ------------------------------------------------------------------------------------------------------

    def _stepped(self, _: None, observer: RunObserver, report: StepReport) -> kept.Stepped:
        self._look_at_servers(observer)
        siblings = [t.id for group in observer._state.feed.groups(report.step) for t in group.trajectories]
        return kept.Stepped(
            step=report.step,
            metrics=dict(report.metrics),
            episodes=_episodes(observer, siblings),
            samples_full=observer._kept.is_full,
            cpu_s=self._cpu_s,
        )

    def _evaluated(self, _: None, observer: RunObserver, version: VersionId, *, position: int) -> kept.Evaluated:
        records, ids = observer._trajectories.records, observer._evaluations.ids(version)
        outcomes = tuple((records[t].reward, len(records[t].tokens)) for t in ids)
        return kept.Evaluated(
            version=version,
            position=position,
            outcomes=outcomes,
            episodes=_episodes(observer, ids),
            samples_full=observer._kept.is_full,
            scores=tuple(map(asdict, observer._evaluations.scores(outcomes))),
        )

    def _shown(self, snapshot: Snapshot, observer: RunObserver) -> kept.Shown:
        self._look_at_servers(observer)
        return kept.Shown(snapshot=encode_snapshot(snapshot))

    def _look_at_servers(self, observer: RunObserver) -> None:
        """Record which servers are up and down, if that has changed: a snapshot shows them."""
        down = {
            id: kept.DownServer(since=one.since, reason=one.reason, then=one.then) for id, one in observer._down.items()
        }
        servers = kept.Servers(urls=dict(observer._urls), down=down)
        if servers != self._servers:
            self._servers = servers
            self.write(servers)


def _episodes(observer: RunObserver, ids: Iterable[TrajectoryId]) -> dict[TrajectoryId, kept.Episode]:
    """Return what is read from the records of trajectories; nothing without an environment."""
    if not observer.facts.has_environment:
        return {}
    return {id: _episode(observer._trajectories.records[id]) for id in ids}


def _episode(record: TrajectoryRecord) -> kept.Episode:
    return kept.Episode(
        num_tokens=len(record.tokens),
        observed=tuple(record.observed),
        turn_rewards=tuple(record.turn_rewards),
        truncated=record.truncated,
    )


def _sampled(_: None, ledger: TokenLedger, trajectory: TrajectoryId, num_tokens: int) -> kept.Sampled:
    return kept.Sampled(trajectory=trajectory, num_tokens=num_tokens)


def _ended(_: None, observer: RunObserver, outcome: Outcome) -> kept.Ended:
    return kept.Ended(finished=outcome.finished, reason=outcome.reason)


def _failed(_: None, observer: RunObserver, error: DoraError) -> kept.Failed:
    return kept.Failed(reason=one_line(error))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("file", type=Path)
    parser.add_argument("--after-step", nargs=2, metavar=("N", "ACTION"), default=(0, ""))
    parser.add_argument("command", nargs="+", metavar="-- COMMAND")
    arguments = parser.parse_args()
    step, action = arguments.after_step
    recorder = Recorder(arguments.file, after_step=int(step), action=action)
    recorder.install()
    sys.argv = ["dora", *arguments.command]
    try:
        command_line()
    finally:
        recorder.finish()


if __name__ == "__main__":
    main()
