"""Sessions: the policy over HTTP for agents that drive themselves, one session for each episode.

A session is known by its URL and its key. Its requests are answered one after the other, in the order in which they
came. A request becomes an observation, and waits for the turn that the policy samples after it. The turn comes when its
tokens are on the disk, so a reply that an agent has is never lost. Until then a stream gets comments, and a reply in
one piece begins with spaces, so that no client gives up.

A process that plays many episodes may use one URL and key for all its sessions, and name each as the model
(`SessionServer.shared`).

Clients repeat a request whose reply they did not get. One that repeats the last request, or one that still waits, gets
the reply of that: if it says so (`x-stainless-retry-count`), or if the connection of the earlier one was closed before
its reply was written in full. Any other is a new turn, and an equal body a new sample. Invariant: a request that is no
such repetition is handed over once, unless its client gives up before, and at most one waits for a turn.
"""

from __future__ import annotations

import asyncio
import json
import math
import secrets
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from typing import Any, Final

from aiohttp import web

from dora.environments.api import Message, Turn
from dora.environments.chat import ChatRefused, ChatRequest, Reply, Said, as_recorded, read_request, said
from dora.environments.message_calls import MessageReply, read_messages
from dora.environments.response_calls import ResponseReply, read_responses
from dora.environments.token_calls import TokenReply, TokenRequest, read_continue, read_generate

#: Seconds between signs of life while a reply is awaited.
SIGN_S: Final = 10.0
#: Largest body of a request: a conversation of some million characters.
MAX_BYTES: Final = 8 << 20
#: Requests of one session that may wait at a time.
MAX_WAITING: Final = 16
#: Header of the clients of OpenAI: how often a request was sent before.
RETRIES: Final = "x-stainless-retry-count"
_REWARD: Final = "reward"


class SessionEnded(Exception):
    """The agent has ended its session; `reward`: what it gave itself, if it did."""

    def __init__(self, reward: float | None = None) -> None:
        super().__init__("the session has ended")
        self.reward = reward


Asked = ChatRequest | TokenRequest


@dataclass(eq=False)
class _AskedAndTold:
    """A request, and its reply once there is one."""

    body: bytes
    asked: Asked
    reply: asyncio.Future[Reply | MessageReply | ResponseReply | TokenReply]
    was_written: bool = False
    requests: list[web.Request] = field(default_factory=list)  # the first one, and its repetitions

    @property
    def is_awaited(self) -> bool:
        transports = [request.transport for request in self.requests]
        return any(transport is not None and not transport.is_closing() for transport in transports)


@dataclass(eq=False)
class Session:
    """One session: its owner takes the requests, and gives the turns that answer them."""

    number: int
    key: str
    url: str
    is_strict: bool = False  # refuse settings that have no effect
    max_tokens: int = 0  # of the conversation; 0: not known
    counts: dict[str, int] = field(default_factory=dict)  #: what was set aside, repeated or queued, by cause

    def __post_init__(self) -> None:
        self._taken: asyncio.Queue[_AskedAndTold] = asyncio.Queue()
        self._one_at_a_time = asyncio.Lock()
        self._kept: list[_AskedAndTold] = []  # the last one that was handed over, and those without a reply
        self._current: _AskedAndTold | None = None  # that waits for a turn
        self._ended: asyncio.Future[float | None] = asyncio.get_running_loop().create_future()
        self._num_waiting = 0
        self._turns: list[Said] = []
        self._tools: list[dict[str, Any]] | None = None

    # --- for its owner

    async def next_request(self) -> Asked:
        """Wait for a request; SessionEnded if the agent ends first."""
        taking = asyncio.ensure_future(self._taken.get())
        first: list[asyncio.Future[Any]] = [taking, self._ended]
        try:
            await asyncio.wait(first, return_when=asyncio.FIRST_COMPLETED)
            if not taking.done():
                raise SessionEnded(self._ended.result())
            self._current = taking.result()
        finally:
            taking.cancel()
        return self._current.asked

    def answer(self, turn: Turn) -> None:
        """Answer the request that was taken last."""
        exchange, self._current = self._current, None
        assert exchange is not None, "a turn that no request waits for"
        told = said(turn, stop=exchange.asked.stop, after=exchange.asked.messages)
        self._turns.append(told)
        number = f"{self.number}-{len(self._turns)}"
        if exchange.reply.done():
            return
        asked = exchange.asked
        if isinstance(asked, TokenRequest):
            exchange.reply.set_result(TokenReply(number, asked, turn))
        elif asked.dialect == "messages":
            exchange.reply.set_result(MessageReply(number, asked, turn, told.returned))
        elif asked.dialect == "responses":
            exchange.reply.set_result(ResponseReply(number, asked, turn, told.returned))
        else:
            exchange.reply.set_result(Reply(number, asked.model, turn, told.returned, has_ids=asked.wants_ids))

    @property
    def model(self) -> str:
        """The name of the model that stands for the session in requests to the shared URL."""
        return f"session-{self.number}"

    def recorded(self, messages: list[Message]) -> list[Message]:
        """Return a conversation with the turns of this session as they were recorded."""
        return as_recorded(messages, self._turns)

    def end(self, reward: float | None = None) -> None:
        """End the session: no request is taken any more, and those that wait are refused."""
        if not self._ended.done():
            self._ended.set_result(reward)

    # --- for its agent

    async def reply_to(self, request: web.Request, read: Callable[[bytes], Asked]) -> web.StreamResponse:
        """Answer a request, whose body is read by `read`."""
        body = await request.read()
        exchange = self._repeated(body, request)
        if exchange is None:
            asked = read(body)
            self._require_allowed(asked)
            exchange = _AskedAndTold(body, asked, asyncio.get_running_loop().create_future(), requests=[request])
            return await self._in_turn(exchange, request)
        exchange.requests.append(request)
        self._count("retries")
        return await self._write(exchange, request)

    def _repeated(self, body: bytes, request: web.Request) -> _AskedAndTold | None:
        """Return the exchange that the request repeats, if any."""
        equal = [one for one in self._kept if one.body == body]
        left = [one for one in equal if not (one.was_written or one.is_awaited)]
        says_so = request.headers.get(RETRIES, "0") != "0"
        return next(iter(left or (equal if says_so else [])), None)

    def _require_allowed(self, asked: Asked) -> None:
        if self.is_strict and asked.left_aside:
            raise ChatRefused(f"{', '.join(asked.left_aside)}: would have no effect; sampling is that of the run")
        if isinstance(asked, ChatRequest):
            if self._tools is None:
                self._tools = asked.tools
            if asked.tools != self._tools:
                raise ChatRefused("tools: must be those of the first request of the session")

    async def _in_turn(self, exchange: _AskedAndTold, request: web.Request) -> web.StreamResponse:
        """Hand a request over once the earlier ones are answered."""
        if self._num_waiting >= MAX_WAITING:
            raise ChatRefused(f"{MAX_WAITING} requests of this session wait already", status=429)
        self._num_waiting += 1
        if self._one_at_a_time.locked():
            self._count("parallel requests")
        self._kept.append(exchange)
        try:
            async with self._one_at_a_time:
                if not exchange.is_awaited:
                    self._kept.remove(exchange)
                    return web.Response()
                self._hand_over(exchange)
                return await self._write(exchange, request)
        finally:
            self._num_waiting -= 1

    def _hand_over(self, exchange: _AskedAndTold) -> None:
        if self._ended.done():
            raise ChatRefused("the session has ended", status=409)
        for name in exchange.asked.left_aside:
            self._count(name)
        self._kept = [one for one in self._kept if not one.reply.done()]
        self._taken.put_nowait(exchange)

    async def _write(self, exchange: _AskedAndTold, request: web.Request) -> web.StreamResponse:
        """Write the reply when it is there, and signs of life before."""
        exchange.was_written = False
        streams = exchange.asked.streams
        response = web.StreamResponse()
        response.content_type = "text/event-stream" if streams else "application/json"
        try:
            while not await self._is_decided(exchange.reply):
                await _begin(response, request)
                await response.write(b": waiting\n\n" if streams else b" ")
            if not exchange.reply.done():
                return _refuse(response, request)
            reply = exchange.reply.result()
            await _begin(response, request)
            if streams:
                await response.write(b"".join(reply.events(wants_usage=exchange.asked.wants_usage)))
            else:
                await response.write(reply.whole())
            await response.write_eof()
            exchange.was_written = True
        except ConnectionError:  # the agent has gone, or asks again
            pass
        return response

    async def _is_decided(self, reply: asyncio.Future[Any]) -> bool:
        """Wait a while for the reply or the end of the session."""
        first: list[asyncio.Future[Any]] = [reply, self._ended]
        done, _ = await asyncio.wait(first, timeout=SIGN_S, return_when=asyncio.FIRST_COMPLETED)
        return bool(done)

    def give_reward(self, body: bytes) -> None:
        """End the session with the reward that its agent gives; ChatRefused if that is no number."""
        try:
            reward = json.loads(body)[_REWARD]
            is_number = isinstance(reward, int | float) and not isinstance(reward, bool) and math.isfinite(reward)
        except (ValueError, KeyError, TypeError, RecursionError, OverflowError):
            is_number = False
        if not is_number:
            raise ChatRefused('the body must be {"reward": NUMBER}')
        if self._ended.done():
            raise ChatRefused("the session has ended", status=409)
        self.end(float(reward))

    def _count(self, cause: str) -> None:
        self.counts[cause] = self.counts.get(cause, 0) + 1


async def _begin(response: web.StreamResponse, request: web.Request) -> None:
    if not response.prepared:
        await response.prepare(request)


def _refuse(response: web.StreamResponse, request: web.Request) -> web.StreamResponse:
    """Say that the session has ended; a reply that has begun is broken off."""
    if not response.prepared:
        raise ChatRefused("the session has ended", status=409)
    if request.transport is not None:
        request.transport.abort()
    return response


class SessionServer:
    """The HTTP server of all sessions of a process, on loopback."""

    def __init__(self) -> None:
        self._sessions: dict[int, Session] = {}
        self._numbers = 0
        self._base = ""
        self._key = secrets.token_urlsafe(24)
        self._runner: web.AppRunner | None = None

    @asynccontextmanager
    async def running(self) -> AsyncIterator[SessionServer]:
        """Serve while the context is open."""
        await self.start()
        try:
            yield self
        finally:
            await self.stop()

    async def start(self) -> None:
        """Listen on a free port of loopback."""
        app = web.Application(client_max_size=MAX_BYTES, middlewares=[_refusals])
        app.router.add_post("/sessions/{number}/v1/chat/completions", self._chat)
        app.router.add_post("/sessions/{number}/v1/messages", self._message)
        app.router.add_post("/sessions/{number}/v1/responses", self._respond)
        app.router.add_post("/sessions/{number}/v1/completions", self._complete)
        app.router.add_post("/sessions/{number}/inference/v1/generate", self._generate)
        app.router.add_get("/sessions/{number}/v1/models", self._models)
        app.router.add_post("/sessions/{number}/reward", self._reward)
        app.router.add_post("/shared/inference/v1/generate", self._generate_for_one)
        self._runner = web.AppRunner(app, access_log=None, shutdown_timeout=0.5)
        await self._runner.setup()
        site = web.TCPSite(self._runner, "127.0.0.1", 0)
        await site.start()
        self._base = f"http://127.0.0.1:{self._runner.addresses[0][1]}"

    async def stop(self) -> None:
        """End all sessions, and stop listening."""
        for session in [*self._sessions.values()]:
            self.close(session)
        if self._runner is not None:
            await self._runner.cleanup()

    @property
    def shared(self) -> tuple[str, str]:
        """The URL and the key of all sessions together, for a process that plays many episodes."""
        return f"{self._base}/shared", self._key

    def open(self, *, is_strict: bool = False, max_tokens: int = 0) -> Session:
        """Begin a session."""
        self._numbers += 1
        url = f"{self._base}/sessions/{self._numbers}"
        session = Session(self._numbers, secrets.token_urlsafe(24), url, is_strict, max_tokens)
        self._sessions[self._numbers] = session
        return session

    def close(self, session: Session) -> None:
        """End a session and forget it."""
        session.end()
        self._sessions.pop(session.number, None)

    def _session(self, request: web.Request) -> Session:
        """Return the session that a request names. ChatRefused, with the same message, if there is none or the key is
        another."""
        given = request.headers.get("x-api-key") or request.headers.get("Authorization", "").removeprefix("Bearer ")
        with suppress(ValueError):
            session = self._sessions.get(int(request.match_info["number"]))
            if session is not None and secrets.compare_digest(given.encode(), session.key.encode()):
                return session
        raise ChatRefused("no session of this number has this key", status=401)

    async def _generate_for_one(self, request: web.Request) -> web.StreamResponse:
        """Answer a request of the session that it names as its model."""
        given = request.headers.get("Authorization", "").removeprefix("Bearer ")
        if not secrets.compare_digest(given.encode(errors="surrogateescape"), self._key.encode()):
            raise ChatRefused("this is not the key of all sessions", status=401)
        model = read_generate(await request.read()).model
        session = next((session for session in self._sessions.values() if session.model == model), None)
        if session is None:
            raise ChatRefused("model: no session has this name", status=409)
        return await session.reply_to(request, read_generate)

    async def _chat(self, request: web.Request) -> web.StreamResponse:
        return await self._session(request).reply_to(request, read_request)

    async def _message(self, request: web.Request) -> web.StreamResponse:
        return await self._session(request).reply_to(request, read_messages)

    async def _respond(self, request: web.Request) -> web.StreamResponse:
        return await self._session(request).reply_to(request, read_responses)

    async def _complete(self, request: web.Request) -> web.StreamResponse:
        return await self._session(request).reply_to(request, read_continue)

    async def _generate(self, request: web.Request) -> web.StreamResponse:
        return await self._session(request).reply_to(request, read_generate)

    async def _models(self, request: web.Request) -> web.StreamResponse:
        session = self._session(request)
        model = {"id": "policy", "object": "model", "created": 0, "owned_by": "dora"}
        longest = {"max_model_len": session.max_tokens} if session.max_tokens else {}
        return web.json_response({"object": "list", "data": [model | longest]})

    async def _reward(self, request: web.Request) -> web.StreamResponse:
        self._session(request).give_reward(await request.read())
        return web.json_response({})


@web.middleware
async def _refusals(
    request: web.Request, handler: Callable[[web.Request], Awaitable[web.StreamResponse]]
) -> web.StreamResponse:
    """Turn a refusal into the error of the API."""
    try:
        return await handler(request)
    except ChatRefused as err:
        kind = "authentication_error" if err.status == 401 else "invalid_request_error"
        content = {"type": "error", "error": {"message": str(err), "type": kind, "param": None, "code": None}}
        return web.json_response(content, status=err.status)
