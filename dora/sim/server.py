"""Data of a simulated server: its capabilities, a request, and an account of its time."""

from __future__ import annotations

from dataclasses import dataclass, replace

import msgspec

from dora.core.commands import Generate
from dora.core.decode_time import DecodeTime
from dora.core.events import Span
from dora.sim.tools import Call


class SpeculationModel(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Speculative decoding: a step may give an answer several tokens, and takes longer.

    Of the tokens that are drafted for an answer, each is kept with probability `acceptance` if the one before it is, as
    in arXiv 2211.17192 (section 3); one more is sampled behind them. Every answer gains the expected number.
    """

    draft_tokens: int = 4
    acceptance: float = 0.7
    draft_s: float = 0.0  #: of each step, to make drafts
    per_draft_s: float = 0.0  #: for each drafted token of each request, to compute it

    @property
    def tokens(self) -> float:
        """Return the tokens that an answer gains in a step."""
        return sum(self.acceptance**number for number in range(self.draft_tokens + 1))

    def longer_s(self, num_requests: int) -> float:
        """Return by how much a step is longer."""
        return self.draft_s + self.per_draft_s * self.draft_tokens * num_requests


class SimulatedServer(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The capabilities of every instance of a fleet."""

    slots: int = 64
    kv_tokens: int = 65_536
    decode: DecodeTime = DecodeTime()
    prefill_s_per_token: float = 1e-5
    prefill_s_per_token2: float = 0.0  #: attention: multiplied by the tokens and by the context that they attend to
    kv_bytes_per_token: int = 0
    kv_bytes_s: float = 0.0  #: bytes/s for the transfer of a moved answer's KV; 0: its tokens are prefilled again
    speculation: SpeculationModel | None = None

    def drafting(self, num_requests: int) -> tuple[float, float]:
        """Return by how many seconds a step of so many requests is longer for drafts, and the tokens that each gains in
        it: (0, 1) if drafts do not pay even without any context, which only makes a step longer."""
        drafts = self.speculation
        if drafts is None:
            return 0.0, 1.0
        step_s = self.decode.step_s(num_requests=num_requests, num_tokens=0)
        longer_s = drafts.longer_s(num_requests)
        return (longer_s, drafts.tokens) if step_s + longer_s < step_s * drafts.tokens else (0.0, 1.0)

    def prefill_s(self, num_tokens: int, *, cached: int = 0) -> float:
        """Return the seconds to read `num_tokens` after `cached` tokens that are already in KV."""
        return num_tokens * (self.prefill_s_per_token + self.prefill_s_per_token2 * (cached + num_tokens / 2))

    def copy_s(self, num_tokens: int) -> float:
        """Return the seconds to transfer the KV of `num_tokens` from another server."""
        return num_tokens * self.kv_bytes_per_token / self.kv_bytes_s


@dataclass(slots=True)
class Request:
    """One request on the server."""

    order: Generate
    group: int
    prompt_tokens: int
    total: int  #: tokens of the whole answer
    offset: int  #: number of tokens, minus the server's `steps` while the request runs
    brings_kv: bool = False  #: it was stopped elsewhere, and its KV is transferred
    calls: tuple[Call, ...] = ()  #: the call under way and those still to be made
    unread: int = 0  #: tokens of a result, or of an own prompt, that are still to be read
    age: int = 0  #: larger for a request that was taken later
    running: bool = False
    ran_s: float = 0.0  #: total time in batches; while it runs, minus the time when it joined the batch
    spans: tuple[Span, ...] = ()  #: closed by weight updates during the request

    @property
    def stops_at(self) -> int:
        """Its number of tokens when it ends or makes its next call."""
        return self.calls[0].at if self.calls else self.total

    def receive_result(self) -> None:
        """Take the result of the call under way, which is read later."""
        self.unread = self.calls[0].num_tokens
        self.offset += self.unread
        self.calls = self.calls[1:]

    def resent(self, order: Generate) -> Request:
        """Return the same answer in another request, from all its tokens."""
        return replace(self, order=order, age=0, running=False, spans=())


@dataclass(slots=True)
class Use:
    """An account of an instance's time until its anchor, in seconds."""

    full_s: float = 0.0  #: decoding: what a full batch would have taken for the same tokens
    thin_new_s: float = 0.0  #: additional decoding time because the batch was small, under the newest version
    thin_old_s: float = 0.0  #: the same under older versions
    prefill_s: float = 0.0
    again_s: float = 0.0  #: prefill or transfer of tokens that were in KV before: evictions and migrations
    push_s: float = 0.0
    down_s: float = 0.0
    empty_s: float = 0.0  #: nothing ran, or training had its device

    def plus(self, other: Use, *, sign: int = 1) -> Use:
        """Return the sum; with sign = -1 the difference."""
        return Use(*(getattr(self, n) + sign * getattr(other, n) for n in Use.__slots__))
