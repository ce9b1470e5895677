"""The client of every inference server of a run: SGLang's HTTP protocol, an aiohttp session but for the streams.

Tokens are handed on as they arrive, so that a lost server costs no token already streamed. A stream has no read
time-out (a paused server is silent but alive; the controller's watchdog ends a stuck one); every other call has a
deadline. Every control call sends its mode, flush and abort flags explicitly: SGLang's defaults abort or flush.
Calls that may be repeated are, after connection trouble (`_control`); any call waits while this host cannot open a
connection at all (`local.py`). Errors: `ServerGone`, `RequestRefused` and `ProtocolError`, each starting with the url.
"""

from __future__ import annotations

import asyncio
import math
import uuid
from collections.abc import Sequence
from typing import Any, Final

import aiohttp
import msgspec

from dora.core.strategies import Pause
from dora.engine.api import GenerateRequest, GenerateResult, OnTokens
from dora.engine.errors import RequestRefused, ServerGone
from dora.engine.local import NoConnectionLeft, Patience, is_local
from dora.engine.post import Post, open_post
from dora.engine.sglang import protocol
from dora.engine.sglang.answers import (
    ChecksumsAnswer,
    Loads,
    LoadsAnswer,
    ModelInfo,
    PromptAnswer,
    UpdateAnswer,
    read,
    without_secrets,
)
from dora.engine.sglang.stream import StreamParser, refusal
from dora.errors import ConfigError, DoraError, ProtocolError, RemoteError

PauseMode = Pause  # SGLang's `abort` would destroy requests: never sent

CONTROL_ATTEMPTS: Final = 3
RETRY_DELAY_S: Final = 0.05  # doubled each time

_NOT_A_URL: Final = (aiohttp.InvalidURL, aiohttp.NonHttpUrlClientError)


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

        `api_key` goes to every server that has no key of its own in `keys`.
        Control calls are not counted: an abort must not wait behind the streams that it is to end. Token ids
        outside `vocab_size` are refused here: they would kill the server.
        """
        self._vocab_size = vocab_size
        self._control_timeout_s = control_timeout_s
        self._streams = asyncio.Semaphore(max_connections)
        self._unanswered: set[str] = set()  # urls of servers that may still be at an update that was given up
        self._paused: set[str] = set()  # urls of servers that this client has paused and not told to continue
        self._connect_timeout_s = connect_timeout_s
        self._api_key = api_key
        self.keys: dict[str, str] = {}  #: by the url of the one server that may see it
        self._posts: set[Post] = set()  # open streams, at most `max_connections`
        self._patience = Patience()
        self._session = aiohttp.ClientSession(
            # A kept-alive connection that its server closes just now looks like a dead server: open one per call.
            connector=aiohttp.TCPConnector(limit=0, force_close=True),
            timeout=aiohttp.ClientTimeout(total=None, sock_connect=connect_timeout_s),
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
            post = await self._patience.until_connected(
                lambda: open_post(
                    url,
                    protocol.GENERATE,
                    body=self.encode(request),
                    headers=self._headers(url),
                    on_events=parser.feed,
                    timeout_s=self._connect_timeout_s,
                )
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
        return read(answer, LoadsAnswer, what=url + protocol.LOADS).summed()

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

    @staticmethod
    def encode(request: GenerateRequest) -> bytes:
        """Its JSON. Log-probs are always asked for; SGLang heeds a seed in its deterministic mode alone."""
        sampling_params: dict[str, Any] = {
            "max_new_tokens": request.max_new_tokens,
            "temperature": request.temperature,
            "top_p": request.top_p,
            "top_k": request.top_k,
            "stop_token_ids": request.stop_tokens,
            "no_stop_trim": True,
            "skip_special_tokens": False,
            "spaces_between_special_tokens": False,
        }
        if request.seed is not None:
            sampling_params["sampling_seed"] = request.seed
        body = {
            "rid": request.id,
            "input_ids": request.tokens,
            "sampling_params": sampling_params,
            "stream": True,
            "return_logprob": True,
            "extra_key": request.label,
        }
        return msgspec.json.encode(body)

    def _check(self, request: GenerateRequest) -> None:
        """Refuse here what would kill a server or be refused by it."""
        if not request.tokens or request.max_new_tokens < 1:
            raise ConfigError(
                f"request {request.id}: {len(request.tokens)} input tokens and a budget of "
                f"{request.max_new_tokens}; both must be at least 1"
            )
        self._check_ids(request.tokens, what=f"request {request.id}")

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
        """One control call, as soon as this host can open a connection for it."""
        limit_s = timeout_s or self._control_timeout_s
        status, answer = await self._patience.until_connected(
            lambda: self._try(method, url, path, body, limit_s=limit_s, attempts=attempts)
        )
        if status not in accept:
            raise refusal(status, answer, source=f"{url}{path}")
        return status, answer

    async def _try(
        self, method: str, url: str, path: str, body: dict[str, Any] | None, *, limit_s: float, attempts: int
    ) -> tuple[int, bytes]:
        """Tried again only after connection trouble, all tries within one deadline."""
        try:
            async with asyncio.timeout(limit_s):
                attempt = 0
                while True:
                    try:
                        return await self._send(method, url, path, body)
                    except (aiohttp.ClientError, ConnectionError) as err:
                        attempt, error = attempt + 1, _error_of(url, err)
                        if attempt == attempts or not isinstance(error, RemoteError):
                            raise error from err
                    await asyncio.sleep(RETRY_DELAY_S * 2 ** (attempt - 1))
        except TimeoutError as err:
            raise RemoteError(f"{url}: no answer to {path} within {limit_s:g} s") from err

    async def _send(self, method: str, url: str, path: str, body: dict[str, Any] | None) -> tuple[int, bytes]:
        async with self._session.request(
            method, _join(url, path), json=body, headers=self._headers(url), allow_redirects=False
        ) as response:
            return response.status, await response.read()

    def _headers(self, url: str) -> dict[str, str]:
        key = self.keys.get(url, self._api_key)
        return {"Authorization": f"Bearer {key}"} if key else {}


def _join(url: str, path: str) -> str:
    return url.rstrip("/") + path


def _error_of(url: str, err: aiohttp.ClientError | ConnectionError) -> DoraError:
    if isinstance(err, _NOT_A_URL):
        return ConfigError(f"{url}: not a server url; write it as http://HOST:PORT")
    if isinstance(err, aiohttp.ClientConnectorError):
        if is_local(err.os_error):
            return NoConnectionLeft(err.os_error.strerror or str(err.os_error))
        return ServerGone(f"{url}: cannot connect ({err.os_error.strerror or err.os_error}); is the server running?")
    if isinstance(err, aiohttp.ConnectionTimeoutError):
        return ServerGone(f"{url}: no connection in time; is the server running?")
    if isinstance(err, aiohttp.ClientResponseError):
        return ProtocolError(f"{url}: not an HTTP answer ({err.message})")
    return ServerGone(f"{url}: the connection broke off ({err or type(err).__name__})")
