"""The messages API of Anthropic as a session speaks it; the conversation is that of the chat API (chat.py).

A message of the user may have results of tools and text, which become messages of their own, in their order. Invariant:
as for the chat API, a reply is a function of its number and its turn.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import msgspec

from dora.environments.api import Message, Turn
from dora.environments.chat import ChatRefused, ChatRequest, SamplingFields, Stops, text_of


class _MessagesBody(SamplingFields, kw_only=True):
    """What is read of a request; other fields are ignored."""

    messages: list[dict[str, Any]]
    model: str = ""
    system: str | list[dict[str, Any]] | None = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: dict[str, Any] | None = None
    stream: bool | None = None
    stop_sequences: Stops | None = None
    return_token_ids: bool | None = None


def read_messages(body: bytes) -> ChatRequest:
    """Return what a request asks for; ChatRefused if that is not supported."""
    try:
        asked = msgspec.json.decode(body, type=_MessagesBody)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as err:
        raise ChatRefused(f"the body is not a request of the messages API: {err}") from err
    choice = (asked.tool_choice or {}).get("type", "auto")
    if choice not in ("auto", "none"):
        raise ChatRefused("tool_choice: the policy decides whether it calls a tool; only auto and none are served")
    messages: list[Message] = []
    if system := text_of(asked.system, of="system"):
        messages.append({"role": "system", "content": system})
    for message in asked.messages:
        messages += _messages(message)
    if not messages or messages[-1]["role"] == "assistant":
        raise ChatRefused("messages: the last one must be one that the model can answer")
    return ChatRequest(
        model=asked.model,
        messages=messages,
        tools=[_tool(tool) for tool in asked.tools or ()],
        stop=tuple(asked.stop_sequences or ()),
        streams=bool(asked.stream),
        wants_usage=True,
        left_aside=asked.left_aside(forbids_calls=bool(asked.tools) and choice == "none"),
        max_tokens=asked.limit,
        wants_ids=bool(asked.return_token_ids),
        dialect="messages",
    )


def _messages(message: dict[str, Any]) -> Iterator[Message]:
    """Yield a message as messages of the chat API."""
    role, content = message.get("role"), message.get("content")
    if role not in ("user", "assistant"):
        raise ChatRefused(f"messages: the role {str(role)[:40]!r} is not served")
    if role == "assistant":
        yield _turn(content)
        return
    if isinstance(content, str):
        yield {"role": "user", "content": content}
        return
    text: list[str] = []
    for block in _blocks(content):
        if block["type"] == "tool_result":
            if not isinstance(block.get("tool_use_id"), str):
                raise ChatRefused("messages: a result of a tool has no tool_use_id")
            found = text_of(block.get("content"), of="the result of a tool")
            yield {"role": "tool", "tool_call_id": block["tool_use_id"], "content": found}
        else:
            text.append(text_of([block]))
    if text:
        yield {"role": "user", "content": "".join(text)}


def _turn(content: Any) -> Message:
    """Return a turn of the policy that the agent repeats."""
    if isinstance(content, str):
        return {"role": "assistant", "content": content}
    turn: Message = {"role": "assistant", "content": ""}
    for block in _blocks(content):
        match block["type"]:
            case "tool_use" if isinstance(block.get("name"), str) and isinstance(block.get("input"), dict):
                function = {"name": block["name"], "arguments": block["input"]}
                call = {"id": str(block.get("id", "")), "type": "function", "function": function}
                turn.setdefault("tool_calls", []).append(call)
            case "thinking":
                turn["reasoning_content"] = str(block.get("thinking", ""))
            case _:
                turn["content"] += text_of([block])
    return turn


def _blocks(content: Any) -> list[dict[str, Any]]:
    blocks: list[Any] = content if isinstance(content, list) else [None]
    if not all(isinstance(block, dict) and isinstance(block.get("type"), str) for block in blocks):
        raise ChatRefused("messages: content is neither text nor a list of blocks")
    return blocks


def _tool(tool: dict[str, Any]) -> dict[str, Any]:
    if not isinstance(tool.get("name"), str) or not isinstance(tool.get("input_schema"), dict):
        raise ChatRefused("tools: a tool needs a name and an input_schema; those of Anthropic's servers are not served")
    described = {"description": tool["description"]} if isinstance(tool.get("description"), str) else {}
    return {"type": "function", "function": {"name": tool["name"], **described, "parameters": tool["input_schema"]}}


@dataclass(frozen=True)
class MessageReply:
    """The reply to a request, made of a turn."""

    number: str  # of the session and of the turn in it
    asked: ChatRequest
    turn: Turn
    message: Message

    def whole(self) -> bytes:
        """Return the body of a reply in one piece."""
        told = self._head() | {"content": self._content(), "stop_reason": self._stop_reason(), "usage": self._usage()}
        return msgspec.json.encode(told | ({"token_ids": list(self.turn.token_ids)} if self.asked.wants_ids else {}))

    def events(self, *, wants_usage: bool) -> Iterator[bytes]:
        """Yield the events of a stream, all of them at once; they have the usage in any case."""
        head = self._head() | {"content": [], "stop_reason": None, "usage": self._usage() | {"output_tokens": 0}}
        yield _event("message_start", message=head)
        empty: dict[str, Any]
        for index, block in enumerate(self._content()):
            match block["type"]:
                case "text":
                    empty, delta = {"text": ""}, {"type": "text_delta", "text": block["text"]}
                case "thinking":
                    empty = {"thinking": "", "signature": ""}
                    delta = {"type": "thinking_delta", "thinking": block["thinking"]}
                case _:
                    empty = {"input": {}}
                    told = msgspec.json.encode(block["input"]).decode()
                    delta = {"type": "input_json_delta", "partial_json": told}
            yield _event("content_block_start", index=index, content_block=block | empty)
            yield _event("content_block_delta", index=index, delta=delta)
            yield _event("content_block_stop", index=index)
        ended = {"stop_reason": self._stop_reason(), "stop_sequence": None}
        yield _event("message_delta", delta=ended, usage={"output_tokens": self.turn.num_tokens})
        yield _event("message_stop")

    def _head(self) -> dict[str, Any]:
        of = {"model": self.asked.model, "stop_sequence": None}
        return {"id": f"msg-{self.number}", "type": "message", "role": "assistant", **of}

    def _content(self) -> list[dict[str, Any]]:
        found: list[dict[str, Any]] = []
        if reasoning := self.message.get("reasoning_content"):
            found.append({"type": "thinking", "thinking": reasoning, "signature": ""})
        calls = [
            {
                "type": "tool_use",
                "id": call["id"],
                "name": call["function"]["name"],
                "input": call["function"]["arguments"],
            }
            for call in self.message.get("tool_calls", ())
        ]
        if self.message["content"] or not calls:
            found.append({"type": "text", "text": self.message["content"]})
        return found + calls

    def _stop_reason(self) -> str:
        if self.message.get("tool_calls"):
            return "tool_use"
        return "max_tokens" if self.turn.finish == "length" else "end_turn"

    def _usage(self) -> dict[str, int]:
        return {"input_tokens": self.turn.num_prompt_tokens, "output_tokens": self.turn.num_tokens}


def _event(kind: str, **content: Any) -> bytes:
    return f"event: {kind}\ndata: ".encode() + msgspec.json.encode({"type": kind, **content}) + b"\n\n"
