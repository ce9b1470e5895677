"""The HTTP endpoint over real sockets: JSON, metrics, health and page."""

from __future__ import annotations

import re
import socket
from collections.abc import AsyncIterator
from dataclasses import replace

import aiohttp
import pytest

from dora.errors import ConfigError, ProtocolError, RemoteError
from dora.status import metrics
from dora.status.client import ask, fetch
from dora.status.server import StatusServer
from dora.status.snapshot import Snapshot

TOKEN = "open sesame"


class Desk:
    """Takes requests down; refuses instance 13."""

    def __init__(self) -> None:
        self.asked: list[tuple[str, str]] = []

    async def add(self, which: str) -> str:
        return self._take("add", which)

    async def drain(self, which: str) -> str:
        return self._take("drain", which)

    async def remove(self, which: str) -> str:
        return self._take("remove", which)

    def _take(self, verb: str, which: str) -> str:
        if which == "13":
            raise ConfigError("instance 13: no")
        self.asked.append((verb, which))
        return f"{verb} {which}: done"


@pytest.fixture
async def server(middle: Snapshot) -> AsyncIterator[StatusServer]:
    async with StatusServer(lambda: middle, host="127.0.0.1", port=0, requests=Desk(), token=TOKEN) as server:
        yield server


async def get(url: str) -> tuple[int, str, str]:
    """Status code, content type and text."""
    async with aiohttp.ClientSession() as session, session.get(url) as answer:
        return answer.status, answer.headers["Content-Type"], await answer.text()


async def test_the_status_is_the_snapshot(server: StatusServer, middle: Snapshot):
    assert await fetch(server.url) == middle
    assert await fetch(f"{server.url}/status") == middle


async def test_every_answer_is_made_from_a_snapshot_taken_for_it(middle: Snapshot):
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


async def test_the_page_asks_for_nothing_outside(server: StatusServer):
    code, kind, page = await get(server.url)
    assert (code, kind) == (200, "text/html; charset=utf-8")
    assert not re.findall(r"""(?:src|href)=["']?(?:https?:)?//|@import|url\(""", page)
    assert 'fetch("status"' in page


async def test_the_page_reads_only_fields_that_the_status_has(server: StatusServer, middle: Snapshot):
    page = (await get(server.url))[2]
    fields = set(re.findall(r"\bs\.([a-z_]\w*)", page))
    assert fields <= set(Snapshot.__dataclass_fields__)
    assert {"versions", "scores", "steps", "instances", "trainer", "counts"} <= fields
    for letter, rows in {"v": middle.versions, "x": middle.steps, "i": middle.instances}.items():
        used = set(re.findall(rf"\b{letter}\.([a-z_]\w*)", page)) - {"toFixed"}
        assert used <= set(type(rows[0]).__dataclass_fields__), letter


async def test_metrics_are_in_the_prometheus_format(server: StatusServer):
    code, kind, text = await get(f"{server.url}/metrics")
    assert (code, kind) == (200, "text/plain; version=0.0.4; charset=utf-8")
    assert text.endswith("\n")
    sample = re.compile(r'(dora_[a-z0-9_]+)(?:\{(?:[a-z]+="(?:[^"\\\n]|\\["\\n])*",?)*\})? -?[0-9][0-9.e+-]*')
    declared = ""
    for line in text.splitlines():
        if line.startswith("# HELP"):
            declared = line.split()[2]
            assert text.count(f"# HELP {declared} ") == 1
        elif line.startswith("# TYPE"):
            assert line.split()[2:] in ([declared, "gauge"], [declared, "counter"])
            assert declared.endswith("_total") == line.endswith("counter")
        else:
            found = sample.fullmatch(line)
            assert found, line
            assert found[1] == declared


def test_metrics_show_what_must_stay_0_and_the_lag(middle: Snapshot):
    lines = metrics.render(middle).splitlines()
    for name in ("version_conflicts", "scheduling_aborts", "staleness_violations"):
        assert f"dora_{name}_total 0" in lines
    assert 'dora_event_loop_lag_seconds{quantile="0.5"} 0.002' in lines
    assert "dora_event_loop_lag_max_seconds 0.25" in lines


def test_metrics_count_instances_per_version(middle: Snapshot):
    lines = metrics.render(middle).splitlines()
    for row in middle.versions:
        assert f'dora_version_instances{{version="{row.version}"}} {row.serving}' in lines


def test_labels_are_escaped(middle: Snapshot):
    lines = metrics.render(replace(middle, dropped={'a "b"\\\n': 1})).splitlines()
    assert 'dora_groups_dropped_total{reason="a \\"b\\"\\\\\\n"} 1' in lines


def test_a_value_that_does_not_exist_yet_has_no_sample(middle: Snapshot):
    text = metrics.render(replace(middle, eta_s=None, steps=()))
    assert "# TYPE dora_eta_seconds gauge\n# HELP" in text
    assert "dora_reward_mean " not in text.replace("HELP dora_reward_mean ", "").replace("TYPE dora_reward_mean ", "")


async def test_a_port_in_use_is_a_config_error_naming_field_and_port(server: StatusServer, middle: Snapshot):
    port = int(server.url.rpartition(":")[2])
    with pytest.raises(ConfigError, match=rf"status\.port: cannot listen on 127\.0\.0\.1:{port} "):
        await StatusServer(lambda: middle, host="127.0.0.1", port=port, requests=Desk(), token=TOKEN).__aenter__()


async def test_a_status_server_that_is_left_listens_no_more(middle: Snapshot):
    async with StatusServer(lambda: middle, host="127.0.0.1", port=0, requests=Desk(), token=TOKEN) as server:
        pass
    with pytest.raises(ConfigError, match="nobody answers there"):
        await fetch(server.url)


async def test_an_address_that_is_none_is_a_config_error():
    with pytest.raises(ConfigError, match="is not an http:// or https:// address"):
        await fetch("127.0.0.1:8421")


async def test_another_server_is_not_taken_for_a_run(middle: Snapshot):
    async with StatusServer(lambda: middle, host="127.0.0.1", port=0, requests=Desk(), token=TOKEN) as server:
        with pytest.raises(RemoteError, match="answers 404"):
            await fetch(f"{server.url}/elsewhere")
        with pytest.raises(ProtocolError, match="not the status of a run"):
            await fetch(f"{server.url}/healthz?")


async def test_a_server_that_says_nothing_is_given_up_in_time():
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


async def test_the_fleets_refusal_is_a_config_error_in_its_own_words(server: StatusServer):
    with pytest.raises(ConfigError, match=r"^instance 13: no$"):
        await ask(server.url, "drain", "13", token=TOKEN)
    with pytest.raises(ConfigError, match="the token is missing or wrong"):
        await ask(server.url, "drain", "2", token="guess")


@pytest.mark.parametrize("body", [b"", b"{}", b'{"instance": 3}', b'{"instance": "3", "force": true}'])
async def test_what_is_no_request_is_refused(server: StatusServer, body: bytes):
    headers = {"Authorization": f"Bearer {TOKEN}"}
    url = f"{server.url}/instances/drain"
    async with aiohttp.ClientSession() as session, session.post(url, headers=headers, data=body) as answer:
        assert answer.status == 400


async def test_reading_is_not_asking(server: StatusServer):
    for verb in ("add", "drain", "remove"):
        assert (await get(f"{server.url}/instances/{verb}"))[0] == 405
