"""The interface between DORA and an inference engine.

Everything particular to one engine (routes, fields, flags, the stages of a push) stays in its folder. Invariant: the
tokens of an answer are delivered exactly once and in order, and delivered tokens are valid however the request ends.
Failures are those of `errors.py`. docs/ENGINES.md describes how to add an engine.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, Protocol

from dora.adapter_files import Proof
from dora.core.strategies import Pause
from dora.errors import ConfigError
from dora.routing import Chosen, RoutingShape

#: `stop`: an end token; `length`: the token budget is used up; `abort`: `InferenceEngine.stop` was called.
FinishReason = Literal["stop", "length", "abort"]

#: Called with the ids and log-probs of new tokens.
OnTokens = Callable[[Sequence[int], Sequence[float]], None]

#: The stages of a push: make sure that no request runs; replace the weights; check them, and serve again.
PushStage = Literal["drain", "load", "verify"]
OnStage = Callable[[PushStage], None]


def no_stage(stage: PushStage) -> None:
    """Ignore the stages of a push."""


@dataclass(frozen=True, slots=True)
class AskedRouting:
    """The choice of experts is to be returned at the end of a request."""

    shape: RoutingShape
    start: int  # position in `GenerateRequest.tokens` of the first token of interest; at most that of the last one


@dataclass(frozen=True, slots=True)
class GenerateRequest:
    """One attempt at one trajectory. The answer consists of token ids and log-probs, never of text."""

    id: str  # unique on the server; see names.py
    tokens: Sequence[int]  # prompt and tokens of earlier attempts
    max_new_tokens: int  # remaining budget of the trajectory
    temperature: float  # 0 is greedy
    stop_tokens: Sequence[int]
    seed: int | None  # for this attempt and position; an engine may ignore it
    label: str  # label of the version; KV cached under one label must not be reused under another label
    top_p: float = 1.0
    top_k: int = -1  # -1: off
    adapter: str | None = None  # name of an adapter that the server has loaded; None: the server's own weights
    routing: AskedRouting | None = None  # None: the choice of experts is not asked for
    ignore_end: bool = False  # only the token budget ends the answer, not the model's end tokens nor `stop_tokens`


@dataclass(frozen=True, slots=True)
class GenerateResult:
    """How a request ended. Its tokens were delivered before."""

    finish_reason: FinishReason
    #: (version label, start, end): half-open, contiguous from 0, over the output tokens of this request alone (not
    #: those of earlier attempts). If the server reports only one label, at the end of the request, there is one span;
    #: that is correct if weights never change during a request. Empty if the server reports no version.
    spans: tuple[tuple[str, int, int], ...]
    num_tokens: int  # output tokens of this request, including a matched stop token
    cached_tokens: int  # prompt tokens found in the prefix cache
    num_steps: int = 0  # decoding steps, from a server with speculative decoding; 0 from others
    num_rereads: int = 0  # times that the server dropped the KV of the request and read all of its tokens again
    #: If it was asked for: from `AskedRouting.start` to the last but one token of prompt and answer, one row for each.
    #: None also if the request ended before it generated anything, or was stopped while it waited to be continued.
    chosen: Chosen | None = None

    @property
    def was_stopped(self) -> bool:
        """Whether `InferenceEngine.stop` ended the request, so that it can be resumed."""
        return self.finish_reason == "abort"


@dataclass(frozen=True, slots=True)
class Capabilities:
    """What a server is and can hold; queried once, when it joins a run."""

    release: str  # "unknown" if the server does not report it
    slots: int  # maximum number of concurrent requests
    kv_tokens: int  # KV capacity
    context_tokens: int | None  # maximum length of prompt + answer; None if the server does not report it
    label: str  # label of the current weights
    model_path: str  # the folder it was started with, as the server sees it; "" if not reported
    speculation: str = ""  # its algorithm of speculative decoding, which was found to lose nothing; "": none
    slots_doubt: str = ""  # why `slots` may not be what its operator meant, and what to do; "": nothing says so
    not_from_disk: str = ""  # why it cannot be pushed to through a folder; "": it can
    routing_doubt: str = ""  # why it would not return the true choice of experts, and what to do; "": nothing says so

    @property
    def longest_request(self) -> int:
        """Maximum length of prompt + answer in tokens."""
        return min(self.context_tokens or self.kv_tokens, self.kv_tokens)

    def require_meant(self, url: str, *, slots: int | None, transfer: str, routing: bool = False) -> None:
        """Raise ConfigError if a run with these settings would not do with the server what its operator means.

        `slots` and `transfer`: `engine.slots` and `weights.transfer`. `routing`: the choice of experts is replayed.
        """
        if self.slots_doubt and slots is None:
            raise ConfigError(f"{url}: {self.slots_doubt}, or set engine.slots to {self.slots} if that is meant")
        if self.not_from_disk and transfer == "disk":
            raise ConfigError(f"{url}: {self.not_from_disk}; set weights.transfer to distributed")
        if routing and self.routing_doubt:
            raise ConfigError(f"{url}: {self.routing_doubt}, or set objective.router_replay to off")


@dataclass(frozen=True, slots=True)
class AdapterNeeds:
    """The adapters that a server must be able to hold, and to mix in one batch with requests that have none."""

    count: int
    rank: int
    targets: tuple[str, ...]  # the last parts of the names of the modules that they change


@dataclass(frozen=True, slots=True)
class KvUse:
    """KV usage and capacity of a server in tokens, as reported by it; cached prefixes do not count as used."""

    used_tokens: int
    kv_tokens: int


class InferenceEngine(Protocol):
    """All servers of a run, each identified by its URL. Every call except `generate` has a timeout.

    Failures are `ServerGone`, `RequestRefused` and `ProtocolError`: `RemoteError`s whose messages start with the URL.
    """

    async def generate(self, url: str, request: GenerateRequest, on_tokens: OnTokens) -> GenerateResult:
        """Run one request to its end and call `on_tokens(ids, logprobs)` as tokens arrive.

        There is no timeout: a paused server is silent but alive. Cancellation drops the request.
        """

    async def stop(self, url: str, request_id: str) -> None:
        """End a request early; its `generate` then returns normally. An unknown id is not an error."""

    async def is_alive(self, url: str, *, timeout_s: float) -> bool:
        """Return whether the server passes its health check in time. Do not call this while it is paused."""

    async def examine(self, url: str, *, timeout_s: float) -> Capabilities:
        """Return what the server can do, and change nothing. ConfigError if it cannot prove which weights it used."""

    async def label(self, url: str) -> str:
        """Return the label of the weights that the server reports. A paused server answers too."""

    async def kv_use(self, url: str) -> KvUse: ...

    async def resume(self, url: str) -> None:
        """End a pause of the server; a failed push may have left the server paused."""

    async def take_over(self, url: str, *, timeout_s: float) -> str:
        """End what an earlier controller left on the server: its pause, its requests, a push that it began. Return the
        label of the weights, which is `names.UNCONFIRMED` or foreign unless a push has proved them."""

    async def push(
        self,
        url: str,
        *,
        folder: Path,
        label: str,
        timeout_s: float,
        live: Pause | None,
        on_stage: OnStage = no_stage,
    ) -> None:
        """Load the weights in `folder` into a server without requests or, with `live`, among its running requests.

        `on_stage` is called as each stage begins. Returns when the server has confirmed `label` and serves again. After
        a RemoteError, the weights of the server are unknown. From the moment that they may change until they are
        proved, the server's label is `names.UNCONFIRMED`, even if this process ends.
        """

    async def require_adapters(self, url: str, needs: AdapterNeeds) -> None:
        """ConfigError, one line for each problem, unless the server can hold these adapters and keeps them until they
        are unloaded."""

    async def clear_adapters(self, url: str, *, timeout_s: float) -> None:
        """Unload the adapters of earlier controllers; ConfigError if the server has adapters of others."""

    async def load_adapter(self, url: str, *, name: str, folder: Path, proof: Proof, timeout_s: float) -> None:
        """Load the adapter in `folder` beside others, while requests run, and compare what the server computes under
        `name` with `proof`. After a RemoteError the server may have it, and must be made to unload it."""

    async def unload_adapter(self, url: str, *, name: str, proof: Proof | None, timeout_s: float) -> None:
        """Unload an adapter that no request uses; with `proof`, compare first (`AdapterDisproved`: it is another one,
        and stays loaded). An adapter that the server does not have counts as unloaded.
        """

    def sending(
        self, argv: Sequence[str], *, env: Mapping[str, str], log: Path, dtype: str, on_gpu: bool
    ) -> AbstractAsyncContextManager[InferenceEngine]:
        """The same servers, but pushes go through sender processes, started with `argv`, instead of through folders.

        The processes end with the context. `dtype`: data type of the weights. `on_gpu`: the processes have a GPU.
        """

    def set_key(self, url: str, key: str) -> None:
        """Use this API key for the server at `url`, and for no other."""
