"""Three requests with OpenAI's client: in one piece, streamed and by the asynchronous client, with a tool in all."""

from __future__ import annotations

import asyncio
from typing import Any

import openai
from warm import Order, serve

TOOL = {
    "type": "function",
    "function": {
        "name": "look_up",
        "description": "Look a key up.",
        "parameters": {"type": "object", "properties": {"key": {"type": "string"}}, "required": ["key"]},
    },
}


def play(order: Order) -> int:
    access = {"base_url": order["base_url"], "api_key": order["api_key"], "timeout": 600.0}
    asked: dict[str, Any] = {"model": "policy", "tools": [TOOL], "temperature": 0.3}
    messages: list[Any] = [
        {"role": "system", "content": "You look up keys."},
        {"role": "user", "content": "Where is k3?"},
    ]
    client = openai.OpenAI(**access)
    assert [model.id for model in client.models.list()] == ["policy"]
    whole = client.chat.completions.create(messages=messages, **asked).choices[0].message
    messages += [
        whole.model_dump(exclude_none=True),
        *answers(whole.tool_calls),
        {"role": "user", "content": "And k4?"},
    ]
    stream = client.chat.completions.create(
        messages=messages, stream=True, stream_options={"include_usage": True}, **asked
    )
    text, used = "", 0
    for chunk in stream:
        used = chunk.usage.completion_tokens if chunk.usage else used
        text += chunk.choices[0].delta.content or "" if chunk.choices else ""
    assert used
    messages += [{"role": "assistant", "content": text}, {"role": "user", "content": [{"type": "text", "text": "k5?"}]}]
    asyncio.run(ask(access, messages, asked))
    return 3


def answers(calls: Any) -> list[Any]:
    return [{"role": "tool", "tool_call_id": call.id, "content": "k7"} for call in calls or ()]


async def ask(access: dict[str, Any], messages: list[Any], asked: dict[str, Any]) -> None:
    async with openai.AsyncOpenAI(**access) as client:
        reply = await client.chat.completions.create(messages=messages, stop=["\n\n"], **asked)
        assert reply.choices[0].message.role == "assistant"


serve(play)
