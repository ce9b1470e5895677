"""Pauses, weight updates, flushes, labels and load as the controller relies on them, on both servers."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from dora.engine.errors import PushFailed, RequestRefused, ServerGone
from dora.engine.sglang.client import EngineClient
from dora.engine.sglang.push import push
from dora.engine.sglang.target import PushTarget
from tests.embedded.conftest import Reference
from tests.sglang.conftest import (
    DIALECT,
    KV_TOKENS,
    LONG,
    PROMPT,
    QUEUE,
    SLOTS,
    START_LABEL,
    Stream,
    Tokens,
    Wire,
    ask,
    request,
    spans_of,
)

pytestmark = pytest.mark.timeout(120, func_only=True)  # starting a server has a limit of its own

SHORT = {"max_new_tokens": 20, "ignore_eos": True}
#: Longer than what a test waits for, short enough to run to its end.
MEDIUM = {"max_new_tokens": 400, "ignore_eos": True}
SILENCE_S = 0.3  # enough for a hundred tokens of a server that decodes


def plain(reference: Reference, token_ids: list[int]) -> Any:
    """What the log-probs of an answer to PROMPT must be."""
    return pytest.approx(reference.logprobs(PROMPT + token_ids)[len(PROMPT) - 1 :], abs=1e-3)


async def is_silent(stream: Stream) -> bool:
    """Whether no token comes for a while; what was on its way when a pause was answered may still arrive."""
    await asyncio.sleep(SILENCE_S)
    seen = len(stream.token_ids)
    await asyncio.sleep(SILENCE_S)
    return len(stream.token_ids) == seen


# --- information


async def test_an_idle_server_is_healthy_ready_and_empty(wire: Wire, client: EngineClient) -> None:
    assert (await wire.get("/health"))[0] == 200
    assert (await wire.get("/ready"))[0] == (200 if DIALECT.has_ready else 404)
    load = await wire.load()
    assert (load["num_running_reqs"], load["num_waiting_reqs"], load["num_used_tokens"]) == (0, 0, 0)
    assert (load["max_running_requests"], load["max_total_num_tokens"]) == (SLOTS, KV_TOKENS)
    assert (await client.loads(wire.server.url)).is_empty
    assert await client.weight_version(wire.server.url) == START_LABEL


async def test_a_busy_server_says_what_runs_and_what_waits(wire: Wire, client: EngineClient) -> None:
    calls = [asyncio.create_task(wire.generate(sampling=LONG)) for _ in range(SLOTS)]
    await wire.until_load(num_running_reqs=SLOTS)
    calls.append(asyncio.create_task(wire.generate(sampling=LONG)))
    await wire.until_load(num_waiting_reqs=1)
    loads = await client.loads(wire.server.url)
    assert (loads.num_running, loads.num_waiting, loads.is_empty) == (SLOTS, 1, False)
    assert loads.used_tokens >= SLOTS * len(PROMPT)
    assert (await wire.get("/health"))[0] == 200  # answered by anybody's tokens, without a slot of its own
    await wire.post("/abort_request", {"abort_all": True})
    await asyncio.gather(*calls)
    await wire.until_load(num_running_reqs=0, num_waiting_reqs=0, num_used_tokens=0)


async def test_metrics_have_the_names_that_are_read_and_count_tokens(wire: Wire) -> None:
    async def generated() -> float:
        _, text = await wire.get("/metrics")
        values = [line.split()[-1] for line in text.splitlines() if line.startswith("sglang:generation_tokens_total")]
        assert all(f"sglang:{name}" in text for name in ("num_running_reqs", "num_queue_reqs", "token_usage"))
        return sum(map(float, values))

    await wire.generate(sampling=SHORT)
    before = await generated()
    await wire.generate(sampling=SHORT)
    assert await generated() == before + 20


async def test_an_unknown_route_is_a_404(wire: Wire) -> None:
    assert await wire.post("/no_such_route") == (404, {"detail": "Not Found"})


async def test_a_known_route_says_405_to_a_method_that_it_does_not_take(wire: Wire, client: EngineClient) -> None:
    """How the probe finds what a server can do without doing it."""
    for path, present in (
        ("/begin_weight_update", DIALECT.has_update_gate),
        ("/end_weight_update", DIALECT.has_update_gate),
        ("/ready", DIALECT.has_ready),
        ("/get_load", DIALECT.has_get_load),
        ("/weights_checker", True),
        ("/no_such_route", False),
    ):
        assert await client.has_route(wire.server.url, path) is present


@pytest.mark.skipif(not DIALECT.has_update_gate, reason=f"{DIALECT.version} has no gate around updates")
async def test_the_gate_opens_once_and_an_update_that_brings_its_tensors_needs_it(wire: Wire, model_a: Path) -> None:
    bucket = {"names": [], "dtypes": [], "shapes": [], "group_name": "nobody", "flush_cache": False}
    status, answer = await wire.post("/update_weights_from_distributed", bucket)
    words = "update_weights_from_distributed must run between begin_weight_update() and end_weight_update()"
    assert (status, answer) == (400, {"success": False, "message": words})
    assert (await wire.post("/begin_weight_update"))[0] == 200
    assert (await wire.post("/begin_weight_update"))[0] == 400
    assert (await wire.post("/end_weight_update"))[0] == 200
    assert (await wire.post("/end_weight_update"))[0] == 400
    assert (await wire.update(model_a, START_LABEL))[0] == 200  # from disk: no gate


# --- pauses


@pytest.mark.parametrize("mode", ["in_place", "retract"])
async def test_a_pause_loses_no_token_and_holds_new_requests(wire: Wire, reference_a: Reference, mode: str) -> None:
    async with wire.stream(sampling=MEDIUM) as (stream, task):
        await stream.until(5)
        paused = {"message": "Generation paused successfully.", "status": "ok"}
        assert await wire.post("/pause_generation", {"mode": mode}) == (200, paused)
        held = asyncio.create_task(wire.generate(sampling=SHORT))
        assert (await wire.get("/ready"))[0] == (503 if DIALECT.has_ready else 404)
        assert await is_silent(stream)
        assert not held.done()
        continued = {"message": "Generation continued successfully.", "status": "ok"}
        assert await wire.post("/continue_generation") == (200, continued)
        assert (await held)["meta_info"]["completion_tokens"] == 20
        await task
    assert stream.done
    assert (len(stream.token_ids), stream.meta["num_retractions"]) == (400, 1 if mode == "retract" else 0)
    assert spans_of(stream.meta) == [{"version": START_LABEL, "start": 0, "end": 400}]
    assert stream.logprobs == plain(reference_a, stream.token_ids)


async def test_a_pause_in_mode_abort_ends_what_runs(wire: Wire) -> None:
    async with wire.stream(sampling=LONG) as (stream, task):
        await stream.until(5)
        await wire.post("/pause_generation", {"mode": "abort"})
        await task
        assert stream.meta["finish_reason"]["type"] == "abort"


@pytest.mark.parametrize("mode", ["in_place", "retract"])
async def test_queued_requests_stay_queued_during_a_pause_and_then_complete(wire: Wire, mode: str) -> None:
    running = [asyncio.create_task(wire.post("/generate", ask(LONG, rid=f"runs-{i}"))) for i in range(SLOTS)]
    await wire.until_load(num_running_reqs=SLOTS)
    waiting = asyncio.create_task(wire.generate(sampling=SHORT, rid="waits-0"))
    await wire.until_load(num_waiting_reqs=1)
    await wire.post("/pause_generation", {"mode": mode})
    await asyncio.sleep(SILENCE_S)
    assert not waiting.done()
    await wire.post("/continue_generation")
    await wire.post("/abort_request", {"rid": "runs-0"})
    assert (await waiting)["meta_info"]["finish_reason"] == {"type": "length", "length": 20}
    await wire.post("/abort_request", {"abort_all": True})
    await asyncio.gather(*running)


async def test_a_retracted_request_that_finds_the_queue_full_ends_with_its_tokens_and_may_be_tried_again(
    wire: Wire, client: EngineClient, reference_a: Reference
) -> None:
    """The limit of the queue counts the retracted too; hence no limit in what docs/SGLANG.md tells to start.

    The real server may break the stream off instead (its KeyError after a retraction): to be tried again as well.
    """
    url, answers = wire.server.url, [Tokens() for _ in range(SLOTS)]
    running = [
        asyncio.create_task(client.generate(url, request(f"full-{i}", endless=True), answers[i])) for i in range(SLOTS)
    ]
    for tokens in answers:
        await tokens.until(5)
    waiting = [asyncio.create_task(wire.generate(sampling=SHORT)) for _ in range(QUEUE)]
    await wire.until_load(num_waiting_reqs=QUEUE)
    await client.pause(url, "retract")
    for call, tokens in zip(running, answers, strict=True):
        with pytest.raises((RequestRefused, ServerGone), match=r"The request queue is full|broke off") as refused:
            await call
        assert isinstance(refused.value, ServerGone) or refused.value.retryable
        assert tokens.logprobs == plain(reference_a, tokens.token_ids)
    await client.resume(url)
    await asyncio.gather(*waiting)


async def test_a_pause_in_mode_abort_ends_what_waits(wire: Wire) -> None:
    calls = [asyncio.create_task(wire.generate(sampling=LONG)) for _ in range(SLOTS)]
    await wire.until_load(num_running_reqs=SLOTS)
    calls.append(asyncio.create_task(wire.generate(sampling=LONG)))
    await wire.until_load(num_waiting_reqs=1)
    await wire.post("/pause_generation", {"mode": "abort"})
    reasons = [answer["meta_info"]["finish_reason"]["message"] for answer in await asyncio.gather(*calls)]
    assert sorted(reasons) == ["Abort in waiting queue", *["Aborted"] * SLOTS]


async def test_a_server_is_ready_again_after_a_pause(wire: Wire) -> None:
    await wire.post("/pause_generation", {"mode": "in_place"})
    await wire.post("/continue_generation")
    assert (await wire.get("/health"))[0] == 200
    assert (await wire.get("/ready"))[0] == (200 if DIALECT.has_ready else 404)


async def test_a_request_aborted_in_a_retract_pause_ends_at_once_and_each_token_is_handed_on_once(
    wire: Wire, client: EngineClient, reference_a: Reference
) -> None:
    """Its last chunk repeats the last id and all log-probs. Aborted before all earlier chunks were sent, the stream of
    0.5.20 would break off instead (docs/SGLANG.md)."""
    url, tokens = wire.server.url, Tokens()
    call = asyncio.create_task(client.generate(url, request("retract-0", endless=True), tokens))
    await tokens.until(5)
    await client.pause(url, "retract")
    await asyncio.sleep(SILENCE_S)
    await client.abort(url, "retract-0")
    async with asyncio.timeout(10):
        result = await call
    assert (result.finish_reason, result.num_tokens) == ("abort", len(tokens.token_ids))
    assert tokens.logprobs == plain(reference_a, tokens.token_ids)


async def test_a_request_aborted_in_a_pause_in_place_ends_after_it(wire: Wire) -> None:
    async with wire.stream(sampling=LONG, rid="in-place") as (stream, task):
        await stream.until(5)
        await wire.post("/pause_generation", {"mode": "in_place"})
        await wire.post("/abort_request", {"rid": "in-place"})
        assert await is_silent(stream)
        assert not task.done()
        await wire.post("/continue_generation")
        async with asyncio.timeout(10):
            await task
    assert stream.meta["finish_reason"]["type"] == "abort"
    assert stream.meta["completion_tokens"] == len(stream.token_ids)


# --- the prefix cache


async def test_a_flush_empties_the_prefix_cache(wire: Wire) -> None:
    async def cached() -> int:
        count: int = (await wire.generate(sampling=SHORT))["meta_info"]["cached_tokens"]
        return count

    assert [await cached(), await cached()] == [0, len(PROMPT) - 1]
    async with asyncio.timeout(10):
        while (answer := await wire.post("/flush_cache"))[0] == 400:  # SGLang is busy for a moment after the last token
            assert answer[1].splitlines()[0] == "Flush cache failed."
    assert (answer[0], answer[1].splitlines()[0]) == (200, "Cache flushed.")
    assert await cached() == 0


@pytest.mark.parametrize("pause", [None, "in_place", "retract"])
async def test_a_flush_is_refused_while_a_request_is_resident_unless_retracted_since_0_5_21(
    wire: Wire, client: EngineClient, pause: str | None
) -> None:
    async with wire.stream(sampling=LONG) as (stream, _):
        await stream.until(1)
        if pause is not None:
            await wire.post("/pause_generation", {"mode": pause})
        may_flush = pause == "retract" and DIALECT.flushes_over_queue
        status, text = await wire.post("/flush_cache")
        assert (status, text.splitlines()[0]) == (
            (200, "Cache flushed.") if may_flush else (400, "Flush cache failed.")
        )
        assert await client.flush_cache(wire.server.url) is may_flush


# --- weights


async def test_a_push_makes_the_server_hold_other_weights_under_their_label_and_back(
    wire: Wire, client: EngineClient, model_a: Path, model_b: Path, reference_a: Reference, reference_b: Reference
) -> None:
    endpoint = PushTarget(client, wire.server.url)
    for folder, label, reference in ((model_b, "run/1", reference_b), (model_a, "run/0", reference_a)):
        await push(endpoint, folder=folder, label=label, timeout_s=30)
        answer = await wire.generate(sampling=SHORT)  # no extra_key: nothing of the other weights may be cached
        meta = answer["meta_info"]
        assert (meta["cached_tokens"], meta["weight_version"]) == (0, label)
        assert spans_of(meta) == [{"version": label, "start": 0, "end": 20}]
        assert [triple[0] for triple in meta["output_token_logprobs"]] == plain(reference, answer["output_ids"])
        assert await wire.weight_version() == label


async def test_a_push_to_a_busy_server_changes_nothing_and_leaves_it_serving(
    wire: Wire, client: EngineClient, model_b: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("dora.engine.sglang.push.DRAIN_TIMEOUT_S", 0.5)
    async with wire.stream(sampling=LONG) as (stream, _):
        await stream.until(30)  # by now it is counted
        with pytest.raises(PushFailed) as failed:
            await push(PushTarget(client, wire.server.url), folder=model_b, label="run/1", timeout_s=30)
        assert not failed.value.doubtful
        assert await wire.weight_version() == START_LABEL
        await stream.until(len(stream.token_ids) + 20)


async def test_an_update_without_a_pause_waits_for_what_runs_and_holds_what_comes(
    wire: Wire, model_b: Path, reference_a: Reference, reference_b: Reference
) -> None:
    async with wire.stream(sampling=MEDIUM) as (stream, task):
        await stream.until(1)
        update = asyncio.create_task(wire.update(model_b, "run/1"))
        await asyncio.sleep(0.05)
        assert not update.done()
        later = asyncio.create_task(wire.generate(sampling=SHORT, extra_key="run/1"))
        status, answer = await update
        await task
    assert (status, answer["success"]) == (200, True)
    assert answer["message"].endswith("Weight version updated to run/1.")
    assert spans_of(stream.meta) == [{"version": START_LABEL, "start": 0, "end": 400}]
    assert stream.logprobs == plain(reference_a, stream.token_ids)
    after = await later
    assert spans_of(after["meta_info"]) == [{"version": "run/1", "start": 0, "end": 20}]
    assert [triple[0] for triple in after["meta_info"]["output_token_logprobs"]] == plain(
        reference_b, after["output_ids"]
    )


@pytest.mark.parametrize("pause", [None, "abort", "retract", "in_place"])
@pytest.mark.parametrize("flush", [True, False, None])
async def test_an_update_of_an_empty_server_flushes_unless_told_not_to(
    wire: Wire, model_b: Path, pause: str | None, flush: bool | None
) -> None:
    """However it is paused; None is the default of the call."""
    await wire.generate(sampling=SHORT)
    await wire.round_trip()
    if pause is not None:
        await wire.post("/pause_generation", {"mode": pause})
    body = {"model_path": str(model_b), "weight_version": "run/1"} | ({} if flush is None else {"flush_cache": flush})
    status, answer = await wire.post("/update_weights_from_disk", body)
    assert (status, answer["success"], await wire.weight_version()) == (200, True, "run/1")
    await wire.post("/continue_generation")
    after = await wire.generate(sampling=SHORT)
    assert after["meta_info"]["cached_tokens"] == (len(PROMPT) - 1 if flush is False else 0)


async def test_an_update_that_aborts_ends_what_runs_and_needs_no_pause(wire: Wire, model_b: Path) -> None:
    """Unflushed: what is aborted may not have left the batch yet, and a flush under it ends 0.5.20."""
    async with wire.stream(sampling=LONG) as (stream, task):
        await stream.until(5)
        status, answer = await wire.update(model_b, "run/1", abort_all_requests=True)
        await task
    assert (status, answer["success"], await wire.weight_version()) == (200, True, "run/1")
    assert stream.meta["finish_reason"]["type"] == "abort"
    assert spans_of(stream.meta)[0]["version"] == START_LABEL


@pytest.mark.skipif(not DIALECT.has_spans, reason=f"{DIALECT.version} tells no spans")
@pytest.mark.parametrize("mode", ["in_place", "retract"])
async def test_an_update_in_mid_flight_shows_as_two_spans_whose_border_is_where_the_weights_changed(
    wire: Wire, model_b: Path, reference_a: Reference, mode: str
) -> None:
    """Unflushed, in either mode the new weights read KV of the old ones: what follows agrees with neither."""
    async with wire.stream(sampling=MEDIUM) as (stream, task):
        await stream.until(5)
        await wire.post("/pause_generation", {"mode": mode})
        assert (await wire.update(model_b, "run/1"))[0] == 200
        await wire.post("/continue_generation")
        await task
    first, second = stream.meta["weight_versions"]
    border = first["end"]
    assert 5 <= border < 400
    assert first == {"version": START_LABEL, "start": 0, "end": border}
    assert second == {"version": "run/1", "start": border, "end": 400}
    assert (stream.meta["weight_version"], stream.meta["num_retractions"]) == ("run/1", 1 if mode == "retract" else 0)
    old = reference_a.logprobs(PROMPT + stream.token_ids)[len(PROMPT) - 1 :]
    assert stream.logprobs[:border] == pytest.approx(old[:border], abs=1e-3)
    assert stream.logprobs[border] != pytest.approx(old[border], abs=1e-3)


async def test_a_prefix_outlives_an_update_that_does_not_flush(
    wire: Wire, model_b: Path, reference_b: Reference
) -> None:
    """Why each version has its namespace: the cache is not keyed by version."""
    await wire.generate(sampling=SHORT, extra_key="run/0")
    await wire.update(model_b, "run/1")
    for key, cached in (("run/0", len(PROMPT) - 1), ("run/1", 0)):
        answer = await wire.generate(sampling=SHORT, extra_key=key)
        assert answer["meta_info"]["cached_tokens"] == cached
        agrees = [t[0] for t in answer["meta_info"]["output_token_logprobs"]] == plain(
            reference_b, answer["output_ids"]
        )
        assert agrees is (cached == 0)


async def test_a_missing_checkpoint_is_refused_and_the_old_weights_stay(
    wire: Wire, client: EngineClient, reference_a: Reference, tmp_path: Path
) -> None:
    status, answer = await wire.update(tmp_path / "absent", "run/1")
    assert (status, answer["success"]) == (400, False)
    await client.pause(wire.server.url, "in_place")
    with pytest.raises(RequestRefused):
        await client.update_weights_from_disk(wire.server.url, str(tmp_path / "absent"), "run/1", timeout_s=30)
    await client.resume(wire.server.url)
    assert await wire.weight_version() == START_LABEL
    after = await wire.generate(sampling=SHORT)
    assert [triple[0] for triple in after["meta_info"]["output_token_logprobs"]] == plain(
        reference_a, after["output_ids"]
    )


async def test_a_relabel_changes_the_label_and_nothing_else(wire: Wire, reference_a: Reference) -> None:
    async with wire.stream(sampling=MEDIUM) as (stream, task):
        await stream.until(5)
        body = {"new_version": "run/7", "abort_all_requests": False}
        status, answer = await wire.post("/update_weight_version", body)
        assert (status, answer["success"], answer["new_version"]) == (200, True, "run/7")
        await task
    assert await wire.weight_version() == "run/7"
    assert stream.meta["finish_reason"] == {"type": "length", "length": 400}
    assert stream.logprobs == plain(reference_a, stream.token_ids)


async def test_a_relabel_aborts_running_requests_unless_told_not_to(wire: Wire) -> None:
    """Why the client never relabels: the default aborts."""
    async with wire.stream(sampling=LONG) as (stream, task):
        await stream.until(5)
        assert (await wire.post("/update_weight_version", {"new_version": "run/7"}))[0] == 200
        await task
    assert stream.meta["finish_reason"]["type"] == "abort"
