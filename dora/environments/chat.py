"""The chat API of OpenAI as a session speaks it: what a request may ask for, and the reply that a turn becomes.

Sampling is the run's: behavior log-probs must be the trainer's, so what a client sets is left aside, and what would
change the distribution or the number of answers is refused. Invariant: a reply is a function of its number and its
turn, so that a session that is repeated gives the same bytes.
"""

from __future__ import annotations

import hashlib
import json
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Final, Literal

import msgspec

from dora.environments.api import Message, Turn
from dora.environments.messages import arguments_key, assistant_message, has_named_function

#: More tokens than this are any number.
MAX_TOKENS: Final = 1 << 20
#: Most strings at which a turn may stop.
MAX_STOPS: Final = 16
Stops = Annotated[list[str], msgspec.Meta(max_length=MAX_STOPS)]
_Positive = Annotated[int, msgspec.Meta(ge=1)]
_WITH_EFFECT: Final = ("n", "logit_bias", "max_tokens", "max_completion_tokens")


class ChatRefused(Exception):
    """A request that is not carried out: an HTTP status, and one line."""

    def __init__(self, message: str, *, status: int = 400) -> None:
        super().__init__(message)
        self.status = status


class _StreamOptions(msgspec.Struct):
    include_usage: bool = False


class SamplingFields(msgspec.Struct, kw_only=True):
    """Settings of sampling in a request, of all APIs."""

    n: int | None = None
    logit_bias: Any = None
    temperature: Any = None
    top_p: Any = None
    top_k: Any = None
    min_p: Any = None
    presence_penalty: Any = None
    frequency_penalty: Any = None
    seed: Any = None
    max_tokens: _Positive | None = None
    max_completion_tokens: _Positive | None = None

    @property
    def limit(self) -> int:
        """The most tokens that are asked for; 0: any number."""
        asked = self.max_completion_tokens or self.max_tokens or 0
        return asked if asked <= MAX_TOKENS else 0

    def left_aside(self, *, forbids_calls: bool = False) -> tuple[str, ...]:
        """Return the settings that have no effect; ChatRefused for those that cannot be left aside.

        `forbids_calls`: of tools, which stay in the prompt all the same, because it must stay that of the session.
        """
        if self.n not in (None, 1):
            raise ChatRefused(f"n: a session samples one answer at a time, not {self.n}; repeat the request instead")
        if self.logit_bias:
            raise ChatRefused("logit_bias: would change what the policy samples")
        names = [name for name in SamplingFields.__struct_fields__ if name not in _WITH_EFFECT]
        given = tuple(name for name in names if getattr(self, name) is not None)
        return (*given, "tool_choice") if forbids_calls else given


class _ChatBody(SamplingFields, kw_only=True):
    """What is read of a request; other fields are ignored."""

    messages: list[dict[str, Any]]
    model: str = ""
    tools: list[dict[str, Any]] | None = None
    tool_choice: Any = None
    stream: bool | None = None
    stream_options: _StreamOptions | None = None
    stop: str | Stops | None = None
    response_format: Any = None
    logprobs: Any = None
    return_token_ids: bool | None = None


@dataclass(frozen=True)
class ChatRequest:
    """A conversation that an agent wants to have continued."""

    model: str
    messages: list[Message]
    tools: list[dict[str, Any]]
    stop: tuple[str, ...]
    streams: bool
    wants_usage: bool
    left_aside: tuple[str, ...]  # settings without effect
    max_tokens: int = 0  # of the turn; 0: any number
    wants_ids: bool = False  # of the tokens that are sampled
    dialect: Literal["chat", "messages", "responses"] = "chat"


def read_request(body: bytes) -> ChatRequest:
    """Return what a request asks for; ChatRefused if that is not supported."""
    try:
        asked = msgspec.json.decode(body, type=_ChatBody)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as err:
        raise ChatRefused(f"the body is not a chat request: {err}") from err
    _require_supported(asked)
    messages = [_message(message) for message in asked.messages]
    if not messages or messages[-1]["role"] == "assistant":
        raise ChatRefused("messages: the last one must be one that the model can answer")
    return ChatRequest(
        model=asked.model,
        messages=messages,
        tools=asked.tools or [],
        stop=(asked.stop,) if isinstance(asked.stop, str) else tuple(asked.stop or ()),
        streams=bool(asked.stream),
        wants_usage=asked.stream_options is not None and asked.stream_options.include_usage,
        left_aside=asked.left_aside(forbids_calls=bool(asked.tools) and asked.tool_choice == "none"),
        max_tokens=asked.limit,
        wants_ids=bool(asked.return_token_ids),
    )


def _require_supported(asked: _ChatBody) -> None:
    kind = asked.response_format.get("type") if isinstance(asked.response_format, dict) else asked.response_format
    if kind not in (None, "text"):
        raise ChatRefused(
            f"response_format: {str(kind)[:40]!r} would change what the policy samples; only text is served"
        )
    if asked.tool_choice not in (None, "auto", "none"):
        raise ChatRefused("tool_choice: the policy decides whether it calls a tool; only auto and none are served")
    if asked.logprobs:
        raise ChatRefused("logprobs: are not in the replies of a session")
    if not all(map(has_named_function, asked.tools or ())):
        raise ChatRefused("tools: a function without a name")


def _message(message: dict[str, Any]) -> Message:
    """Return a message with the fields that count, its content as text."""
    role = message.get("role")
    role = "system" if role == "developer" else role  # some templates have no other
    if role not in ("system", "user", "assistant", "tool"):
        raise ChatRefused(f"messages: the role {str(role)[:40]!r} is not served")
    kept: Message = {"role": role, "content": text_of(message.get("content"))}
    if role == "tool":
        if not isinstance(message.get("tool_call_id"), str):
            raise ChatRefused("messages: a result of a tool has no tool_call_id")
        kept["tool_call_id"] = message["tool_call_id"]
    if role == "assistant" and (calls := message.get("tool_calls")):
        kept["tool_calls"] = [_call(call) for call in (calls if isinstance(calls, list) else [calls])]
    if role == "assistant" and isinstance(message.get("reasoning_content"), str):
        kept["reasoning_content"] = message["reasoning_content"]
    return kept


def text_of(content: Any, *, of: str = "messages") -> str:
    """Return the text of a string or of parts of text; ChatRefused if there is anything else."""
    if content is None or isinstance(content, str):
        return content or ""
    parts = content if isinstance(content, list) else [content]
    for part in parts:
        if not isinstance(part, dict) or part.get("type") != "text" or not isinstance(part.get("text"), str):
            kind = part.get("type") if isinstance(part, dict) else type(part).__name__
            raise ChatRefused(f"{of}: content of type {str(kind)[:40]!r} is not served, only text")
    return "".join(part["text"] for part in parts)


def _call(call: Any) -> dict[str, Any]:
    function = call.get("function") if isinstance(call, dict) else None
    if not isinstance(function, dict) or not isinstance(function.get("name"), str):
        raise ChatRefused("messages: a call without the name of its function")
    arguments = function.get("arguments", {})
    if not isinstance(arguments, str | dict):
        raise ChatRefused(f"messages: the arguments of {function['name'][:40]!r} are neither text nor an object")
    return {
        "id": str(call.get("id", "")),
        "type": "function",
        "function": {"name": function["name"], "arguments": arguments},
    }


@dataclass(frozen=True)
class Said:
    """A turn as the agent was told, and as the episode has it."""

    returned: Message
    recorded: Message
    stop: tuple[str, ...]  # of its request
    before: bytes  # digest of the conversation in its request


def said(turn: Turn, *, stop: Sequence[str], after: Sequence[Message]) -> Said:
    """Return what a turn becomes in a conversation. The text that is returned ends before a string of `stop`."""
    recorded = assistant_message(turn)
    text = recorded["content"]
    cuts = [at for word in stop if word and (at := text.find(word)) >= 0]
    returned = {**recorded, "content": text[: min(cuts)] if cuts else text}
    return Said(returned, recorded, tuple(stop), _digests(after)[-1])


def as_recorded(messages: Sequence[Message], turns: Sequence[Said]) -> list[Message]:
    """Return a conversation in which what the agent repeats of earlier turns is as the episode has it.

    An agent may drop reasoning, strip spaces, end the text with a string at which the turn was to stop, or write the
    arguments of a call in another way. Of turns that it was told alike, the one is meant that followed the same
    messages, or else the last.
    """
    known: dict[tuple[Any, ...], dict[bytes, Message]] = defaultdict(dict)
    for turn in turns:
        for text in (turn.returned["content"], turn.returned["content"].strip()):
            for end in (*turn.stop, ""):
                found = known[_loose({**turn.returned, "content": text + end})]
                found[b""] = found[turn.before] = turn.recorded
    told = []
    for message, before in zip(messages, _digests(messages), strict=False):
        found = known.get(_loose(message), {}) if message["role"] == "assistant" else {}
        told.append(found.get(before, found.get(b"", message)))
    return told


def _digests(messages: Sequence[Message]) -> list[bytes]:
    """Return the digests of the first n messages, for n from 0 on."""
    digest = hashlib.blake2b(digest_size=16)
    found = [digest.digest()]
    for message in messages:
        digest.update(msgspec.json.encode(message))
        found.append(digest.digest())
    return found


def _loose(message: Message) -> tuple[Any, ...]:
    calls = [call["function"] for call in message.get("tool_calls") or ()]
    return message["content"].strip(), *((call["name"], arguments_key(call["arguments"])) for call in calls)


@dataclass(frozen=True)
class Reply:
    """The reply to a request, made of a turn."""

    number: str  # of the session and of the turn in it
    model: str
    turn: Turn
    message: Message
    has_ids: bool = False

    @property
    def finish_reason(self) -> Literal["stop", "length", "tool_calls"]:
        return "tool_calls" if self.message.get("tool_calls") else self.turn.finish

    def whole(self) -> bytes:
        """Return the body of a reply in one piece."""
        message = {**self._message(), "role": "assistant", "refusal": None}
        choice: dict[str, Any] = {"index": 0, "message": message, "logprobs": None}
        choice["finish_reason"] = self.finish_reason
        if self.has_ids:
            choice["token_ids"] = list(self.turn.token_ids)
        return msgspec.json.encode(self._head("chat.completion") | {"choices": [choice], "usage": self._usage()})

    def events(self, *, wants_usage: bool) -> Iterator[bytes]:
        """Yield the events of a stream, all of them at once: the turn is complete when its tokens are on the disk."""
        head = self._head("chat.completion.chunk") | ({"usage": None} if wants_usage else {})
        message = self._message()
        calls = [{"index": index, **call} for index, call in enumerate(message.pop("tool_calls", ()))]
        deltas = [{"role": "assistant", "content": ""}, *({name: text} for name, text in message.items() if text)]
        deltas += [{"tool_calls": calls}] if calls else []
        for delta in deltas:
            yield _event(head | {"choices": [{"index": 0, "delta": delta, "finish_reason": None}]})
        end: dict[str, Any] = {"index": 0, "delta": {}, "finish_reason": self.finish_reason}
        if self.has_ids:
            end["token_ids"] = list(self.turn.token_ids)
        yield _event(head | {"choices": [end]})
        if wants_usage:
            yield _event(head | {"choices": [], "usage": self._usage()})
        yield b"data: [DONE]\n\n"

    def _head(self, kind: str) -> dict[str, Any]:
        return {"id": f"chatcmpl-{self.number}", "object": kind, "created": 0, "model": self.model}

    def _message(self) -> dict[str, Any]:
        """Return the message without its role; arguments of calls are text in this API."""
        is_a_call_alone = bool(self.message.get("tool_calls")) and not self.message["content"]
        found: dict[str, Any] = {"content": None if is_a_call_alone else self.message["content"]}
        if self.message.get("reasoning_content"):
            found["reasoning_content"] = self.message["reasoning_content"]
        if calls := self.message.get("tool_calls"):
            found["tool_calls"] = [
                {**call, "function": {**call["function"], "arguments": json.dumps(call["function"]["arguments"])}}
                for call in calls
            ]
        return found

    def _usage(self) -> dict[str, int]:
        prompt, sampled = self.turn.num_prompt_tokens, self.turn.num_tokens
        return {"prompt_tokens": prompt, "completion_tokens": sampled, "total_tokens": prompt + sampled}


def _event(content: dict[str, Any]) -> bytes:
    return b"data: " + msgspec.json.encode(content) + b"\n\n"
