"""The Responses API of OpenAI as a session speaks it: its items become messages as the chat API has them (chat.py).

What one turn of the policy was told in several items, reasoning, text and calls, is one message again when an agent
repeats it. A session keeps no responses: every request has the whole conversation. Invariant: as for the chat API, a
reply is a function of its number and its turn.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Annotated, Any, Final

import msgspec

from dora.environments.api import Message, Turn
from dora.environments.chat import ChatRefused, ChatRequest, SamplingFields, text_of

#: Fields that refer to what another server would have kept, or would change what is sampled.
_REFUSED: Final = {
    "previous_response_id": "a session keeps no responses; send the whole conversation as input",
    "conversation": "a session keeps no conversations; send the whole conversation as input",
    "prompt": "a session has no stored prompts; send input and instructions",
    "background": "a reply is awaited; leave it out",
}
_TEXTS: Final = frozenset({"text", "input_text", "output_text", "reasoning_text", "summary_text"})


class _ResponsesBody(SamplingFields, kw_only=True):
    """What is read of a request; other fields are ignored."""

    input: str | list[dict[str, Any]]
    model: str = ""
    instructions: str | None = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: Any = None
    stream: bool | None = None
    text: dict[str, Any] | None = None
    max_output_tokens: Annotated[int, msgspec.Meta(ge=1)] | None = None
    top_logprobs: Any = None
    previous_response_id: Any = None
    conversation: Any = None
    prompt: Any = None
    background: Any = None
    return_token_ids: bool | None = None

    @property
    def limit(self) -> int:
        self.max_tokens = self.max_output_tokens
        return super().limit


def read_responses(body: bytes) -> ChatRequest:
    """Return what a request asks for; ChatRefused if that is not supported."""
    try:
        asked = msgspec.json.decode(body, type=_ResponsesBody)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as err:
        raise ChatRefused(f"the body is not a request of the Responses API: {err}") from err
    _require_supported(asked)
    messages = [{"role": "system", "content": asked.instructions}] if asked.instructions else []
    messages += _messages([{"role": "user", "content": asked.input}] if isinstance(asked.input, str) else asked.input)
    if not messages or messages[-1]["role"] == "assistant":
        raise ChatRefused("input: the last item must be one that the model can answer")
    return ChatRequest(
        model=asked.model,
        messages=messages,
        tools=[_tool(tool) for tool in asked.tools or ()],
        stop=(),
        streams=bool(asked.stream),
        wants_usage=True,
        left_aside=asked.left_aside(forbids_calls=bool(asked.tools) and asked.tool_choice == "none"),
        max_tokens=asked.limit,
        wants_ids=bool(asked.return_token_ids),
        dialect="responses",
    )


def _require_supported(asked: _ResponsesBody) -> None:
    for name, why in _REFUSED.items():
        if getattr(asked, name):
            raise ChatRefused(f"{name}: {why}")
    form = (asked.text or {}).get("format") or {}
    kind = form.get("type", "text") if isinstance(form, dict) else form
    if kind != "text":
        raise ChatRefused(f"text.format: {str(kind)[:40]!r} would change what the policy samples; only text is served")
    if asked.tool_choice not in (None, "auto", "none"):
        raise ChatRefused("tool_choice: the policy decides whether it calls a tool; only auto and none are served")
    if asked.top_logprobs:
        raise ChatRefused("top_logprobs: are not in the replies of a session")


def _messages(items: list[dict[str, Any]]) -> list[Message]:
    """Return items as messages. Neighboring items of the policy are one message."""
    messages: list[Message] = []
    turn: Message | None = None  # the message of the policy that the next item may belong to
    for item in items:
        kind, role = item.get("type", "message"), item.get("role")
        if kind in ("reasoning", "function_call") or (kind == "message" and role == "assistant"):
            if turn is None:
                turn = {"role": "assistant", "content": ""}
                messages.append(turn)
            _add(item, turn)
            continue
        turn = None
        if kind == "function_call_output" and isinstance(item.get("call_id"), str):
            found = _text(item.get("output"), of="the output of a function")
            messages.append({"role": "tool", "tool_call_id": item["call_id"], "content": found})
        elif kind == "message" and role in ("user", "system", "developer"):
            role = "system" if role == "developer" else role  # some templates have no other
            messages.append({"role": role, "content": _text(item.get("content"))})
        elif kind == "message":
            raise ChatRefused(f"input: the role {str(role)[:40]!r} is not served")
        else:
            raise ChatRefused(f"input: an item of type {str(kind)[:40]!r} is not served, or lacks its call_id")
    return messages


def _add(item: dict[str, Any], turn: Message) -> None:
    """Add an item of the policy to its message."""
    match item.get("type", "message"):
        case "reasoning":
            parts = item.get("content") or item.get("summary") or []
            if thought := _text(parts, of="reasoning"):
                turn["reasoning_content"] = turn.get("reasoning_content", "") + thought
        case "function_call":
            name, arguments = item.get("name"), item.get("arguments", "{}")
            if not isinstance(name, str) or not isinstance(arguments, str):
                raise ChatRefused("input: a function_call needs a name, and arguments as text")
            function = {"name": name, "arguments": arguments}
            call = {"id": str(item.get("call_id", "")), "type": "function", "function": function}
            turn.setdefault("tool_calls", []).append(call)
        case _:
            turn["content"] += _text(item.get("content"))


def _text(content: Any, *, of: str = "input") -> str:
    if isinstance(content, list):
        content = [
            {**part, "type": "text"} if isinstance(part, dict) and part.get("type") in _TEXTS else part
            for part in content
        ]
    return text_of(content, of=of)


def _tool(tool: dict[str, Any]) -> dict[str, Any]:
    if tool.get("type") != "function" or not isinstance(tool.get("name"), str):
        kind = str(tool.get("type"))[:40]
        raise ChatRefused(f"tools: a tool of type {kind!r} is not served, only functions with a name")
    described = {"description": tool["description"]} if isinstance(tool.get("description"), str) else {}
    parameters = tool.get("parameters") or {"type": "object", "properties": {}}
    return {"type": "function", "function": {"name": tool["name"], **described, "parameters": parameters}}


@dataclass(frozen=True)
class ResponseReply:
    """The reply to a request, made of a turn."""

    number: str  # of the session and of the turn in it
    asked: ChatRequest
    turn: Turn
    message: Message

    def whole(self) -> bytes:
        """Return the body of a reply in one piece."""
        return msgspec.json.encode(self._response(self._items()))

    def events(self, *, wants_usage: bool) -> Iterator[bytes]:
        """Yield the events of a stream, all of them at once; they have the usage in any case."""
        told = [*self._told()]
        for number, event in enumerate(told):
            yield f"event: {event['type']}\ndata: ".encode()
            yield msgspec.json.encode({**event, "sequence_number": number}) + b"\n\n"

    def _told(self) -> Iterator[dict[str, Any]]:
        begun = {**self._response([]), "status": "in_progress", "usage": None, "incomplete_details": None}
        yield {"type": "response.created", "response": begun}
        yield {"type": "response.in_progress", "response": begun}
        items = self._items()
        for index, item in enumerate(items):
            place = {"output_index": index}
            empty: dict[str, Any] = {"content": []} if "content" in item else {"arguments": ""}
            yield {"type": "response.output_item.added", **place, "item": {**item, **empty, "status": "in_progress"}}
            yield from self._parts(item, {"item_id": item["id"], **place})
            yield {"type": "response.output_item.done", **place, "item": item}
        whole = self._response(items)
        yield {"type": f"response.{whole['status']}", "response": whole}

    def _parts(self, item: dict[str, Any], place: dict[str, Any]) -> Iterator[dict[str, Any]]:
        match item["type"]:
            case "function_call":
                of = "response.function_call_arguments"
                yield {"type": f"{of}.delta", **place, "delta": item["arguments"]}
                yield {"type": f"{of}.done", **place, "name": item["name"], "arguments": item["arguments"]}
            case "reasoning":
                [part] = item["content"]
                yield {"type": "response.reasoning_text.delta", **place, "content_index": 0, "delta": part["text"]}
                yield {"type": "response.reasoning_text.done", **place, "content_index": 0, "text": part["text"]}
            case _:
                [part] = item["content"]
                at: dict[str, Any] = {**place, "content_index": 0}
                yield {"type": "response.content_part.added", **at, "part": {**part, "text": ""}}
                yield {"type": "response.output_text.delta", **at, "delta": part["text"], "logprobs": []}
                yield {"type": "response.output_text.done", **at, "text": part["text"], "logprobs": []}
                yield {"type": "response.content_part.done", **at, "part": part}

    def _items(self) -> list[dict[str, Any]]:
        found: list[dict[str, Any]] = []
        if reasoning := self.message.get("reasoning_content"):
            content = [{"type": "reasoning_text", "text": reasoning}]
            found.append({"type": "reasoning", "id": f"rs-{self.number}", "summary": [], "content": content})
        calls = self.message.get("tool_calls", ())
        if self.message["content"] or not calls:
            content = [{"type": "output_text", "text": self.message["content"], "annotations": [], "logprobs": []}]
            found.append({"type": "message", "id": f"msg-{self.number}", "role": "assistant", "content": content})
        found += [
            {
                "type": "function_call",
                "id": f"fc-{self.number}-{index}",
                "call_id": call["id"],
                "name": call["function"]["name"],
                "arguments": json.dumps(call["function"]["arguments"]),
            }
            for index, call in enumerate(calls)
        ]
        return [{**item, "status": "completed"} for item in found]

    def _response(self, items: list[dict[str, Any]]) -> dict[str, Any]:
        is_cut = self.turn.finish == "length" and not self.message.get("tool_calls")
        prompt, sampled = self.turn.num_prompt_tokens, self.turn.num_tokens
        return {
            "id": f"resp-{self.number}",
            "object": "response",
            "created_at": 0,
            "status": "incomplete" if is_cut else "completed",
            "error": None,
            "incomplete_details": {"reason": "max_output_tokens"} if is_cut else None,
            "instructions": None,
            "metadata": {},
            "model": self.asked.model,
            "output": items,
            "parallel_tool_calls": True,
            "tool_choice": "auto",
            "tools": [],
            "usage": {
                "input_tokens": prompt,
                "input_tokens_details": {"cached_tokens": 0},
                "output_tokens": sampled,
                "output_tokens_details": {"reasoning_tokens": 0},
                "total_tokens": prompt + sampled,
            },
            **({"token_ids": list(self.turn.token_ids)} if self.asked.wants_ids else {}),
        }
