"""What DORA asks of an inference engine, in DORA's words: all that the rest of the code knows of one.

An engine's own words (routes, fields, flags, what a push is made of) stay in its folder. Invariant: an answer's tokens
are handed on exactly once and in order, and what was handed on is good, however the request ends. Failures are those of
`errors.py`. docs/ENGINES.md says what someone writes for an engine of another kind.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, Protocol

from dora.core.strategies import Pause

#: `stop`: an end token; `length`: the budget is used up; `abort`: the request was stopped on demand.
FinishReason = Literal["stop", "length", "abort"]

#: Takes the ids and log-probs of an answer's new tokens.
OnTokens = Callable[[Sequence[int], Sequence[float]], None]


@dataclass(frozen=True, slots=True)
class GenerateRequest:
    """One attempt at one trajectory. Token ids and log-probs are wanted back, never text."""

    id: str  # unlike any other on the server; see names.py
    tokens: Sequence[int]  # prompt and the tokens of earlier attempts
    max_new_tokens: int  # what is left of the trajectory's budget
    temperature: float  # 0 is greedy
    stop_tokens: Sequence[int]
    seed: int | None  # of this attempt and position; an engine may ignore it
    label: str  # of the version: KV cached under one label must not be found under another
    top_p: float = 1.0
    top_k: int = -1  # off


@dataclass(frozen=True, slots=True)
class GenerateResult:
    """How one request ended. Its tokens were handed on before."""

    finish_reason: FinishReason
    #: (version label, start, end): half-open, contiguous from 0 over this request's own output tokens; a resumed
    #: request knows nothing of the tokens before it. Empty: the server told no version at all.
    spans: tuple[tuple[str, int, int], ...]
    num_tokens: int  # output tokens of this request, a matched stop token included
    cached_tokens: int  # prompt tokens found in the prefix cache
    prompt_tokens: int  # 0 where the server leaves it out (aborted while it waited)
    num_retractions: int
    #: The spans are the server's. False: one span made of the only label that it tells, that of the weights at the end
    #: of the request. It is right for all tokens if no weights change under a request, as when they are pushed to
    #: empty servers only.
    has_spans: bool = True

    @property
    def was_stopped(self) -> bool:
        """It ended because `InferenceEngine.stop` asked for that; it can be resumed."""
        return self.finish_reason == "abort"


@dataclass(frozen=True, slots=True)
class Capabilities:
    """What a server is and can hold, asked once when it joins a run."""

    release: str  # as the server says; "unknown" if it does not
    slots: int  # requests decoded at the same time
    kv_tokens: int  # KV room
    context_tokens: int | None  # longest prompt + answer that it takes, however cut; None: the server does not say
    label: str  # of the weights it holds now
    model_path: str  # the folder it was started with, as it sees it; "" if it does not say

    @property
    def longest_request(self) -> int:
        """Tokens of the longest request that fits, prompt and answer together."""
        return min(self.context_tokens or self.kv_tokens, self.kv_tokens)


@dataclass(frozen=True, slots=True)
class KvUse:
    """A server's KV room in tokens, as it counts them; cached prefixes are not in use."""

    used_tokens: int
    kv_tokens: int


class InferenceEngine(Protocol):
    """All servers of a run, each named by its url. Every call but `generate` has a deadline of its own.

    Failures: `ServerGone`, `RequestRefused` and `ProtocolError`, all of them `RemoteError`s that begin with the url.
    """

    async def generate(self, url: str, request: GenerateRequest, on_tokens: OnTokens) -> GenerateResult:
        """Run one request to its end; `on_tokens(ids, logprobs)` is called as tokens arrive. No deadline: a paused
        server is silent but alive. Cancelling it drops the request."""

    async def stop(self, url: str, request_id: str) -> None:
        """Ask for the end of a request; its `generate` then returns what there is. An unknown id is no error."""

    async def is_alive(self, url: str, *, timeout_s: float) -> bool:
        """Whether the server answers its health check in time; not to be asked while it is paused."""

    async def examine(self, url: str, *, timeout_s: float) -> Capabilities:
        """What the server can do; ConfigError if it cannot prove which weights gave a token. Changes nothing."""

    async def label(self, url: str) -> str:
        """The label of the weights that the server says it holds. It answers while it is paused, too."""

    async def kv_use(self, url: str) -> KvUse: ...

    async def resume(self, url: str) -> None:
        """Go on if it is paused: a push that failed may have left it so."""

    async def push(self, url: str, *, folder: Path, label: str, timeout_s: float, live: Pause | None) -> None:
        """Give the server the weights in `folder`. It holds no request, unless `live`, where they go on under them.

        Returns when the server has confirmed `label` and serves again; RemoteError means that its weights are in doubt.
        """

    def sending(
        self, argv: Sequence[str], *, env: Mapping[str, str], log: Path, dtype: str, on_gpu: bool
    ) -> AbstractAsyncContextManager[InferenceEngine]:
        """The same servers, whose pushes go through processes started with `argv` instead of through folders; these
        end with the context. `dtype` is that of the weights; `on_gpu`: the processes have one."""

    def set_key(self, url: str, key: str) -> None:
        """From now on the server at `url` demands this key; no other server may see it."""
