"""Callers that the engine refuses: web pages under any name and, if there is a key, callers without it."""

from __future__ import annotations

import asyncio
import json
import socket
from pathlib import Path
from typing import Any

import pytest

from dora.embedded.server import OPEN_PATHS
from tests.embedded.conftest import Served, Serving
from tests.embedded.test_generate import sample

KEY = "s3cret"
JSON = {"Content_Type": "application/json"}
#: Requests of a hostile caller; each changes what the engine does.
HOSTILE: dict[str, dict[str, Any]] = {
    "/update_weights_from_disk": {"model_path": "{model}", "weight_version": "default"},
    "/update_weight_version": {"new_version": "theirs"},
    "/abort_request": {"rid": "", "abort_all": True},
    "/pause_generation": {"mode": "in_place"},
    "/continue_generation": {},
    "/flush_cache": {},
    "/load_lora_adapter": {"lora_name": "theirs", "lora_path": "{model}"},
    "/unload_lora_adapter": {"lora_name": "ours"},
    "/generate": {"input_ids": [5, 6], "sampling_params": {"max_new_tokens": 2}},
}


async def ask(
    served: Served, path: str, *, method: str = "POST", body: bytes | None = None, **headers: str
) -> tuple[int, str]:
    """Status and text; `headers` with _ for -."""
    given = {name.replace("_", "-"): value for name, value in headers.items()}
    async with served.http.request(method, path, data=body, headers=given) as answer:
        return answer.status, await answer.text()


async def state(served: Served) -> dict[str, Any]:
    """The state that a hostile call would change, read with the key."""
    headers = {"Authorization": f"Bearer {KEY}"}
    async with served.http.get("/server_info", headers=headers) as answer:
        info = await answer.json()
    kept = {name: info[name] for name in ("model_path", "weight_version")}
    engine = served.engine
    return {
        **kept,
        "paused": engine.gate.paused,
        "live": sorted(engine.batcher.live),
        "adapters": engine.adapters.paths,
        "spans": engine.batcher.weight_version,
    }


@pytest.mark.parametrize("authorization", [None, "Bearer", "Bearer ", "Bearer s3cre", "Basic s3cret", "Bearer ä"])
async def test_a_caller_without_the_key_changes_nothing_and_running_requests_continue(
    serving: Serving, model_b: Path, authorization: str | None
) -> None:
    headers = {**JSON} if authorization is None else {**JSON, "Authorization": authorization}
    ours = {"input_ids": [5, 6], "sampling_params": {"max_new_tokens": 1500, "ignore_eos": True}, "stream": True}
    async with (
        serving(api_key=KEY) as served,
        served.http.post("/generate", json=ours, headers={"Authorization": f"Bearer {KEY}"}) as answer,
    ):
        await answer.content.readline()  # it runs
        before = await state(served)
        for path, fields in HOSTILE.items():
            body = json.dumps(fields).replace("{model}", str(model_b)).encode()
            assert await ask(served, path, body=body, **headers) == (401, '{"error": "Unauthorized"}'), path
        assert (await ask(served, "/flush_cache", method="GET", **headers))[0] == 401
        assert await state(served) == before
        *_, last, done, _ = (await answer.read()).split(b"\n\n")
    assert done == b"data: [DONE]"
    assert json.loads(last.removeprefix(b"data: "))["meta_info"]["completion_tokens"] == 1500


async def test_a_key_that_is_not_text_is_refused(serving: Serving) -> None:
    async with serving(api_key=KEY) as served:
        reader, writer = await asyncio.open_connection("127.0.0.1", served.http._base_url.port)  # type: ignore[union-attr]
        head = "GET /server_info HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n"
        writer.write(head.encode() + b"Authorization: Bearer \xff\xfe\r\n\r\n")
        assert (await reader.read()).startswith(b"HTTP/1.1 401 ")
        writer.close()


PAGES = [
    ({"Host": "evil.example"}, 421),
    ({"Host": "127.0.0.1.evil.example:80"}, 421),
    ({"Host": "localhost@evil.example"}, 421),
    ({"Host": "[::1].evil.example"}, 421),
    ({"Host": ""}, 421),
    ({"Origin": "http://evil.example"}, 403),
    ({"Origin": "http://127.0.0.1:1"}, 403),
    ({"Origin": "null"}, 403),
    ({"Origin": "http://[bad"}, 403),
    ({"Sec_Fetch_Site": "cross-site"}, 403),
    ({"Sec_Fetch_Site": "same-site"}, 403),
    ({"Content_Type": "text/plain"}, 415),
    ({"Content_Type": "application/x-www-form-urlencoded"}, 415),
    ({"Content_Type": "multipart/form-data; boundary=x"}, 415),
]


@pytest.mark.parametrize(("headers", "status"), PAGES, ids=str)
async def test_a_web_page_cannot_control_an_engine_without_a_key(
    served: Served, headers: dict[str, str], status: int
) -> None:
    body = b'{"mode": "retract"}'
    found, text = await ask(served, "/pause_generation", body=body, **{**JSON, **headers})
    assert found == status
    assert {**json.loads(text), "message": ""} == {
        **{"object": "error", "message": "", "type": str(status), "param": None, "code": status}
    }
    assert not served.engine.gate.paused


@pytest.mark.parametrize("headers", [{"Host": "evil.example"}, {"Sec_Fetch_Site": "cross-site"}], ids=str)
async def test_a_web_page_changes_nothing_with_a_get(served: Served, headers: dict[str, str]) -> None:
    for path in ("/flush_cache", "/model_info", *OPEN_PATHS):
        assert (await ask(served, path, method="GET", **headers))[0] in (403, 421), path


@pytest.mark.parametrize(
    ("body", "kind"),
    [
        (b"{}", "application/json"),
        (b"{}", "application/json; charset=utf-8"),
        (None, "application/json"),
        (None, "application/octet-stream"),  # what aiohttp says of no body at all
    ],
)
@pytest.mark.parametrize("host", ["127.0.0.1:{port}", "localhost:{port}", "LocalHost", "127.1.2.3:80", "[::1]:80"])
async def test_local_clients_may_use_any_name_of_this_machine(
    served: Served, body: bytes | None, kind: str, host: str
) -> None:
    name = host.format(port=served.http._base_url.port)  # type: ignore[union-attr]
    assert (await ask(served, "/continue_generation", body=body, Host=name, Content_Type=kind))[0] == 200


@pytest.mark.parametrize("path", ["/generate", "/pause_generation", "/abort_request", "/update_weights_from_disk"])
@pytest.mark.parametrize(
    "body",
    [b"\xff", b'{"rid": "\xff", "mode": "\xff", "model_path": "\xff"}', b'{"mode": ' + b"[" * 100_000],
    ids=[0, 1, 2],
)
async def test_bytes_that_are_not_json_are_a_400_in_sglangs_shape(served: Served, path: str, body: bytes) -> None:
    status, text = await ask(served, path, body=body, **JSON)
    captured = json.loads(sample("error_bad_json")["body"])
    assert status == 400
    assert {**json.loads(text), "message": ""} == {**captured, "message": ""}


async def test_any_host_header_is_accepted_on_an_address_that_is_not_loopback(serving: Serving) -> None:
    """Proxies and port mappings give it names that the server cannot know; the key protects it there."""
    async with serving(host="0.0.0.0", api_key=KEY) as served:
        address = await own_address()
        if address is None:
            pytest.skip("this host has no address but loopback")
        url = f"http://{address}:{served.http._base_url.port}/model_info"  # type: ignore[union-attr]
        async with served.http.get(url, headers={"Host": "gpu-7.example"}) as answer:
            assert answer.status == 401
        known = {"Host": "gpu-7.example", "Authorization": f"Bearer {KEY}"}
        async with served.http.get(url, headers=known) as answer:
            assert answer.status == 200
        async with served.http.get(url, headers={**known, "Origin": "http://evil.example"}) as answer:
            assert answer.status == 403


async def own_address() -> str | None:
    """The address of the interface with the default route; nothing is sent."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect(("192.0.2.1", 9))
        except OSError:
            return None
        address: str = probe.getsockname()[0]
        return address


async def test_bytes_that_are_not_a_request_are_not_logged(served: Served, caplog: pytest.LogCaptureFixture) -> None:
    base = served.http._base_url
    assert base is not None
    reader, writer = await asyncio.open_connection(base.host, base.port)
    writer.write(b"GET / HTTP/1.1\r\nX: " + b"a" * 100_000)
    assert b" 400 " in await reader.readline()
    writer.close()
    assert caplog.records == []
