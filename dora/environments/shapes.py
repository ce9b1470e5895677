"""Shapes of conversations: who follows whom, with or without text, reasoning and calls.

A chat template is a program, and a renderer another one. Whether they agree depends on the shape of a conversation far
more than on its words, so a conversation of the same shape with short texts stands for all others. Invariant: pure.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final, NamedTuple

Message = Mapping[str, Any]

#: Of a longer conversation only parts are compared: an agent may send any number of messages.
MAX_SHAPES: Final = 256
#: Longest beginning of such a conversation up to the first message of its user.
MAX_HEAD: Final = 8
#: More calls in one turn than this count as this number.
_MANY: Final = 3


class MessageShape(NamedTuple):
    """What a template may treat differently in a message."""

    role: str
    has_text: bool
    has_reasoning: bool = False
    num_calls: int = 0

    def __str__(self) -> str:
        """What it has, in words.

        >>> str(MessageShape("assistant", True, True, 1)), str(MessageShape("user", False))
        ('assistant (text, reasoning, 1 call)', 'user (empty)')
        """
        calls = f"{self.num_calls} call{'s' * (self.num_calls > 1)}" if self.num_calls else ""
        parts = ["text" * self.has_text, "reasoning" * self.has_reasoning, calls]
        return f"{self.role} ({', '.join(filter(None, parts)) or 'empty'})"


#: A message with the one before it, which is None for the first.
ShapePair = tuple[MessageShape | None, MessageShape]


def shapes_of(messages: Sequence[Message]) -> list[MessageShape]:
    """Return the shape of each message. A turn has at least as many calls as results follow it: a result of an invalid
    call, which is not part of the turn, is rendered as any other. A part that neither begins with a result nor precedes
    one has the shapes that it has in the whole."""
    shapes: list[MessageShape] = []
    num_results = 0
    for message in reversed(messages):
        role = str(message["role"])
        text, reasoning = bool(message.get("content")), bool(message.get("reasoning_content"))
        num_results = num_results + 1 if role == "tool" else num_results
        if role == "assistant":
            num_calls = min(max(len(message.get("tool_calls") or ()), num_results), _MANY)
            # Templates differ in text before several calls (docs/AGENTS.md); it is sampled, so it is rarely rendered.
            shapes.append(MessageShape(role, text and num_calls < 2, reasoning, num_calls))
        else:
            shapes.append(MessageShape(role, text))
        num_results = num_results if role == "tool" else 0
    return shapes[::-1]


def shortened(shapes: Sequence[MessageShape]) -> list[MessageShape]:
    """Return at most MAX_SHAPES and a few of them: of a longer conversation its beginning, and its end from a turn on.

    The first turn follows a message of the user in most conversations, so that this is one, too.
    """
    if len(shapes) <= MAX_SHAPES:
        return [*shapes]
    head, tail = shapes[:MAX_HEAD], shapes[-MAX_SHAPES:]
    first = next((number for number, shape in enumerate(head) if shape.role == "user"), 0)
    turn = next((number for number, shape in enumerate(tail) if shape.role == "assistant"), 0)
    return [*head[: first + 1], *tail[turn:]]


def pairs_of(shapes: Sequence[MessageShape]) -> list[ShapePair]:
    """Return each shape with the one before it."""
    return [*zip([None, *shapes], shapes, strict=False)]


def example_of(shapes: Sequence[MessageShape], *, tool: str = "look_up") -> list[dict[str, Any]]:
    """Return a conversation of this shape with short texts, whose calls are of one tool."""
    messages: list[dict[str, Any]] = []
    waiting: list[str] = []  # calls without a result
    for number, shape in enumerate(shapes):
        message: dict[str, Any] = {"role": shape.role, "content": f"k{number % 16}" if shape.has_text else ""}
        if shape.has_reasoning:
            message["reasoning_content"] = "So."
        if shape.num_calls:
            waiting = [f"functions.{tool}:{index}" for index in range(shape.num_calls)]
            function = {"name": tool, "arguments": {"key": "k"}}
            message["tool_calls"] = [{"id": call, "type": "function", "function": function} for call in waiting]
        if shape.role == "tool":
            message |= {"tool_call_id": waiting.pop(0) if waiting else f"functions.{tool}:0", "name": tool}
        messages.append(message)
    return messages
