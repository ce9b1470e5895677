"""The Responses API of OpenAI, with OpenAI's client, and what it refuses."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from typing import Any

import openai
import pytest

from dora.environments.api import ToolCall, Turn
from dora.environments.chat import ChatRefused
from dora.environments.response_calls import read_responses
from dora.environments.sessions import Session, SessionServer

PARAMETERS = {"type": "object", "properties": {"a": {"type": "integer"}}}
TOOL: Any = {"type": "function", "name": "add", "description": "Add.", "parameters": PARAMETERS, "strict": False}
ASK: dict[str, Any] = {"model": "policy", "input": "2+2", "instructions": "Be brief.", "tools": [TOOL]}
TURN = Turn("so", "hm", (ToolCall("c1", "add", {"a": 2}),), num_tokens=3, num_prompt_tokens=8)


@pytest.fixture
async def session() -> AsyncIterator[Session]:
    async with SessionServer().running() as server:
        yield server.open()


@pytest.fixture
async def client(session: Session) -> AsyncIterator[openai.AsyncOpenAI]:
    async with openai.AsyncOpenAI(base_url=f"{session.url}/v1", api_key=session.key, max_retries=0) as client:
        yield client


async def test_a_turn_with_a_call_is_told_and_its_result_comes_back(
    session: Session, client: openai.AsyncOpenAI
) -> None:
    asking = asyncio.create_task(client.responses.create(**ASK, max_output_tokens=9, temperature=0.1))
    asked = await session.next_request()
    assert asked.messages == [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "2+2"}]
    assert asked.tools == [
        {"type": "function", "function": {"name": "add", "description": "Add.", "parameters": PARAMETERS}}
    ]
    assert (asked.max_tokens, asked.left_aside) == (9, ("temperature",))
    session.answer(TURN)
    told = await asking
    assert [item.type for item in told.output] == ["reasoning", "message", "function_call"]
    assert (told.output_text, told.status) == ("so", "completed")
    assert (told.output[2].call_id, told.output[2].name, told.output[2].arguments) == ("c1", "add", '{"a": 2}')
    assert told.usage is not None
    assert (told.usage.input_tokens, told.usage.output_tokens, told.usage.total_tokens) == (8, 3, 11)

    history = [
        {"role": "user", "content": [{"type": "input_text", "text": "2+2"}]},
        *(item.model_dump() for item in told.output),
        {"type": "function_call_output", "call_id": "c1", "output": "4"},
        {"role": "developer", "content": "go on"},
    ]
    asking = asyncio.create_task(client.responses.create(**{**ASK, "input": history}))
    recorded = session.recorded((await session.next_request()).messages)
    assert recorded[1:] == [
        {"role": "user", "content": "2+2"},
        {
            "role": "assistant",
            "content": "so",
            "reasoning_content": "hm",
            "tool_calls": [{"id": "c1", "type": "function", "function": {"name": "add", "arguments": {"a": 2}}}],
        },
        {"role": "tool", "tool_call_id": "c1", "content": "4"},
        {"role": "system", "content": "go on"},
    ]
    session.answer(Turn("4", finish="length"))
    told = await asking
    assert (told.status, told.incomplete_details and told.incomplete_details.reason) == (
        "incomplete", "max_output_tokens",
    )  # fmt: skip


async def test_a_stream_has_the_same_items_and_every_event_a_number(
    session: Session, client: openai.AsyncOpenAI
) -> None:
    async def streamed() -> tuple[list[Any], Any]:
        async with client.responses.stream(**ASK) as stream:
            events = [event async for event in stream]
            return events, await stream.get_final_response()

    asking = asyncio.create_task(streamed())
    await session.next_request()
    session.answer(TURN)
    events, told = await asking
    assert [event.sequence_number for event in events] == [*range(len(events))]
    assert [item.type for item in told.output] == ["reasoning", "message", "function_call"]
    assert (told.output_text, told.output[2].arguments) == ("so", '{"a": 2}')
    texts = {event.type: event for event in events}
    assert texts["response.output_text.delta"].delta == "so"
    assert texts["response.function_call_arguments.done"].arguments == '{"a": 2}'
    assert events[-1].type == "response.completed"


async def test_a_key_of_another_session_is_refused(session: Session, client: openai.AsyncOpenAI) -> None:
    with pytest.raises(openai.AuthenticationError):
        await client.with_options(api_key="other").responses.create(**ASK)


REFUSED: dict[str, dict[str, Any]] = {
    "the body is not a request of the Responses API": {"input": 1},
    "previous_response_id: a session keeps no responses": {"previous_response_id": "resp-1-1"},
    "conversation: a session keeps no conversations": {"conversation": "c"},
    "prompt: a session has no stored prompts": {"prompt": {"id": "p"}},
    "background: a reply is awaited": {"background": True},
    "text.format: 'json_schema' would change": {"text": {"format": {"type": "json_schema", "schema": {}}}},
    "tool_choice: the policy decides": {"tool_choice": "required"},
    "top_logprobs: are not in the replies": {"top_logprobs": 3},
    "tools: a tool of type 'web_search' is not served": {"tools": [{"type": "web_search"}]},
    "input: the last item must be one": {"input": [{"role": "assistant", "content": "4"}]},
    "input: the role 'critic' is not served": {"input": [{"role": "critic", "content": "4"}]},
    "input: an item of type 'item_reference' is not served": {"input": [{"type": "item_reference", "id": "x"}]},
    "input: content of type 'input_image' is not served": {
        "input": [{"role": "user", "content": [{"type": "input_image", "image_url": "x"}]}]
    },
    "input: a function_call needs a name": {"input": [{"type": "function_call", "call_id": "c"}]},
    "input: an item of type 'function_call_output' is not served, or lacks": {
        "input": [{"type": "function_call_output", "output": "4"}]
    },
}


@pytest.mark.parametrize("what", REFUSED)
def test_what_is_not_served_is_refused(what: str) -> None:
    with pytest.raises(ChatRefused) as refused:
        read_responses(json.dumps({**ASK, **REFUSED[what]}).encode())
    assert str(refused.value).startswith(what)


def test_reasoning_that_is_kept_back_and_empty_outputs_are_read() -> None:
    hidden = {"type": "reasoning", "id": "rs", "summary": [], "encrypted_content": "x"}
    called = {"type": "function_call", "call_id": "c", "name": "add", "arguments": "{}"}
    done = {"type": "function_call_output", "call_id": "c", "output": []}
    asked = read_responses(json.dumps({"input": [hidden, called, done]}).encode())
    assert [message["role"] for message in asked.messages] == ["assistant", "tool"]
    assert "reasoning_content" not in asked.messages[0]
