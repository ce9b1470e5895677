"""What a run is asked over its status endpoint: real processes and sockets, hostile clicks, and a resume."""

from __future__ import annotations

import http.client
import re
import subprocess
import threading
from collections.abc import Mapping
from dataclasses import dataclass, field
from urllib.parse import urlsplit

import msgspec
import pytest

from dora.core import commands as cmd
from dora.core import events as ev
from dora.journal.run_folder import RunFolder
from tests.e2e.runs import Run, assert_audit_clean, events_of, orders_of, run_to_end, small

pytestmark = [pytest.mark.deep, pytest.mark.timeout(900)]

Answer = tuple[int, str]


@dataclass
class Story:
    """What was asked of one run, and what it answered."""

    folder: RunFolder
    token: str
    answers: dict[str, Answer] = field(default_factory=dict)
    drained: list[Answer] = field(default_factory=list)  # of one request that was sent eight times at once
    evaluated: int = -1  # the version that was asked for
    code: int = -1
    summary: str = ""
    resumed: dict[str, Answer] = field(default_factory=dict)
    listed: subprocess.CompletedProcess[str] | None = None


def post(url: str, path: str, token: str, body: bytes, headers: Mapping[str, str] | None = None) -> Answer:
    """Status code and sentence; (0, "") if the connection is refused or cut."""
    parts = urlsplit(url)
    connection = http.client.HTTPConnection(parts.hostname or "", parts.port, timeout=60)
    sent = {"Content-Type": "application/json", "Authorization": f"Bearer {token}"} | dict(headers or {})
    try:
        connection.request("POST", path, body, sent)
        answer = connection.getresponse()
        return answer.status, str(msgspec.json.decode(answer.read())["said"])
    except (OSError, http.client.HTTPException):
        return 0, ""
    finally:
        connection.close()


def body(**fields: str) -> bytes:
    return msgspec.json.encode(fields)


@pytest.fixture(scope="module")
def story(tmp_path_factory: pytest.TempPathFactory) -> Story:
    folder = tmp_path_factory.mktemp("runs")
    arguments = small(
        folder,
        run__steps=2000,
        rollout__max_staleness=1,
        engine__instances=2,
        eval__sets="[{prompts=8}]",
        eval__every=0,
    )
    with Run(*arguments) as run:
        run.until_trained(2)
        found = Story(run.folder, run.folder.status_token.read_text().strip())
        hostile_clicks(run, found)
        eight_clicks(run, found)
        ask_friendly(run, found)
        found.answers["stop"] = post(run.url, "/run/stop", found.token, body(id="stop-1", by="ada"))
        found.answers["late"] = post(run.url, "/instances/drain", found.token, body(instance="1", by="ada"))
        found.code = run.end()
        found.summary = "".join(run.out)
    with Run("--resume", str(found.folder.root), "--set", "status.port=0") as run:
        run.until_status(lambda s: s["phase"] == "running", what="it goes on")
        token = found.folder.status_token.read_text().strip()
        found.resumed["old token"] = post(run.url, "/run/stop", found.token, body(id="stop-2"))
        found.resumed["stop again"] = post(run.url, "/run/stop", token, body(id="stop-1", by="ada"))
        found.resumed["asked"] = (0, " ".join(q["verb"] for q in run.status()["requests"]))
        run.until_trained(run.status()["steps_trained"] + 1)
        run.interrupt()
        assert run.end() == 130, run.told()
    return found


def hostile_clicks(run: Run, found: Story) -> None:
    """None of these may change anything."""
    url, token = run.url, found.token
    drain = body(instance="1", id="hostile")
    found.answers |= {
        "wrong token": post(url, "/instances/drain", token[:-1], drain),
        "no token": post(url, "/instances/drain", "", drain),
        "foreign origin": post(url, "/instances/drain", token, drain, {"Origin": "http://evil.example"}),
        "other port": post(url, "/run/stop", token, body(), {"Origin": "http://127.0.0.1:1"}),
        "cross-site": post(url, "/run/stop", token, body(), {"Sec-Fetch-Site": "cross-site"}),
        "rebound": post(url, "/run/stop", token, body(), {"Host": "evil.example"}),
        "a form": post(url, "/run/stop", token, b"a=b", {"Content-Type": "application/x-www-form-urlencoded"}),
        "token in the address": post(f"{url}", f"/run/stop?token={token}", "", body()),
        "garbage": post(url, "/run/stop", token, b"\x00\xff{"),
        "a list": post(url, "/run/stop", token, b"[]"),
        "unknown field": post(url, "/run/stop", token, body(force="yes")),
        "long id": post(url, "/run/stop", token, body(id="x" * 65)),
        "long name": post(url, "/run/stop", token, body(by="x" * 65)),
        "deep": post(url, "/run/stop", token, b"[" * 9000),
        "lone surrogate": post(url, "/instances/drain", token, b'{"instance": "\\ud800"}'),
        "huge": post(url, "/run/stop", token, b'{"by": "' + b"x" * 20_000 + b'"}'),
        "far too huge": post(url, "/run/stop", token, b'{"by": "' + b"x" * 4_000_000 + b'"}'),
        "huge number": post(url, "/instances/drain", token, body(instance="9" * 900)),
        "many digits": post(url, "/instances/drain", token, body(instance="9" * 19)),
        "negative": post(url, "/instances/drain", token, body(instance="-1")),
        "no address": post(url, "/instances/add", token, body(instance="http://[")),
        "a file": post(url, "/instances/add", token, body(instance="file:///etc/passwd")),
        "password": post(url, "/instances/add", token, body(instance="http://ada:pw@127.0.0.1:1")),
        "nobody there": post(url, "/instances/add", token, body(instance="http://127.0.0.1:1")),
    }
    status = run.status()
    assert [row["asked"] for row in status["instances"]] == ["", ""], found.answers
    assert status["phase"] == "running"


def eight_clicks(run: Run, found: Story) -> None:
    """One request, eight times at once: it is granted once."""

    def click() -> None:
        found.drained.append(post(run.url, "/instances/drain", found.token, body(instance="1", id="drain-1", by="ada")))

    clicks = [threading.Thread(target=click) for _ in range(8)]
    for one in clicks:
        one.start()
    for one in clicks:
        one.join()


def ask_friendly(run: Run, found: Story) -> None:
    url, token = run.url, found.token
    found.answers["recall"] = post(url, "/instances/add", token, body(instance="1", id="recall-1", by="bob\x1b[2J\r\n"))
    found.answers["late drain"] = post(url, "/instances/drain", token, body(instance="1", id="drain-1", by="ada"))
    found.answers["evaluate"] = post(url, "/run/evaluate", token, body(id="evaluate-1", by="ada"))
    run.until_status(lambda s: len({e["version"] for e in s["scores"]}) == 2, what="the version has a score")
    found.evaluated = run.status()["scores"][-1]["version"]
    found.listed = run_to_end("instances", url, "--token-file", str(found.folder.status_token), "drain", "7")


def test_hostile_clicks_are_refused_with_a_sentence(story: Story) -> None:
    codes = {name: code for name, (code, _) in story.answers.items()}
    assert {codes[name] for name in ("wrong token", "no token", "token in the address")} == {401}
    assert {codes[name] for name in ("foreign origin", "other port", "cross-site")} == {403}
    assert (codes["rebound"], codes["a form"], codes["huge"]) == (421, 415, 413)
    for name in ("garbage", "a list", "unknown field", "long id", "long name", "deep"):
        assert codes[name] == 400, name
    assert codes["lone surrogate"] in (400, 409)
    assert codes["far too huge"] in (0, 413)  # 0: cut off while it is being sent
    for name in ("huge number", "many digits", "negative", "no address", "a file", "password", "nobody there"):
        assert codes[name] == 409, name
    assert not any("pw" in said for _, said in story.answers.values())


def test_a_double_click_does_it_once(story: Story) -> None:
    granted = [said for code, said in story.drained if code == 200]
    refused = {said for code, said in story.drained if code == 409}
    assert len(granted) == 1
    assert granted[0].startswith("instance 1 drains: ")
    assert refused == {"instance 1: this request was answered before: nothing was changed again"}
    assert story.answers["recall"] == (200, "instance 1 gets work again")
    assert story.answers["late drain"][0] == 409


def test_a_version_that_is_asked_for_is_evaluated(story: Story) -> None:
    assert story.answers["evaluate"] == (200, "the newest version is evaluated next")
    assert story.evaluated > 0
    assert [order.version for order in orders_of(story.folder, cmd.ReportEvaluation)] == [0, story.evaluated]


def test_a_stop_ends_the_run_as_ctrl_c_does(story: Story) -> None:
    assert story.answers["stop"] == (200, "the run stops; everything in flight is kept for a resume")
    code, said = story.answers["late"]
    assert (code, said) == (0, "") or re.fullmatch(
        r"(instance 1: )?the run (is being stopped|has ended): nothing was changed", said
    )
    assert story.code == 130
    assert "stopped by ada (127.0.0.1); everything in flight is kept" in story.summary
    assert "to continue it: dora run --resume" in story.summary


def test_what_was_asked_before_a_resume_is_not_done_after_it(story: Story) -> None:
    assert story.resumed["old token"][0] == 401
    again = (409, "this request was answered before: nothing was changed again")
    assert story.resumed["stop again"] == again


def test_who_asked_is_in_the_journal_and_in_the_status_also_after_a_resume(story: Story) -> None:
    asked = events_of(story.folder, ev.InstanceRecalled)
    assert [event.request.by for event in asked] == ["bob\N{REPLACEMENT CHARACTER}[2J (127.0.0.1)"]
    assert {event.request.by for event in events_of(story.folder, ev.InstanceDrainRequested)} >= {"ada (127.0.0.1)"}
    stops = [event.request.by for event in events_of(story.folder, ev.StopRequested)]
    assert stops == ["ada (127.0.0.1)"] * 2 + ["a signal"]
    assert story.resumed["asked"][1].split().count("recall") == 1
    assert story.listed is not None
    assert story.listed.returncode == 2
    assert story.listed.stderr == "dora: instance 7: there is no such instance, or it has not come up yet\n"


def test_nothing_was_lost_and_no_token_is_in_what_the_run_wrote(story: Story) -> None:
    assert_audit_clean(story.folder)
    for path in [story.folder.journal, story.folder.log, *story.folder.logs.iterdir()]:
        assert story.token.encode() not in path.read_bytes(), path
