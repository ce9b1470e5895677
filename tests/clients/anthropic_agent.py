"""Three requests with Anthropic's client: in one piece, streamed and by the asynchronous client, with a tool in all."""

from __future__ import annotations

import asyncio
import os
from typing import Any

import anthropic
from warm import Order, serve

TOOL = {
    "name": "look_up",
    "description": "Look a key up.",
    "input_schema": {"type": "object", "properties": {"key": {"type": "string"}}, "required": ["key"]},
}


def play(order: Order) -> int:
    access = {"base_url": order["base_url"].removesuffix("/v1"), "timeout": 600.0}
    asked: dict[str, Any] = {"model": "policy", "tools": [TOOL], "max_tokens": 2000, "system": "You look up keys."}
    messages: list[Any] = [{"role": "user", "content": "Where is k3?"}]
    client = anthropic.Anthropic(api_key=order["api_key"], **access)
    whole = client.messages.create(messages=messages, **asked)
    messages += [*exchange(whole, "And k4?")]
    with client.messages.stream(messages=messages, **asked) as stream:
        streamed = stream.get_final_message()
    assert streamed.usage.output_tokens
    messages += [*exchange(streamed, "k5?")]
    asyncio.run(ask({"auth_token": order["api_key"], **access}, messages, asked))  # a Bearer token
    return 3


def exchange(reply: Any, question: str) -> list[Any]:
    """The turn, and what it is answered."""
    calls = [block for block in reply.content if block.type == "tool_use"]
    results = [{"type": "tool_result", "tool_use_id": call.id, "content": "k7"} for call in calls]
    turn = [block.model_dump(exclude_none=True) for block in reply.content]
    asked = [*results, {"type": "text", "text": question}]
    return [{"role": "assistant", "content": turn}, {"role": "user", "content": asked}]


async def ask(access: dict[str, Any], messages: list[Any], asked: dict[str, Any]) -> None:
    async with anthropic.AsyncAnthropic(**access) as client:
        reply = await client.messages.create(messages=messages, stop_sequences=["\n\n"], **asked)
        assert reply.role == "assistant"


os.environ.pop("ANTHROPIC_API_KEY", None)
serve(play)
