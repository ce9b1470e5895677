"""Calls of a session with token ids in place of messages: /v1/completions of OpenAI, and the generate call of vLLM.
Clients use them that render conversations by themselves.

Invariant: a reply has the ids that were sampled, and the log-prob of each, as the trainer gets them.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Annotated, Any, Literal

import msgspec

from dora.environments.api import Turn
from dora.environments.chat import ChatRefused, SamplingFields

_Ids = Annotated[list[Annotated[int, msgspec.Meta(ge=0, lt=2**31)]], msgspec.Meta(min_length=1)]


class _Generate(msgspec.Struct):
    token_ids: _Ids
    model: str = ""
    sampling_params: SamplingFields = msgspec.field(default_factory=SamplingFields)


class _Continue(SamplingFields, kw_only=True):
    prompt: Any = None
    model: str = ""
    stream: bool | None = None
    echo: bool | None = None
    best_of: int | None = None


@dataclass(frozen=True)
class TokenRequest:
    """A conversation, as token ids, that an agent wants to have continued."""

    model: str
    tokens: tuple[int, ...]
    kind: Literal["completions", "generate"]
    left_aside: tuple[str, ...]  # settings without effect
    streams: bool = False
    wants_usage: bool = False
    stop: tuple[str, ...] = ()
    max_tokens: int = 0  # of the turn; 0: any number
    tools: tuple[()] = ()
    messages: tuple[()] = ()


def read_continue(body: bytes) -> TokenRequest:
    """Return what a request of /v1/completions asks for; ChatRefused if that is not supported, as a prompt of text."""
    asked: _Continue = _decoded(body, _Continue)
    try:
        prompt = msgspec.convert(asked.prompt, _Ids)
    except msgspec.ValidationError as err:
        raise ChatRefused(f"prompt: must be the token ids of one conversation ({err})") from err
    for name in ("stream", "echo"):
        if getattr(asked, name):
            raise ChatRefused(f"{name}: is served by /v1/chat/completions only, or not at all")
    if asked.best_of not in (None, 1):
        raise ChatRefused("best_of: a session samples one answer at a time; repeat the request instead")
    return TokenRequest(asked.model, tuple(prompt), "completions", asked.left_aside(), max_tokens=asked.limit)


def read_generate(body: bytes) -> TokenRequest:
    """Return what a request of /inference/v1/generate asks for; ChatRefused if that is not supported."""
    asked: _Generate = _decoded(body, _Generate)
    sampling = asked.sampling_params
    tokens = tuple(asked.token_ids)
    return TokenRequest(asked.model, tokens, "generate", sampling.left_aside(), max_tokens=sampling.limit)


def _decoded(body: bytes, kind: Any) -> Any:
    try:
        return msgspec.json.decode(body, type=kind)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as err:
        raise ChatRefused(f"the body is not such a request: {err}") from err


@dataclass(frozen=True)
class TokenReply:
    """The reply to such a request."""

    number: str  # of the session and of the turn in it
    asked: TokenRequest
    turn: Turn

    def whole(self) -> bytes:
        """Return its body."""
        return msgspec.json.encode(self._generated() if self.asked.kind == "generate" else self._completed())

    def events(self, *, wants_usage: bool) -> Iterator[bytes]:
        """Yield nothing: these replies are not streamed."""
        yield from ()

    def _generated(self) -> dict[str, Any]:
        turn = self.turn
        content = [
            {"token": f"token_id:{id}", "logprob": logprob}
            for id, logprob in zip(turn.token_ids, _finite(turn.logprobs), strict=True)
        ]
        choice = {
            "index": 0,
            "token_ids": list(turn.token_ids),
            "logprobs": {"content": content},
            "finish_reason": turn.finish,
        }
        return {"request_id": self.number, "choices": [choice], "prompt_token_ids": list(self.asked.tokens)}

    def _completed(self) -> dict[str, Any]:
        turn = self.turn
        ids = list(turn.token_ids)
        logprobs = {"tokens": [f"token_id:{id}" for id in ids], "token_logprobs": _finite(turn.logprobs)}
        choice = {
            "index": 0,
            "text": turn.content,
            "token_ids": ids,
            "logprobs": logprobs,
            "finish_reason": turn.finish,
        }
        prompt = len(self.asked.tokens)
        usage = {"prompt_tokens": prompt, "completion_tokens": len(ids), "total_tokens": prompt + len(ids)}
        head = {"id": f"cmpl-{self.number}", "object": "text_completion", "created": 0, "model": self.asked.model}
        return head | {"choices": [choice], "usage": usage}


def _finite(logprobs: tuple[float, ...]) -> list[float]:
    """Return log-probs that JSON can hold; -inf, which a rounded probability of 0 has, becomes the lowest number."""
    return [logprob if math.isfinite(logprob) else -3e38 for logprob in logprobs]
