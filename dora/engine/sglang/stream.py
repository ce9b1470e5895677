"""A parser without IO for the streamed answer of POST /generate: bytes in, new tokens out.

Invariant: every token is delivered exactly once, in order, with its log-prob, whether the stream is cumulative or
incremental (decided per chunk from its lengths), wherever the bytes are split, and however the stream ends. Token ids
come from the log-prob triples, so that an id and its log-prob cannot be misaligned; `output_ids` is not read (it is
wrong in one abort chunk). From here to the journal, tokens are arrays of 32-bit numbers: 8 bytes per token instead of
68 as Python objects.

This is the hottest path of a run, executed for every chunk of every stream: structs without garbage collection, no
generators, a callback instead of a queue (bench/streams.py).
"""

from __future__ import annotations

import struct
from array import array
from collections.abc import Callable
from functools import lru_cache
from typing import Any, Final

import msgspec

from dora.engine.api import FinishReason, GenerateResult, OnTokens
from dora.engine.errors import RequestRefused, ServerGone, is_retryable
from dora.engine.sglang.protocol import DONE
from dora.errors import ProtocolError

#: No valid event is larger (a cumulative one of 100,000 tokens has about 4 MB), without a choice of experts.
MAX_EVENT_BYTES: Final = 64 * 2**20

_NOTHING: Final = msgspec.Raw()
_Triple = tuple[float, int, Any]  # log-prob, id, text or null


class _Finish(msgspec.Struct, gc=False):
    type: FinishReason
    message: str | None = None
    status_code: int | None = None


class _Span(msgspec.Struct, gc=False):
    version: str
    start: int
    end: int


class _Meta(msgspec.Struct, gc=False):
    output_token_logprobs: list[_Triple] | None = None
    completion_tokens: int | None = None
    finish_reason: _Finish | None = None
    weight_versions: list[_Span] | None = None
    weight_version: str | None = None  # valid in the last chunk only
    cached_tokens: int = 0
    spec_verify_ct: int = 0
    num_retractions: int | None = None
    routed_experts: msgspec.Raw = _NOTHING


class _Error(msgspec.Struct, gc=False):
    message: str = "no reason given"
    code: int | str | None = None
    retryable: bool | None = None


class _Event(msgspec.Struct, gc=False):
    meta_info: _Meta | None = None
    error: _Error | str | None = None
    message: str | None = None  # next to `code`: an error without an `error` object
    code: int | str | None = None


_decode = msgspec.json.Decoder(_Event).decode
_DONE: Final = DONE.encode()
_MAX_FLOAT32: Final = 3.4028234e38


class StreamParser:
    """The parser of one stream: `feed` it the bytes, `close` it at their end."""

    __slots__ = (
        "_max_event_bytes",
        "_max_tokens",
        "_num_tokens",
        "_on_tokens",
        "_result",
        "_source",
        "_unfinished",
        "routed",
    )

    def __init__(
        self, source: str, on_tokens: OnTokens, *, max_tokens: int = 2**31, max_event_bytes: int = MAX_EVENT_BYTES
    ) -> None:
        """`max_tokens`: what was asked for; an answer that goes on is refused from there on."""
        self.routed: msgspec.Raw | None = None  #: JSON of the choice of experts in the last chunk (routing.py)
        self._source = source  # URL of the server, for error messages
        self._max_event_bytes = max_event_bytes
        self._max_tokens = max_tokens
        self._on_tokens = on_tokens
        self._unfinished = bytearray()  # an incomplete line
        self._num_tokens = 0
        self._result: GenerateResult | None = None

    def feed(self, data: bytes | bytearray) -> None:
        """Deliver the tokens of all events that `data` completes. Tokens before an error are delivered first."""
        if self._unfinished:
            self._unfinished += data
            if b"\n" not in data:
                if len(self._unfinished) > self._max_event_bytes:
                    raise ProtocolError(f"{self._source}: an event of more than {self._max_event_bytes} bytes")
                return
            data, self._unfinished = self._unfinished, bytearray()  # without a copy: it may have many megabytes
        start = 0
        while (end := data.find(b"\n", start)) >= 0:  # faster than split()
            if data.startswith(b"data:", start):
                self._take(data[start + 5 : end])
            start = end + 1
        if start < len(data):
            self._unfinished += data[start:]

    def close(self) -> GenerateResult:
        """Return the result if the last chunk has arrived; otherwise raise ServerGone.

        A stream that ends after its last chunk but before `[DONE]` is complete: resuming it would sample too much.
        """
        if self._result is None:
            raise ServerGone(f"{self._source}: the stream broke off after {self._num_tokens} tokens")
        return self._result

    def _take(self, payload: bytes | bytearray) -> None:
        try:
            event = _decode(payload)
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as err:
            if payload.strip() == _DONE:
                return
            raise ProtocolError(f"{self._source}: unreadable event in a stream: {err}") from err
        meta = event.meta_info
        if meta is None:
            raise _refusal_in_stream(event, self._source)
        if self._result is not None:
            raise ProtocolError(f"{self._source}: a chunk after the last chunk of a stream")
        triples = meta.output_token_logprobs or []
        if meta.completion_tokens != self._num_tokens + len(triples):
            triples = self._new_triples(meta, triples)
        if triples:
            if self._num_tokens + len(triples) > self._max_tokens:
                raise ProtocolError(f"{self._source}: an answer of more than the {self._max_tokens} tokens asked for")
            self._num_tokens += len(triples)
            logprobs, token_ids, _ = zip(*triples)  # noqa: B905  all are triples
            if min(token_ids) < 0 or min(logprobs) < -_MAX_FLOAT32 or max(logprobs) > _MAX_FLOAT32:
                raise ProtocolError(f"{self._source}: a token id below 0, or a log-prob beyond float32")
            pack_ids, pack_logprobs = _packers(len(triples))
            try:
                chunk = array("i", pack_ids(*token_ids)), array("f", pack_logprobs(*logprobs))
            except struct.error as err:
                raise ProtocolError(f"{self._source}: a token id beyond 32 bits: {err}") from err
            self._on_tokens(*chunk)
        if meta.finish_reason is not None:
            self._result = self._finished(meta, meta.finish_reason)
            if bytes(memoryview(meta.routed_experts)[:4]) not in (b"", b"null"):
                self.routed = meta.routed_experts

    def _new_triples(self, meta: _Meta, triples: list[_Triple]) -> list[_Triple]:
        """Return the new triples of a chunk, which holds all tokens so far (cumulative) or only the new ones."""
        total = meta.completion_tokens
        if total is None:
            total = meta.weight_versions[-1].end if meta.weight_versions else len(triples)
        if self._num_tokens <= total == len(triples):
            return triples[self._num_tokens :]
        if self._num_tokens + len(triples) == total:
            return triples
        raise ProtocolError(
            f"{self._source}: a chunk with {len(triples)} log-probs and a total of {total} tokens does not follow "
            f"{self._num_tokens} tokens" + ("" if triples else "; does the server return log-probs?")
        )

    def _finished(self, meta: _Meta, finish: _Finish) -> GenerateResult:
        if (status := finish.status_code or 0) >= 400:  # aborted by the server: queue full, timeout, out of KV
            message = f"{self._source}: {finish.message or 'aborted by the server'} ({status})"
            raise RequestRefused(message, status=status, retryable=is_retryable(status))
        if finish.type != "abort" and not self._num_tokens:
            raise ProtocolError(f"{self._source}: an answer ended with '{finish.type}' before its first token")
        spans = tuple((span.version, span.start, span.end) for span in meta.weight_versions or ())
        if not spans and meta.weight_version is not None:  # SGLang before 0.5.20
            spans = ((meta.weight_version, 0, self._num_tokens),)
        borders = [0, *(end for _, _, end in spans)]
        if spans and ([start for _, start, _ in spans] != borders[:-1] or borders[-1] != self._num_tokens):
            raise ProtocolError(f"{self._source}: version spans {spans} do not cover {self._num_tokens} tokens")
        return GenerateResult(
            finish_reason=finish.type,
            spans=spans,
            num_tokens=self._num_tokens,
            cached_tokens=meta.cached_tokens,
            num_steps=meta.spec_verify_ct,
            num_rereads=meta.num_retractions or 0,
        )


@lru_cache(maxsize=4096)
def _packers(count: int) -> tuple[Callable[..., bytes], Callable[..., bytes]]:
    """Functions that pack `count` ids or log-probs into bytes; array() of a tuple takes three times as long."""
    return struct.Struct(f"{count}i").pack, struct.Struct(f"{count}f").pack


def refusal(status: int, body: bytes, *, source: str) -> RequestRefused:
    """Return the error for a status other than 200, from any of the four shapes that SGLang uses."""
    try:
        event = _decode(body)
        error = event.error if event.error is not None else event.message
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        error = None
    message = error.message if isinstance(error, _Error) else error
    if message is None:
        message = body[:300].decode(errors="replace").strip() or "no reason given"
    return RequestRefused(f"{source}: {message} ({status})", status=status, retryable=is_retryable(status))


def _refusal_in_stream(event: _Event, source: str) -> RequestRefused | ProtocolError:
    error = event.error if event.error is not None else event.message
    if error is None:
        return ProtocolError(f"{source}: an event in a stream with neither tokens nor an error")
    if isinstance(error, str):
        error = _Error(message=error, code=event.code)
    status = error.code if isinstance(error.code, int) else 400
    retryable = is_retryable(status) if error.retryable is None else error.retryable
    return RequestRefused(f"{source}: {error.message} ({status})", status=status, retryable=retryable)
