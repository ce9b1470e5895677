"""POST /generate: one call from the parsed body to the last byte, unary or streamed.

A call is live, and can be aborted, once it has passed the gate. It is aborted if its client disconnects.
"""

from __future__ import annotations

import asyncio
import time
from contextlib import suppress

import msgspec
from aiohttp import web

from dora.embedded.adapters import AdapterRefused
from dora.embedded.answers import CallAnswer, event
from dora.embedded.bodies import error_body
from dora.embedded.engine_state import ENGINE, EngineState
from dora.embedded.requests import BadBody, BadValue, GenerateCall, RefusedCall, UnknownSamplingKey, parse
from dora.embedded.text import Text
from dora.engine.sglang import protocol

#: Headers wait this long, so that they can share a packet with the first chunk: a write costs as much as a step of a
#: small model.
HEADERS_AFTER_S = 0.05
_DONE_EVENT = f"data: {protocol.DONE}\n\n".encode()
_STREAM_HEADERS = {"Content-Type": "text/event-stream; charset=utf-8", "Cache-Control": "no-cache"}


async def generate(request: web.Request) -> web.StreamResponse:
    engine = request.app[ENGINE]
    call = parse(await request.read(), engine.limits)
    if isinstance(call, RefusedCall):
        return await _refuse(request, call)
    opened = await _open(request) if call.stream and engine.gate.closed else None
    async with engine.gate.passage():
        return await _run(request, engine, call, opened)


async def _run(
    request: web.Request, engine: EngineState, call: GenerateCall, opened: web.StreamResponse | None
) -> web.StreamResponse:
    generation, batcher = call.generation, engine.batcher
    if call.adapter is not None:
        try:
            generation.adapter = await engine.adapters.find(call.adapter)
        except AdapterRefused as err:
            return await _refuse(request, RefusedCall(BadValue(str(err)), stream=call.stream), opened)
    if generation.rid in batcher.live:
        duplicate = BadValue(f"Duplicate request ID detected: {generation.rid}")
        return await _refuse(request, RefusedCall(duplicate, stream=call.stream), opened)
    answer = CallAnswer(
        call,
        text=Text(generation, engine.tokenizer) if engine.tokenizer is not None else None,
        incremental=call.stream and bool(engine.arguments["incremental_streaming_output"]),
        has_spans=engine.dialect.has_spans,
        dispatched_at=time.time(),
    )
    batcher.submit(generation)
    try:
        return await (_stream(request, engine, answer, opened) if call.stream else _unary(answer))
    finally:
        if not generation.done:  # the client is gone
            batcher.abort_only(generation.rid)


async def _unary(answer: CallAnswer) -> web.StreamResponse:
    generation = answer.generation
    while not generation.done:
        await generation.next_news()
    reason = generation.finish_reason or {}
    if (status := reason.get("status_code") or 200) >= 400:
        return web.json_response(error_body(reason["message"], status=status), status=status)
    return web.Response(body=msgspec.json.encode(answer.next()), content_type="application/json")


async def _open(request: web.Request) -> web.StreamResponse:
    """Send the headers of a stream."""
    response = web.StreamResponse(headers=_STREAM_HEADERS)
    with suppress(ConnectionError):  # the first write fails again
        await response.prepare(request)
    return response


async def _stream(
    request: web.Request, engine: EngineState, answer: CallAnswer, opened: web.StreamResponse | None
) -> web.StreamResponse:
    """Send chunks as they are published. If the answer is complete before its headers are due, all is one write."""
    generation = answer.generation
    if opened is None:
        with suppress(TimeoutError):
            async with asyncio.timeout(HEADERS_AFTER_S):
                await generation.news.wait()  # does not clear the event
        if generation.done:
            return web.Response(body=event(answer.next()) + _DONE_EVENT, headers=_STREAM_HEADERS)
        opened = await _open(request)
    with suppress(ConnectionError):  # the client closed: the caller aborts
        while not generation.done:
            if answer.due():
                answer.weight_version = engine.label
                await opened.write(event(answer.next()))
            await generation.next_news()
        await opened.write_eof(event(answer.next()) + _DONE_EVENT)
    return opened


async def _refuse(
    request: web.Request, refusal: RefusedCall, opened: web.StreamResponse | None = None
) -> web.StreamResponse:
    message = str(refusal.error)
    if isinstance(refusal.error, BadBody):
        return web.json_response(error_body(message), status=400)
    if isinstance(refusal.error, UnknownSamplingKey):
        if request.app[ENGINE].dialect.names_unknown_sampling_key:
            return web.json_response({"error": message}, status=400)
        return web.Response(text="Internal Server Error", status=500)
    if not refusal.stream:
        return web.json_response({"error": {"message": message}}, status=400)
    error = {"message": message, "type": "invalid_request_error", "code": 400, "retryable": False}
    body = event({"error": error}) + _DONE_EVENT
    if opened is None:
        return web.Response(body=body, headers=_STREAM_HEADERS)
    await opened.write_eof(body)
    return opened
