"""What a simulated server can do, a request on it, and where its time went. Data only; instance.py is the machine.

Called by instance.py, world.py, measure.py, workload.py and the paced engine.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import msgspec

from dora.core.commands import Generate
from dora.core.decode_time import DecodeTime
from dora.core.events import Span
from dora.sim.tools import Call


class Server(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What every instance of a fleet can do."""

    slots: int = 64
    kv_tokens: int = 65_536
    decode: DecodeTime = DecodeTime()
    prefill_s_per_token: float = 1e-5
    prefill_s_per_token2: float = 0.0  #: attention: times tokens times the context that they attend to
    kv_bytes_per_token: int = 0
    kv_bytes_s: float = 0.0  #: rate at which an answer that moves brings its KV; 0: it is read again

    def prefill_s(self, num_tokens: int, *, cached: int = 0) -> float:
        """Seconds to read `num_tokens` after `cached` ones that are in KV already."""
        return num_tokens * (self.prefill_s_per_token + self.prefill_s_per_token2 * (cached + num_tokens / 2))

    def copy_s(self, num_tokens: int) -> float:
        """Seconds until so many tokens of KV have come from another server."""
        return num_tokens * self.kv_bytes_per_token / self.kv_bytes_s


@dataclass(slots=True)
class Request:
    """One request on the server."""

    order: Generate
    group: int
    prompt_tokens: int
    total: int  #: tokens of the whole answer
    offset: int  #: tokens it has = offset + steps of the server, while it runs; tokens it has, while it does not
    brings_kv: bool = False  #: it was stopped elsewhere and its KV comes with it
    calls: tuple[Call, ...] = ()  #: of tools: the one under way and those still to be made
    back_at: float | None = None  #: when the result of the call under way is there; None: no call is
    unread: int = 0  #: of the tokens it has, those of a result that is still to be read
    age: int = 0  #: grows with every request taken in
    running: bool = False
    spans: tuple[Span, ...] = ()  #: ended by weights that reached it

    @property
    def stops_at(self) -> int:
        """Tokens it has when it ends or makes its next call."""
        return self.calls[0].at if self.calls else self.total

    def hear(self) -> None:
        """The result of its call is there, to be read."""
        self.unread = self.calls[0].num_tokens
        self.offset += self.unread
        self.calls, self.back_at = self.calls[1:], None

    def resent(self, order: Generate) -> Request:
        """The same answer from all its tokens in another request; a call goes on meanwhile."""
        return replace(self, order=order, age=0, running=False, spans=())


@dataclass(slots=True)
class Use:
    """Where an instance's time went, in seconds: together all the time until its anchor."""

    full_s: float = 0.0  #: decoding, as much as a full batch would have taken for the same tokens
    thin_new_s: float = 0.0  #: decoding beyond that, because the batch was small, under the newest version
    thin_old_s: float = 0.0  #: the same under an older one
    prefill_s: float = 0.0
    again_s: float = 0.0  #: prefill or transfer of tokens that had been in KV before: evictions and migrations
    push_s: float = 0.0
    down_s: float = 0.0
    empty_s: float = 0.0  #: nothing ran, or another had its device

    def plus(self, other: Use, *, sign: int = 1) -> Use:
        """The sum, or (-1) the difference."""
        return Use(*(getattr(self, n) + sign * getattr(other, n) for n in Use.__slots__))
