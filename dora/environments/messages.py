"""Turns of the policy as messages of a conversation, and what makes two calls of a tool equal."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from dora.environments.api import Turn


def assistant_message(turn: Turn) -> dict[str, Any]:
    """Return a turn as a message; text that is not a valid call stays in the content."""
    calls = [
        {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}
        for call in turn.calls
        if call.arguments is not None
    ]
    texts = [turn.content, *(call.text for call in turn.calls if call.arguments is None)]
    message: dict[str, Any] = {"role": "assistant", "content": "\n".join(text for text in texts if text)}
    if turn.reasoning:
        message["reasoning_content"] = turn.reasoning
    if calls:
        message["tool_calls"] = calls
    return message


def has_named_function(tool: Mapping[str, Any]) -> bool:
    """Return whether the function of a tool has a name; some tools have no function."""
    function = tool.get("function", {"name": ""})
    return isinstance(function, Mapping) and isinstance(function.get("name"), str)


def arguments_key(arguments: object) -> str:
    """Return a call's arguments in one form; some clients send them as text."""
    try:
        value = json.loads(arguments) if isinstance(arguments, str) else arguments
    except (ValueError, RecursionError):
        value = arguments
    return json.dumps(value, sort_keys=True, default=repr)
