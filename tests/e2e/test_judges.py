"""A run whose rewards come from a judge: another process of the chat API, which is busy, wrong and away at times."""

from __future__ import annotations

import json
import re
import socket
import threading
import tomllib
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from dora.core import events as ev
from dora.journal.deep import read_kept
from dora.journal.run_folder import RunFolder
from tests.e2e.runs import Run, assert_audit_clean, assert_one_clear_error, events_of, run_to_end, small, until

pytestmark = [pytest.mark.deep, pytest.mark.timeout(600)]

PAGE = (Path(__file__).parents[2] / "docs" / "DATA.md").read_text().partition("## Judges")[2]
[EXAMPLE] = re.findall(r"^```toml\n(.*?)^```$", PAGE, re.DOTALL | re.MULTILINE)


@dataclass
class Judging:
    """What the judge was asked, and what it said."""

    port: int
    answers: int = 0  # that it gave
    refusals: int = 0
    silent: int = 0  # texts without a score
    asked: list[str] = field(default_factory=list)
    lock: threading.Lock = field(default_factory=threading.Lock)
    holds: threading.Event = field(default_factory=threading.Event)  # set: replies are given
    stop: Callable[[], None] = lambda: None


@contextmanager
def judging(port: int = 0) -> Iterator[Judging]:
    """A judge that compares, refuses every fifth request, and gives no score for every eleventh."""

    class Judge(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.reply(200, {"object": "list", "data": []})

        def do_POST(self) -> None:
            asked = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            content = asked["messages"][0]["content"]
            with found.lock:
                found.asked.append(content)
                number = len(found.asked)
            if number % 5 == 0:
                found.refusals += 1
                self.reply(503, {"error": "busy"})
                return
            found.holds.wait()
            [(right, written)] = re.findall(r"right answer is (.*)\. The student wrote: (.*)\n", content)
            said = "I cannot say." if number % 11 == 0 else f"Score: {10 * written.endswith(right)}"
            found.silent += number % 11 == 0
            found.answers += 1
            choice = {"index": 0, "message": {"role": "assistant", "content": said}, "finish_reason": "stop"}
            self.reply(200, {"choices": [choice], "usage": {"prompt_tokens": 50, "completion_tokens": 3}})

        def reply(self, status: int, content: dict[str, Any]) -> None:
            body = json.dumps(content).encode()
            self.send_response(status)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, format: str, *args: Any) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", port), Judge) as server:
        found = Judging(server.server_port)
        found.holds.set()
        serving = threading.Thread(target=server.serve_forever)
        serving.start()

        def stop() -> None:
            server.shutdown()
            serving.join()
            server.server_close()

        found.stop = stop
        try:
            yield found
        finally:
            found.holds.set()
            stop()


@contextmanager
def dropping(port: int) -> Iterator[list[int]]:
    """Accept connections and close them at once; yield a list with an element for each."""
    found: list[int] = []

    def drop() -> None:
        with suppress(OSError):
            while True:
                connection, _ = listening.accept()
                found.append(1)
                connection.close()

    with socket.create_server(("127.0.0.1", port)) as listening:
        accepting = threading.Thread(target=drop)
        accepting.start()
        try:
            yield found
        finally:
            listening.shutdown(socket.SHUT_RDWR)
            accepting.join()


def job(folder: Path, port: int, **changes: object) -> list[str]:
    """The example of docs/DATA.md with the address of this judge."""
    [term] = tomllib.loads(EXAMPLE)["task"]["rewards"]
    term["url"] = f"http://127.0.0.1:{port}/v1"
    (folder / "judged.toml").write_text("[[task.rewards]]\n" + "\n".join(f"{k} = {_toml(v)}" for k, v in term.items()))
    return [str(folder / "judged.toml"), *small(folder / "runs", **changes)]


def _toml(value: Any) -> str:
    if isinstance(value, dict):
        return "{" + ", ".join(f"{key} = {_toml(one)}" for key, one in value.items()) + "}"
    return json.dumps(value)


def folder_of(runs: Path) -> RunFolder:
    [root] = runs.iterdir()
    return RunFolder(root)


def is_grading(status: dict[str, Any]) -> bool:
    return bool(status["groups_by_phase"].get("grading", 0))


def uses(folder: RunFolder) -> list[ev.JudgeUse]:
    return [e.judged for e in events_of(folder, ev.TrajectoryGraded) if e.judged is not None]


def test_what_a_judge_says_and_costs_is_recorded_and_what_it_does_not_say_is_no_reward(tmp_path: Path) -> None:
    with judging() as judge:
        result = run_to_end("run", *job(tmp_path, judge.port, run__steps=4, log__trajectories_per_step=4))
    assert result.returncode == 0, result.stderr
    folder = folder_of(tmp_path / "runs")
    graded = events_of(folder, ev.TrajectoryGraded)
    failed = [e.reason for e in graded if e.reward is None]
    assert len(failed) == judge.silent > 0
    assert all(reason.endswith("ValueError: no score in 'I cannot say.'") for reason in failed)
    assert sum(use.requests for use in uses(folder)) == len(judge.asked) == judge.answers + judge.refusals
    assert sum(use.sampled_tokens for use in uses(folder)) == 3 * judge.answers
    told = f"judges: {judge.answers:,} answers, {50 * judge.answers:,} tokens read and {3 * judge.answers:,} written, "
    assert told + f"{judge.refusals} requests more than answers, {judge.silent} not graded" in result.stdout
    kept = [one for one in read_kept(folder.trajectories) if one.reward is not None]
    assert kept
    assert all(one.verdicts == (("Qwen3-32B", f"Score: {10 * one.reward:g}"),) for one in kept)
    assert_audit_clean(folder)


def test_a_judge_that_is_away_for_a_moment_costs_no_answer(tmp_path: Path) -> None:
    with judging() as judge, Run(*job(tmp_path, judge.port, run__steps=8)) as run:
        run.until_trained(2)
        judge.stop()
        with dropping(judge.port) as dropped:
            until(lambda: dropped or None, what="a request that is dropped")
        with judging(judge.port) as again:
            assert run.end() == 0
    folder = run.folder
    failed = [e.reason for e in events_of(folder, ev.TrajectoryGraded) if e.reward is None]
    assert len(failed) == judge.silent + again.silent
    refused = sum(use.requests for use in uses(folder)) - len(judge.asked) - len(again.asked)
    assert refused >= len(dropped)  # and those that found nobody between them
    assert_audit_clean(folder)


def test_answers_that_were_being_judged_when_the_controller_was_killed_are_judged_again(tmp_path: Path) -> None:
    with judging() as judge:
        with Run(*job(tmp_path, judge.port, run__steps=4)) as run:
            run.until_trained(1)
            judge.holds.clear()  # what is asked now waits
            run.until_status(is_grading, what="answers that are being judged")
            run.process.kill()
            run.process.wait()
            judge.holds.set()
        before = len(uses(run.folder))
        result = run_to_end("run", "--resume", str(run.folder.root), "--set", "status.port=0")
        assert result.returncode == 0, result.stderr
    graded = [e.trajectory for e in events_of(run.folder, ev.TrajectoryGraded)]
    assert len(graded) == len({*graded}) > before
    assert f"judges: {len(uses(run.folder)):,} answers" in result.stdout
    assert_audit_clean(run.folder)


def test_a_judge_that_is_not_there_is_one_clear_line(tmp_path: Path) -> None:
    with judging() as judge:
        pass
    result = run_to_end("run", *job(tmp_path, judge.port))
    says = r"task\.rewards\.0\.url: http://127\.0\.0\.1:\d+/v1 does not answer \(.+\); start the judge or correct"
    assert_one_clear_error(result, code=2, says=says)
