"""Episodes of several turns, live: the seed policy answers two sums, of which its environment gives the second."""

from __future__ import annotations

import json
import re
import signal
from array import array
from pathlib import Path
from typing import Any

import msgspec
import psutil
import pytest

from dora.controller.recorder import read_rows
from dora.core.commands import AdmitGroup, CallEnvironment, Generate, TrainMicroBatch
from dora.core.events import (
    CallFinished,
    CallStarted,
    ControllerRestarted,
    GenerationFinished,
    InstanceLost,
    StepTrained,
)
from dora.journal.deep import read_kept
from dora.journal.reader import Journal
from dora.journal.run_folder import RunFolder
from dora.journal.tokens import read_tokens
from dora.seed.policy import path as seed_path
from dora.tasks.arithmetic import problem
from dora.tasks.tokenizer import load_tokenizer
from tests.e2e.runs import Run, assert_audit_clean, events_of, get, orders_of, run_to_end, settings, small, until

pytestmark = [pytest.mark.deep, pytest.mark.timeout(400)]

HERE = Path(__file__).parent
GROUP_SIZE = 4  # of `small`
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
    rows = tmp_path / "failing.jsonl"
    rows.write_text('{"prompt": "a1b2=", "answer": "none"}\n' * 2)
    failing = f'{{name="failing", source={{kind="jsonl", path="{rows}"}}}}'
    room = {"environment__hosts": 2, "environment__episodes_per_host": 5}
    with Run(*relay(tmp_path / "runs", eval__sets=f"[{{prompts=8, samples=2}}, {failing}]", **room)) as run:
        folder, status = run.folder, run.until_trained(1)
        gauges = get(f"{run.url}/metrics")[2]
        assert run.end() == 0, run.told()
    assert_shown(folder, status, gauges, told="".join(run.out))
    started, finished = events_of(folder, CallStarted), events_of(folder, CallFinished)
    assert len(started) == len(finished) == len(orders_of(folder, CallEnvironment)) > 3 * 16
    failed = [event for event in finished if event.failed]
    assert len(failed) == 2 * 2, "two versions are evaluated"
    assert all(event.trajectory < 0 and event.failed.startswith("raised: ") for event in failed)
    assert all(event.ended == event.graded for event in finished)
    assert 4 < most_unfinished(folder) <= 10
    assert_audit_clean(folder)
    deep = run_to_end("audit", str(folder.root), "--deep")
    assert deep.returncode == 0, deep.stdout
    kept = [one for one in read_kept(folder.trajectories) if one.outcome == "trained"]
    assert any(one.observed for one in kept)
    for one in kept:
        assert one.reward in (0.0, 0.5, 1.0)
        assert len(one.observed) <= len(one.turn_rewards) == len(one.calls_s) <= 2
        assert one.reward == sum(one.turn_rewards)
        for start, end in one.observed:
            assert one.tokens[start - 1] == 1  # the end token, sampled
            assert not any(one.logprobs[start:end])
            assert all(one.logprobs[:start])


def assert_shown(folder: RunFolder, status: dict[str, Any], gauges: str, *, told: str) -> None:
    """Wherever people look, they see turns, calls, observations, and what failed."""
    for step in [*read_rows(folder.metrics, kind="step"), *status["steps"]]:
        episodes = step["episodes"]
        assert (episodes["count"], episodes["turns_max"], episodes["calls_max"]) == (16, 2, 2)
        assert 1 < episodes["turns_mean"] <= 2
        assert episodes["observation_tokens_mean"] > 0
        assert episodes["call_s_mean"] > 0
        assert 0 < episodes["call_share"] < 1
        assert len(episodes["turn_rewards"]) == 2
    assert status["environment"]["failed"] == {"raised": 2}
    assert 'dora_environment_failed_total{cause="raised"} 2\n' in gauges
    assert re.search(r"^dora_episode_turns_mean \d", gauges, re.MULTILINE)
    scores = {(row["name"], row["version"]): row for row in read_rows(folder.metrics, kind="evaluation")}
    assert set(scores) == {(name, version) for name in ("heldout", "failing") for version in (0, 3)}
    for (name, _), row in scores.items():
        if name == "heldout":
            assert (row["num_samples"], row["num_failed"], row["episodes"]["calls_max"]) == (16, 0, 2)
            assert 0 < row["mean"] < 1
        else:
            assert (row["mean"], row["pass_at"], row["num_samples"], row["num_failed"]) == (None, {}, 0, 2)
    assert "version 3: failing reward: nothing was graded (0 answers, 2 failed)\n" in told
    assert re.search(r"  episodes of the last step: [\d.]+ turns \(at most 2\), .*; calls: [\d.]+ an episode", told)
    assert "  4 episodes left out because their environment failed: 4 raised\n" in told


def test_a_run_whose_environment_rewrites_the_conversation_trains_the_rows_of_its_forks(tmp_path: Path) -> None:
    result = run_to_end(
        "run",
        *relay(
            tmp_path,
            environment__name=f"{HERE / 'relay.py'}:Rewriter",
            objective__turn_rewards="reward_to_go",
            objective__aggregation="seq_mean_token_mean",
        ),
    )
    assert result.returncode == 0, result.stderr
    (root,) = tmp_path.iterdir()
    folder = RunFolder(root)
    assert not failures(folder)
    assert_audit_clean(folder)
    assert_rows_are_trained(folder)


def assert_rows_are_trained(folder: RunFolder) -> None:
    """Every kept trajectory that forked has the log-probs of its rows, and the trainer computed what they repeat."""
    deep = run_to_end("audit", str(folder.root), "--deep")
    assert deep.returncode == 0, deep.stdout
    forked = [one for one in read_kept(folder.trajectories) if one.forks]
    assert forked
    for one in forked:
        first, second = one.rows()
        (fork,) = one.forks
        assert one.observed == ((fork.start, one.observed[0][1]),)
        assert first[0] == [*one.prompt_tokens, *one.tokens[: fork.start]]
        assert second[0] == [*first[0][: fork.keep], *one.tokens[fork.start :]]
        assert fork.keep >= len(one.prompt_tokens)
    repeated = {event.trajectory: event.repeated for event in events_of(folder, CallFinished) if event.repeated}
    stored = read_tokens(folder.tokens)
    orders = orders_of(folder, TrainMicroBatch)
    for row in read_rows(folder.metrics, kind="step"):
        trained = {t for order in orders if order.step == row["step"] for rank in order.ranks for t in rank}
        lengths = [len(stored.prompts[t // GROUP_SIZE].tokens) + len(stored.answers[t].tokens) for t in trained]
        assert row["trainer"]["step_tokens"] == sum(lengths) + sum(repeated.get(t, 0) for t in trained)
    assert len(repeated) > 16


def most_unfinished(folder: RunFolder) -> int:
    """Return how many training episodes were unfinished at once."""
    counts = [0]
    for event, orders in Journal(folder.journal):
        ended = isinstance(event, GenerationFinished) or (isinstance(event, CallFinished) and event.ended)
        admitted = sum(4 for order in orders if isinstance(order, AdmitGroup))
        counts.append(counts[-1] + admitted - (ended and event.trajectory >= 0))
    return max(counts)


FAULTS = {
    "raises": "raised: raised KeyError: 'level' (relay.py",
    "never_returns": "timeout: timed out after 3 s",
    "never_returns_async": "timeout: timed out after 3 s",
    "returns_nothing": "invalid: invalid reply: step returned NoneType, not Observation or End",
    "returns_10_mb": "",
    "ends_twice": "host: host died: a reply to no request",
}


def test_what_goes_wrong_in_an_environment_costs_its_episodes_alone(tmp_path: Path) -> None:
    rows = tmp_path / "rows.jsonl"
    with rows.open("wb") as file:
        *faults, last = FAULTS  # the last one costs the host, and with it the calls of other episodes
        for index, fault in enumerate([*faults, *[""] * 7, last, *[""] * 40]):
            prompt, answer = problem(index, seed=1, split="train", max_terms=4)
            file.write(msgspec.json.encode({"prompt": prompt, "answer": answer, "fault": fault}) + b"\n")
    result = run_to_end(
        "run",
        *relay(
            tmp_path / "runs",
            environment__name=f"{HERE / 'relay.py'}:Faulty",
            environment__call_timeout_s=3,
            environment__output_bytes=16,
            task__sources__0__kind="jsonl",
            task__sources__0__path=rows,
            task__sources__0__options="{}",
            task__shuffle=False,
        ),
    )
    assert result.returncode == 0, result.stderr
    [root] = (tmp_path / "runs").iterdir()
    folder = RunFolder(root)
    found = failures(folder)
    for fault, reason in FAULTS.items():
        assert any(each.startswith(reason) for each in found) or not reason, (fault, found)
    assert all(any(each.startswith(reason) for reason in FAULTS.values() if reason) for each in found), found
    assert f"{len(found)} episodes left out because their environment failed" in result.stdout
    assert [event.step for event in events_of(folder, StepTrained)] == [0, 1, 2]
    assert_audit_clean(folder)
    answers = read_tokens(folder.tokens).answers.values()
    observed = [bytes(a.tokens[start:end].tobytes()) for a in answers for start, end in a.observed]
    text = f"{'1' * 16}\n[output cut: 10,000,000 bytes, 16 kept]"
    cut = load_tokenizer(seed_path()).encode(text, special_tokens=False)
    assert array("i", cut).tobytes() in observed, "the model sees the mark"


class Holding:
    """A run whose calls do not return before they are told to."""

    def __init__(self, folder: Path, *, environment: str = "Held", **changes: object) -> None:
        self.folder = folder / "environment"
        self.folder.mkdir()
        self.arguments = relay(
            folder / "runs",
            environment__name=f"{HERE / 'relay.py'}:{environment}",
            environment__options=f'{{folder="{self.folder}"}}',
            **changes,
        )

    @property
    def calls(self) -> list[tuple[int, int, int]]:
        """Each call so far: its host, whether its episode is in the half, and the number of turns left."""
        log = self.folder / "calls"
        lines = log.read_text().splitlines() if log.exists() else []
        return [(int(pid), int(half), int(left)) for pid, half, left in (line.split() for line in lines)]

    def hold(self, which: str = "all") -> None:
        new = self.folder / "hold.new"
        new.write_text(which)
        new.replace(self.folder / "hold")

    def release(self) -> None:
        (self.folder / "hold").unlink()

    def until_held(self, run: Run, *, halves: int = 1) -> None:
        """Wait until more calls are held than before, in so many halves."""
        self.hold()
        before = len(self.calls)

        def are_held() -> bool:
            return len({half for _, half, left in self.calls[before:] if left > 1}) >= halves

        until(lambda: run.process.poll() is not None or are_held(), what="calls that are held")
        assert run.process.poll() is None, run.told()

    def stop_in_turns(self, run: Run) -> None:
        """Stop all servers in turns of one half of the episodes, while calls of the others are held."""
        folder = run.folder
        self.until_held(run, halves=2)
        for server in (0, 1):
            run.engine(server).suspend()
        before = len(later_turns(folder))
        self.hold("half")
        until(lambda: len(later_turns(folder)) > before, what="a later turn")


def later_turns(folder: RunFolder) -> list[Generate]:
    """Return the orders to sample turns after a call."""
    called = {event.trajectory for event in events_of(folder, CallFinished)}
    return [order for order in orders_of(folder, Generate) if order.num_tokens and order.trajectory in called]


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
        psutil.Process(holding.calls[-1][0]).kill()
        holding.release()
        assert run.end() == 0, run.told()
    assert failures(folder)
    assert all(reason.startswith("host: host died") for reason in failures(folder))
    assert_trained_once(folder, holding)


def test_servers_that_are_killed_in_a_turn_and_during_a_call_cost_nothing(tmp_path: Path) -> None:
    holding = Holding(tmp_path)
    with Run(*holding.arguments) as run:
        folder = run.folder
        holding.stop_in_turns(run)
        for engine in [run.engine(0), run.engine(1)]:
            engine.kill()
        until(lambda: len(events_of(folder, InstanceLost)) >= 2, what="the loss of both servers")
        holding.release()
        assert run.end() == 0, run.told()
    assert not failures(folder)
    assert_trained_once(folder, holding)


def test_a_controller_that_is_killed_in_turns_and_calls_never_repeats_a_call(tmp_path: Path) -> None:
    holding = Holding(tmp_path)
    with Run(*holding.arguments) as run:
        folder = run.folder
        holding.stop_in_turns(run)
        run.process.send_signal(signal.SIGKILL)
        run.end()
    holding.release()
    resumed = run_to_end("run", "--resume", str(folder.root), *settings(status__port=0, environment__hosts=2))
    assert resumed.returncode == 0, resumed.stderr
    [restarted] = events_of(folder, ControllerRestarted)
    assert (restarted.replayable, restarted.max_episodes) == ((), 512)
    unanswered = len(orders_of(folder, CallEnvironment)) - len(events_of(folder, CallFinished))
    assert unanswered >= 1
    assert set(failures(folder)) == {"host: its environment ended with an earlier controller"}
    assert_trained_once(folder, holding)


def test_an_environment_that_can_be_replayed_survives_its_host_and_the_controller(tmp_path: Path) -> None:
    holding = Holding(tmp_path, environment="HeldReplayable")
    with Run(*holding.arguments) as run:
        folder = run.folder
        holding.until_held(run)
        psutil.Process(holding.calls[-1][0]).kill()
        holding.release()
        until(lambda: any(event.replays for event in events_of(folder, CallFinished)), what="a replay")
        holding.stop_in_turns(run)
        run.process.send_signal(signal.SIGKILL)
        run.end()
    holding.release()
    resumed = run_to_end("run", "--resume", str(folder.root), *settings(status__port=0))
    assert resumed.returncode == 0, resumed.stderr
    [restarted] = events_of(folder, ControllerRestarted)
    assert restarted.replayable
    after = [event for event in events_of(folder, CallFinished) if event.at > restarted.at]
    assert {event.trajectory for event in after} >= set(restarted.replayable)
    assert any(event.replays for event in after)
    assert not failures(folder)
    steps = [event.step for event in events_of(folder, StepTrained)]
    assert [*dict.fromkeys(steps)] == [0, 1, 2], (
        "a step after the last checkpoint is trained again, with the same groups"
    )
    deep = run_to_end("audit", str(folder.root), "--deep")
    assert deep.returncode == 0, deep.stdout
    assert re.search(r"environments 0 trajectories failed, [1-9]\d* replays", deep.stdout)
    assert len(holding.calls) > len(orders_of(folder, CallEnvironment)), "what was recorded was fed again"


def test_a_controller_that_is_killed_resumes_with_the_forks_that_it_had(tmp_path: Path) -> None:
    holding = Holding(tmp_path, environment="HeldRewriter", run__steps=8)
    with Run(*holding.arguments) as run:
        folder = run.folder
        until(lambda: len(events_of(folder, StepTrained)) > 1, what="two trained steps")
        holding.until_held(run)
        run.process.send_signal(signal.SIGKILL)
        run.end()
    holding.release()
    resumed = run_to_end("run", "--resume", str(folder.root), *settings(status__port=0))
    assert resumed.returncode == 0, resumed.stderr
    assert_audit_clean(folder)
    assert_rows_are_trained(folder)


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
