"""The HTTP endpoint over real sockets: JSON, metrics, health and page."""

from __future__ import annotations

import asyncio
import re
import shutil
import socket
import subprocess
from collections.abc import AsyncIterator
from contextlib import suppress
from dataclasses import replace

import aiohttp
import msgspec
import pytest
from prometheus_client.parser import text_string_to_metric_families

from dora.core.events import RequestTag
from dora.errors import ConfigError, ProtocolError, RemoteError
from dora.observe.episodes import EpisodeStats
from dora.observe.figures import figures
from dora.observe.snapshot import Snapshot
from dora.status import metrics
from dora.status.client import ask, fetch
from dora.status.page_server import MAX_ARRIVING_BYTES, MAX_BODY_BYTES, MAX_CONNECTIONS
from dora.status.server import MAX_NAME, StatusServer
from dora.trainer.metrics import METRICS
from tests.escapes import HOSTILE
from tests.made import poisoned

TOKEN = "open sesame"


class Desk:
    """Records requests; refuses instance 13."""

    def __init__(self) -> None:
        self.asked: list[tuple[str, str]] = []
        self.requests: list[RequestTag] = []

    async def add(self, which: str, request: RequestTag) -> str:
        return self._take("add", which, request)

    async def drain(self, which: str, request: RequestTag) -> str:
        return self._take("drain", which, request)

    async def remove(self, which: str, request: RequestTag) -> str:
        return self._take("remove", which, request)

    async def evaluate(self, request: RequestTag) -> str:
        return self._take("evaluate", "", request)

    async def stop(self, request: RequestTag) -> str:
        return self._take("stop", "", request)

    def _take(self, verb: str, which: str, request: RequestTag) -> str:
        if which == "13":
            raise ConfigError("instance 13: no")
        self.asked.append((verb, which))
        self.requests.append(request)
        return f"{verb} {which}: done"


@pytest.fixture
async def server(middle: Snapshot) -> AsyncIterator[StatusServer]:
    async with StatusServer(lambda: middle, host="127.0.0.1", port=0, requests=Desk(), token=TOKEN) as server:
        yield server


async def get(url: str, **headers: str) -> tuple[int, str, str]:
    """Status code, content type and text."""
    async with aiohttp.ClientSession() as session, session.get(url, headers=headers) as answer:
        return answer.status, answer.headers["Content-Type"], await answer.text()


async def test_the_status_is_the_snapshot(server: StatusServer, middle: Snapshot):
    assert await fetch(server.url) == middle
    assert await fetch(f"{server.url}/status") == middle


async def test_every_answer_is_made_from_a_new_snapshot(middle: Snapshot):
    taken = iter([middle, replace(middle, step_forming=99)])
    async with StatusServer(lambda: next(taken), host="127.0.0.1", port=0, requests=Desk(), token=TOKEN) as server:
        assert (await fetch(server.url)).step_forming == middle.step_forming
        assert (await fetch(server.url)).step_forming == 99


async def test_health_is_ok_unless_the_run_has_failed(server: StatusServer, middle: Snapshot):
    assert (await get(f"{server.url}/healthz"))[::2] == (200, "running\n")
    async with StatusServer(
        lambda: replace(middle, phase="failed"), host="127.0.0.1", port=0, requests=Desk(), token=TOKEN
    ) as failed:
        assert (await get(f"{failed.url}/healthz"))[::2] == (503, "failed\n")


async def test_metrics_are_what_prometheus_reads(server: StatusServer):
    code, kind, text = await get(f"{server.url}/metrics")
    assert (code, kind) == (200, "text/plain; version=0.0.4; charset=utf-8")
    assert text.endswith("\n")
    families = list(text_string_to_metric_families(text))
    lines = text.splitlines()
    assert sum(len(family.samples) for family in families) == sum(not line.startswith("#") for line in lines)
    assert len({family.name for family in families}) == len(families) == text.count("# TYPE ")
    for family in families:
        assert family.documentation, family.name
        assert family.type in ("gauge", "counter", "summary", "histogram"), family.name
        assert all(sample.name.endswith("_total") == (family.type == "counter") for sample in family.samples)


def test_reserved_labels_are_used_only_where_promtool_allows_them(middle: Snapshot):
    for family in text_string_to_metric_families(metrics.render(middle)):
        labels = {label for sample in family.samples for label in sample.labels}
        assert ("quantile" in labels) == (family.type == "summary"), family.name
        assert ("le" in labels) == (family.type == "histogram"), family.name
        assert family.type == "histogram" or not family.name.endswith(("_count", "_sum", "_bucket")), family.name


@pytest.mark.skipif(shutil.which("promtool") is None, reason="promtool is not installed (Debian: prometheus)")
def test_promtool_finds_nothing_wrong(middle: Snapshot, calling: Snapshot):
    for shown in (middle, calling):
        command = ["promtool", "check", "metrics"]
        found = subprocess.run(command, input=metrics.render(shown), capture_output=True, text=True, check=False)
        assert (found.returncode, found.stdout, found.stderr) == (0, "", "")


def test_the_trainers_metrics_of_the_last_step_are_shown(middle: Snapshot):
    lines = metrics.render(middle).splitlines()
    for key in METRICS.keys() - {"grad_norm"}:
        assert f"dora_{metrics.trainer_name(key)} 0.5" in lines
    names = {metrics.trainer_name(key) for key in METRICS}
    assert len(names) == len(METRICS)
    assert {"trainer_busy_seconds", "trainer_all_entropy", "trainer_nonfinite_tokens"} <= names
    assert not [line for line in lines if "grad_norm" in line or "lag_0" in line]


def test_a_bucket_counts_all_durations_up_to_its_bound(middle: Snapshot):
    lines = metrics.render(middle).splitlines()
    buckets = {"0.01": 1, "0.03": 2, "3000.0": 2, "+Inf": 3}
    for bound, count in buckets.items():
        assert f'dora_grading_duration_seconds_bucket{{le="{bound}"}} {count}' in lines
    assert "dora_grading_duration_seconds_sum 5000.03" in lines
    assert "dora_grading_duration_seconds_count 3" in lines


def test_metrics_show_the_counters_that_must_stay_0_and_the_lag(middle: Snapshot):
    lines = metrics.render(middle).splitlines()
    for name in ("version_conflicts", "scheduling_aborts", "staleness_violations"):
        assert f"dora_{name}_total 0" in lines
    assert 'dora_event_loop_lag_seconds{quantile="0.5"} 0.002' in lines
    assert "dora_event_loop_lag_max_seconds 0.25" in lines


def test_metrics_count_instances_per_version(middle: Snapshot):
    lines = metrics.render(middle).splitlines()
    for row in middle.versions:
        assert f'dora_version_instances{{version="{row.version}"}} {row.serving}' in lines


def test_episodes_are_shown_where_there_is_an_environment(calling: Snapshot, middle: Snapshot):
    families = {family.name: family for family in text_string_to_metric_families(metrics.render(calling))}
    names = {f"dora_{metrics.episode_name(name)}" for name in figures(EpisodeStats)}
    assert names == {name for name in families if name.startswith("dora_episode_")} | {"dora_episodes"}

    def samples(name: str) -> list[tuple[dict[str, str], float]]:
        return [(sample.labels, sample.value) for sample in families[name].samples]

    assert samples("dora_episode_turns_max") == [({}, 4)]
    assert samples("dora_episode_call_seconds_p90") == [({}, 0.5)]
    assert samples("dora_episode_turn_rewards") == [({"turn": "1"}, 0.25), ({"turn": "2"}, 0.5)]
    assert samples("dora_episode_truncated") == [({"cause": "turns"}, 2)]
    assert samples("dora_episode_metrics") == [({"name": "moves"}, 2.5)]
    assert samples("dora_episodes_calling") == [({}, 7)]
    assert samples("dora_environment_failed") == [({"cause": "timeout"}, 2), ({"cause": "host"}, 1)]
    assert not {"episode", "environment"} & set(re.split(r"\W|_", metrics.render(middle)))


def test_a_held_out_set_of_which_nothing_was_graded_has_no_mean(middle: Snapshot):
    none = replace(middle.scores[0], name="none", mean=None, pass_at_n=None, num_samples=0, num_failed=4)
    assert 'set="none"' not in metrics.render(replace(middle, scores=(*middle.scores, none)))


def test_skipped_prompts_are_counted(middle: Snapshot):
    assert "dora_prompts_skipped_total 2" in metrics.render(replace(middle, prompts_skipped=2)).splitlines()


def test_labels_are_escaped(middle: Snapshot):
    text = metrics.render(replace(middle, dropped={'a "b"\\\n': 1}))
    (dropped,) = (f for f in text_string_to_metric_families(text) if f.name == "dora_groups_dropped")
    assert [sample.labels for sample in dropped.samples] == [{"reason": 'a "b"\\\n'}]


def test_a_value_that_is_not_known_yet_has_no_sample(middle: Snapshot):
    text = metrics.render(replace(middle, eta_s=None, steps=()))
    assert "# TYPE dora_eta_seconds gauge\n# HELP" in text
    assert "dora_reward_mean " not in text.replace("HELP dora_reward_mean ", "").replace("TYPE dora_reward_mean ", "")


async def test_a_port_in_use_is_a_config_error_naming_field_and_port(server: StatusServer, middle: Snapshot):
    port = int(server.url.rpartition(":")[2])
    with pytest.raises(ConfigError, match=rf"status\.port: cannot listen on 127\.0\.0\.1:{port} "):
        await StatusServer(lambda: middle, host="127.0.0.1", port=port, requests=Desk(), token=TOKEN).__aenter__()


async def test_a_status_server_stops_listening_when_it_is_left(middle: Snapshot):
    async with StatusServer(lambda: middle, host="127.0.0.1", port=0, requests=Desk(), token=TOKEN) as server:
        pass
    with pytest.raises(ConfigError, match="is the run alive, and is this its status address"):
        await fetch(server.url)


async def test_an_invalid_address_is_a_config_error():
    with pytest.raises(ConfigError, match="not an address; write it as http://"):
        await fetch("127.0.0.1:8421")


async def test_another_server_is_not_mistaken_for_a_run(middle: Snapshot):
    async with StatusServer(lambda: middle, host="127.0.0.1", port=0, requests=Desk(), token=TOKEN) as server:
        with pytest.raises(RemoteError, match="answered 404"):
            await fetch(f"{server.url}/elsewhere")
        with pytest.raises(ProtocolError, match="not the status of a run"):
            await fetch(f"{server.url}/healthz?")


@pytest.mark.parametrize("url", ["http://a..b:8421", f"http://{'a' * 64}:8421"])
async def test_a_name_that_no_host_can_have_has_no_answer(url: str):
    with pytest.raises(ConfigError, match=rf"^{url}/status: no answer .*; is the run alive, and is this its status"):
        await fetch(url)


async def test_a_request_to_a_server_that_does_not_answer_times_out():
    with socket.create_server(("127.0.0.1", 0)) as silent:
        url = f"http://127.0.0.1:{silent.getsockname()[1]}"
        with pytest.raises(RemoteError, match=r"no answer within 0\.2 s"):
            await fetch(url, timeout_s=0.2)


# -- requests ---------------------------------------------------------------------------------------------------------


async def test_a_request_with_the_token_reaches_the_fleet_and_is_answered(middle: Snapshot):
    desk = Desk()
    async with StatusServer(lambda: middle, host="127.0.0.1", port=0, requests=desk, token=TOKEN) as server:
        assert await ask(server.url, "drain", "2", token=TOKEN) == "drain 2: done"
        assert await ask(f"{server.url}/status", "add", "http://a:1", token=TOKEN) == "add http://a:1: done"
        assert await ask(server.url, "remove", "0", token=TOKEN) == "remove 0: done"
    assert desk.asked == [("drain", "2"), ("add", "http://a:1"), ("remove", "0")]


@pytest.mark.parametrize(
    "header", [None, "", "Bearer", "Bearer ", "Bearer open sesam", "Basic open sesame", "Bearer ä"]
)
async def test_a_request_without_the_token_is_refused_and_changes_nothing(middle: Snapshot, header: str | None):
    desk = Desk()
    async with StatusServer(lambda: middle, host="127.0.0.1", port=0, requests=desk, token=TOKEN) as server:
        headers = {} if header is None else {"Authorization": header}
        url = f"{server.url}/instances/drain"
        async with (
            aiohttp.ClientSession() as session,
            session.post(url, headers=headers, json={"instance": "0"}) as got,
        ):
            assert (got.status, await got.json()) == (401, {"said": "the token is missing or wrong"})
        assert (await get(f"{server.url}/status"))[0] == 200  # reading needs none
    assert desk.asked == []


@pytest.mark.parametrize("path", ["instances/add", "instances/remove", "run/evaluate", "run/stop"])
async def test_everything_that_changes_the_run_needs_the_token(middle: Snapshot, path: str):
    desk = Desk()
    async with StatusServer(lambda: middle, host="127.0.0.1", port=0, requests=desk, token=TOKEN) as server:
        for headers in ({}, {"Authorization": "Bearer guess"}, {"Cookie": f"token={TOKEN}"}):
            url = f"{server.url}/{path}?token={TOKEN}"
            async with aiohttp.ClientSession() as session, session.post(url, headers=headers, json={}) as answer:
                assert answer.status == 401
        assert (await get(f"{server.url}/{path}", Authorization=f"Bearer {TOKEN}"))[0] == 405
    assert desk.asked == []


async def test_who_asks_is_a_short_line_with_the_address(middle: Snapshot):
    desk = Desk()
    async with StatusServer(lambda: middle, host="127.0.0.1", port=0, requests=desk, token=TOKEN) as server:
        for name in ("", "ada", f"a\n{HOSTILE}"[:MAX_NAME], "\u202eada"):
            await ask(server.url, "evaluate", token=TOKEN, by=name)
        with pytest.raises(ConfigError, match="not a request"):
            await ask(server.url, "stop", token=TOKEN, by="a" * (MAX_NAME + 1))
    found = [request.by for request in desk.requests]
    assert found[:2] == ["127.0.0.1", "ada (127.0.0.1)"]
    assert all(by.isprintable() and by.endswith("127.0.0.1" if by == found[0] else "(127.0.0.1)") for by in found)
    assert len({request.id for request in desk.requests}) == 4


async def test_the_token_can_be_tried_without_asking_for_anything(server: StatusServer):
    for header, code in ((f"Bearer {TOKEN}", 200), ("Bearer guess", 401), ("", 401)):
        assert (await get(f"{server.url}/run/token", Authorization=header))[0] == code


async def test_a_token_that_is_not_text_is_refused(server: StatusServer):
    host, _, port = server.url.removeprefix("http://").partition(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    head = "POST /instances/drain HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n"
    writer.write(head.encode() + b"Authorization: Bearer \xff\xfe\r\n\r\n")
    assert (await reader.read()).startswith(b"HTTP/1.1 401 ")
    writer.close()


async def test_a_refusal_is_a_config_error_with_the_fleets_text(server: StatusServer):
    with pytest.raises(ConfigError, match=r"^instance 13: no$"):
        await ask(server.url, "drain", "13", token=TOKEN)
    with pytest.raises(ConfigError, match="the token is missing or wrong"):
        await ask(server.url, "drain", "2", token="guess")


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"{}",
        b'{"instance": 3}',
        b'{"instance": "3", "force": true}',
        b'{"instance": "\xff"}',
        b"\xff",
        b"[" * 9_000,
    ],
)
async def test_a_body_that_is_not_a_request_is_refused(server: StatusServer, body: bytes):
    assert (await drain(server, body=body))[0] == 400


async def test_a_request_that_is_too_long_is_refused(server: StatusServer):
    code, said = await drain(server, body=b'{"instance": "' + b"1" * MAX_BODY_BYTES + b'"}')
    assert (code, said) == (413, f"not a request: longer than {MAX_BODY_BYTES} bytes")


async def drain(server: StatusServer, *, body: bytes, **headers: str) -> tuple[int, str]:
    """Status code and sentence; `headers` replace the usual ones, with _ for -."""
    given = {"Authorization": f"Bearer {TOKEN}", "Content-Type": "application/json"}
    given |= {name.replace("_", "-"): value for name, value in headers.items()}
    url = f"{server.url}/instances/drain"
    async with aiohttp.ClientSession() as session, session.post(url, headers=given, data=body) as answer:
        return answer.status, (await answer.json())["said"]


@pytest.mark.parametrize(
    ("headers", "code"),
    [
        ({"Host": "evil.example:8421"}, 421),
        ({"Host": "127.0.0.1.evil.example"}, 421),
        ({"Origin": "http://evil.example"}, 403),
        ({"Origin": "http://127.0.0.1:1"}, 403),  # another port is another site
        ({"Origin": "null"}, 403),
        ({"Sec_Fetch_Site": "cross-site"}, 403),
        ({"Content_Type": "text/plain"}, 415),
        ({"Content_Type": "application/x-www-form-urlencoded"}, 415),
    ],
    ids=str,
)
async def test_a_request_of_another_sites_page_is_refused_even_with_the_token(
    middle: Snapshot, headers: dict[str, str], code: int
):
    desk = Desk()
    async with StatusServer(lambda: middle, host="127.0.0.1", port=0, requests=desk, token=TOKEN) as server:
        assert (await drain(server, body=b'{"instance": "2"}', **headers))[0] == code
    assert desk.asked == []


async def test_the_runs_own_page_may_send_requests(server: StatusServer):
    own = {"Origin": server.url, "Sec_Fetch_Site": "same-origin"}
    assert await drain(server, body=b'{"instance": "2"}', **own) == (200, "drain 2: done")


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost:9000", "LOCALHOST", "127.0.0.2:1", "[::1]:8421"])
async def test_the_status_may_be_read_under_any_name_of_this_machine(server: StatusServer, host: str):
    assert (await get(f"{server.url}/status", Host=host))[0] == 200


async def test_a_page_that_rebinds_its_name_to_this_machine_reads_nothing(server: StatusServer):
    code, _, text = await get(f"{server.url}/status", Host="evil.example")
    assert (code, text) == (421, '{"said":"the Host header does not name this machine: use 127.0.0.1 or localhost"}')


async def test_a_link_from_another_site_opens_the_page(server: StatusServer):
    assert (await get(server.url, **{"Sec-Fetch-Site": "cross-site"}))[0] == 200


async def test_a_get_cannot_send_a_request_to_the_fleet(server: StatusServer):
    for verb in ("add", "drain", "remove"):
        assert (await get(f"{server.url}/instances/{verb}"))[0] == 405


async def test_bytes_that_are_not_a_request_are_refused_and_not_logged(
    server: StatusServer, caplog: pytest.LogCaptureFixture
):
    for sent in (b"GET / HTTP/1.1\r\nX: " + b"a" * 50_000, b"GET /\xff HTTP/1.1\r\n\r\n", b"\0\0\r\n\r\n"):
        reader, writer = await asyncio.open_connection("127.0.0.1", int(server.url.rsplit(":", 1)[1]))
        writer.write(sent)
        assert (await reader.readline()).startswith(b"HTTP/1.0 400"), sent[:20]
        writer.close()
    assert caplog.records == []


async def test_far_too_many_bytes_at_once_are_not_parsed(server: StatusServer):
    reader, writer = await asyncio.open_connection("127.0.0.1", int(server.url.rsplit(":", 1)[1]))
    writer.write(bytes(16 * MAX_ARRIVING_BYTES))
    with suppress(ConnectionError):
        assert await reader.read() == b""
    writer.close()


async def test_idle_connections_of_strangers_are_closed_for_new_ones(server: StatusServer):
    port = int(server.url.rsplit(":", 1)[1])
    idle = [await asyncio.open_connection("127.0.0.1", port) for _ in range(MAX_CONNECTIONS)]
    for _, writer in idle:
        writer.write(b"GET /status HTTP/1.1\r\nHost: localhost\r\n")
    late = [await asyncio.open_connection("127.0.0.1", port) for _ in range(3)]
    assert (await get(f"{server.url}/status"))[0] == 200
    async with asyncio.timeout(10.0):
        for reader, _ in idle[:3]:
            with suppress(ConnectionError):
                assert await reader.read() == b""
    for _, writer in (*idle, *late):
        writer.close()


def test_no_text_of_others_makes_a_line_of_the_metrics(middle: Snapshot):
    """Of a rank, a source of prompts, a reason: in any field."""
    sent = msgspec.to_builtins(middle)
    durations = sent.pop("durations")
    known = {family.name for family in text_string_to_metric_families(metrics.render(middle))}
    forged = f"{HOSTILE}\ndora_forged 1\n"
    for bad in poisoned(sent, forged):
        with suppress(msgspec.ValidationError):  # the name of a field
            text = metrics.render(msgspec.convert({**bad, "durations": durations}, Snapshot))
            assert {family.name for family in text_string_to_metric_families(text)} <= known
            assert all(line.startswith(("dora_", "# HELP dora_", "# TYPE dora_")) for line in text.split("\n")[:-1])
            assert "\ndora_forged" not in text


def test_a_status_of_a_folder_may_lack_durations(middle: Snapshot):
    assert "dora_push_duration_seconds" in metrics.render(middle)
    assert "dora_push_duration_seconds" not in metrics.render(replace(middle, durations={}))
