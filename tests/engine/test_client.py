"""The client against a scripted server on a real socket: nothing streamed is lost, nothing waits for ever."""

from __future__ import annotations

import asyncio
import errno
import json
from array import array
from collections.abc import AsyncIterator
from dataclasses import dataclass, field, replace
from typing import Any

import pytest
from aiohttp import web
from scripted_server import CAPTURES, ScriptedServer, captured, reset

from dora.engine.api import GenerateRequest
from dora.engine.errors import RequestRefused, ServerGone
from dora.engine.sglang.answers import Loads
from dora.engine.sglang.client import CONTROL_ATTEMPTS, EngineClient
from dora.engine.sglang.target import PushTarget
from dora.errors import ConfigError, ProtocolError, RemoteError

REQUEST = GenerateRequest(
    id="r-1", tokens=[5, 6, 7, 8], max_new_tokens=3, temperature=1.0, stop_tokens=[2], seed=11, label="run/3"
)
FIRST, SECOND, LAST = [
    f"{line}\n\n".encode() for _, line in json.loads((CAPTURES / "stream_logprob.json").read_text())["events"][:3]
]
DONE = b"data: [DONE]\n\n"
TOKENS = [9, 370, 446]


@dataclass
class Tokens:
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    arrived: asyncio.Event = field(default_factory=asyncio.Event)

    def __call__(self, token_ids: Any, logprobs: Any) -> None:
        self.token_ids += token_ids
        self.logprobs += logprobs
        self.arrived.set()


@pytest.fixture
async def client() -> AsyncIterator[EngineClient]:
    async with EngineClient(max_connections=8, vocab_size=512) as client:
        yield client


async def test_tokens_are_delivered_while_the_stream_is_still_open(
    server: ScriptedServer, client: EngineClient
) -> None:
    tokens = Tokens()
    server.streams(FIRST, tokens.arrived, SECOND, LAST, DONE)  # the server goes on only when the first token is there
    result = await client.generate(server.url, REQUEST, tokens)
    assert tokens.token_ids == TOKENS
    assert tokens.logprobs == pytest.approx([-6.1853156, -6.0413374, -6.1197514])
    assert (result.finish_reason, result.num_tokens, result.cached_tokens) == ("length", 3, 3)
    assert result.spans == (("default", 0, 3),)


@pytest.mark.parametrize(
    ("budget", "says", "kept"),
    [
        # SGLang lowers a budget that its context cannot hold, and calls the end `length` (scheduler.py, 0.5.20).
        (4, "an answer was cut to 3 of 4 tokens", 3),
        (2, "an answer of more than the 2 tokens asked for", 2),
    ],
)
async def test_an_answer_with_another_budget_than_was_asked_for_is_not_a_finished_one(
    server: ScriptedServer, client: EngineClient, budget: int, says: str, kept: int
) -> None:
    tokens = Tokens()
    server.streams(FIRST, SECOND, LAST, DONE)
    with pytest.raises(ProtocolError, match=says):
        await client.generate(server.url, replace(REQUEST, max_new_tokens=budget), tokens)
    assert tokens.token_ids == TOKENS[:kept]


async def test_the_request_says_everything_and_leaves_nothing_to_defaults(
    server: ScriptedServer, client: EngineClient
) -> None:
    server.streams(FIRST, SECOND, LAST, DONE)
    await client.generate(server.url, REQUEST, Tokens())
    await client.generate(server.url + "/", replace(REQUEST, seed=None), Tokens())
    await client.generate(server.url, replace(REQUEST, ignore_end=True), Tokens())
    (path, body), (_, unseeded), (_, endless) = server.calls
    assert path == "/generate"
    assert body == {
        "rid": "r-1",
        "input_ids": [5, 6, 7, 8],
        "stream": True,
        "return_logprob": True,
        "extra_key": "run/3",
        "sampling_params": {
            "max_new_tokens": 3,
            "temperature": 1.0,
            "top_p": 1.0,
            "top_k": -1,
            "stop_token_ids": [2],
            "sampling_seed": 11,
            "no_stop_trim": True,
            "skip_special_tokens": False,
            "spaces_between_special_tokens": False,
        },
    }
    assert "sampling_seed" not in unseeded["sampling_params"]
    assert endless["sampling_params"] == {**body["sampling_params"], "ignore_eos": True}


@pytest.mark.parametrize("ending", ["reset", "closed"])
async def test_a_stream_cut_short_is_a_lost_server_and_keeps_its_tokens(
    server: ScriptedServer, client: EngineClient, ending: str
) -> None:
    tokens = Tokens()
    server.streams(FIRST, SECOND, LAST[:100], tokens.arrived, *([None] if ending == "reset" else []))
    with pytest.raises(ServerGone, match=rf"^{server.url}: "):
        await client.generate(server.url, REQUEST, tokens)
    assert tokens.token_ids == TOKENS[:2]


async def test_an_error_of_the_receiver_is_not_taken_for_a_lost_server(
    server: ScriptedServer, client: EngineClient
) -> None:
    def full(token_ids: Any, logprobs: Any) -> None:
        raise OSError(errno.ENOSPC, "no space left on device")

    server.streams(FIRST, SECOND, LAST, DONE)
    with pytest.raises(OSError, match="no space left"):
        await client.generate(server.url, REQUEST, full)


async def test_a_stream_cut_after_its_last_chunk_has_ended_well(server: ScriptedServer, client: EngineClient) -> None:
    tokens = Tokens()
    server.streams(FIRST, SECOND, LAST, tokens.arrived)
    assert (await client.generate(server.url, REQUEST, tokens)).num_tokens == 3


async def test_an_unreachable_server_is_one_line_that_names_it(unused_url: str, client: EngineClient) -> None:
    line = rf"^{unused_url}: cannot connect \(Connect.*\); is the server running\?$"
    with pytest.raises(ServerGone, match=line):
        await client.generate(unused_url, REQUEST, Tokens())
    with pytest.raises(ServerGone, match=line):
        await client.weight_version(unused_url)


@pytest.mark.parametrize("url", ["127.0.0.1:8000", "ftp://127.0.0.1:8000", "http://", "http://a..b:8000", ""])
async def test_an_invalid_url_is_a_config_error(client: EngineClient, url: str) -> None:
    with pytest.raises(ConfigError, match="not a server URL"):
        await client.generate(url, REQUEST, Tokens())
    with pytest.raises(ConfigError, match="not a server URL"):
        await client.loads(url)


async def test_a_paused_stream_may_stay_silent_beyond_every_control_deadline(server: ScriptedServer) -> None:
    release = asyncio.Event()
    server.streams(FIRST, release, SECOND, LAST, DONE)
    server.answers["/pause_generation"] = _hang(release)
    tokens = Tokens()
    async with EngineClient(max_connections=2, control_timeout_s=0.1) as client, asyncio.TaskGroup() as group:
        generation = group.create_task(client.generate(server.url, REQUEST, tokens))
        await tokens.arrived.wait()
        with pytest.raises(RemoteError, match=r"no answer to /pause_generation within 0.1 s"):
            await client.pause(server.url, "in_place")
        release.set()
        assert (await generation).num_tokens == 3


async def test_more_streams_than_connections_wait_and_control_calls_do_not(server: ScriptedServer) -> None:
    release = asyncio.Event()
    server.streams(FIRST, release, SECOND, LAST, DONE)
    server.says("/abort_request", "")
    first, second = Tokens(), Tokens()
    async with EngineClient(max_connections=1) as client, asyncio.TaskGroup() as group:
        group.create_task(client.generate(server.url, REQUEST, first))
        await first.arrived.wait()
        group.create_task(client.generate(server.url, replace(REQUEST, id="r-2"), second))
        await client.abort(server.url, "r-1")
        assert server.paths() == ["/generate", "/abort_request"]
        release.set()
    assert server.paths() == ["/generate", "/abort_request", "/generate"]
    assert second.token_ids == TOKENS


@pytest.mark.parametrize(
    ("status", "body", "says", "retryable"),
    [
        (400, {"error": {"message": "Duplicate request ID detected: r-1"}}, "Duplicate request ID", False),
        (503, {"object": "error", "message": "The request queue is full.", "code": 503}, "queue is full", True),
        (500, "Internal Server Error", "Internal Server Error", True),
    ],
)
async def test_a_refused_request_says_whether_it_may_be_tried_again(
    server: ScriptedServer, client: EngineClient, status: int, body: object, says: str, retryable: bool
) -> None:
    server.says("/generate", body, status=status)
    with pytest.raises(RequestRefused, match=says) as refused:
        await client.generate(server.url, REQUEST, Tokens())
    assert (refused.value.status, refused.value.retryable) == (status, retryable)


async def test_a_server_that_speaks_something_else_is_a_protocol_error(
    server: ScriptedServer, client: EngineClient
) -> None:
    server.says("/generate", {"output_ids": [1]})
    with pytest.raises(ProtocolError, match=r"answered application/json instead of a stream"):
        await client.generate(server.url, REQUEST, Tokens())
    server.says("/model_info", {"weight_version": 7})
    with pytest.raises(ProtocolError, match=r"/model_info: unexpected answer"):
        await client.weight_version(server.url)

    async def greet(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(b"220 mail.example ESMTP\r\n")
        writer.close()

    async with await asyncio.start_server(greet, "127.0.0.1", 0) as mail:
        url = f"http://127.0.0.1:{mail.sockets[0].getsockname()[1]}"
        with pytest.raises(ProtocolError, match="not an HTTP answer"):
            await client.weight_version(url)


async def test_an_answer_to_a_control_call_has_a_limit(
    server: ScriptedServer, client: EngineClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    server.says("/server_info", {"version": "0" * 100_000})
    assert len((await client.server_info(server.url))["version"]) == 100_000
    monkeypatch.setattr("dora.engine.sglang.client.MAX_ANSWER_BYTES", 100_000)
    with pytest.raises(ProtocolError, match=r"the answer to /server_info has more than 100,000 bytes"):
        await client.server_info(server.url)


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"tokens": [5, 512]}, "vocabulary of 512"),
        ({"tokens": array("i", [5, 512])}, r"token ids from 5 to 512 are outside .* vocabulary of 512"),
        ({"tokens": [-1, 5]}, "vocabulary of 512"),
        ({"tokens": []}, "0 input tokens"),
        ({"max_new_tokens": 0}, "a budget of 0"),
    ],
)
async def test_a_request_that_would_kill_the_server_is_never_sent(
    server: ScriptedServer, client: EngineClient, change: dict[str, Any], says: str
) -> None:
    with pytest.raises(ConfigError, match=says):
        await client.generate(server.url, replace(REQUEST, **change), Tokens())
    assert server.calls == []


async def test_every_control_call_sends_its_flags(server: ScriptedServer, client: EngineClient) -> None:
    for path in ("/abort_request", "/pause_generation", "/continue_generation"):
        server.says(path, "")
    server.says("/update_weights_from_disk", {"success": True, "message": "ok", "num_paused_requests": 0})
    await client.abort(server.url, "r-1")
    await client.pause(server.url, "in_place")
    await client.update_weights_from_disk(server.url, "/store/v000004", "run/4", timeout_s=5)
    await client.resume(server.url)
    update = {
        "model_path": "/store/v000004",
        "weight_version": "run/4",
        "flush_cache": False,
        "abort_all_requests": False,
    }
    assert server.calls == [
        ("/abort_request", {"rid": "r-1", "abort_all": False}),
        ("/pause_generation", {"mode": "in_place"}),
        ("/update_weights_from_disk", update),
        ("/continue_generation", {}),
    ]


@pytest.mark.parametrize("failures", range(CONTROL_ATTEMPTS + 1))
async def test_a_control_call_is_retried_after_connection_errors_a_limited_number_of_times(
    server: ScriptedServer, client: EngineClient, failures: int
) -> None:
    async def answer(request: web.Request) -> web.Response:
        if len(server.calls) <= failures:
            reset(request)
        return web.Response()

    server.answers["/abort_request"] = answer
    if failures < CONTROL_ATTEMPTS:
        await client.abort(server.url, "r-1")
        assert len(server.calls) == failures + 1
    else:
        with pytest.raises(ServerGone, match="the connection broke off"):
            await client.abort(server.url, "r-1")
        assert len(server.calls) == CONTROL_ATTEMPTS


async def test_an_update_is_sent_once(server: ScriptedServer, client: EngineClient) -> None:
    async def answer(request: web.Request) -> web.Response:
        reset(request)
        return web.Response()

    server.answers["/update_weights_from_disk"] = answer
    server.says("/pause_generation", "")
    await client.pause(server.url, "in_place")
    with pytest.raises(ServerGone):
        await client.update_weights_from_disk(server.url, "/store/v000004", "run/4", timeout_s=5)
    assert server.paths() == ["/pause_generation", "/update_weights_from_disk"]


async def test_weights_are_updated_in_a_pause_only(server: ScriptedServer, client: EngineClient) -> None:
    """Else an update that is given up would wait there for running requests; two at once end SGLang."""
    for path in ("/pause_generation", "/continue_generation"):
        server.says(path, "")
    for _ in range(2):
        with pytest.raises(RemoteError, match="pause the server first"):
            await client.update_weights_from_disk(server.url, "/store/v000004", "run/4", timeout_s=5)
        await client.pause(server.url, "in_place")
        await client.resume(server.url)
    assert "/update_weights_from_disk" not in server.paths()


async def test_after_an_update_that_timed_out_the_next_one_waits_for_its_end(
    server: ScriptedServer, client: EngineClient
) -> None:
    """By a flush, which the scheduler answers after it."""
    release = asyncio.Event()

    async def hang(_: web.Request) -> web.Response:
        await release.wait()
        return web.json_response({"success": True, "message": ""})

    server.answers["/update_weights_from_disk"] = hang
    server.says("/pause_generation", "")
    server.says("/flush_cache", captured("flush_idle.json"))
    await client.pause(server.url, "in_place")
    with pytest.raises(RemoteError, match=r"within 0.1 s"):
        await client.update_weights_from_disk(server.url, "/store/v000004", "run/4", timeout_s=0.1)
    release.set()
    await client.update_weights_from_disk(server.url, "/store/v000005", "run/5", timeout_s=5)
    await client.update_weights_from_disk(server.url, "/store/v000006", "run/6", timeout_s=5)
    update = "/update_weights_from_disk"
    assert server.paths() == ["/pause_generation", update, "/flush_cache", update, update]


@pytest.mark.parametrize("status", [400, 200])
async def test_an_update_without_success_is_refused(server: ScriptedServer, client: EngineClient, status: int) -> None:
    server.says("/update_weights_from_disk", captured("update_bad_path.json"), status=status)
    server.says("/pause_generation", "")
    await client.pause(server.url, "in_place")
    with pytest.raises(RequestRefused, match="Failed to get weights iterator"):
        await client.update_weights_from_disk(server.url, "/nowhere", "run/4", timeout_s=5)


async def test_a_flush_tells_whether_it_was_done(server: ScriptedServer, client: EngineClient) -> None:
    server.says("/flush_cache", captured("flush_idle.json"))
    assert await client.flush_cache(server.url) is True
    server.says("/flush_cache", captured("flush_busy.json"), status=400)
    assert await client.flush_cache(server.url) is False
    for status in (400, 401):  # a refusal of another kind says nothing of resident requests
        server.says("/flush_cache", "Unauthorized", status=status)
        with pytest.raises(RequestRefused, match="Unauthorized"):
            await client.flush_cache(server.url)


async def test_loads_count_the_requests_of_every_rank(server: ScriptedServer, client: EngineClient) -> None:
    idle, busy = captured("GET_v1_loads.json"), captured("GET_v1_loads_busy.json")
    server.says("/v1/loads", idle)
    assert (await client.loads(server.url)).is_empty
    server.says("/v1/loads", busy)
    loads = await client.loads(server.url)
    assert not loads.is_empty
    assert loads == Loads(num_running=1, num_waiting=0, used_tokens=274, max_total_tokens=65536, max_running=64)
    server.says("/v1/loads", {"loads": [idle["loads"][0], {**idle["loads"][0], "num_waiting_reqs": 1}]})
    loads = await client.loads(server.url)
    assert not loads.is_empty
    assert loads.max_running == 128


async def test_a_server_that_once_retracted_a_request_can_be_empty(
    server: ScriptedServer, client: EngineClient
) -> None:
    """An idle SGLang 0.5.20 repeats the retractions of its last report until it reports again."""
    idle = captured("GET_v1_loads.json")["loads"][0]
    server.says("/v1/loads", {"loads": [{**idle, "queues": {**idle["queues"], "retracted": 1}}]})
    assert (await client.loads(server.url)).is_empty


async def test_secrets_in_the_server_info_are_dropped_at_every_depth(
    server: ScriptedServer, client: EngineClient
) -> None:
    info = captured("GET_server_info.json")
    assert {"api_key", "ssl_keyfile_password"} <= info.keys()
    assert "admin_api_key" in info["internal_states"][0]
    server.says("/server_info", info)
    kept = await client.server_info(server.url)
    assert "api_key" not in json.dumps(kept)
    assert "ssl_keyfile_password" not in json.dumps(kept)
    assert kept["version"] == "0.5.20"
    assert kept["internal_states"][0]["effective_max_running_requests_per_dp"] == 64


async def test_the_api_key_is_sent_and_never_follows_a_redirect(server: ScriptedServer) -> None:
    async for elsewhere in ScriptedServer().run():
        server.says("/model_info", captured("GET_model_info.json"))

        async def redirect(_: web.Request) -> web.Response:
            raise web.HTTPTemporaryRedirect(elsewhere.url + "/generate")  # noqa: B023 - used within this round

        server.answers["/generate"] = redirect
        async with EngineClient(max_connections=1, api_key="s3cret") as client:
            assert await client.weight_version(server.url) == "v9"
            with pytest.raises(RequestRefused, match="307") as refused:
                await client.generate(server.url, REQUEST, Tokens())
            server.answers["/model_info"] = redirect
            with pytest.raises(RequestRefused, match="307"):
                await client.weight_version(server.url)
        assert server.authorizations == ["Bearer s3cret"] * 3
        assert elsewhere.calls == []
        assert "s3cret" not in str(refused.value)


async def test_the_key_of_one_server_is_sent_to_no_other(server: ScriptedServer) -> None:
    async for elsewhere in ScriptedServer().run():
        for one in (server, elsewhere):
            one.says("/model_info", captured("GET_model_info.json"))
        async with EngineClient(max_connections=1) as client:
            client.keys[server.url] = "s3cret"
            for one in (server, elsewhere):
                assert await client.weight_version(one.url) == "v9"
                with pytest.raises(RemoteError):
                    await client.generate(one.url, REQUEST, Tokens())
        assert server.authorizations == ["Bearer s3cret"] * 2
        assert elsewhere.authorizations == [None, None]


async def test_a_cancelled_request_leaves_no_connection_behind(client: EngineClient) -> None:
    tokens, dropped = Tokens(), asyncio.Event()

    async def stream_for_ever(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\n\r\n" + FIRST)
        await reader.read(-1)  # ends when the client closes
        dropped.set()
        writer.close()

    async with await asyncio.start_server(stream_for_ever, "127.0.0.1", 0) as listener, asyncio.timeout(10):
        url = f"http://127.0.0.1:{listener.sockets[0].getsockname()[1]}"
        generation = asyncio.create_task(client.generate(url, REQUEST, tokens))
        await tokens.arrived.wait()
        generation.cancel()
        with pytest.raises(asyncio.CancelledError):
            await generation
        await dropped.wait()


def _hang(until: asyncio.Event) -> Any:
    async def answer(_: web.Request) -> web.Response:
        await until.wait()
        return web.Response()

    return answer


async def test_a_client_that_is_closed_ends_its_streams(server: ScriptedServer) -> None:
    tokens = Tokens()
    server.streams(FIRST, asyncio.Event())
    async with EngineClient(max_connections=1) as client:
        generation = asyncio.create_task(client.generate(server.url, REQUEST, tokens))
        await tokens.arrived.wait()
    with pytest.raises(ServerGone, match="the stream broke off after 1 tokens"):
        await generation


async def test_a_bucket_is_not_sent_to_a_server_outside_its_group(server: ScriptedServer, client: EngineClient) -> None:
    """SGLang's scheduler would die of it."""
    server.says("/init_weights_update_group", {"success": True, "message": ""})
    server.says("/destroy_weights_update_group", {"success": True, "message": ""})
    server.says("/update_weights_from_distributed", {"success": True, "message": ""})
    endpoint = PushTarget(client, server.url)
    bucket: dict[str, Any] = {"names": [], "dtypes": [], "shapes": [], "timeout_s": 10.0}
    with pytest.raises(RemoteError, match="has not joined group 'g0'"):
        await endpoint.receive("g0", **bucket)
    await endpoint.join_group("g0", address="127.0.0.1", port=1, world_size=2, backend="gloo", timeout_s=10)
    await endpoint.receive("g0", **bucket)
    await endpoint.leave_group("g0")
    with pytest.raises(RemoteError, match="has not joined group 'g0'"):
        await endpoint.receive("g0", **bucket)
    assert server.paths().count("/update_weights_from_distributed") == 1


async def test_a_verification_with_ids_beyond_the_vocabulary_is_not_sent(server: ScriptedServer) -> None:
    async with EngineClient(max_connections=1, vocab_size=64) as client:
        with pytest.raises(ConfigError, match="vocabulary of 64"):
            await client.prompt_logprobs(server.url, [5, 64], timeout_s=10)
    assert server.paths() == []
