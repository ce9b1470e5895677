"""Sessions over HTTP: each request once, repeated replies byte for byte, and nothing for those without the key."""

from __future__ import annotations

import asyncio
import io
import json
from collections.abc import AsyncIterator
from typing import Any

import aiohttp
import openai
import pytest

from dora.environments import sessions
from dora.environments.api import ToolCall, Turn
from dora.environments.chat import MAX_STOPS, ChatRefused, read_request
from dora.environments.episode import Episode
from dora.environments.message_calls import read_messages
from dora.environments.renderer import open_renderer
from dora.environments.sessions import MAX_WAITING, Session, SessionEnded, SessionServer
from dora.tasks.tokenizer import Tokenizer

ASK = {"model": "m", "messages": [{"role": "user", "content": "2+2"}]}
TOOLS = [{"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}]


@pytest.fixture
async def server() -> AsyncIterator[SessionServer]:
    async with SessionServer().running() as server:
        yield server


@pytest.fixture
async def http() -> AsyncIterator[aiohttp.ClientSession]:
    async with aiohttp.ClientSession() as http:
        yield http


class Caller:
    """An agent that calls its session."""

    def __init__(self, session: Session, http: aiohttp.ClientSession) -> None:
        self.session, self.http = session, http

    async def post(self, body: Any, *, path: str = "/v1/chat/completions", **headers: str) -> tuple[int, bytes]:
        data = body if isinstance(body, bytes) else json.dumps(body).encode()
        given = {"Authorization": f"Bearer {self.session.key}", **headers}
        async with self.http.post(self.session.url + path, data=data, headers=given) as response:
            return response.status, await response.read()

    def begin(self, body: Any, **headers: str) -> asyncio.Task[tuple[int, bytes]]:
        return asyncio.create_task(self.post(body, **headers))


@pytest.fixture
async def caller(server: SessionServer, http: aiohttp.ClientSession) -> Caller:
    return Caller(server.open(), http)


class Counted(dict[str, int]):
    """Counts that say when something was counted."""

    def __init__(self) -> None:
        self.changed = asyncio.Event()

    def __setitem__(self, cause: str, count: int) -> None:
        super().__setitem__(cause, count)
        self.changed.set()


def error(reply: tuple[int, bytes]) -> tuple[int, str]:
    return reply[0], json.loads(reply[1])["error"]["message"]


async def test_a_request_waits_for_its_turn_and_gets_it(caller: Caller) -> None:
    asking = caller.begin(ASK | {"tools": TOOLS, "temperature": 0.1, "max_tokens": 5})
    asked = await caller.session.next_request()
    assert asked.messages == [{"role": "user", "content": "2+2"}]
    assert (asked.tools, asked.max_tokens) == (TOOLS, 5)
    calls = (ToolCall("call_0", "add", {"a": 2}), ToolCall("call_1", "", None, "<tool_call>{</tool_call>"))
    caller.session.answer(Turn("so", "hm", calls, num_tokens=7, num_prompt_tokens=12))
    status, body = await asking
    reply = json.loads(body)
    assert status == 200
    [choice] = reply["choices"]
    assert choice["finish_reason"] == "tool_calls"
    assert choice["message"] == {
        "role": "assistant",
        "refusal": None,
        "content": "so\n<tool_call>{</tool_call>",
        "reasoning_content": "hm",
        "tool_calls": [{"id": "call_0", "type": "function", "function": {"name": "add", "arguments": '{"a": 2}'}}],
    }
    assert reply["usage"] == {"prompt_tokens": 12, "completion_tokens": 7, "total_tokens": 19}
    assert caller.session.counts == {"temperature": 1}


@pytest.mark.parametrize(
    ("asked", "limit"),
    [
        ({}, 0),
        ({"max_tokens": 5}, 5),
        ({"max_tokens": 5, "max_completion_tokens": 7}, 7),
        ({"max_tokens": None, "max_completion_tokens": 1 << 40}, 0),
    ],
)
def test_a_request_may_limit_its_turn(asked: dict[str, Any], limit: int) -> None:
    assert read_request(json.dumps(ASK | asked).encode()).max_tokens == limit


def test_a_request_has_few_strings_at_which_its_turn_stops() -> None:
    """What is repeated of a turn is compared with its text before each of them."""
    most = [str(number) for number in range(MAX_STOPS)]
    assert read_request(json.dumps(ASK | {"stop": most}).encode()).stop == tuple(most)
    with pytest.raises(ChatRefused, match=r"the body is not a chat request: .* length"):
        read_request(json.dumps(ASK | {"stop": [*most, "more"]}).encode())
    with pytest.raises(ChatRefused, match=r"the body is not a request of the messages API: .* length"):
        read_messages(json.dumps(ASK | {"max_tokens": 1, "stop_sequences": [*most, "more"]}).encode())


@pytest.mark.parametrize("limit", [0, -1, 1.5, "many"])
def test_a_limit_is_a_number_of_tokens(limit: Any) -> None:
    with pytest.raises(ChatRefused, match=r"the body is not a chat request: .* `\$.max_tokens`"):
        read_request(json.dumps(ASK | {"max_tokens": limit}).encode())


@pytest.mark.parametrize(("calls", "content"), [((), ""), ((ToolCall("c", "add", {}),), None)])
async def test_an_empty_turn_has_text_and_a_call_alone_has_none(
    caller: Caller, calls: tuple[ToolCall, ...], content: str | None
) -> None:
    asking = caller.begin(ASK)
    await caller.session.next_request()
    caller.session.answer(Turn("", calls=calls))
    assert json.loads((await asking)[1])["choices"][0]["message"]["content"] == content


async def test_one_that_says_that_it_is_repeated_gets_the_same_bytes_and_is_not_handed_over(caller: Caller) -> None:
    counts = caller.session.counts = Counted()
    first = caller.begin(ASK)
    await caller.session.next_request()
    joined = caller.begin(ASK, **{"x-stainless-retry-count": "1"})
    await counts.changed.wait()
    assert counts == {"retries": 1}
    caller.session.answer(Turn("4"))
    later = await caller.post(ASK, **{"x-stainless-retry-count": "2"})
    assert await first == await joined == later
    assert later[0] == 200
    again = caller.begin(ASK)  # it has the reply, and samples again
    assert (await caller.session.next_request()).messages == ASK["messages"]
    caller.session.answer(Turn("5"))
    assert (await again)[1] != later[1]


async def test_an_equal_body_whose_reply_was_not_written_is_a_repetition(caller: Caller) -> None:
    counts = caller.session.counts = Counted()
    broken = caller.begin(ASK)
    await caller.session.next_request()
    broken.cancel()
    await asyncio.wait([broken])
    again = caller.begin(ASK)
    await counts.changed.wait()
    assert counts == {"retries": 1}
    caller.session.answer(Turn("4"))
    assert json.loads((await again)[1])["choices"][0]["message"]["content"] == "4"


async def test_parallel_requests_are_handed_over_one_after_the_other(caller: Caller) -> None:
    asking = [caller.begin({"messages": [{"role": "user", "content": str(n)}]}) for n in range(3)]
    seen = []
    for _ in range(3):
        asked = await caller.session.next_request()
        seen.append(asked.messages[0]["content"])
        caller.session.answer(Turn(f"to {seen[-1]}"))
    replies = [json.loads((await task)[1])["choices"][0]["message"]["content"] for task in asking]
    assert replies == ["to 0", "to 1", "to 2"]
    assert sorted(seen) == ["0", "1", "2"]
    assert caller.session.counts == {"parallel requests": 2}


async def test_equal_requests_in_parallel_are_samples_of_their_own(caller: Caller) -> None:
    asking = [caller.begin(ASK) for _ in range(4)]
    for number in range(4):
        await caller.session.next_request()
        caller.session.answer(Turn(str(number)))
    replies = [json.loads((await task)[1]) for task in asking]
    assert {reply["choices"][0]["message"]["content"] for reply in replies} == {"0", "1", "2", "3"}
    assert len({reply["id"] for reply in replies}) == 4


@pytest.mark.parametrize("retries", ["0", "1"])
async def test_a_request_that_waits_is_sampled_once_however_often_it_is_repeated_and_not_for_nobody(
    caller: Caller, retries: str
) -> None:
    counts = caller.session.counts = Counted()

    async def begin(text: str, **headers: str) -> asyncio.Task[tuple[int, bytes]]:
        counts.changed.clear()
        asking = caller.begin({"messages": [{"role": "user", "content": text}]}, **headers)
        await counts.changed.wait()
        return asking

    first = caller.begin(ASK)
    await caller.session.next_request()
    broken, forgotten = [await begin(text) for text in ("B", "C")]
    for asking in (broken, forgotten):
        asking.cancel()
    await asyncio.wait([broken, forgotten])
    again = await begin("B", **{"x-stainless-retry-count": retries})
    last = await begin("D")
    assert counts == {"parallel requests": 3, "retries": 1}
    caller.session.answer(Turn("to A"))
    for text in ("B", "D"):
        asked = await caller.session.next_request()
        assert asked.messages[0]["content"] == text
        caller.session.answer(Turn(f"to {text}"))
    replies = [json.loads((await task)[1])["choices"][0]["message"]["content"] for task in (first, again, last)]
    assert replies == ["to A", "to B", "to D"]


async def test_a_flood_is_bounded(caller: Caller) -> None:
    asking = [caller.begin({"messages": [{"role": "user", "content": str(n)}]}) for n in range(MAX_WAITING + 5)]
    refused = [task async for task in _done(asking, 5)]
    assert {error(task.result()) for task in refused} == {(429, "16 requests of this session wait already")}
    for task in asking:
        task.cancel()


async def _done(tasks: list[asyncio.Task[Any]], number: int) -> AsyncIterator[asyncio.Task[Any]]:
    left = set(tasks)
    for _ in range(number):
        done, left = await asyncio.wait(left, return_when=asyncio.FIRST_COMPLETED)
        left |= {*list(done)[1:]}
        yield next(iter(done))


REFUSED: dict[str, tuple[Any, str]] = {
    "no JSON": (b"{", "the body is not a chat request"),
    "no messages": ({}, "missing required field `messages`"),
    "empty": ({"messages": []}, "the last one must be one that the model can answer"),
    "a turn at the end": ({"messages": [{"role": "assistant", "content": "4"}]}, "the last one must be one"),
    "an image": ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "'image_url' is not served"),
    "a role": ({"messages": [{"role": "critic", "content": ""}]}, "the role 'critic' is not served"),
    "no id": ({"messages": [{"role": "tool", "content": "1"}]}, "has no tool_call_id"),
    "calls": ({"messages": [{"role": "assistant", "tool_calls": 5}, *ASK["messages"]]}, "a call without the name"),
    "a function without a name": (
        ASK | {"tools": [{"type": "function", "function": "add"}]},
        "tools: a function without",
    ),
    "several": (ASK | {"n": 2}, "n: a session samples one answer at a time, not 2"),
    "bias": (ASK | {"logit_bias": {"5": 1}}, "logit_bias: would change"),
    "a grammar": (ASK | {"response_format": {"type": "json_object"}}, "'json_object' would change"),
    "a forced call": (ASK | {"tool_choice": "required"}, "tool_choice: the policy decides"),
    "log-probs": (ASK | {"logprobs": True}, "logprobs: are not in the replies"),
    "deep": (b'{"messages": ' + b"[" * 10_000 + b"]" * 10_000 + b"}", "the body is not a chat request"),
}


@pytest.mark.parametrize("what", REFUSED)
async def test_what_is_not_served_is_refused_and_not_handed_over(caller: Caller, what: str) -> None:
    body, says = REFUSED[what]
    status, message = error(await caller.post(body))
    assert status == 400
    assert says in message
    assert "\n" not in message
    asking = caller.begin(ASK)
    assert (await caller.session.next_request()).messages == ASK["messages"]
    caller.session.answer(Turn("4"))
    assert (await asking)[0] == 200


async def test_a_strict_session_refuses_what_has_no_effect(server: SessionServer, http: aiohttp.ClientSession) -> None:
    caller = Caller(server.open(is_strict=True), http)
    refused = await caller.post(ASK | {"temperature": 0, "top_p": 0.9, "max_completion_tokens": 9})
    assert error(refused) == (
        400,
        "temperature, top_p: would have no effect; sampling is that of the run",
    )


async def test_a_body_of_100_megabytes_is_refused(caller: Caller) -> None:
    given = {"Authorization": f"Bearer {caller.session.key}"}
    body = io.BytesIO(bytes(100 << 20))
    url = f"{caller.session.url}/v1/chat/completions"
    async with caller.http.post(url, data=body, headers=given) as response:
        assert response.status == 413


async def test_a_key_opens_its_own_session_alone(server: SessionServer, caller: Caller) -> None:
    other = server.open()
    for url, key in ((other.url, caller.session.key), (caller.session.url, ""), (f"{other.url}99", other.key)):
        stranger = Caller(Session(0, key, url), caller.http)
        for path in ("/v1/chat/completions", "/reward"):
            status, message = error(await stranger.post(ASK, path=path))
            assert (status, message) == (401, "no session of this number has this key")
    async with caller.http.get(f"{other.url}/v1/models") as response:
        assert response.status == 401


async def test_the_model_says_how_long_a_conversation_may_become(server: SessionServer, caller: Caller) -> None:
    for session, longest in ((server.open(max_tokens=77), 77), (caller.session, None)):
        headers = {"Authorization": f"Bearer {session.key}"}
        async with caller.http.get(f"{session.url}/v1/models", headers=headers) as response:
            [model] = (await response.json())["data"]
        assert (model["id"], model.get("max_model_len")) == ("policy", longest)


async def test_tools_stay_those_of_the_first_request(caller: Caller) -> None:
    asking = caller.begin(ASK | {"tools": TOOLS})
    await caller.session.next_request()
    caller.session.answer(Turn("4"))
    await asking
    assert error(await caller.post(ASK)) == (400, "tools: must be those of the first request of the session")


@pytest.mark.parametrize(
    ("path", "asked", "choice"),
    [
        ("/v1/chat/completions", {"messages": ASK["messages"], "tools": TOOLS}, "none"),
        (
            "/v1/messages",
            {"messages": ASK["messages"], "tools": [{"name": "add", "input_schema": {}}]},
            {"type": "none"},
        ),
        ("/v1/responses", {"input": "2+2", "tools": [{"type": "function", "name": "add"}]}, "none"),
    ],
)
async def test_tools_stay_where_they_are_not_to_be_called(
    server: SessionServer, caller: Caller, path: str, asked: dict[str, Any], choice: Any
) -> None:
    tools = []
    for body in (asked, asked | {"tool_choice": choice}):
        asking = asyncio.create_task(caller.post(body, path=path))
        tools.append((await caller.session.next_request()).tools)
        caller.session.answer(Turn("4"))
        assert (await asking)[0] == 200
    assert tools[0] == tools[1] != []
    assert caller.session.counts == {"tool_choice": 1}
    strict = Caller(server.open(is_strict=True), caller.http)
    assert error(await strict.post(asked | {"tool_choice": choice}, path=path)) == (
        400,
        "tool_choice: would have no effect; sampling is that of the run",
    )


async def test_a_reward_ends_the_session_once(caller: Caller) -> None:
    for body in (b"{", b"[]", b"{}", b'{"reward": "1"}', b'{"reward": NaN}', b'{"reward": true}', b'{"reward": 1e999}'):
        assert error(await caller.post(body, path="/reward")) == (400, 'the body must be {"reward": NUMBER}')
    waiting = caller.begin(ASK)
    await caller.session.next_request()
    assert (await caller.post({"reward": 0.5}, path="/reward"))[0] == 200
    with pytest.raises(SessionEnded) as ended:
        await caller.session.next_request()
    assert ended.value.reward == 0.5
    assert error(await waiting) == (409, "the session has ended")
    assert error(await caller.post({"reward": 1}, path="/reward")) == (409, "the session has ended")
    assert error(await caller.post(ASK)) == (409, "the session has ended")


@pytest.mark.parametrize("streams", [False, True])
async def test_signs_of_life_come_before_a_late_reply(
    caller: Caller, streams: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sessions, "SIGN_S", 0.01)
    url, key = f"{caller.session.url}/v1", caller.session.key
    async with openai.AsyncOpenAI(base_url=url, api_key=key, timeout=10.0, max_retries=0) as client:
        asking = asyncio.create_task(
            client.chat.completions.create(model="m", messages=ASK["messages"], stream=streams)  # type: ignore[call-overload]
        )
        await caller.session.next_request()
        for _ in range(5):
            await asyncio.sleep(0.01)
        caller.session.answer(Turn("4", calls=(ToolCall("c", "add", {"a": 1}),)))
        if streams:
            chunks = [chunk async for chunk in await asking]
            assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == "4"
            [call] = [call for chunk in chunks for call in chunk.choices[0].delta.tool_calls or ()]
            assert (call.function.name, call.function.arguments) == ("add", '{"a": 1}')
            assert chunks[-1].choices[0].finish_reason == "tool_calls"
        else:
            reply = await asking
            assert reply.choices[0].message.content == "4"
            assert reply.choices[0].message.tool_calls[0].function.arguments == '{"a": 1}'


async def test_the_text_ends_before_a_stop_string_and_the_record_does_not(caller: Caller) -> None:
    asking = caller.begin(ASK | {"stop": ["Observation:", "never"]})
    await caller.session.next_request()
    caller.session.answer(Turn("Action: add \nObservation: 5"))
    told = json.loads((await asking)[1])["choices"][0]["message"]["content"]
    assert told == "Action: add \n"
    for again in (told, told.strip(), f"{told}Observation:", f"{told}never\n"):
        history = [*ASK["messages"], {"role": "assistant", "content": again}, {"role": "user", "content": "4"}]
        assert caller.session.recorded(history)[1]["content"] == "Action: add \nObservation: 5"
    other = [{"role": "assistant", "content": "Action: sub"}]
    assert caller.session.recorded(other) == other


async def test_turns_that_were_told_alike_are_told_apart_by_what_came_before(caller: Caller, qwen3: Tokenizer) -> None:
    renderer = open_renderer(qwen3, settings={"name": "qwen3"})
    episode = Episode(renderer, (), max_tokens=1_000, own_prompt=True)
    history = [{"role": "user", "content": "go"}]
    episode.begin(history)
    for number in range(3):
        asking = caller.begin({"messages": history, "stop": ["Observation:"]})
        await caller.session.next_request()
        tokens = [*qwen3.encode(f"look\nObservation: {number}", special_tokens=False), renderer.stop_ids[0]]
        episode.append(tokens, [0.0] * len(tokens))
        caller.session.answer(episode.end_turn("stop"))
        told = json.loads((await asking)[1])["choices"][0]["message"]["content"]
        history += [{"role": "assistant", "content": told}, {"role": "user", "content": "nothing"}]
        episode.rewrite(caller.session.recorded(history))
    assert {message["content"] for message in history[1::2]} == {"look\n"}
    assert not episode.forks
    assert [message["content"][-1] for message in caller.session.recorded(history)[1::2]] == ["0", "1", "2"]
    back = [*history[:4], {"role": "user", "content": "another"}]
    assert [message["content"][-1] for message in caller.session.recorded(back)[1::2]] == ["0", "1"]
    changed = [{"role": "user", "content": "a summary"}, *history[3:5]]
    assert caller.session.recorded(changed)[1]["content"][-1] == "2"


async def test_a_process_of_many_sessions_names_each_as_the_model(
    server: SessionServer, http: aiohttp.ClientSession
) -> None:
    url, key = server.shared
    first, second = server.open(), server.open()

    async def ask(model: str, key: str = key) -> tuple[int, bytes]:
        body = {"token_ids": [1, 2], "model": model}
        headers = {"Authorization": f"Bearer {key}"}
        async with http.post(f"{url}/inference/v1/generate", json=body, headers=headers) as response:
            return response.status, await response.read()

    for key_of_another in (first.key, ""):
        assert error(await ask(first.model, key_of_another)) == (401, "this is not the key of all sessions")
    reader, writer = await asyncio.open_connection("127.0.0.1", int(url.split(":")[2].split("/")[0]))
    writer.write(b"POST /shared/inference/v1/generate HTTP/1.0\r\nAuthorization: Bearer \xff\r\n\r\n")
    assert b" 401 " in (await reader.read()).splitlines()[0]
    writer.close()
    assert error(await ask("session-9")) == (409, "model: no session has this name")
    asking = asyncio.create_task(ask(second.model))
    assert (await second.next_request()).tokens == (1, 2)
    second.answer(Turn("x", token_ids=(7,), logprobs=(-0.5,)))
    assert json.loads((await asking)[1])["choices"][0]["token_ids"] == [7]
    server.close(first)
    assert error(await ask(first.model)) == (409, "model: no session has this name")
