"""The embedded engine as each release of SGLang: every row of the table of dialects (docs/SGLANG.md)."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from dora.embedded.dialect import DIALECTS, dialect_of
from dora.embedded.updates import outside_gate
from dora.engine.api import GenerateRequest
from dora.engine.sglang.client import EngineClient
from dora.engine.sglang.probe import probe
from dora.engine.sglang.push import push
from dora.engine.sglang.target import PushTarget
from dora.errors import ConfigError
from tests.embedded.conftest import EOS, Reference, Served, Serving
from tests.embedded.test_control import pause, resume, until_tokens, update, updated
from tests.embedded.test_generate import running, sample

NEWEST = "0.5.23"
every_dialect = pytest.mark.parametrize("dialect", DIALECTS)

REQUEST = GenerateRequest(
    id="ours-0",
    tokens=[5, 6, 7, 8],
    max_new_tokens=12,
    temperature=1.0,
    stop_tokens=[EOS],
    seed=1,
    label="run/1",
)

UNFLUSHED = (
    400,
    {
        "success": False,
        "message": "Weights were updated, but the cache was not flushed because requests are still running or queued."
        " Retract or finish them, then call /flush_cache.",
        "num_paused_requests": 0,
    },
)


@pytest.fixture
def deaths(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The reasons for which the process would have ended."""
    reasons: list[str] = []
    monkeypatch.setattr("dora.embedded.updates.die", reasons.append)
    return reasons


async def in_flight(served: Served) -> asyncio.Task[Any]:
    call, _ = await running(served, "a")
    await until_tokens(served, "a", 5)
    return call


async def outcome(served: Served, call: asyncio.Task[Any], *, after: int) -> Any:
    """The answer, aborted once it has more than `after` tokens."""
    await resume(served)
    await until_tokens(served, "a", after + 20)
    await served.post("/abort_request", {"rid": "a"})
    return await call


def test_an_unknown_dialect_is_refused_with_the_known_ones() -> None:
    with pytest.raises(ConfigError, match=r"^dialect: unknown release '0.5.19'; choose one of 0.5.18, .*, 0.5.23$"):
        dialect_of("0.5.19")


@every_dialect
async def test_spans_and_routes_are_those_of_the_release(serving: Serving, dialect: str) -> None:
    async with serving(dialect=dialect) as served:
        assert (await served.get("/server_info"))[1]["version"] == dialect
        meta = (await served.generate([5, 6], sampling={"max_new_tokens": 2}))["meta_info"]
        assert meta["weight_version"] == "default"
        assert ("weight_versions" in meta) == (dialect != "0.5.18")
        assert (await served.get("/ready"))[0] == (404 if dialect == "0.5.18" else 200)
        assert (await served.get("/get_load"))[0] == (200 if dialect in ("0.5.18", "0.5.20") else 404)
        for path in ("/begin_weight_update", "/end_weight_update"):
            assert (await served.get(path))[0] == (404 if dialect in ("0.5.18", "0.5.20") else 405)


async def test_the_older_load_has_the_keys_of_a_captured_one(served: Served) -> None:
    status, [load] = await served.get("/get_load")
    assert (status, load.keys()) == (200, sample("GET_get_load")["body"][0].keys())


@every_dialect
async def test_an_unknown_sampling_key_has_the_error_of_the_release(serving: Serving, dialect: str) -> None:
    async with serving(dialect=dialect) as served:
        status, body = await served.post("/generate", {"input_ids": [5], "sampling_params": {"foo": 1}})
    if dialect in ("0.5.22", "0.5.23"):
        assert status == 400
        assert body["error"].startswith("unknown field `foo`, expected one of `max_new_tokens`, ")
    else:
        assert (status, body) == (500, "Internal Server Error")


# --- the gate around updates that send their tensors


async def test_the_gate_opens_once_and_closes_once_with_the_captured_words(serving: Serving) -> None:
    captured = sample("probe_0.5.23")
    async with serving(dialect=NEWEST) as served:
        for path, key in (("begin", "begin"), ("begin", "begin again"), ("end", "end")):
            status, body = await served.post(f"/{path}_weight_update")
            assert (status, body) == (captured[key][0], json_of(captured[key]))
        assert (await served.post("/end_weight_update"))[0] == 400


async def test_an_update_that_sends_its_tensors_is_refused_outside_an_open_gate(serving: Serving) -> None:
    captured = sample("probe_0.5.23")["dist without begin"]
    call = "update_weights_from_distributed"
    async with serving(dialect=NEWEST) as served:
        refusal = outside_gate(served.engine, call)
        assert refusal is not None
        assert (refusal.status, json_of([refusal.status, refusal.text])) == (captured[0], json_of(captured))
        await served.post("/begin_weight_update")
        assert outside_gate(served.engine, call) is None
    async with serving(dialect="0.5.20") as served:
        assert outside_gate(served.engine, call) is None


@every_dialect
async def test_a_disk_update_needs_no_gate(serving: Serving, model_b: Path, dialect: str) -> None:
    async with serving(dialect=dialect) as served:
        assert await update(served, model_b, "w1") == updated("w1")


# --- updates among live requests, as measured on each release


@pytest.mark.parametrize("mode", ["in_place", "retract"])
@every_dialect
async def test_an_unflushed_update_in_a_pause_switches_the_spans(
    serving: Serving, model_b: Path, dialect: str, mode: str
) -> None:
    async with serving(dialect=dialect) as served:
        call = await in_flight(served)
        await pause(served, mode)
        border = len(served.engine.batcher.live["a"].output_ids)
        assert await update(served, model_b, "w1", flush_cache=False) == updated("w1")
        meta = (await outcome(served, call, after=border))["meta_info"]
    assert (meta["weight_version"], meta["num_retractions"]) == ("w1", 1 if mode == "retract" else 0)
    if DIALECTS[dialect].has_spans:
        assert meta["weight_versions"] == spans(meta, border)


@every_dialect
async def test_an_update_that_flushes_in_a_pause_in_place_dies_or_changes_the_weights_under_a_400(
    serving: Serving, model_b: Path, reference_b: Reference, deaths: list[str], dialect: str
) -> None:
    async with serving(dialect=dialect) as served:
        call = await in_flight(served)
        await pause(served, "in_place")
        border = len(served.engine.batcher.live["a"].output_ids)
        answer = await update(served, model_b, "w1")
        label = (await served.get("/model_info"))[1]["weight_version"]
        meta = (await outcome(served, call, after=border))["meta_info"]
        if dialect in ("0.5.18", "0.5.20", "0.5.21"):
            assert deaths == ["cache flush failed after updating weights: requests were resident"]
            return
        assert (answer, label, deaths) == (UNFLUSHED, "default", [])
        assert (meta["weight_version"], meta["weight_versions"]) == ("w1", spans(meta, border))
        after = await served.generate([9, 8, 7], sampling={"max_new_tokens": 5, "ignore_eos": True})
    given = [logprob for logprob, _, _ in after["meta_info"]["output_token_logprobs"]]
    assert given == pytest.approx(reference_b.logprobs([9, 8, 7, *after["output_ids"]])[2:], abs=1e-4)
    assert after["meta_info"]["weight_versions"] == [{"version": "w1", "start": 0, "end": 5}]


@every_dialect
async def test_an_update_that_flushes_over_retracted_requests_dies_or_works(
    serving: Serving, model_b: Path, reference_b: Reference, deaths: list[str], dialect: str
) -> None:
    """Where it works, the tokens that follow agree with a plain forward of the new weights."""
    async with serving(dialect=dialect) as served:
        call = await in_flight(served)
        await pause(served, "retract")
        border = len(served.engine.batcher.live["a"].output_ids)
        answer = await update(served, model_b, "w1")
        label = (await served.get("/model_info"))[1]["weight_version"]
        whole = await outcome(served, call, after=border)
    if dialect in ("0.5.18", "0.5.20"):
        assert deaths == ["cache flush failed after updating weights: requests were resident"]
        return
    assert (answer, label, deaths) == (updated("w1"), "w1", [])
    meta = whole["meta_info"]
    assert (meta["num_retractions"], meta["weight_versions"]) == (1, spans(meta, border))
    given = [logprob for logprob, _, _ in meta["output_token_logprobs"]]
    assert given[border:] == pytest.approx(
        reference_b.logprobs([5, 6, 7, 8, *whole["output_ids"]])[3 + border :], abs=1e-4
    )


@every_dialect
async def test_a_flush_over_retracted_requests_is_refused_or_works_and_loses_no_token(
    serving: Serving, reference_a: Reference, dialect: str
) -> None:
    async with serving(dialect=dialect) as served:
        call = await in_flight(served)
        await pause(served, "retract")
        captured = sample("flush_busy" if dialect in ("0.5.18", "0.5.20") else "flush_idle")
        assert await served.post("/flush_cache") == (captured["status"], captured["body"])
        produced = len(served.engine.batcher.live["a"].output_ids)
        whole = await outcome(served, call, after=produced)
    given = [logprob for logprob, _, _ in whole["meta_info"]["output_token_logprobs"]]
    plain = reference_a.logprobs([5, 6, 7, 8, *whole["output_ids"]])[3:]
    assert given == pytest.approx(plain, abs=1e-4)


@pytest.mark.parametrize("mode", [None, "in_place"])
@every_dialect
async def test_a_flush_over_running_requests_is_refused(serving: Serving, dialect: str, mode: str | None) -> None:
    async with serving(dialect=dialect) as served:
        call = await in_flight(served)
        if mode is not None:
            await pause(served, mode)
        assert await served.post("/flush_cache") == (400, sample("flush_busy")["body"])
        await served.post("/abort_request", {"rid": "a"})
        await resume(served)
        await call


def json_of(captured: Any) -> Any:
    """The body of a captured pair of status and text."""
    return json.loads(captured[1])


def spans(meta: dict[str, Any], border: int) -> list[dict[str, Any]]:
    """The spans of an answer during which the weights changed at token `border`."""
    return [
        {"version": "default", "start": 0, "end": border},
        {"version": "w1", "start": border, "end": meta["completion_tokens"]},
    ]


# --- DORA's client


@every_dialect
async def test_doras_client_probes_pushes_and_reads_an_answer_of_one_version(
    serving: Serving, model_b: Path, reference_b: Reference, dialect: str
) -> None:
    facts = DIALECTS[dialect]
    async with serving(dialect=dialect) as served, EngineClient(max_connections=1) as client:
        url = str(served.http._base_url)
        assert (await probe(client, url, timeout_s=30)).release == dialect
        assert await client.has_route(url, "/begin_weight_update") == facts.has_update_gate
        await push(PushTarget(client, url), folder=model_b, label="run/1", timeout_s=30)
        token_ids: list[int] = []
        logprobs: list[float] = []

        def keep(new_ids: Sequence[int], new_logprobs: Sequence[float]) -> None:
            token_ids.extend(new_ids)
            logprobs.extend(new_logprobs)

        result = await client.generate(url, REQUEST, keep)
    assert result.spans == (("run/1", 0, len(token_ids)),)
    assert logprobs == pytest.approx(reference_b.logprobs([5, 6, 7, 8, *token_ids])[3:], abs=1e-4)
