"""Episodes of several turns, live: the seed policy answers two sums, of which its environment gives the second."""

from __future__ import annotations

import json
import signal
from pathlib import Path

import psutil
import pytest

from dora.core.commands import CallEnvironment
from dora.core.events import CallFinished, CallStarted, ControllerRestarted, InstanceLost, StepTrained
from dora.journal.deep import read_kept
from dora.journal.run_folder import RunFolder
from tests.e2e.runs import Run, assert_audit_clean, events_of, orders_of, run_to_end, settings, small, until

pytestmark = [pytest.mark.e2e, pytest.mark.slow, pytest.mark.timeout(400)]

HERE = Path(__file__).parent
RENDERER = json.dumps(f"{HERE / 'relay.py'}:SumRenderer")


def relay(folder: Path, **changes: object) -> list[str]:
    values = {
        "environment__name": f"{HERE / 'relay.py'}:Relay",
        "environment__renderer": f'{{name="custom", import_path={RENDERER}}}',
        "task__sources__0__options__max_terms": 4,
        "rollout__max_staleness": 1,
        "engine__instances": 2,
        "run__steps": 3,
        **changes,
    }
    return small(folder, **values)


def test_a_run_whose_episodes_have_two_turns(tmp_path: Path) -> None:
    result = run_to_end("run", *relay(tmp_path, eval__sets="[{prompts=8}]"))
    assert result.returncode == 0, result.stderr
    (root,) = tmp_path.iterdir()
    folder = RunFolder(root)
    started, finished = events_of(folder, CallStarted), events_of(folder, CallFinished)
    assert len(started) == len(finished) == len(orders_of(folder, CallEnvironment)) > 3 * 16
    assert all(event.ended == event.graded and not event.failed for event in finished)
    assert_audit_clean(folder)
    deep = run_to_end("audit", str(root), "--deep")
    assert deep.returncode == 0, deep.stdout
    kept = list(read_kept(folder.trajectories))
    assert any(one.observed for one in kept)
    for one in kept:
        assert one.reward in (0.0, 0.5, 1.0)
        assert len(one.observed) <= 1
        for start, end in one.observed:
            assert one.tokens[start - 1] == 1  # the end token, sampled
            assert not any(one.logprobs[start:end])
            assert all(one.logprobs[:start])


class Holding:
    """A run whose calls do not return while the file `hold` exists."""

    def __init__(self, folder: Path, **changes: object) -> None:
        self.folder = folder / "environment"
        self.folder.mkdir()
        self.arguments = relay(
            folder / "runs",
            environment__name=f"{HERE / 'relay.py'}:Held",
            environment__options=f'{{folder="{self.folder}"}}',
            **changes,
        )

    @property
    def calls(self) -> list[int]:
        """The host of each call so far."""
        log = self.folder / "calls"
        return [int(line) for line in log.read_text().split()] if log.exists() else []

    def hold(self) -> None:
        (self.folder / "hold").touch()

    def release(self) -> None:
        (self.folder / "hold").unlink()

    def until_held(self, run: Run) -> None:
        """Wait until more calls are held than before."""
        self.hold()
        before = len(self.calls)
        until(lambda: run.process.poll() is not None or len(self.calls) > before, what="a call that is held")
        assert run.process.poll() is None, run.told()


def failures(folder: RunFolder) -> list[str]:
    return [event.failed for event in events_of(folder, CallFinished) if event.failed]


def assert_trained_once(folder: RunFolder, holding: Holding) -> None:
    assert_audit_clean(folder)
    assert [event.step for event in events_of(folder, StepTrained)] == [0, 1, 2]
    assert len(holding.calls) <= len(orders_of(folder, CallEnvironment))


def test_a_host_that_is_killed_in_a_call_fails_its_episodes_alone(tmp_path: Path) -> None:
    holding = Holding(tmp_path)
    with Run(*holding.arguments) as run:
        folder = run.folder
        holding.until_held(run)
        psutil.Process(holding.calls[-1]).kill()
        holding.release()
        assert run.end() == 0, run.told()
    assert failures(folder)
    assert all(reason.startswith("host: host died") for reason in failures(folder))
    assert_trained_once(folder, holding)


def test_a_server_that_is_killed_during_a_call_costs_nothing(tmp_path: Path) -> None:
    holding = Holding(tmp_path)
    with Run(*holding.arguments) as run:
        folder = run.folder
        holding.until_held(run)
        for engine in [run.engine(0), run.engine(1)]:
            engine.kill()
        until(lambda: len(events_of(folder, InstanceLost)) >= 2, what="the loss of both servers")
        holding.release()
        assert run.end() == 0, run.told()
    assert not failures(folder)
    assert_trained_once(folder, holding)


def test_a_controller_that_is_killed_between_intent_and_result_never_repeats_the_call(tmp_path: Path) -> None:
    holding = Holding(tmp_path)
    with Run(*holding.arguments) as run:
        folder = run.folder
        holding.until_held(run)
        run.process.send_signal(signal.SIGKILL)
        run.end()
    holding.release()
    resumed = run_to_end("run", "--resume", str(folder.root), *settings(status__port=0))
    assert resumed.returncode == 0, resumed.stderr
    assert events_of(folder, ControllerRestarted)
    unanswered = len(orders_of(folder, CallEnvironment)) - len(events_of(folder, CallFinished))
    assert unanswered >= 1
    assert_trained_once(folder, holding)


def test_a_clean_stop_waits_for_the_calls(tmp_path: Path) -> None:
    holding = Holding(tmp_path)
    with Run(*holding.arguments) as run:
        folder = run.folder
        holding.until_held(run)
        run.interrupt()
        holding.release()
        assert run.end() == 130, run.told()
    assert len(orders_of(folder, CallEnvironment)) == len(events_of(folder, CallFinished))
    resumed = run_to_end("run", "--resume", str(folder.root), *settings(status__port=0))
    assert resumed.returncode == 0, resumed.stderr
    assert all(reason == "host: its environment ended with an earlier controller" for reason in failures(folder))
    assert_trained_once(folder, holding)
