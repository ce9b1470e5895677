"""One simulated inference server: continuous batching with a KV limit, in closed form between changes of the batch.

All running requests gain one token per decoding step, and a step takes `DecodeTime.step_s` of the batch. Between two
changes of the batch the time of n steps is a quadratic in n, so nothing is computed per token: a request that joins at
step j with a tokens has a + (steps - j) of them at any later step. A prefill halts the batch (as SGLang's does without
chunk mixing); siblings that are resident share the prompt's KV. When the next step does not fit, the youngest request
is evicted; it waits, first in line, and is prefilled again with all its tokens.

Invariant: `used` is the KV of running requests, prompts shared by siblings counted once, and never above `kv_tokens`
while more than one request runs. Called by world.py and the paced engine, which ask `next_at()` when something will
happen by itself.
"""

from __future__ import annotations

import math
from collections import deque
from dataclasses import dataclass
from heapq import heappop, heappush
from typing import Final

import msgspec

from dora.core.commands import Generate
from dora.core.decode_time import DecodeTime
from dora.core.events import Span
from dora.core.ids import InstanceId, TrajectoryId

#: A request is taken in only where every running one, itself included, can grow by so many tokens.
HEADROOM_TOKENS: Final = 64


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
    offset: int  #: tokens it has = offset + steps of the server, while it runs; tokens it has, while it waits
    brings_kv: bool = False  #: it was stopped elsewhere and its KV comes with it
    age: int = 0  #: grows with every request taken in
    running: bool = False
    spans: tuple[Span, ...] = ()  #: ended by weights that reached it


@dataclass(slots=True)
class Use:
    """Where an instance's time went, in seconds; what is left of the clock it was empty, pushed or down."""

    full_s: float = 0.0  #: decoding, as much as a full batch would have taken for the same tokens
    thin_new_s: float = 0.0  #: decoding beyond that, because the batch was small, under the newest version
    thin_old_s: float = 0.0  #: the same under an older one
    prefill_s: float = 0.0
    again_s: float = 0.0  #: prefill or transfer of tokens that had been in KV before: evictions and migrations
    push_s: float = 0.0
    down_s: float = 0.0

    def plus(self, other: Use, *, sign: int = 1) -> Use:
        """The sum, or (-1) the difference."""
        return Use(*(getattr(self, n) + sign * getattr(other, n) for n in Use.__slots__))


class Instance:
    """One server of the fleet."""

    __slots__ = (
        "_ages",
        "_ahead",
        "_ending",
        "_sharing",
        "anchor",
        "context",
        "evictions",
        "id",
        "incarnation",
        "is_newest",
        "num_running",
        "requests",
        "server",
        "slowness",
        "steps",
        "up",
        "use",
        "used",
        "version",
        "waiting",
        "wake",
    )

    def __init__(self, id: InstanceId, server: Server, *, slowness: float = 1.0) -> None:
        self.id = id
        self.server = server
        self.slowness = slowness  #: factor on all its times
        self.incarnation = 0
        self.up = False
        self.version: int | None = None  #: None: it holds no version of the run, or is being pushed
        self.is_newest = True
        self.requests: dict[TrajectoryId, Request] = {}
        self.waiting: deque[Request] = deque()
        self.num_running = 0  #: requests in the batch: all but those that wait
        self.steps = 0  #: decoding steps done
        self.anchor = 0.0  #: when the last of them was done; in the future during a prefill
        self.context = 0  #: tokens that a step reads: prompts and answers of all running requests
        self.used = 0
        self.evictions = 0
        self.use = Use()
        self.wake = 0  #: number of the latest plan: a wake-up of an older one is void
        self._ages = 0
        self._ahead: int | None = None  # steps until an answer ends or the KV is full; None: the batch has changed
        self._ending: list[tuple[int, TrajectoryId, int]] = []  # heap of (last step, id, age)
        self._sharing: dict[int, int] = {}  # group -> running siblings

    def tokens(self, request: Request) -> int:
        """Tokens of its answer so far."""
        return request.offset + self.steps if request.running else request.offset

    def counts(self) -> dict[TrajectoryId, int]:
        """Tokens of all its answers so far."""
        steps = self.steps
        return {id: r.offset + steps if r.running else r.offset for id, r in self.requests.items()}

    # -- time -----------------------------------------------------------------------------------------------------

    def next_at(self) -> float:
        """When the next answer ends or the KV is full; infinity if nothing runs."""
        if not self.num_running:
            return math.inf
        return self.anchor + self._duration(self._steps_ahead())

    def after(self, steps: int) -> float:
        """When so many more steps are done, if the batch stays as it is; infinity if nothing runs."""
        return self.anchor + self._duration(steps) if self.num_running else math.inf

    def reach(self, now: float) -> None:
        """Do all steps that are over at `now`."""
        if not self.num_running:
            self.anchor = max(self.anchor, now)
        elif now > self.anchor:
            ahead = self._steps_ahead()
            taken = self._duration(ahead)
            if self.anchor + taken > now:
                ahead = min(ahead, self._steps_in(now))
                taken = self._duration(ahead)
            if ahead:
                self._go(ahead, taken)

    def _steps_ahead(self) -> int:
        """Steps until an answer ends or the KV is full."""
        if self._ahead is None:
            self._drop_stale()
            self._ahead = self._ending[0][0] - self.steps
            running = self.num_running
            if running > 1:
                self._ahead = min(self._ahead, (self.server.kv_tokens - self.used) // running)
        return self._ahead

    def _drop_stale(self) -> None:
        heap = self._ending
        while True:
            _, id, age = heap[0]
            request = self.requests.get(id)
            if request is not None and request.running and request.age == age:
                return
            heappop(heap)

    def _duration(self, steps: int) -> float:
        """Seconds of the next `steps`, with the batch as it is."""
        decode, running = self.server.decode, self.num_running
        first = decode.base_s + decode.per_request_s * running + decode.per_token_s * self.context
        return self.slowness * steps * (first + decode.per_token_s * running * (steps - 1) / 2)

    def _steps_in(self, now: float) -> int:
        """Whole steps between the anchor and `now`: the inverse of `_duration`."""
        decode, running = self.server.decode, self.num_running
        span = (now - self.anchor) / self.slowness
        slope = decode.per_token_s * running / 2
        first = decode.step_s(num_requests=running, num_tokens=self.context) - slope
        return (
            int(span / first) if slope == 0 else int(2 * span / (first + math.sqrt(first * first + 4 * slope * span)))
        )

    def _go(self, steps: int, taken: float) -> None:
        """Do the next `steps`, which take so many seconds."""
        running, server = self.num_running, self.server
        self.anchor += taken
        self.steps += steps
        if self._ahead is not None:
            self._ahead -= steps
        middle = self.used + running * steps / 2
        fill = min(1.0, max(running / server.slots, middle / server.kv_tokens))
        thin = self.slowness * server.decode.base_s * steps * (1 - fill)
        self.use.full_s += taken - thin
        if self.is_newest:
            self.use.thin_new_s += thin
        else:
            self.use.thin_old_s += thin
        self.context += running * steps
        self.used += running * steps

    # -- requests ---------------------------------------------------------------------------------------------------

    def take(self, request: Request) -> None:
        """A request arrives; call `reach` first and `settle` afterwards."""
        self.requests[request.order.trajectory] = request
        self.waiting.append(request)

    def settle(self) -> list[Request]:
        """At a boundary between steps: answers that have ended leave, the KV is made to fit, who waits is let in."""
        ended = self.end()
        while self.num_running > 1 and self.used + self.num_running > self.server.kv_tokens:
            self._evict()
        while self.waiting and self._fits(self.waiting[0]):
            self._start(self.waiting.popleft())
        return ended

    def end(self) -> list[Request]:
        """At a boundary between steps: answers that have ended leave; call `settle` before time goes on."""
        ended = []
        while self._ending and self.num_running:
            self._drop_stale()
            last, id, _ = self._ending[0]
            if last > self.steps:
                break
            ended.append(self.requests[id])
            self.remove(id)
        return ended

    def pause(self, until: float, *, retract: bool) -> None:
        """No step before then; with `retract` all that runs is prefilled again. `reach` first, `settle` afterwards."""
        if retract:
            for request in sorted((r for r in self.requests.values() if r.running), key=lambda r: -r.age):
                self._leave_batch(request)
                self.waiting.appendleft(request)
        self.anchor = max(self.anchor, until)

    def update(self, version: int) -> None:
        """The weights change, and what runs goes on."""
        for request in self.requests.values():
            request.spans = self.spans(request)
        self.version = version

    def spans(self, request: Request) -> tuple[Span, ...]:
        """Which versions its tokens came from, in this request."""
        assert self.version is not None
        start = request.spans[-1][2] if request.spans else request.order.num_tokens
        end = self.tokens(request)
        return (*request.spans, (self.version, start, end)) if end > start else request.spans

    def remove(self, id: TrajectoryId) -> Request:
        """A request ends or is stopped; its `offset` is its tokens from now on."""
        request = self.requests[id]
        if request.running:
            self._leave_batch(request)
        else:
            self.waiting.remove(request)
        del self.requests[id]
        if not self.num_running:
            self._ending.clear()
        return request

    def clear(self) -> dict[TrajectoryId, int]:
        """The server dies: tokens of what ran there."""
        counts = self.counts()
        self.requests.clear()
        self.waiting.clear()
        self._ending.clear()
        self._sharing.clear()
        self.context = self.used = self.num_running = 0
        self._ahead = None
        return counts

    def _need(self, request: Request) -> int:
        """KV tokens that it brings."""
        return request.offset + (0 if request.group in self._sharing else request.prompt_tokens)

    def _fits(self, request: Request) -> bool:
        running = self.num_running
        if not running:
            return True
        needed = self._need(request) + HEADROOM_TOKENS * (running + 1)
        return running < self.server.slots and self.used + needed <= self.server.kv_tokens

    def _start(self, request: Request) -> None:
        """Prefill what is not in KV, or wait until it has come, then decode from the next step on."""
        shared = request.group in self._sharing
        need = self._need(request)
        if request.brings_kv:
            taken = self.server.copy_s(need)
            request.brings_kv = False
        else:
            taken = self.slowness * self.server.prefill_s(need, cached=request.prompt_tokens if shared else 0)
        self.anchor += taken
        if request.offset:
            self.use.again_s += taken
        else:
            self.use.prefill_s += taken
        self.used += need
        self.context += request.prompt_tokens + request.offset
        self._sharing[request.group] = self._sharing.get(request.group, 0) + 1
        self._ages += 1
        request.age = self._ages
        request.running = True
        self.num_running += 1
        self._ahead = None
        heappush(self._ending, (self.steps + request.total - request.offset, request.order.trajectory, request.age))
        request.offset -= self.steps

    def _leave_batch(self, request: Request) -> None:
        request.offset += self.steps
        request.running = False
        self.num_running -= 1
        self._ahead = None
        self.context -= request.prompt_tokens + request.offset
        self.used -= request.offset
        left = self._sharing[request.group] - 1
        if left:
            self._sharing[request.group] = left
        else:
            del self._sharing[request.group]
            self.used -= request.prompt_tokens

    def _evict(self) -> None:
        """The youngest waits, first in line."""
        youngest = max((r for r in self.requests.values() if r.running), key=lambda r: r.age)
        self._leave_batch(youngest)
        self.waiting.appendleft(youngest)
        self.evictions += 1
