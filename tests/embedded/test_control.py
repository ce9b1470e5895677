"""Control routes over a real socket: pause, updates, flush, health, information, keys."""

from __future__ import annotations

import asyncio
import json
import sys
import threading
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file, save_file

from dora.embedded.control import _gauges
from dora.embedded.generation import Generation, SamplingParams
from tests.embedded.conftest import Reference, Served, Serving
from tests.embedded.test_generate import running, sample


async def until_running(served: Served, count: int = 1) -> None:
    async with asyncio.timeout(20):
        while len(served.engine.batcher.rows) < count:
            await served.get("/v1/loads")


async def until_tokens(served: Served, rid: str, count: int) -> None:
    async with asyncio.timeout(20):
        while len(served.engine.batcher.live[rid].output_ids) < count:
            await served.get("/v1/loads")


async def pause(served: Served, mode: str) -> None:
    captured = sample("pause_in_place_flush_False")["pause"]["body"]
    assert await served.post("/pause_generation", {"mode": mode}) == (200, captured)


async def resume(served: Served) -> None:
    captured = sample("pause_in_place_flush_False")["continue"]["body"]
    assert await served.post("/continue_generation") == (200, captured)


async def update(served: Served, folder: Path, version: str, **fields: Any) -> tuple[int, Any]:
    return await served.post(
        "/update_weights_from_disk", {"model_path": str(folder), "weight_version": version, **fields}
    )


def updated(version: str) -> tuple[int, Any]:
    captured = sample("update_no_pause")["update"]["body"]
    return 200, {**captured, "message": captured["message"].replace("w1", version)}


# --- pause


@pytest.mark.parametrize("mode", ["abort", "retract", "in_place"])
async def test_a_paused_server_holds_new_requests_until_it_continues(served: Served, mode: str) -> None:
    await pause(served, mode)
    assert await served.get("/ready") == (503, "")
    held = asyncio.create_task(served.generate([5], sampling={"max_new_tokens": 2}, rid="held"))
    await served.get("/v1/loads")
    assert "held" not in served.engine.batcher.live
    assert not held.done()
    await resume(served)
    assert (await held)["meta_info"]["completion_tokens"] == 2
    assert await served.get("/ready") == (200, "")


async def test_a_continue_and_a_relabel_are_not_left_half_done_by_a_caller_that_goes(served: Served) -> None:
    await pause(served, "in_place")
    busy = threading.Event()
    thread = asyncio.create_task(served.engine.batcher.between_steps(lambda: busy.wait(20), on_thread=True))
    calls = [
        asyncio.create_task(served.post("/update_weight_version", {"new_version": "v9"})),
        asyncio.create_task(served.post("/continue_generation")),
    ]
    async with asyncio.timeout(20):
        while len(served.engine.batcher._orders) < len(calls):
            await served.get("/v1/loads")
    for call in calls:
        call.cancel()
    await asyncio.wait(calls)
    await served.get("/v1/loads")
    busy.set()
    assert await thread
    assert (await served.generate([5], sampling={"max_new_tokens": 1}))["meta_info"]["weight_version"] == "v9"
    assert (await served.get("/model_info"))[1]["weight_version"] == "v9"


async def test_an_empty_pause_body_means_abort(served: Served) -> None:
    call, _ = await running(served, "a")
    assert await served.post("/pause_generation", {}) == (200, sample("pause_empty_body")["body"])
    assert (await call)["meta_info"]["finish_reason"]["type"] == "abort"
    assert served.engine.batcher.live == {}
    await resume(served)


async def test_a_pause_in_place_stops_decoding_and_an_abort_ends_only_after_continue(served: Served) -> None:
    call, _ = await running(served, "a")
    await until_running(served)
    await pause(served, "in_place")
    produced = len(served.engine.batcher.live["a"].output_ids)
    await served.post("/abort_request", {"rid": "a"})
    await served.get("/v1/loads")
    assert not call.done()
    await resume(served)
    answer = await call
    assert answer["meta_info"]["finish_reason"]["type"] == "abort"
    assert len(answer["output_ids"]) == produced


async def test_a_retract_pause_empties_the_rows_and_loses_no_token(served: Served, reference_a: Reference) -> None:
    sampling = {"max_new_tokens": 300, "ignore_eos": True, "sampling_seed": 3}
    whole = await served.generate([5, 6], sampling=sampling)
    call = asyncio.create_task(served.generate([5, 6], sampling=sampling, rid="a"))
    await until_running(served)
    await until_tokens(served, "a", 5)
    await pause(served, "retract")
    load = (await served.get("/v1/loads"))[1]["loads"][0]
    assert (load["num_running_reqs"], load["num_waiting_reqs"], load["queues"]["retracted"]) == (0, 1, 1)
    await resume(served)
    answer = await call
    assert answer["meta_info"]["num_retractions"] == 1
    assert answer["output_ids"] == whole["output_ids"]
    expected = reference_a.logprobs([5, 6, *answer["output_ids"]])[1:]
    assert [logprob for logprob, _, _ in answer["meta_info"]["output_token_logprobs"]] == pytest.approx(
        expected, abs=1e-4
    )


async def test_a_request_aborted_in_a_retract_pause_answers_at_once_with_its_tokens(served: Served) -> None:
    call, _ = await running(served, "a")
    await until_running(served)
    await until_tokens(served, "a", 5)
    await pause(served, "retract")
    await served.post("/abort_request", {"rid": "a"})
    answer = await call
    assert answer["meta_info"]["finish_reason"]["message"] == "Abort in waiting queue"
    assert len(answer["output_ids"]) >= 5
    assert "prompt_tokens" not in answer["meta_info"]
    await resume(served)


async def test_an_unknown_pause_mode_is_a_400_and_pauses_nothing(served: Served) -> None:
    status, body = await served.post("/pause_generation", {"mode": "bogus"})
    assert (status, body["type"], body["code"]) == (400, "Bad Request", 400)
    await served.generate([5], sampling={"max_new_tokens": 1})


async def test_the_loop_goes_on_while_a_server_that_ends_waits_for_its_decoder_thread(serving: Serving) -> None:
    busy = threading.Event()
    async with serving() as served:
        thread = served.engine.batcher._thread
        freed = thread.submit(busy.wait, 5)

        async def free() -> None:
            while not thread._shutdown:  # noqa: ASYNC110 - it can only be polled
                await asyncio.sleep(0)
            busy.set()

        freeing = asyncio.create_task(free())
    await freeing
    assert freed.result()


# --- weight updates


async def test_the_push_sequence_serves_the_new_version_and_only_that(
    served: Served, model_b: Path, reference_b: Reference
) -> None:
    await served.generate([5, 6, 7, 8])
    await pause(served, "in_place")
    assert await served.post("/flush_cache") == (200, sample("flush_idle")["body"])
    assert await update(served, model_b, "run/1", flush_cache=False) == updated("run/1")
    assert await served.post("/flush_cache") == (200, sample("flush_idle")["body"])
    info = (await served.get("/model_info"))[1]
    assert (info["weight_version"], info["model_path"]) == ("run/1", str(model_b))
    await resume(served)
    answer = await served.generate([5, 6, 7, 8], sampling={"max_new_tokens": 5, "ignore_eos": True})
    meta = answer["meta_info"]
    assert meta["weight_version"] == "run/1"
    assert meta["weight_versions"] == [{"version": "run/1", "start": 0, "end": 5}]
    assert meta["cached_tokens"] == 0
    expected = reference_b.logprobs([5, 6, 7, 8, *answer["output_ids"]])[3:]
    assert [logprob for logprob, _, _ in meta["output_token_logprobs"]] == pytest.approx(expected, abs=1e-4)


async def test_an_unpaused_update_waits_for_running_requests_and_holds_new_ones(
    served: Served, model_b: Path, reference_b: Reference
) -> None:
    call, _ = await running(served, "old")
    push = asyncio.create_task(update(served, model_b, "w1"))
    async with asyncio.timeout(20):
        while not served.engine.gate.closing:
            await served.get("/v1/loads")
    new = asyncio.create_task(served.generate([5, 6], sampling={"max_new_tokens": 3, "ignore_eos": True}, rid="new"))
    await served.get("/v1/loads")
    assert "new" not in served.engine.batcher.live
    assert not push.done()
    old = await call
    assert await push == updated("w1")
    assert len(old["output_ids"]) == 1500
    assert old["meta_info"]["weight_versions"] == [{"version": "default", "start": 0, "end": 1500}]
    answer = await new
    assert answer["meta_info"]["weight_versions"] == [{"version": "w1", "start": 0, "end": 3}]
    expected = reference_b.logprobs([5, 6, *answer["output_ids"]])[1:]
    assert [logprob for logprob, _, _ in answer["meta_info"]["output_token_logprobs"]] == pytest.approx(
        expected, abs=1e-4
    )


async def test_flushing_with_an_update_while_requests_are_resident_is_fatal(
    served: Served, model_b: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    reasons: list[str] = []
    monkeypatch.setattr("dora.embedded.updates.die", reasons.append)  # the process would end here
    call, _ = await running(served, "a")
    await pause(served, "in_place")
    await update(served, model_b, "w1")
    assert reasons == ["cache flush failed after updating weights: requests were resident"]
    await served.post("/abort_request", {"rid": "a"})
    await resume(served)
    await call


async def test_an_update_in_place_without_flush_gives_spans(served: Served, model_b: Path) -> None:
    call, _ = await running(served, "a")
    await until_running(served)
    await until_tokens(served, "a", 5)
    await pause(served, "in_place")
    before = len(served.engine.batcher.live["a"].output_ids)
    assert await update(served, model_b, "w1", flush_cache=False) == updated("w1")
    await resume(served)
    meta = (await call)["meta_info"]
    assert meta["weight_versions"] == [
        {"version": "default", "start": 0, "end": before},
        {"version": "w1", "start": before, "end": 1500},
    ]
    assert (meta["weight_version"], meta["num_retractions"]) == ("w1", 0)


async def test_an_update_may_abort_all_requests(served: Served, model_b: Path) -> None:
    call, _ = await running(served, "old")
    assert await update(served, model_b, "w2", abort_all_requests=True) == updated("w2")
    meta = (await call)["meta_info"]
    assert meta["finish_reason"]["type"] == "abort"
    assert {span["version"] for span in meta["weight_versions"]} == {"default"}


async def test_a_missing_checkpoint_is_a_400_and_changes_nothing(served: Served, tmp_path: Path) -> None:
    status, body = await update(served, tmp_path / "nonexistent", "bad")
    captured = sample("update_bad_path")["body"]
    assert (status, set(body), body["success"]) == (400, set(captured), False)
    assert body["message"].startswith("Failed to get weights iterator: ")
    assert (await served.get("/model_info"))[1]["weight_version"] == "default"
    await served.generate([5], sampling={"max_new_tokens": 1})


def shards(model: Path, folder: Path) -> Path:
    """Write the model as two files; return the second one."""
    folder.mkdir()
    tensors = load_file(model / "model.safetensors")
    for number, names in enumerate((sorted(tensors)[::2], sorted(tensors)[1::2])):
        save_file({name: tensors[name] for name in names}, folder / f"{number}.safetensors")
    return folder / "1.safetensors"


async def checksum(served: Served) -> str:
    answer: dict[str, str] = (await served.post("/weights_checker", {"action": "checksum"}))[1]
    return answer["per_engine_checksum"]


@pytest.mark.parametrize("damage", ["truncated", "link to nothing"])
async def test_a_folder_with_a_file_that_cannot_be_opened_is_a_400_and_changes_nothing(
    served: Served, model_b: Path, tmp_path: Path, damage: str
) -> None:
    second, before = shards(model_b, tmp_path / "damaged"), await checksum(served)
    if damage == "truncated":
        second.write_bytes(second.read_bytes()[:-1])
    else:
        second.unlink()
        second.symlink_to(tmp_path / "nothing")
    status, body = await update(served, second.parent, "bad")
    assert (status, body["message"].startswith("Failed to get weights iterator: ")) == (400, True)
    assert (await served.get("/model_info"))[1]["weight_version"] == "default"
    assert await checksum(served) == before


async def test_whatever_ends_a_load_midway_ends_the_process(
    served: Served, model_b: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    reasons: list[str] = []
    monkeypatch.setattr("dora.embedded.updates.die", reasons.append)  # the process would end here
    second = shards(model_b, tmp_path / "odd")
    header = b'{"odd":{"dtype":"F6_E2M3","shape":[4],"data_offsets":[0,3]}}'  # a type that torch does not have
    second.write_bytes(len(header).to_bytes(8, "little") + header + bytes(3))
    await update(served, second.parent, "bad")
    assert [reason.partition(": ")[0] for reason in reasons] == [
        f"loading {second.parent} failed with the weights half replaced"
    ]


async def test_an_update_without_a_path_is_a_400_with_the_validation_shape(served: Served) -> None:
    status, body = await served.post("/update_weights_from_disk", {"weight_version": "bad"})
    assert (status, set(body)) == (400, set(sample("update_missing_field")["body"]))
    assert "model_path" in body["message"]


async def test_a_relabel_changes_the_label_only_and_aborts_by_default(served: Served) -> None:
    call, _ = await running(served, "a")
    assert await served.post("/update_weight_version", {"new_version": "v9"}) == (
        200,
        sample("update_weight_version")["body"],
    )
    assert (await call)["meta_info"]["finish_reason"]["type"] == "abort"
    assert (await served.get("/model_info"))[1]["weight_version"] == "v9"


# --- flush, health, information


async def test_a_flush_is_refused_while_a_request_runs(served: Served) -> None:
    call, _ = await running(served, "a")
    assert await served.post("/flush_cache") == (400, sample("flush_busy")["body"])
    await served.post("/abort_request", {"rid": "a"})
    assert await served.post("/flush_cache?timeout=20") == (200, sample("flush_idle")["body"])
    await call


async def test_health_costs_one_token_and_is_200(served: Served) -> None:
    before = served.engine.batcher.metrics.generated_tokens
    assert await served.get("/health") == (200, "")
    assert served.engine.batcher.metrics.generated_tokens == before + 1


async def test_health_of_a_busy_server_does_not_wait_for_a_slot(serving: Serving) -> None:
    async with serving(slots=1) as served:
        calls = [(await running(served, f"r{i}"))[0] for i in range(2)]
        await until_running(served)
        assert await served.get("/health") == (200, "")
        assert not any(call.done() for call in calls)
        await served.post("/abort_request", {"abort_all": True})
        await asyncio.gather(*calls)
        assert await served.engine.batcher.emptied(timeout_s=20)


async def test_health_is_503_while_nothing_can_be_generated(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("dora.embedded.control.HEALTH_LIMIT_S", 0.05)
    await pause(served, "in_place")
    assert await served.get("/health") == (503, "")
    await resume(served)
    assert await served.get("/ready") == (503, "")  # until the next good probe
    monkeypatch.setattr("dora.embedded.control.HEALTH_LIMIT_S", 20)
    assert await served.get("/health") == (200, "")
    assert await served.get("/ready") == (200, "")


async def test_information_has_the_keys_of_captured_answers(served: Served) -> None:
    info = (await served.get("/model_info"))[1]
    assert set(sample("GET_model_info")["body"]) - set(info) == {"embedding"}  # internals of SGLang's own models
    captured = sample("GET_v1_loads_busy")["body"]
    answer = (await served.get("/v1/loads"))[1]
    assert set(answer) == set(captured)
    internals = {"memory", "disaggregation", "decode_moments", "num_prealloc_ready_tokens"}
    internals |= {"total_prefill_busy_us", "total_prefill_uncached_tokens"}
    assert set(captured["loads"][0]) - set(answer["loads"][0]) == internals
    assert set(captured["loads"][0]["queues"]) == set(answer["loads"][0]["queues"])
    server = (await served.get("/server_info"))[1]
    assert (server["version"], server["max_total_num_tokens"], server["max_running_requests"]) == ("0.5.20", 8192, 8)


async def test_loads_count_running_and_waiting_requests_and_their_tokens(serving: Serving) -> None:
    async with serving(slots=1) as served:
        calls = [(await running(served, f"r{i}"))[0] for i in range(2)]
        await until_running(served)
        load = (await served.get("/v1/loads"))[1]["loads"][0]
        async with asyncio.timeout(30):  # the second call may still be on its way, and the first without a token
            while not load["num_waiting_reqs"] or load["num_used_tokens"] <= 4:
                load = (await served.get("/v1/loads"))[1]["loads"][0]
        assert (load["num_running_reqs"], load["num_waiting_reqs"]) == (1, 1)
        await served.post("/abort_request", {"abort_all": True})
        await asyncio.gather(*calls)
        load = (await served.get("/v1/loads"))[1]["loads"][0]
        assert (load["num_running_reqs"], load["num_waiting_reqs"], load["num_used_tokens"]) == (0, 0, 0)


async def test_the_queue_is_counted_while_the_decoder_thread_changes_it(served: Served) -> None:
    queue = served.engine.batcher.waiting
    queue.extend(Generation(rid=str(rid), prompt_ids=[5], sampling=SamplingParams()) for rid in range(3000))
    stopping, interval = threading.Event(), sys.getswitchinterval()

    def change() -> None:
        while not stopping.is_set():
            queue.appendleft(queue.pop())

    thread = threading.Thread(target=change)
    try:
        sys.setswitchinterval(1e-6)
        thread.start()
        for _ in range(200):
            assert _gauges(served.engine.batcher)["num_retracted_reqs"] == 0
    finally:
        sys.setswitchinterval(interval)
        stopping.set()
        thread.join()
        queue.clear()


async def test_metrics_carry_sglang_names_and_grow(served: Served) -> None:
    await served.generate([5, 6, 7, 8], sampling={"max_new_tokens": 3, "ignore_eos": True})
    text = (await served.get("/metrics"))[1]
    values = {line.split("{")[0]: float(line.rsplit(" ", 1)[1]) for line in text.splitlines() if line[0] != "#"}
    assert values["sglang:prompt_tokens_total"] == 4
    assert values["sglang:generation_tokens_total"] == 3
    assert values["sglang:num_requests_total"] == 1
    assert values["sglang:e2e_request_latency_seconds_count"] == 1
    for name in ("num_running_reqs", "num_queue_reqs", "num_used_tokens", "max_total_num_tokens", "token_usage"):
        assert f"sglang:{name}" in values


async def test_an_unknown_route_is_a_404_and_a_wrong_method_a_405(served: Served) -> None:
    assert await served.get("/get_weight_version") == (404, {"detail": "Not Found"})
    assert await served.get("/generate") == (405, {"detail": "Method Not Allowed"})


async def test_a_key_guards_everything_but_probes(serving: Serving) -> None:
    async with serving(api_key="s3cret") as served:
        assert await served.post("/generate", {"input_ids": [5]}) == (401, {"error": "Unauthorized"})
        assert (await served.get("/server_info"))[0] == 401
        for open_path in ("/health", "/ready", "/metrics"):
            assert (await served.get(open_path))[0] == 200
        async with served.http.get("/server_info", headers={"Authorization": "Bearer s3cret"}) as answer:
            assert answer.status == 200
            assert "s3cret" not in json.dumps(await answer.json())
