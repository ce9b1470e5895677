"""One simulated inference server: continuous batching with a KV limit, in closed form between changes of the batch.

All running requests gain one token per decoding step, and a step takes `DecodeTime.step_s` of the batch; one with
drafts counts as the steps whose tokens it gives, each of which takes its part of the time. Between two changes of the
batch the time of n steps is a quadratic in n, so nothing is computed per token: a request that joins at step j with a
tokens has a + (steps - j) of them at any later step. A prefill halts the batch (as on a server without chunk mixing);
resident siblings share the KV of their prompt. If the next step does not fit, the youngest request is evicted: it goes
to the head of the queue and is prefilled again with all its tokens.

A request whose turn ends with a call has ended, but its KV stays, as in a prefix cache, until another request needs the
space; the KV that was idle longest is dropped first. If the answer continues here, only tokens that are not in its KV
are prefilled.

Invariant: `used` is the KV of running requests and of idle ones, with prompts shared by siblings counted once, and
never above `kv_tokens` while more than one request has KV. `use` accounts for all time until the anchor. `next_at()` is
the time of the next change without further input.
"""

from __future__ import annotations

import math
from collections import Counter, deque
from collections.abc import Sequence
from heapq import heappop, heappush
from typing import Final

from dora.core.events import Span
from dora.core.ids import InstanceId, TrajectoryId
from dora.sim.server import Request, SimulatedServer, Use

#: A request is admitted only if every running one, itself included, can grow by this many tokens.
HEADROOM_TOKENS: Final = 64


class SimulatedInstance:
    """One server of the fleet."""

    __slots__ = (
        "_ages",
        "_ahead",
        "_ending",
        "_idle",
        "_sharing",
        "adapters",
        "anchor",
        "context",
        "evictions",
        "halted",
        "held_s",
        "id",
        "incarnation",
        "is_loading",
        "is_newest",
        "num_running",
        "requests",
        "served",
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

    def __init__(self, id: InstanceId, server: SimulatedServer, *, slowness: float = 1.0) -> None:
        self.id = id
        self.server = server
        self.slowness = slowness  #: factor of all its times
        self.incarnation = 0
        self.up = False
        self.version: int | None = None  #: None if it holds no version of the run, a push is under way, or of adapters
        self.adapters: dict[int, int] = {}  #: attempt of the load -> version, of those that it has or may have
        self.served: set[int] = set()  #: versions of confirmed adapters
        self.is_newest = True
        self.requests: dict[TrajectoryId, Request] = {}
        self.waiting: deque[Request] = deque()
        self.num_running = 0  #: requests in the batch: all but those that are queued
        self.halted = False  #: training has its device
        self.is_loading = False  #: a push is under way
        self.steps = 0  #: number of decoding steps done
        self.anchor = 0.0  #: end of the last one; in the future during a prefill
        self.context = 0  #: tokens that a step reads: prompts and answers of all running requests
        self.used = 0
        self.evictions = 0
        self.use = Use()
        self.held_s = 0.0  #: time that requests held slots, minus the anchor for each that holds one: see `slots_s`
        self.wake = 0  #: number of the latest plan; a wake-up of an older one is ignored
        self._ages = 0
        self._ahead: int | None = None  # steps until an answer ends or the KV is full; None after a change of the batch
        self._ending: list[tuple[int, TrajectoryId, int]] = []  # heap of (last step, id, age)
        self._sharing: dict[int, int] = {}  # group -> siblings with KV
        self._idle: dict[TrajectoryId, Request] = {}  # calling or queued, and with KV; the longest idle first

    def tokens(self, request: Request) -> int:
        """Return the number of tokens of a request's answer so far."""
        return request.offset + self.steps if request.running else request.offset

    def counts(self) -> dict[TrajectoryId, int]:
        """Return the number of tokens of every answer so far."""
        steps = self.steps
        return {id: r.offset + steps if r.running else r.offset for id, r in self.requests.items()}

    def slots_s(self) -> float:
        """Return the slot-seconds of requests until the anchor."""
        return self.held_s + len(self.requests) * self.anchor

    # -- time -----------------------------------------------------------------------------------------------------

    def next_at(self) -> float:
        """Return when the next turn ends or the KV is full; infinity if never."""
        decodes = self.num_running and not self.halted and not self.is_loading
        return self.anchor + self._duration(self._steps_ahead()) if decodes else math.inf

    def after(self, steps: int) -> float:
        """Return the time after `steps` more steps of the same batch; infinity if nothing runs."""
        return self.anchor + self._duration(steps) if self.num_running else math.inf

    def reach(self, now: float) -> None:
        """Run all steps that end by `now`."""
        if not self.num_running or self.halted or self.is_loading:
            self._idle_until(now)
        elif now > self.anchor:
            ahead = self._steps_ahead()
            taken = self._duration(ahead)
            if self.anchor + taken > now:
                ahead = min(ahead, self._steps_in(now))
                taken = self._duration(ahead)
            if ahead:
                self._advance(ahead, taken)

    def _idle_until(self, now: float) -> None:
        if now > self.anchor:
            if self.is_loading:
                self.use.push_s += now - self.anchor
            elif self.up:
                self.use.empty_s += now - self.anchor
            else:
                self.use.down_s += now - self.anchor
            self.anchor = now

    def _steps_ahead(self) -> int:
        """Return the number of steps until a turn ends or the KV is full."""
        if self._ahead is None:
            self._drop_stale()
            self._ahead = self._ending[0][0] - self.steps
            running = self.num_running
            if running > 1 or self._idle:
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
        """Return the seconds of the next `steps`, with the batch as it is."""
        decode, running = self.server.decode, self.num_running
        longer_s, tokens = self.server.drafting(running)
        first = decode.base_s + decode.per_request_s * running + decode.per_token_s * self.context + longer_s
        return self.slowness * steps * (first + decode.per_token_s * running * (steps - 1) / 2) / tokens

    def _steps_in(self, now: float) -> int:
        """Return the number of whole steps between the anchor and `now`: the inverse of `_duration`."""
        decode, running = self.server.decode, self.num_running
        longer_s, tokens = self.server.drafting(running)
        span = (now - self.anchor) / self.slowness * tokens
        slope = decode.per_token_s * running / 2
        first = decode.step_s(num_requests=running, num_tokens=self.context) + longer_s - slope
        return (
            int(span / first) if slope == 0 else int(2 * span / (first + math.sqrt(first * first + 4 * slope * span)))
        )

    def _advance(self, steps: int, taken: float) -> None:
        """Run the next `steps`, which take `taken` seconds."""
        running, server = self.num_running, self.server
        self.anchor += taken
        self.steps += steps
        if self._ahead is not None:
            self._ahead -= steps
        middle = self.used + running * steps / 2
        fill = min(1.0, max(running / server.slots, middle / server.kv_tokens))
        longer_s, tokens = server.drafting(running)
        base_s = server.decode.base_s
        thin = self.slowness * steps * max(0.0, (base_s + longer_s) / tokens - base_s * fill)
        self.use.full_s += taken - thin
        if self.is_newest:
            self.use.thin_new_s += thin
        else:
            self.use.thin_old_s += thin
        self.context += running * steps
        self.used += running * steps

    # -- requests ---------------------------------------------------------------------------------------------------

    def take(self, request: Request) -> None:
        """Take a request. Call `reach` first and `settle` afterwards."""
        self.requests[request.order.trajectory] = request
        if request.order.trajectory in self._idle:
            self._idle[request.order.trajectory] = request
        self.held_s -= self.anchor
        self.waiting.append(request)

    def forget(self, id: TrajectoryId) -> None:
        """Drop the KV of an answer that continues elsewhere. Call `reach` first and `settle` afterwards."""
        if id in self._idle:
            self._free(self._idle[id])

    def settle(self) -> list[Request]:
        """Remove and return requests whose turn has ended, free KV until it fits, and admit queued ones; at a step
        boundary."""
        ended = self.end()
        while self.used + self.num_running > self.server.kv_tokens and (self._idle or self.num_running > 1):
            if self._idle:
                self._free(next(iter(self._idle.values())))
            else:
                self._retract(max((r for r in self.requests.values() if r.running), key=lambda r: r.age))
                self.evictions += 1
        while self.waiting and not self.halted and not self.is_loading and self._fits(self.waiting[0]):
            self._start(self.waiting.popleft())
        return ended

    def end(self) -> list[Request]:
        """Remove and return requests whose turn has ended; at a step boundary. Call `settle` before time advances."""
        ended = []
        while self._ending and self.num_running:
            self._drop_stale()
            last, id, _ = self._ending[0]
            if last > self.steps:
                break
            request = self.requests[id]
            if request.calls:
                del self.requests[id]
                self.held_s += self.anchor
                self._leave_batch(request)
                self._idle[id] = request
            else:
                self.remove(id)
            ended.append(request)
        return ended

    def begin_push(self, *, retract: bool) -> None:
        """Pause for a push. With `retract` all KV is dropped, and running requests are prefilled again once it has
        ended. Call `reach` first and `settle` afterwards."""
        self.is_loading = True
        if retract:
            for request in list(self._idle.values()):
                self._free(request)
            for request in sorted((r for r in self.requests.values() if r.running), key=lambda r: -r.age):
                self._retract(request)

    def end_push(self) -> None:
        """Go on after a push. Call `reach` first and `settle` afterwards."""
        self.is_loading = False

    def update(self, version: int) -> None:
        """Change the weights under the running requests."""
        for request in self.requests.values():
            request.spans = self.spans(request)
        self.version = version

    def change_total(self, request: Request, total: int) -> None:
        """Change the length of an answer. Call `reach` first and `settle` afterwards."""
        request.total = total
        if request.running:
            self._ages += 1
            request.age = self._ages  # its earlier entry is stale now
            self._ahead = None
            heappush(self._ending, (request.stops_at - request.offset, request.order.trajectory, request.age))

    def spans(self, request: Request) -> tuple[Span, ...]:
        """Return the versions of the request's tokens; of one adapter, if it has an adapter."""
        version = request.order.version if self.version is None else self.version
        start = request.spans[-1][2] if request.spans else request.order.num_tokens
        end = self.tokens(request)
        return (*request.spans, (version, start, end)) if end > start else request.spans

    def remove(self, id: TrajectoryId) -> Request:
        """Remove a request, which has ended or is stopped; its `offset` is then its number of tokens."""
        request = self.requests.pop(id)
        self.held_s += self.anchor
        if request.running:
            self._leave_batch(request)
            self._free(request)
        else:
            self.waiting.remove(request)
        if id in self._idle:
            self._free(request)
        if not self.num_running:
            self._ending.clear()
        return request

    def clear(self) -> dict[TrajectoryId, Request]:
        """Remove and return all requests, because the server fails; they keep their tokens and lose their KV."""
        self.held_s = self.slots_s()
        lost, self.requests = self.requests, {}
        for request in lost.values():
            request.offset = self.tokens(request)
            request.ran_s += self.anchor * request.running
            request.running = request.brings_kv = False
        self.waiting.clear()
        self._idle.clear()
        self._ending.clear()
        self._sharing.clear()
        self.context = self.used = self.num_running = 0
        self._ahead = None
        self.halted = self.is_loading = False
        return lost

    def _need(self, request: Request) -> int:
        """Return the additional KV tokens that a request needs."""
        if self._idle and request.order.trajectory in self._idle:
            return request.unread
        return request.offset + (0 if request.group in self._sharing else request.prompt_tokens)

    def _fits(self, request: Request) -> bool:
        """Return whether a request can be admitted; drop idle KV if that makes it fit, or if nothing runs."""
        running, limit = self.num_running, self.server.kv_tokens
        growth = HEADROOM_TOKENS * (running + 1)
        if running >= self.server.slots:
            return False
        if self.used + self._need(request) + growth > limit:
            others = [r for r in self._idle.values() if r is not request]
            if running and self.used + self._need(request) + growth > limit + self._spare(others, group=request.group):
                return False
            while others and self.used + self._need(request) + growth > limit:
                self._free(others.pop(0))
        return True

    def spare(self) -> int:
        """Return the KV tokens that are dropped when space is needed."""
        return self._spare(list(self._idle.values()), group=None) if self._idle else 0

    def _spare(self, idle: Sequence[Request], *, group: int | None) -> int:
        """Return the KV tokens that `idle` requests hold and a request of `group` does not share."""
        siblings = Counter(r.group for r in idle)
        prompts = {r.group: r.prompt_tokens for r in idle if siblings[r.group] == self._sharing[r.group]}
        if group is not None:
            prompts.pop(group, None)
        return sum(r.offset - r.unread for r in idle) + sum(prompts.values())

    def _start(self, request: Request) -> None:
        """Prefill or transfer the tokens that are not in KV, and decode from the next step on."""
        need = self._need(request)
        request.ran_s -= self.anchor
        was_idle = bool(self._idle) and self._idle.pop(request.order.trajectory, None) is not None
        new = request.unread if request.offset > request.unread else need
        old = need - new  # tokens that were in KV before
        known = request.prompt_tokens + request.offset - need
        if old:
            old_s = self.server.copy_s(old) if request.brings_kv else self._prefill_s(old, cached=known)
            self.anchor += old_s
            self.use.again_s += old_s
        if new:
            new_s = self._prefill_s(new, cached=known + old)
            self.anchor += new_s
            self.use.prefill_s += new_s
        self.used += need
        self.context += request.prompt_tokens + request.offset
        if not was_idle:
            self._sharing[request.group] = self._sharing.get(request.group, 0) + 1
        self._ages += 1
        request.age = self._ages
        request.running, request.brings_kv, request.unread = True, False, 0
        self.num_running += 1
        self._ahead = None
        heappush(self._ending, (self.steps + request.stops_at - request.offset, request.order.trajectory, request.age))
        request.offset -= self.steps

    def _prefill_s(self, num_tokens: int, *, cached: int) -> float:
        return self.slowness * self.server.prefill_s(num_tokens, cached=cached)

    def _leave_batch(self, request: Request) -> None:
        """Stop decoding a request; its KV stays."""
        request.offset += self.steps
        request.ran_s += self.anchor
        request.running = False
        self.num_running -= 1
        self._ahead = None
        self.context -= request.prompt_tokens + request.offset

    def _free(self, request: Request) -> None:
        """Drop the KV of a request that is not running."""
        if self._idle:
            self._idle.pop(request.order.trajectory, None)
        self._ahead = None
        self.used -= request.offset - request.unread
        left = self._sharing[request.group] - 1
        if left:
            self._sharing[request.group] = left
        else:
            del self._sharing[request.group]
            self.used -= request.prompt_tokens

    def _retract(self, request: Request) -> None:
        """Move a running request to the head of the queue, and drop its KV."""
        self._leave_batch(request)
        self._free(request)
        self.waiting.appendleft(request)
