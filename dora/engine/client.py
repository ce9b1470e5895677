"""The client of every inference server of a run: SGLang's HTTP protocol, an aiohttp session but for the streams.

Tokens are handed on as they arrive, so that a lost server costs no token already streamed. A stream has no read
time-out (a paused server is silent but alive; the controller's watchdog ends a stuck one); every other call has a
deadline. Every control call sends its mode, flush and abort flags explicitly: SGLang's defaults abort or flush.
The only retry loop of the project is `_control`, for calls that may be repeated. Errors: `ServerGone`,
`RequestRefused` and `ProtocolError`, each starting with the url. Callers: the controller's effects, `probe.py`, and
`weights/push.py` through `PushEndpoint`.
"""

from __future__ import annotations

import asyncio
import math
import uuid
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Final

import aiohttp
import msgspec

from dora.core.strategies import Pause
from dora.engine import protocol
from dora.engine.answers import (
    ChecksumsAnswer,
    LoadsAnswer,
    ModelInfo,
    PromptAnswer,
    UpdateAnswer,
    read,
    without_secrets,
)
from dora.engine.errors import RequestRefused, ServerGone
from dora.engine.post import Post, open_post
from dora.engine.stream import GenerateResult, OnTokens, StreamParser, refusal
from dora.errors import ConfigError, ProtocolError, RemoteError

PauseMode = Pause  # SGLang's `abort` would destroy requests: never sent

CONTROL_ATTEMPTS: Final = 3
RETRY_DELAY_S: Final = 0.05  # doubled each time

_NOT_A_URL: Final = (aiohttp.InvalidURL, aiohttp.NonHttpUrlClientError)


@dataclass(frozen=True, slots=True)
class GenerateRequest:
    """One attempt at one trajectory. Log-probs and token ids are always asked for, text is never used."""

    rid: str  # see rids.py: none may be a prefix of another
    input_ids: Sequence[int]  # prompt and the tokens of earlier attempts
    max_new_tokens: int  # what is left of the trajectory's budget
    temperature: float  # 0 is greedy
    stop_token_ids: Sequence[int]
    seed: int | None  # of this attempt and position; SGLang heeds it only in its deterministic mode
    extra_key: str  # prefix-cache namespace: the version's label
    top_p: float = 1.0
    top_k: int = -1  # off

    def body(self) -> bytes:
        sampling_params: dict[str, Any] = {
            "max_new_tokens": self.max_new_tokens,
            "temperature": self.temperature,
            "top_p": self.top_p,
            "top_k": self.top_k,
            "stop_token_ids": self.stop_token_ids,
            "no_stop_trim": True,
            "skip_special_tokens": False,
            "spaces_between_special_tokens": False,
        }
        if self.seed is not None:
            sampling_params["sampling_seed"] = self.seed
        request = {
            "rid": self.rid,
            "input_ids": self.input_ids,
            "sampling_params": sampling_params,
            "stream": True,
            "return_logprob": True,
            "extra_key": self.extra_key,
        }
        return msgspec.json.encode(request)


@dataclass(frozen=True, slots=True)
class Loads:
    """What a server holds, summed over its data-parallel ranks.

    Real SGLang counts at each prefill, at every 15th decode step and when it runs dry, so what began a moment ago may
    be missing. Its `queues.retracted` is not read: that is what its last report said, and outlives the requests.
    """

    num_running: int
    num_waiting: int  # for a slot or for the end of a pause, retracted ones included
    used_tokens: int  # KV tokens, cached prefixes left out
    max_total_tokens: int
    max_running: int

    @property
    def is_empty(self) -> bool:
        """No request is resident, as far as the server has counted; `flush_cache` knows for certain."""
        return self.num_running == self.num_waiting == 0


class EngineClient:
    """Talks to all servers of a run. Make it inside a running loop; `close` it, or use it as a context manager."""

    def __init__(
        self,
        *,
        max_connections: int,
        api_key: str | None = None,
        vocab_size: int = 2**31,
        connect_timeout_s: float = 10.0,
        control_timeout_s: float = 10.0,
    ) -> None:
        """`max_connections` bounds the open streams (each is a file descriptor); one more waits until one ends.

        Control calls are not counted: an abort must not wait behind the streams that it is to end. Token ids
        outside `vocab_size` are refused here: they would kill the server (sglang.md §5).
        """
        self._vocab_size = vocab_size
        self._control_timeout_s = control_timeout_s
        self._streams = asyncio.Semaphore(max_connections)
        self._unanswered: set[str] = set()  # urls of servers that may still be at an update that was given up
        self._paused: set[str] = set()  # urls of servers that this client has paused and not told to continue
        self._connect_timeout_s = connect_timeout_s
        self._headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
        self._posts: set[Post] = set()  # open streams, at most `max_connections`
        self._session = aiohttp.ClientSession(
            # A kept-alive connection that its server closes just now looks like a dead server: open one per call.
            connector=aiohttp.TCPConnector(limit=0, force_close=True),
            timeout=aiohttp.ClientTimeout(total=None, sock_connect=connect_timeout_s),
            headers=self._headers,
            cookie_jar=aiohttp.DummyCookieJar(),
        )

    async def __aenter__(self) -> EngineClient:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def close(self) -> None:
        """Ends all connections; servers then drop the requests of open streams."""
        for post in self._posts:
            post.abort()
        await self._session.close()

    async def generate(self, url: str, request: GenerateRequest, on_tokens: OnTokens) -> GenerateResult:
        """Run one request to its end; `on_tokens(ids, logprobs)` is called with the new tokens of each chunk.

        Whatever is raised, the tokens handed on are good and the request can be resumed from them.
        """
        self._check(request)
        parser = StreamParser(url, on_tokens)
        async with self._streams:
            post = await open_post(
                url,
                protocol.GENERATE,
                body=request.body(),
                headers=self._headers,
                on_events=parser.feed,
                timeout_s=self._connect_timeout_s,
            )
            self._posts.add(post)
            try:
                await post.ended
            finally:
                post.abort()
                self._posts.discard(post)
        if post.status != 200:
            raise refusal(post.status, bytes(post.error), source=url)
        if not post.is_stream:
            raise ProtocolError(f"{url}: /generate answered {post.content_type} in place of a stream")
        result = parser.close()
        if result.finish_reason == "length" and result.num_tokens < request.max_new_tokens:
            raise ProtocolError(
                f"{url}: cut an answer to {result.num_tokens} of {request.max_new_tokens} tokens: its context or KV "
                "room is too small for the request"
            )
        return result

    async def abort(self, url: str, rid: str) -> None:
        """Ask the server to end a request; its stream then ends with a last chunk. An unknown rid is no error."""
        await self._control("POST", url, protocol.ABORT_REQUEST, {"rid": rid, "abort_all": False})

    async def pause(self, url: str, mode: PauseMode) -> None:
        """Stop decoding; new requests hang until `resume`."""
        await self._control("POST", url, protocol.PAUSE_GENERATION, {"mode": mode})
        self._paused.add(url)

    async def resume(self, url: str) -> None:
        self._paused.discard(url)
        await self._control("POST", url, protocol.CONTINUE_GENERATION, {})

    async def flush_cache(self, url: str) -> bool:
        """Drop the prefix cache; False if the server refuses because a request is resident."""
        status, body = await self._control("POST", url, protocol.FLUSH_CACHE, {}, accept=(200, 400))
        if status == 400 and b"flush" not in body.lower():
            raise refusal(status, body, source=url)
        return status == 200

    async def update_weights_from_disk(self, url: str, folder: str, label: str, *, timeout_s: float) -> None:
        """Load `folder` (as the server sees it) into a server that this client has paused.

        Unpaused, the update would wait for running requests; if it is given up here it stays there, and two updates
        at once end SGLang 0.5.20 (the second answer finds its future done).
        """
        if url not in self._paused:
            raise RemoteError(f"{url}: weights are updated in a pause only; pause the server first")
        if url in self._unanswered:
            await self.flush_cache(url)  # the scheduler answers in order: after the update that was given up
        self._unanswered.add(url)
        body = {"model_path": folder, "weight_version": label, "flush_cache": False, "abort_all_requests": False}
        try:
            await self.update(url, protocol.UPDATE_WEIGHTS_FROM_DISK, body, timeout_s=timeout_s)
        except RequestRefused:
            self._unanswered.discard(url)
            raise
        self._unanswered.discard(url)

    async def update(self, url: str, path: str, body: dict[str, Any], *, timeout_s: float | None = None) -> None:
        """One call of a weight update. Sent once: whatever is raised, the weights may have changed."""
        _, answer = await self._control("POST", url, path, body, timeout_s=timeout_s, attempts=1)
        update = read(answer, UpdateAnswer, what=url + path)
        if not update.success:
            raise RequestRefused(f"{url}: {update.message}", status=200, retryable=False)

    async def weights_checksum(self, url: str, *, timeout_s: float) -> str | None:
        """Of all weights that the server holds; None if it does not tell (SGLang on a CPU has the route and fails)."""
        path = protocol.WEIGHTS_CHECKER
        status, answer = await self._control(
            "POST", url, path, {"action": "checksum"}, timeout_s=timeout_s, accept=(200, 400, 404)
        )
        return read(answer, ChecksumsAnswer, what=url + path).per_engine_checksum if status == 200 else None

    async def prompt_logprobs(self, url: str, token_ids: Sequence[int], *, timeout_s: float) -> list[float]:
        """Log-prob of each token after the first under the weights held now, whatever the prefix cache holds."""
        self._check_ids(token_ids, what="verification of a push")
        name = f"verify-{uuid.uuid4().hex}"
        body = {
            "rid": name,
            "input_ids": list(token_ids),
            "sampling_params": {"max_new_tokens": 1, "temperature": 1.0},
            "return_logprob": True,
            "logprob_start_len": 0,
            "extra_key": name,
        }
        path = protocol.GENERATE
        _, answer = await self._control("POST", url, path, body, timeout_s=timeout_s, attempts=1)
        triples = read(answer, PromptAnswer, what=url + path).meta_info.input_token_logprobs
        return [math.nan if logprob is None else logprob for logprob, *_ in triples[1:]]

    async def weight_version(self, url: str) -> str:
        """The label of the weights that the server says it holds."""
        _, answer = await self._control("GET", url, protocol.MODEL_INFO)
        return read(answer, ModelInfo, what=url + protocol.MODEL_INFO).weight_version

    async def loads(self, url: str) -> Loads:
        _, answer = await self._control("GET", url, protocol.LOADS)
        ranks = read(answer, LoadsAnswer, what=url + protocol.LOADS).loads
        return Loads(
            num_running=sum(rank.num_running_reqs for rank in ranks),
            num_waiting=sum(rank.num_waiting_reqs for rank in ranks),
            used_tokens=sum(rank.num_used_tokens for rank in ranks),
            max_total_tokens=sum(rank.max_total_num_tokens for rank in ranks),
            max_running=sum(rank.max_running_requests for rank in ranks),
        )

    async def health(self, url: str, *, timeout_s: float) -> None:
        """Returns if the server is well. SGLang generates a token for it: 1 s when idle, 503 after 20 s if paused."""
        await self._control("GET", url, protocol.HEALTH, timeout_s=timeout_s)

    async def server_info(self, url: str) -> dict[str, Any]:
        """The server's arguments and state, its secrets dropped at every depth."""
        _, answer = await self._control("GET", url, protocol.SERVER_INFO)
        info: dict[str, Any] = without_secrets(read(answer, dict[str, Any], what=url + protocol.SERVER_INFO))
        return info

    async def has_route(self, url: str, path: str) -> bool:
        """Whether the server knows `path`, without calling it: none takes DELETE, so a known one says 405."""
        status, _ = await self._control("DELETE", url, path, accept=(404, 405))
        return status == 405

    def push_endpoint(self, url: str) -> PushEndpoint:
        """What `weights.push.push` needs of one server."""
        return PushEndpoint(self, url)

    def _check(self, request: GenerateRequest) -> None:
        """Refuse here what would kill a server or be refused by it."""
        if not request.input_ids or request.max_new_tokens < 1:
            raise ConfigError(
                f"request {request.rid}: {len(request.input_ids)} input tokens and a budget of "
                f"{request.max_new_tokens}; both must be at least 1"
            )
        self._check_ids(request.input_ids, what=f"request {request.rid}")

    def _check_ids(self, token_ids: Sequence[int], *, what: str) -> None:
        if min(token_ids) < 0 or max(token_ids) >= self._vocab_size:
            raise ConfigError(
                f"{what}: token ids from {min(token_ids)} to {max(token_ids)} do not fit the model's vocabulary of "
                f"{self._vocab_size}; use the tokenizer of the served model"
            )

    async def _control(
        self,
        method: str,
        url: str,
        path: str,
        body: dict[str, Any] | None = None,
        *,
        timeout_s: float | None = None,
        attempts: int = CONTROL_ATTEMPTS,
        accept: tuple[int, ...] = (200,),
    ) -> tuple[int, bytes]:
        """One control call: tried again only after connection trouble, all tries within one deadline."""
        limit_s = timeout_s or self._control_timeout_s
        try:
            async with asyncio.timeout(limit_s):
                for attempt in range(attempts):
                    try:
                        status, answer = await self._send(method, _join(url, path), body)
                        break
                    except (aiohttp.ClientError, ConnectionError) as err:
                        if attempt == attempts - 1 or isinstance(err, _NOT_A_URL):
                            raise _remote_error(url, err) from err
                        await asyncio.sleep(RETRY_DELAY_S * 2**attempt)
        except TimeoutError as err:
            raise RemoteError(f"{url}: no answer to {path} within {limit_s:g} s") from err
        if status not in accept:
            raise refusal(status, answer, source=f"{url}{path}")
        return status, answer

    async def _send(self, method: str, url: str, body: dict[str, Any] | None) -> tuple[int, bytes]:
        async with self._session.request(method, url, json=body, allow_redirects=False) as response:
            return response.status, await response.read()


@dataclass(frozen=True, slots=True)
class ServerShape:
    """What a push must know of a server: the `ServerShape` of `weights/push.py`."""

    release: str
    device: str
    num_ranks: int
    can_join: bool
    has_update_gate: bool


@dataclass(frozen=True, slots=True)
class PushEndpoint:
    """The calls of a weight push, bound to one server: the `PushTarget` of `weights/push.py`."""

    client: EngineClient
    url: str
    groups: set[str] = field(default_factory=set, compare=False)  # joined and not left

    async def is_empty(self) -> bool:
        return (await self.client.loads(self.url)).is_empty

    async def pause(self, mode: PauseMode) -> None:
        await self.client.pause(self.url, mode)

    async def resume(self) -> None:
        await self.client.resume(self.url)

    async def flush_cache(self) -> bool:
        return await self.client.flush_cache(self.url)

    async def weight_version(self) -> str:
        return await self.client.weight_version(self.url)

    async def update_weights(self, folder: str, label: str, *, timeout_s: float) -> None:
        await self.client.update_weights_from_disk(self.url, folder, label, timeout_s=timeout_s)

    async def shape(self) -> ServerShape:
        info = await self.client.server_info(self.url)
        return ServerShape(
            release=str(info.get("version", "unknown")),
            device=str(info.get("device", "cuda")),
            num_ranks=int(info.get("tp_size", 1)),
            can_join=int(info.get("dp_size", 1)) == 1
            and await self.client.has_route(self.url, protocol.INIT_WEIGHTS_UPDATE_GROUP),
            has_update_gate=await self.client.has_route(self.url, protocol.BEGIN_WEIGHT_UPDATE),
        )

    async def join_group(
        self, group: str, *, address: str, port: int, world_size: int, backend: str, timeout_s: float
    ) -> None:
        body = {
            "master_address": address,
            "master_port": port,
            "rank_offset": 1,
            "world_size": world_size,
            "group_name": group,
            "backend": backend,
        }
        await self.client.update(self.url, protocol.INIT_WEIGHTS_UPDATE_GROUP, body, timeout_s=timeout_s)
        self.groups.add(group)

    async def leave_group(self, group: str) -> None:
        self.groups.discard(group)
        await self.client.update(self.url, protocol.DESTROY_WEIGHTS_UPDATE_GROUP, {"group_name": group})

    async def begin_update(self) -> None:
        await self.client.update(self.url, protocol.BEGIN_WEIGHT_UPDATE, {})

    async def end_update(self) -> None:
        await self.client.update(self.url, protocol.END_WEIGHT_UPDATE, {})

    async def receive(
        self,
        group: str,
        *,
        names: Sequence[str],
        dtypes: Sequence[str],
        shapes: Sequence[Sequence[int]],
        label: str | None,
        timeout_s: float,
    ) -> None:
        if group not in self.groups:
            raise RemoteError(f"{self.url}: not in the group '{group}'; a bucket for it would end a real server")
        body = {
            "names": names,
            "dtypes": dtypes,
            "shapes": shapes,
            "group_name": group,
            "weight_version": label,
            "flush_cache": False,
            "abort_all_requests": False,
        }
        await self.client.update(self.url, protocol.UPDATE_WEIGHTS_FROM_DISTRIBUTED, body, timeout_s=timeout_s)

    async def prompt_logprobs(self, token_ids: Sequence[int], *, timeout_s: float) -> list[float]:
        return await self.client.prompt_logprobs(self.url, token_ids, timeout_s=timeout_s)

    async def weights_checksum(self, *, timeout_s: float) -> str | None:
        return await self.client.weights_checksum(self.url, timeout_s=timeout_s)


def _join(url: str, path: str) -> str:
    return url.rstrip("/") + path


def _remote_error(url: str, err: aiohttp.ClientError | ConnectionError) -> RemoteError | ConfigError:
    if isinstance(err, _NOT_A_URL):
        return ConfigError(f"{url}: not a server url; write it as http://HOST:PORT")
    if isinstance(err, aiohttp.ClientConnectorError):
        return ServerGone(f"{url}: cannot connect ({err.os_error.strerror or err.os_error}); is the server running?")
    if isinstance(err, aiohttp.ConnectionTimeoutError):
        return ServerGone(f"{url}: no connection in time; is the server running?")
    if isinstance(err, aiohttp.ClientResponseError):
        return ProtocolError(f"{url}: not an HTTP answer ({err.message})")
    return ServerGone(f"{url}: the connection broke off ({err or type(err).__name__})")
