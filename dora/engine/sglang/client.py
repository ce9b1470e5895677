"""The client of all inference servers of a run, for SGLang's HTTP protocol.

Tokens are delivered as they arrive, so that a lost server costs no token already streamed. A stream has no read timeout
(a paused server is silent but alive; the controller's watchdog ends stuck ones); every other call has one. Control
calls set their mode, flush and abort flags explicitly, because SGLang's defaults abort or flush. Repeatable calls are
retried after connection errors (`_control`); every call waits while this host cannot open connections (`local.py`).
Errors: `ServerGone`, `RequestRefused` and `ProtocolError`, each starting with the URL.
"""

from __future__ import annotations

import asyncio
import math
import uuid
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, Final

import aiohttp
import msgspec
import numpy as np

from dora.core.strategies import Pause
from dora.engine.api import GenerateRequest, GenerateResult, OnTokens
from dora.engine.errors import RequestRefused, ServerGone
from dora.engine.local import NoConnectionLeft, Patience, is_local
from dora.engine.post import Post, open_post
from dora.engine.sglang import protocol, routing
from dora.engine.sglang.answers import (
    AdapterAnswer,
    ChecksumsAnswer,
    Loads,
    LoadsAnswer,
    ModelInfo,
    ModelsAnswer,
    PromptAnswer,
    UpdateAnswer,
    read,
    without_secrets,
)
from dora.engine.sglang.stream import StreamParser, refusal
from dora.errors import ConfigError, DoraError, ProtocolError, RemoteError
from dora.routing import Chosen

CONTROL_ATTEMPTS: Final = 3
RETRY_DELAY_S: Final = 0.05  # doubled after each attempt

#: UnicodeError: no name of a host has such a label.
_NOT_A_URL: Final = (aiohttp.InvalidURL, aiohttp.NonHttpUrlClientError, UnicodeError)


class EngineClient:
    """A client of all servers of a run, created in a running event loop. Close it, or use it as a context manager."""

    def __init__(
        self,
        *,
        max_connections: int,
        api_key: str | None = None,
        vocab_size: int = 2**31,
        connect_timeout_s: float = 10.0,
        control_timeout_s: float = 10.0,
    ) -> None:
        """`max_connections` bounds the open streams (a file descriptor each); further ones wait.

        Control calls are not counted, because an abort must not wait for the streams that it ends. `api_key` is sent
        to all servers without a key in `keys`. Token ids outside `vocab_size` would crash a server and are refused.
        """
        self._vocab_size = vocab_size
        self._control_timeout_s = control_timeout_s
        self._streams = asyncio.Semaphore(max_connections)
        self._unanswered: set[str] = set()  # URLs of servers that may still run an update that timed out here
        self._paused: set[str] = set()  # URLs of servers paused by this client and not resumed
        self._connect_timeout_s = connect_timeout_s
        self._api_key = api_key
        self.keys: dict[str, str] = {}  #: by URL; a key is sent to its own server only
        self._posts: set[Post] = set()  # open streams, at most `max_connections`
        self._patience = Patience()
        self._session = aiohttp.ClientSession(
            # One connection per call: a keep-alive connection that the server is closing looks like a dead server.
            connector=aiohttp.TCPConnector(limit=0, force_close=True),
            timeout=aiohttp.ClientTimeout(total=None, sock_connect=connect_timeout_s),
            cookie_jar=aiohttp.DummyCookieJar(),
        )

    async def __aenter__(self) -> EngineClient:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def close(self) -> None:
        """Close all connections; servers then drop the requests of open streams."""
        for post in self._posts:
            post.abort()
        await self._session.close()

    async def generate(self, url: str, request: GenerateRequest, on_tokens: OnTokens) -> GenerateResult:
        """Run one request to its end and call `on_tokens(ids, logprobs)` with the new tokens of each chunk.

        After any error, the delivered tokens are valid and the request can be resumed from them.
        """
        self._check(request)
        parser = StreamParser(url, on_tokens, max_event_bytes=routing.max_event_bytes(request))
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
            raise ProtocolError(f"{url}: /generate answered {post.content_type} instead of a stream")
        result = parser.close()
        if result.finish_reason == "length" and result.num_tokens < request.max_new_tokens:
            raise ProtocolError(
                f"{url}: an answer was cut to {result.num_tokens} of {request.max_new_tokens} tokens: the context or "
                "the KV capacity of the server is too small for the request"
            )
        if request.routing is not None:
            result = replace(result, chosen=await self._chosen(url, request, result, parser.routed))
        return result

    @staticmethod
    async def _chosen(
        url: str, request: GenerateRequest, result: GenerateResult, routed: msgspec.Raw | None
    ) -> Chosen | None:
        """Return the choice of experts in an answer, which is decoded in a thread: it may have many megabytes."""
        if not result.num_tokens or request.routing is None:
            return None
        if routed is None:
            if result.was_stopped:  # in the waiting queue, after a retraction
                return None
            raise routing.missing(url, num_tokens=result.num_tokens)
        rows = len(request.tokens) + result.num_tokens - 1 - request.routing.start
        return await asyncio.to_thread(routing.read_chosen, routed, request.routing, rows=rows, source=url)

    async def abort(self, url: str, rid: str) -> None:
        """End a request; its stream then ends with a last chunk. An unknown rid is not an error."""
        await self._control("POST", url, protocol.ABORT_REQUEST, {"rid": rid, "abort_all": False})

    async def abort_all(self, url: str) -> None:
        """End all requests that have passed the gate of a pause."""
        await self._control("POST", url, protocol.ABORT_REQUEST, {"rid": "", "abort_all": True})

    async def pause(self, url: str, mode: Pause) -> None:
        """Stop decoding; new requests wait until `resume`. SGLang's mode `abort` is never sent."""
        await self._control("POST", url, protocol.PAUSE_GENERATION, {"mode": mode})
        self._paused.add(url)

    async def resume(self, url: str) -> None:
        self._paused.discard(url)
        await self._control("POST", url, protocol.CONTINUE_GENERATION, {})

    async def flush_cache(self, url: str, *, timeout_s: float | None = None) -> bool:
        """Drop the prefix cache. Return False if the server refuses because it holds a request.

        The answer comes after the end of every update that began before.
        """
        status, body = await self._control(
            "POST", url, protocol.FLUSH_CACHE, {}, timeout_s=timeout_s, accept=(200, 400)
        )
        if status == 400 and b"flush" not in body.lower():
            raise refusal(status, body, source=url)
        return status == 200

    async def update_weights_from_disk(self, url: str, folder: str, label: str, *, timeout_s: float) -> None:
        """Load `folder` (as the server sees it) into a server that this client has paused.

        Without a pause, the update would wait for running requests and survive a timeout here, and two concurrent
        updates crash SGLang 0.5.20 (the second answer finds its future done).
        """
        if url not in self._paused:
            raise RemoteError(f"{url}: weights can be updated only while paused; pause the server first")
        if url in self._unanswered:
            await self.flush_cache(url)  # answered in order, so after the update that timed out
        self._unanswered.add(url)
        body = {"model_path": folder, "weight_version": label, "flush_cache": False, "abort_all_requests": False}
        try:
            await self.update(url, protocol.UPDATE_WEIGHTS_FROM_DISK, body, timeout_s=timeout_s)
        except RequestRefused:
            self._unanswered.discard(url)
            raise
        self._unanswered.discard(url)

    async def update(self, url: str, path: str, body: dict[str, Any], *, timeout_s: float | None = None) -> None:
        """Make one call of a weight update, without retries. After any error, the weights may have changed."""
        _, answer = await self._control("POST", url, path, body, timeout_s=timeout_s, attempts=1)
        update = read(answer, UpdateAnswer, what=url + path)
        if not update.success:
            raise RequestRefused(f"{url}: {update.message}", status=200, retryable=False)

    async def weights_checksum(self, url: str, *, timeout_s: float) -> str | None:
        """Return the checksum of all weights; None if unsupported (SGLang on a CPU has the route but fails)."""
        path = protocol.WEIGHTS_CHECKER
        status, answer = await self._control(
            "POST", url, path, {"action": "checksum"}, timeout_s=timeout_s, accept=(200, 400, 404)
        )
        return read(answer, ChecksumsAnswer, what=url + path).per_engine_checksum if status == 200 else None

    async def load_adapter(self, url: str, name: str, folder: str, *, timeout_s: float) -> None:
        """Load an adapter from `folder`, as the server sees it, beside those that it has.

        RequestRefused: it is not loaded. After any other RemoteError it may be, or may be later, and the server may be
        dead: SGLang reads the matrices now, but dies of wrong ones when a request first has them.
        """
        await self._change_adapter(
            url, protocol.LOAD_LORA_ADAPTER, {"lora_name": name, "lora_path": folder}, timeout_s=timeout_s
        )

    async def unload_adapter(self, url: str, name: str, *, timeout_s: float) -> None:
        """Unload an adapter; the server answers once no request has it, and until then all loads and unloads wait.

        RequestRefused: it was not loaded. After any other RemoteError it may be unloaded later. Its name must not be
        used again in a request, because the server would load it again from the folder that it had.
        """
        await self._change_adapter(url, protocol.UNLOAD_LORA_ADAPTER, {"lora_name": name}, timeout_s=timeout_s)

    async def _change_adapter(self, url: str, path: str, body: dict[str, Any], *, timeout_s: float) -> None:
        """Make one call, without retries: servers finish what they have begun."""
        status, answer = await self._control(
            "POST", url, path, body, timeout_s=timeout_s, attempts=1, accept=(200, 400)
        )
        change = read(answer, AdapterAnswer, what=url + path)
        if not change.success:
            raise RequestRefused(f"{url}: {change.error_message or 'no reason given'}", status=status, retryable=False)

    async def adapters(self, url: str) -> dict[str, str]:
        """Return the loaded adapters, by name, and the folders that they came from."""
        _, answer = await self._control("GET", url, protocol.MODELS)
        cards = read(answer, ModelsAnswer, what=url + protocol.MODELS).data
        return {card.id: card.root or "" for card in cards if card.parent is not None}

    async def prompt_logprobs(
        self, url: str, token_ids: Sequence[int], *, timeout_s: float, adapter: str | None = None
    ) -> list[float]:
        """Return the log-probs of all tokens but the first under the current weights, bypassing the prefix cache."""
        self._check_ids(token_ids, what="verification of a push")
        name = f"verify-{uuid.uuid4().hex}"
        body = {
            "rid": name,
            "input_ids": list(token_ids),
            "sampling_params": {"max_new_tokens": 1, "temperature": 1.0},
            "return_logprob": True,
            "logprob_start_len": 0,
            "extra_key": name,
            "lora_path": adapter,
        }
        path = protocol.GENERATE
        _, answer = await self._control("POST", url, path, body, timeout_s=timeout_s, attempts=1)
        triples = read(answer, PromptAnswer, what=url + path).meta_info.input_token_logprobs
        if len(triples) != len(token_ids):
            raise ProtocolError(f"{url}: {len(triples)} log-probs of a prompt of {len(token_ids)} tokens")
        return [math.nan if logprob is None else logprob for logprob, *_ in triples[1:]]

    async def weight_version(self, url: str) -> str:
        """Return the label of the weights that the server reports."""
        _, answer = await self._control("GET", url, protocol.MODEL_INFO)
        return read(answer, ModelInfo, what=url + protocol.MODEL_INFO).weight_version

    async def set_label(self, url: str, label: str) -> None:
        """Change the label of the weights, and nothing else."""
        body = {"new_version": label, "abort_all_requests": False}
        await self._control("POST", url, protocol.UPDATE_WEIGHT_VERSION, body)

    async def loads(self, url: str) -> Loads:
        _, answer = await self._control("GET", url, protocol.LOADS)
        return read(answer, LoadsAnswer, what=url + protocol.LOADS).summed()

    async def health(self, url: str, *, timeout_s: float) -> None:
        """Return if the server is healthy. SGLang generates a token: 1 s when idle, 503 after 20 s if paused."""
        await self._control("GET", url, protocol.HEALTH, timeout_s=timeout_s)

    async def server_info(self, url: str) -> dict[str, Any]:
        """Return the server's arguments and state, without secrets at any depth."""
        _, answer = await self._control("GET", url, protocol.SERVER_INFO)
        info: dict[str, Any] = without_secrets(read(answer, dict[str, Any], what=url + protocol.SERVER_INFO))
        return info

    async def has_route(self, url: str, path: str) -> bool:
        """Return whether the server has the route `path`, without calling it: DELETE gives 405 if it does."""
        status, _ = await self._control("DELETE", url, path, accept=(404, 405))
        return status == 405

    @staticmethod
    def encode(request: GenerateRequest) -> bytes:
        """Encode a request as JSON, with log-probs. SGLang uses the seed in its deterministic mode only."""
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
        if request.ignore_end:
            sampling_params["ignore_eos"] = True
        body: dict[str, Any] = {
            "rid": request.id,
            "input_ids": request.tokens,
            "sampling_params": sampling_params,
            "stream": True,
            "return_logprob": True,
            "extra_key": request.label,
        }
        if request.adapter is not None:
            body["lora_path"] = request.adapter
        if request.routing is not None:
            body |= routing.fields(request.routing)
        return msgspec.json.encode(body, enc_hook=list)  # of an array of tokens

    def _check(self, request: GenerateRequest) -> None:
        """Refuse what would crash a server or be refused by it."""
        if not request.tokens or request.max_new_tokens < 1:
            raise ConfigError(
                f"request {request.id}: {len(request.tokens)} input tokens and a budget of "
                f"{request.max_new_tokens}; both must be at least 1"
            )
        if request.routing is not None and not 0 <= request.routing.start < len(request.tokens):
            raise ConfigError(
                f"request {request.id}: asks for the choice of experts from token {request.routing.start} of "
                f"{len(request.tokens)} on"
            )
        self._check_ids(request.tokens, what=f"request {request.id}")

    def _check_ids(self, token_ids: Sequence[int], *, what: str) -> None:
        ids = np.asarray(token_ids)
        if ids.min() < 0 or ids.max() >= self._vocab_size:
            raise ConfigError(
                f"{what}: token ids from {ids.min()} to {ids.max()} are outside the model's vocabulary of "
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
        """Make one control call, as soon as this host can open a connection."""
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
        """Retry after connection errors only, with one timeout for all attempts."""
        try:
            async with asyncio.timeout(limit_s):
                attempt = 0
                while True:
                    try:
                        return await self._send(method, url, path, body)
                    except (aiohttp.ClientError, ConnectionError, UnicodeError) as err:
                        attempt, error = attempt + 1, _error_of(url, err)
                        if attempt == attempts or not isinstance(error, RemoteError):
                            raise error from err
                    await asyncio.sleep(RETRY_DELAY_S * 2 ** (attempt - 1))
        except TimeoutError as err:
            raise RemoteError(f"{url}: no answer to {path} within {limit_s:g} s") from err

    async def _send(self, method: str, url: str, path: str, body: dict[str, Any] | None) -> tuple[int, bytes]:
        async with self._session.request(
            method, url.rstrip("/") + path, json=body, headers=self._headers(url), allow_redirects=False
        ) as response:
            return response.status, await response.read()

    def _headers(self, url: str) -> dict[str, str]:
        key = self.keys.get(url, self._api_key)
        return {"Authorization": f"Bearer {key}"} if key else {}


def _error_of(url: str, err: aiohttp.ClientError | ConnectionError | UnicodeError) -> DoraError:
    if isinstance(err, _NOT_A_URL):
        return ConfigError(f"{url}: not a server URL; write it as http://HOST:PORT")
    if isinstance(err, aiohttp.ClientConnectorError):
        if is_local(err.os_error):
            return NoConnectionLeft(err.os_error.strerror or str(err.os_error))
        return ServerGone(f"{url}: cannot connect ({err.os_error.strerror or err.os_error}); is the server running?")
    if isinstance(err, aiohttp.ConnectionTimeoutError):
        return ServerGone(f"{url}: connection timed out; is the server running?")
    if isinstance(err, aiohttp.ClientResponseError):
        return ProtocolError(f"{url}: not an HTTP answer ({err.message})")
    return ServerGone(f"{url}: the connection broke off ({err or type(err).__name__})")
