"""The messages API of Anthropic, with Anthropic's client, and what it refuses."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from typing import Any

import anthropic
import pytest

from dora.environments.api import ToolCall, Turn
from dora.environments.chat import ChatRefused
from dora.environments.message_calls import read_messages
from dora.environments.sessions import Session, SessionServer

TOOL = {"name": "add", "description": "Add.", "input_schema": {"type": "object", "properties": {"a": {}}}}
ASK: dict[str, Any] = {"model": "policy", "max_tokens": 9, "messages": [{"role": "user", "content": "2+2"}]}


@pytest.fixture
async def session() -> AsyncIterator[Session]:
    async with SessionServer().running() as server:
        yield server.open()


@pytest.fixture
async def client(session: Session) -> AsyncIterator[anthropic.AsyncAnthropic]:
    async with anthropic.AsyncAnthropic(base_url=session.url, api_key=session.key, max_retries=0) as client:
        yield client


async def test_a_turn_with_a_call_is_told_and_its_result_comes_back(
    session: Session, client: anthropic.AsyncAnthropic
) -> None:
    asking = asyncio.create_task(client.messages.create(**ASK, system="Be brief.", tools=[TOOL]))
    asked = await session.next_request()
    assert asked.messages == [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "2+2"}]
    [tool] = asked.tools
    assert tool["function"] == {"name": "add", "description": "Add.", "parameters": TOOL["input_schema"]}
    session.answer(Turn("so", "hm", (ToolCall("c1", "add", {"a": 2}),), num_tokens=3, num_prompt_tokens=8))
    told = await asking
    assert [block.type for block in told.content] == ["thinking", "text", "tool_use"]
    assert (told.content[2].id, told.content[2].input) == ("c1", {"a": 2})
    assert (told.stop_reason, told.usage.input_tokens, told.usage.output_tokens) == ("tool_use", 8, 3)

    result = {"type": "tool_result", "tool_use_id": "c1", "content": [{"type": "text", "text": "4"}]}
    history = [
        *ASK["messages"],
        {"role": "assistant", "content": [block.model_dump() for block in told.content]},
        {"role": "user", "content": [result, {"type": "text", "text": "go on"}]},
    ]
    again = {**ASK, "messages": history, "system": "Be brief.", "tools": [TOOL]}
    asking = asyncio.create_task(client.messages.create(**again))
    recorded = session.recorded((await session.next_request()).messages)
    assert recorded[2] == {
        "role": "assistant",
        "content": "so",
        "reasoning_content": "hm",
        "tool_calls": [{"id": "c1", "type": "function", "function": {"name": "add", "arguments": {"a": 2}}}],
    }
    assert recorded[3:] == [
        {"role": "tool", "tool_call_id": "c1", "content": "4"},
        {"role": "user", "content": "go on"},
    ]
    session.answer(Turn("4", finish="length"))
    assert (await asking).stop_reason == "max_tokens"


async def test_a_stream_has_the_same_blocks(session: Session, client: anthropic.AsyncAnthropic) -> None:
    async def streamed() -> Any:
        async with client.messages.stream(**ASK, tools=[TOOL]) as stream:
            return await stream.get_final_message()

    asking = asyncio.create_task(streamed())
    await session.next_request()
    session.answer(Turn("so", "hm", (ToolCall("c1", "add", {"a": [1, "x"]}),), num_tokens=3, num_prompt_tokens=8))
    told = await asking
    assert [block.type for block in told.content] == ["thinking", "text", "tool_use"]
    assert told.content[0].thinking == "hm"
    assert told.content[1].text == "so"
    assert told.content[2].input == {"a": [1, "x"]}
    assert (told.stop_reason, told.usage.output_tokens) == ("tool_use", 3)


async def test_a_key_of_another_session_is_refused(session: Session, client: anthropic.AsyncAnthropic) -> None:
    with pytest.raises(anthropic.AuthenticationError, match="no session of this number has this key"):
        await client.with_options(api_key="other").messages.create(**ASK)


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "no messages": ({}, "missing required field"),
    "empty": ({"messages": []}, "the last one must be one"),
    "a turn at the end": ({"messages": [{"role": "assistant", "content": "4"}]}, "the last one must be one"),
    "an image": ({"messages": [{"role": "user", "content": [{"type": "image"}]}]}, "'image' is not served"),
    "a role": ({"messages": [{"role": "system", "content": ""}]}, "the role 'system' is not served"),
    "no blocks": ({"messages": [{"role": "user", "content": {}}]}, "neither text nor a list of blocks"),
    "no id": ({"messages": [{"role": "user", "content": [{"type": "tool_result"}]}]}, "has no tool_use_id"),
    "a forced call": (ASK | {"tool_choice": {"type": "any"}}, "tool_choice: the policy decides"),
    "a tool of a server": (ASK | {"tools": [{"type": "web_search", "name": "x"}]}, "needs a name and an input_schema"),
}


@pytest.mark.parametrize("what", REFUSED)
def test_what_is_not_served_is_refused(what: str) -> None:
    body, says = REFUSED[what]
    with pytest.raises(ChatRefused, match=says):
        read_messages(json.dumps(body).encode())
