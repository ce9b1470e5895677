"""Environments of OpenEnv: servers that speak as openenv-core 0.3 was measured to, over real sockets."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web

from dora.environments import openenv
from dora.environments.api import End, EnvironmentLost, Observation, ToolCall, Turn
from dora.environments.openenv import OpenEnv

#: What a session answers to a message; an exception becomes an error of its code.
Play = Callable[[str, dict[str, Any]], dict[str, Any]]
TEXT = {"properties": {"message": {"type": "string"}, "metadata": {"type": "object"}}, "required": ["message"]}
MOVE = {
    "description": "Move on the board.",
    "type": "object",
    "properties": {"row": {"type": "integer"}, "column": {"type": "integer"}, "metadata": {"type": "object"}},
}
CALL = {
    "properties": {"type": {"const": "call_tool"}, "tool_name": {"type": "string"}, "arguments": {"type": "object"}}
}


class Refused(Exception):
    """An error that the server tells its client."""


@pytest.fixture(autouse=True)
def _client(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(Path(__file__).parent / "openenv_client"))
    for name in [name for name in sys.modules if name.partition(".")[0] == "openenv"]:
        monkeypatch.delitem(sys.modules, name)


def seen(*, reward: float | None = None, done: bool = False, **observation: Any) -> dict[str, Any]:
    return {"observation": observation, "reward": reward, "done": done}


@asynccontextmanager
async def serving(schema: Any, play: Callable[[], Play], *, port: int = 0) -> AsyncIterator[str]:
    """A server with a session for each connection."""

    async def schemas(request: web.Request) -> web.Response:
        return web.json_response({"action": schema, "observation": {}, "state": {}})

    async def session(request: web.Request) -> web.WebSocketResponse:
        socket = web.WebSocketResponse()
        await socket.prepare(request)
        answer = play()
        async for message in socket:
            asked = message.json()
            if asked["type"] == "close":
                break
            try:
                await socket.send_json({"type": "observation", "data": answer(asked["type"], asked["data"])})
            except Refused as err:
                data = {"message": str(err), "code": str(err)}
                await socket.send_json({"type": "error", "data": data})
        return socket

    app = web.Application()
    app.router.add_get("/schema", schemas)
    app.router.add_get("/ws", session)
    runner = web.AppRunner(app, shutdown_timeout=0.1)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", port, reuse_address=True).start()
    try:
        yield f"http://127.0.0.1:{runner.addresses[0][1]}"
    finally:
        await runner.cleanup()


@asynccontextmanager
async def episode(url: str, row: dict[str, Any], **options: Any) -> AsyncIterator[tuple[OpenEnv, Any]]:
    """An episode as a host has it: made in a thread."""
    environment = await asyncio.to_thread(OpenEnv, url, **options)
    try:
        yield environment, await environment.reset(row)
    finally:
        await environment.close()


def guessing() -> Play:
    """Guess the seed: the text of a turn is the action."""
    secret = 0

    def answer(kind: str, data: dict[str, Any]) -> dict[str, Any]:
        nonlocal secret
        if kind == "reset":
            secret = data["seed"]
            return seen(hint="Guess a number.")
        if data["message"] == "?":
            raise Refused("VALIDATION_ERROR")
        is_right = data["message"] == str(secret)
        return seen(hint="yes" if is_right else "no", reward=1.0 if is_right else -0.5, done=is_right)

    return answer


async def test_an_action_with_one_text_is_what_a_turn_says() -> None:
    async with serving(TEXT, guessing) as url, episode(url, {"prompt": "Play.", "seed": 7}) as (game, begun):
        assert (begun.messages, begun.tools) == ([{"role": "user", "content": "Play.\n\nGuess a number."}], ())
        assert await game.step(Turn("3")) == Observation([{"role": "user", "content": "no"}], -0.5)
        assert await game.step(Turn("?")) == Observation(
            [{"role": "user", "content": "error: not a valid action"}], 0.0
        )
        assert await game.step(Turn("7")) == End(1.0, [{"role": "user", "content": "yes"}])


async def test_sessions_are_apart() -> None:
    async with (
        serving(TEXT, guessing) as url,
        episode(url, {"seed": 1}) as (one, begun),
        episode(url, {"messages": [{"role": "system", "content": "Play."}], "seed": 2}) as (two, other),
    ):
        assert begun.messages == [{"role": "user", "content": "Guess a number."}]
        assert [message["role"] for message in other.messages] == ["system", "user"]
        assert isinstance(await two.step(Turn("2")), End)
        assert isinstance(await one.step(Turn("1")), End)


def board() -> Play:
    def answer(kind: str, data: dict[str, Any]) -> dict[str, Any]:
        return seen(board="...", moves=0) if kind == "reset" else seen(board="x..", moves=data["row"], reward=0.25)

    return answer


async def test_any_other_action_is_a_tool_whose_calls_are_made_in_order() -> None:
    async with serving(MOVE, board) as url, episode(url, {}) as (game, begun):
        [tool] = begun.tools
        assert tool["function"]["name"] == "act"
        assert tool["function"]["description"] == "Move on the board."
        assert {*tool["function"]["parameters"]["properties"]} == {"row", "column"}
        assert begun.messages == [{"role": "user", "content": '{"board": "...", "moves": 0}'}]
        calls = (ToolCall("a", "act", {"row": 1}), ToolCall("b", "jump", {}), ToolCall("c", "act", None, "act("))
        told = await game.step(Turn("", calls=calls))
        assert isinstance(told, Observation)
        assert told.reward == 0.25
        assert [(one["tool_call_id"], one["content"]) for one in told.messages] == [
            ("a", '{"board": "x..", "moves": 1}'),
            ("b", "error: there is no tool 'jump'; there is act"),
            ("c", "error: not a valid tool call: act("),
        ]
        assert await game.step(Turn("done")) == End(0.0)


async def test_a_field_of_the_action_and_of_the_observation_may_be_named() -> None:
    async with serving({"properties": {"code": {"type": "string"}, "limit": {"type": "integer"}}}, board) as url:
        with pytest.raises(ValueError, match="has no field 'x' in its actions; they have code, limit"):
            await asyncio.to_thread(OpenEnv, url, action="x")
        async with episode(url, {}, action="code", observation="board") as (_, begun):
            assert (begun.messages[0]["content"], begun.tools) == ("...", ())
        with pytest.raises(ValueError, match="has no field 'output'; it has board, moves"):
            async with episode(url, {}, action="code", observation="output"):
                pass


def tools() -> Play:
    content: list[Any] = [{"type": "text", "text": "v3"}, {"type": "image", "data": "..."}]
    answers = {
        "look_up": {"result": {"content": content, "is_error": False}, "error": None},
        "fail": {"result": {"content": content[:1], "is_error": True}, "error": None},
        "nope": {"result": None, "error": {"error_type": "tool_not_found", "message": "Unknown tool: 'nope'"}},
    }

    def answer(kind: str, data: dict[str, Any]) -> dict[str, Any]:
        if kind == "reset":
            return seen()
        if data["type"] == "list_tools":
            tool = {"name": "look_up", "description": "Look a key up.", "input_schema": {"type": "object"}}
            return seen(tools=[tool])
        return seen(tool_name=data["tool_name"], **answers[data["tool_name"]])

    return answer


async def test_tools_of_the_server_are_tools_of_the_policy_and_without_a_reward_the_task_grades() -> None:
    async with serving(CALL, tools) as url, episode(url, {"prompt": "Where is k1?"}) as (asked, begun):
        function = {"name": "look_up", "description": "Look a key up.", "parameters": {"type": "object"}}
        assert begun.tools == ({"type": "function", "function": function},)
        told = await asked.step(Turn("", calls=tuple(ToolCall(name, name, {}) for name in ("look_up", "fail", "nope"))))
        assert isinstance(told, Observation)
        assert [one["content"] for one in told.messages] == [
            "v3\n[image left out]", "error: v3", "error: Unknown tool: 'nope'",
        ]  # fmt: skip
        assert await asked.step(Turn("v3")) == End(None)


def silent() -> Play:
    """Ends at its second message, and never gives a reward."""
    return lambda kind, data: seen(text=kind, done=kind != "reset")


async def test_an_end_without_a_reward_is_zero_if_nobody_grades_it() -> None:
    async with serving(CALL, tools) as url, episode(url, {"prompt": "Where is k1?"}) as (asked, _):
        asked.is_graded = False
        assert await asked.step(Turn("v3")) == End(0.0)
    for is_graded, reward in ((True, None), (False, 0.0)):
        async with serving(TEXT, silent) as url, episode(url, {"prompt": "Play."}) as (game, _):
            game.is_graded = is_graded
            assert await game.step(Turn("a")) == End(reward, [{"role": "user", "content": "step"}])


def full() -> Play:
    def answer(kind: str, data: dict[str, Any]) -> dict[str, Any]:
        raise Refused("CAPACITY_REACHED" if kind == "reset" else "EXECUTION_ERROR")

    return answer


async def test_a_server_without_room_is_named_with_what_to_do() -> None:
    async with serving(TEXT, full) as url:
        with pytest.raises(RuntimeError, match=r"no room for another session; raise its max_concurrent_envs, or lower"):
            async with episode(url, {}):
                pass


async def test_a_server_that_is_lost_is_not_blamed_on_the_policy_and_counts_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(openenv, "PAUSES_S", (0.01,))
    async with (
        serving(TEXT, guessing) as url,
        episode(url, {"seed": 1}) as (one, _),
        episode(url, {"seed": 2}) as (two, _),
    ):
        for game in (one, two):
            await game._client._socket.close()  # the connection has gone
        with pytest.raises(EnvironmentLost, match=f"{url} was lost in a call") as first:
            await one.step(Turn("1"))
        with pytest.raises(EnvironmentLost) as second:
            await two.step(Turn("2"))
    lost = await asyncio.to_thread(OpenEnv, url)  # what its actions are is known
    with pytest.raises(EnvironmentLost, match=f"{url} cannot be reached") as third:
        await lost.reset({})
    assert first.value.loss == second.value.loss == third.value.loss


async def test_a_server_that_comes_back_in_time_is_not_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(openenv, "PAUSES_S", (0.05,) * 100)
    async with serving(TEXT, guessing) as url:
        game = await asyncio.to_thread(OpenEnv, url)
    beginning = asyncio.create_task(game.reset({"seed": 7}))
    async with serving(TEXT, guessing, port=int(url.rpartition(":")[2])):
        assert (await beginning).messages == [{"role": "user", "content": "Guess a number."}]
        await game.close()


@pytest.mark.parametrize("schema", [None, [], {"properties": 1}])
async def test_a_server_without_a_schema_of_actions_is_refused(schema: Any) -> None:
    async with serving(schema, board) as url:
        with pytest.raises(ValueError, match=f"url: {url} describes its actions by no schema of an object"):
            await asyncio.to_thread(OpenEnv, url)


def test_what_is_no_server_is_refused() -> None:
    with pytest.raises(ValueError, match="url: 'ws://x' is not an http:// or https:// address"):
        OpenEnv("ws://x")
    with pytest.raises(ValueError, match=r"url: http://127.0.0.1:1 is not a server of OpenEnv that can be reached"):
        OpenEnv("http://127.0.0.1:1")


def test_the_package_must_be_there(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(openenv, "find_spec", lambda name: None)
    with pytest.raises(
        ValueError, match=r"openenv-core is not installed in the Python of the hosts; set environment.py"
    ):
        OpenEnv("http://127.0.0.1:1")
