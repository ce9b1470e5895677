"""Conversations that tell chat templates apart; docs/AGENTS.md names what they do not cover.

They go from simple to long, so the name of the first one that two templates render differently says what differs.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, Final, NamedTuple

Message = Mapping[str, Any]


class ProbeConversation(NamedTuple):
    """A conversation, and the tools that it has."""

    messages: tuple[Message, ...]
    tools: tuple[Mapping[str, Any], ...] = ()


def _tool(name: str, about: str, **properties: Any) -> Mapping[str, Any]:
    parameters = {"type": "object", "properties": properties, "required": [*properties][:1]}
    return {"type": "function", "function": {"name": name, "description": about, "parameters": parameters}}


def _call(name: str, **arguments: Any) -> dict[str, Any]:
    """A call, with an id in the format of the families that have one."""
    return {"id": f"functions.{name}:0", "type": "function", "function": {"name": name, "arguments": arguments}}


def _turn(content: str, *calls: dict[str, Any], reasoning: str = "") -> Message:
    turn: dict[str, Any] = {"role": "assistant", "content": content}
    if reasoning:
        turn["reasoning_content"] = reasoning
    if calls:
        turn["tool_calls"] = [call | {"id": f"{call['id'][:-1]}{index}"} for index, call in enumerate(calls)]
    return turn


def _results(turn: Message, *contents: str) -> tuple[Message, ...]:
    return tuple(
        {"role": "tool", "tool_call_id": call["id"], "name": call["function"]["name"], "content": content}
        for call, content in zip(turn["tool_calls"], contents, strict=True)
    )


_SYSTEM: Final[Message] = {"role": "system", "content": "Be brief."}
_USER: Final[Message] = {"role": "user", "content": "What is k?"}
_MORE: Final[Message] = {"role": "user", "content": "And what is j?"}
_LOOK_UP: Final = _tool("look_up", "Look a key up.", key={"type": "string"})
_COUNT: Final = _tool(
    "count",
    'Count "all" <keys> & é.',
    start={"type": "integer", "description": "Where to begin."},
    names={"type": "array", "items": {"type": "string"}},
)
_TOOLS: Final = (_LOOK_UP,)
_TWO_TOOLS: Final = (_LOOK_UP, _COUNT)

_CALLED: Final = _turn("", _call("look_up", key="k"))
_SAID: Final = _turn("Let me see.", _call("look_up", key="k"))
_THOUGHT: Final = _turn("", _call("look_up", key="k"), reasoning="It is unknown.\n\nI must look.")
_ALL: Final = _turn(
    "",
    _call("look_up", key="a b"),
    _call("count", start=-3, names=["x", 'é"<'], flag=True),
    _call("look_up", key="c"),
    reasoning="Three are needed.",
)
_MANY: Final = _turn(
    "Let me see.", _call("count", start=-3, names=["x", 'é"<'], flag=True, none=None, share=0.5), reasoning="One."
)
_ONE: Final = _turn("", _call("count", start=1), reasoning="First one.")
_ANSWER: Final = _turn("It is 7.")
_THOUGHT_ANSWER: Final = _turn("It is 7.", reasoning="That was easy.")

#: A turn with a call that is continued: the prompt, the prompt with the turn, and the result.
START: Final = ProbeConversation((_SYSTEM, _USER), _TOOLS)
CALL: Final = ProbeConversation((*START.messages, _CALLED), _TOOLS)
RESULT: Final = _results(_CALLED, "7")

#: Conversations by the feature that each one tests.
PROBES: Final[Mapping[str, ProbeConversation]] = MappingProxyType(
    {
        "a system message": ProbeConversation((_SYSTEM, _USER)),
        "no system message": ProbeConversation((_USER,)),
        "a call and its result": ProbeConversation((*CALL.messages, *RESULT), _TOOLS),
        "a tool": START,
        "tools and no system message": ProbeConversation((_USER,), _TWO_TOOLS),
        "a call without a system message": ProbeConversation((_USER, _CALLED, *RESULT), _TOOLS),
        "text with a call": ProbeConversation((_USER, _SAID, *_results(_SAID, "7")), _TOOLS),
        "reasoning with a call": ProbeConversation((_USER, _THOUGHT, *_results(_THOUGHT, "7")), _TOOLS),
        "a turn without a call": ProbeConversation((_USER, _ANSWER, _MORE)),
        "a turn without a call, and tools": ProbeConversation((_SYSTEM, _USER, _ANSWER, _MORE), _TOOLS),
        "the reasoning of an earlier turn": ProbeConversation((_USER, _THOUGHT_ANSWER, _MORE)),
        "a user's message after a result": ProbeConversation(
            (_SYSTEM, _USER, _THOUGHT, *_results(_THOUGHT, "7"), _MORE), _TOOLS
        ),
        "several calls in a turn": ProbeConversation(
            (_SYSTEM, _USER, _ONE, *_results(_ONE, "0"), _ALL, *_results(_ALL, "1", "2", "3")), _TWO_TOOLS
        ),
        "turns of several kinds": ProbeConversation(
            (
                *(_USER, _SAID, *_results(_SAID, "7"), _THOUGHT_ANSWER),
                *(_MORE, _ANSWER, _USER, _MANY, *_results(_MANY, "1"), _CALLED, *RESULT),
            ),
            _TWO_TOOLS,
        ),
        "space around its texts": ProbeConversation(
            (
                {"role": "system", "content": " Be brief. "},
                {"role": "user", "content": " k? \n"},
                spaced := _turn(" So. ", _call("look_up", key=" k "), reasoning=" Well. "),
                *_results(spaced, " a \n"),
            ),
            _TOOLS,
        ),
        "empty texts": ProbeConversation((_USER, _turn(""), {"role": "user", "content": ""})),
        "two messages of the user": ProbeConversation((_USER, _MORE)),
    }
)

#: Every template must render these. The others are optional: some templates accept only one call in a turn, for
#: example.
REQUIRED: Final = frozenset({"a system message", "no system message", "a call and its result"})
#: Those without a turn of the policy.
FIRST_PROMPTS: Final = tuple(
    name for name, probe in PROBES.items() if {m["role"] for m in probe.messages} <= {"system", "user"}
)
