"""Environments of OpenEnv, behind their servers, as episodes: one session of the server for each.

    [environment]
    kind = "openenv"
    name = "http://127.0.0.1:8000"
    python = "openenv/bin/python"  # has openenv-core

What a turn becomes follows from the server's schema of actions. If an action has one field, and that is text, the turn
is that text. If actions call tools of the server, these are tools of the policy. Any other action is the arguments of
one tool, `act`. The server gives the rewards; if it gives none, the task's rewards grade the episode; without them it
counts 0.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import urllib.request
from collections.abc import Awaitable
from functools import cache
from importlib.util import find_spec
from typing import Any, Final, NamedTuple

from dora.environments.api import End, Environment, EnvironmentLost, Message, Observation, Reset, ToolCall, Turn

#: Timeout of the question for the schemas, and of opening a session.
REACH_S: Final = 10.0
#: Pauses between attempts to open a session; a server that is started again meanwhile is not lost.
PAUSES_S: Final = (1.0, 2.0, 4.0, 8.0)
#: Largest message of a server; text beyond `environment.output_bytes` is cut anyway.
MAX_MESSAGE_MB: Final = 16
MAX_SCHEMA_BYTES: Final = 1 << 20
#: Maximum number of tools of a server.
MAX_TOOLS: Final = 128
#: The tool whose arguments are an action.
ACT: Final = "act"
_CALL: Final = {"tool_name", "arguments"}


class _Form(NamedTuple):
    """How turns become actions."""

    field: str  # that gets the text of a turn; "": turns call tools
    tools: tuple[dict[str, Any], ...] | None  # None: the server lists them


class OpenEnv(Environment):
    """One session of the server at `url`.

    `action`: name of the field of an action that gets the text of a turn, in place of what the schema says.
    `observation`: name of the field of an observation that the policy sees; "": its only field if that is text, else
    all of them as JSON. `replays`: the same seed and actions always lead to the same observations and rewards, and do
    no harm by that; then an episode goes on after its host or the controller was lost.

    A row may have `prompt` or `messages`, before the first observation, and `seed` and `reset`, a table: these are the
    arguments of the server's `reset`. An action that the server refuses as invalid is answered with a line that begins
    with `error:`. A turn without a call ends an episode with tools.
    """

    def __init__(self, url: str, action: str = "", observation: str = "", replays: bool = False) -> None:
        self.can_replay = replays  # type: ignore[misc]  # here an option, and not of the class
        if find_spec("openenv") is None:
            raise ValueError("openenv-core is not installed in the Python of the hosts; set environment.python")
        self._url = url.rstrip("/")
        self._form = _form(self._url, action)
        self._shown = observation
        self._client: Any = None
        self._was_rewarded = False

    async def reset(self, row: dict[str, Any]) -> Reset:
        """Open a session, and begin its episode."""
        self._client = await _session(self._url)
        given = {**(row.get("reset") or {}), **({"seed": row["seed"]} if "seed" in row else {})}
        try:
            begun = await self._asked(self._client.reset(**given))
        except RuntimeError as err:
            if "CAPACITY_REACHED" not in str(err):
                raise
            room = "raise its max_concurrent_envs, or lower environment.episodes_per_host"
            raise RuntimeError(f"{self._url} has no room for another session; {room}") from err
        tools = self._form.tools
        if tools is None:
            listed = await self._asked(self._client.step({"type": "list_tools"}))
            tools = tuple(_tool(tool) for tool in listed.observation["tools"][:MAX_TOOLS])
        if begun.done:
            raise ValueError(f"{self._url}: the episode is over before its first turn")
        messages = [*(row.get("messages") or ())]
        if not messages and row.get("prompt"):
            messages = [{"role": "user", "content": row["prompt"]}]
        text = self._text(begun.observation)
        if text and messages and messages[-1]["role"] == "user":
            messages[-1] = {**messages[-1], "content": f"{messages[-1]['content']}\n\n{text}"}
        elif text:
            messages.append({"role": "user", "content": text})
        if not messages:
            raise ValueError("neither the first observation nor the row (prompt, messages) has text")
        return Reset(messages, tools=tools)

    async def step(self, turn: Turn) -> Observation | End:
        """Send what the turn says as an action, or each of its calls in order."""
        if self._form.field:
            done, reward, text = await self._send({self._form.field: turn.content})
            told: list[Message] = [{"role": "user", "content": text or "(nothing)"}]
            return self._outcome(done, reward, told)
        if not turn.calls:
            return End(self._last_reward(0.0))
        total, told, done = 0.0, [], False
        for call in turn.calls:
            if done:
                text = "error: the episode was over before this call"
            else:
                done, reward, text = await self._call(call)
                total += reward
            told.append({"role": "tool", "tool_call_id": call.id, "name": call.name, "content": text})
        return self._outcome(done, total, told)

    async def close(self) -> None:
        """Close the session."""
        if self._client is not None:
            await self._client.disconnect()

    async def _asked(self, reply: Awaitable[Any]) -> Any:
        """Return what the server replies; EnvironmentLost if its connection ends first."""
        try:
            return await reply
        except Exception as err:
            if isinstance(err, ConnectionError) or type(err).__name__.startswith("ConnectionClosed"):
                raise _lost(self._url, f"was lost in a call ({err})") from err
            raise

    def _outcome(self, done: bool, reward: float, told: list[Message]) -> Observation | End:
        if done:
            return End(self._last_reward(reward), told)
        return Observation(told, reward)

    def _last_reward(self, reward: float) -> float | None:
        """Return the reward of the last turn, unless the server gave none and the task's rewards grade the episode."""
        return reward if self._was_rewarded or not self.is_graded else None

    async def _call(self, call: ToolCall) -> tuple[bool, float, str]:
        if call.arguments is None:
            return False, 0.0, f"error: not a valid tool call: {call.text}"
        if self._form.tools is None:
            return await self._send({"type": "call_tool", "tool_name": call.name, "arguments": call.arguments})
        if call.name != ACT:
            return False, 0.0, f"error: there is no tool '{call.name}'; there is {ACT}"
        return await self._send(call.arguments)

    async def _send(self, action: dict[str, Any]) -> tuple[bool, float, str]:
        """Return whether the episode is over, the reward, and what the policy sees."""
        try:
            result = await self._asked(self._client.step(action))
        except RuntimeError as err:  # how the client tells errors of the server
            if "VALIDATION_ERROR" not in str(err):
                raise
            return False, 0.0, "error: not a valid action"
        self._was_rewarded |= result.reward is not None
        return bool(result.done), float(result.reward or 0.0), self._text(result.observation)

    def _text(self, seen: dict[str, Any]) -> str:
        if self._shown:
            if self._shown not in seen:
                raise ValueError(f"the observation has no field {self._shown!r}; it has {', '.join(seen) or 'none'}")
            return _as_text(seen[self._shown])
        if "tool_name" in seen and {"result", "error"} & {*seen}:
            return _result(seen)
        if not seen:
            return ""
        [first, *others] = seen.values()
        return first if isinstance(first, str) and not others else _as_text(seen)


def _result(seen: dict[str, Any]) -> str:
    """Return what a tool returned, or why it did not."""
    if seen.get("error"):
        return f"error: {seen['error'].get('message', 'the tool failed')}"
    result = seen.get("result")
    if isinstance(result, dict) and isinstance(result.get("content"), list):
        parts = [part.get("text") or f"[{part.get('type')} left out]" for part in result["content"]]
        return ("error: " if result.get("is_error") else "") + "\n".join(parts)
    return _as_text(result)


def _as_text(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


def _tool(tool: dict[str, Any]) -> dict[str, Any]:
    function = {"name": tool["name"], "description": tool.get("description", ""), "parameters": tool["input_schema"]}
    return {"type": "function", "function": function}


@cache
def _form(url: str, action: str) -> _Form:
    """Return how turns become actions of this server; ValueError if it cannot be asked."""
    schema = _schema(url)
    fields = {name: one for name, one in schema.get("properties", {}).items() if name != "metadata"}
    if action and action not in fields:
        raise ValueError(f"action: {url} has no field {action!r} in its actions; they have {', '.join(fields)}")
    if not action and {*fields} >= _CALL:
        return _Form("", None)
    if not action and len(fields) == 1:
        [(only, one)] = fields.items()
        action = only if one.get("type") == "string" else ""
    if action:
        return _Form(action, ())
    parameters = {**schema, "properties": fields}
    act = {"name": ACT, "description": parameters.pop("description", "Act."), "parameters": parameters}
    return _Form("", ({"type": "function", "function": act},))


def _schema(url: str) -> dict[str, Any]:
    """Return the schema of a server's actions."""
    if not url.startswith(("http://", "https://")):
        raise ValueError(f"url: {url!r} is not an http:// or https:// address")
    try:
        with urllib.request.urlopen(f"{url}/schema", timeout=REACH_S) as reply:
            found = json.loads(reply.read(MAX_SCHEMA_BYTES))["action"]
    except (OSError, ValueError, KeyError, TypeError, RecursionError) as err:
        raise ValueError(f"url: {url} is not a server of OpenEnv that can be reached ({err})") from err
    if not isinstance(found, dict) or not isinstance(found.get("properties"), dict):
        raise ValueError(f"url: {url} describes its actions by no schema of an object")
    return found


_counter = itertools.count(1)
_losses: dict[str, int] = {}  # number of the loss of a server that has no session since


def _lost(url: str, why: str) -> EnvironmentLost:
    return EnvironmentLost(f"{url} {why}", loss=_losses.setdefault(url, next(_counter)))


async def _session(url: str) -> Any:
    """Return a client with a session of its own; EnvironmentLost if the server cannot be reached for a while."""
    from openenv.core.generic_client import GenericEnvClient

    # The limit of a call is that of the host.
    client = GenericEnvClient(url, REACH_S, message_timeout_s=86_400.0, max_message_size_mb=MAX_MESSAGE_MB)
    for pause_s in (*PAUSES_S, None):
        try:
            await client.connect()
        except ConnectionError as err:
            if pause_s is None:
                raise _lost(url, f"cannot be reached ({err})") from err
            await asyncio.sleep(pause_s)
        else:
            _losses.pop(url, None)
            break
    return client
