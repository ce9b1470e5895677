"""Routes of adapters over a real socket: load, unload, /generate, and the traps that SGLang 0.5.23 has."""

from __future__ import annotations

import asyncio
import shutil
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from dora.embedded.dialect import DIALECTS
from dora.embedded.server import ServeOptions
from dora.errors import ConfigError
from tests.embedded.adapted import DENSE, RANK, AdaptedReference, alter, refill, write_adapter
from tests.embedded.conftest import Reference, Served, Serving
from tests.embedded.test_control import pause, resume, until_tokens
from tests.embedded.test_generate import running

PROMPT = [5, 6, 7, 8, 9]
SHORT = {"max_new_tokens": 12, "ignore_eos": True}
ROOM = {"dialect": "0.5.23", "max_lora_rank": RANK, "lora_target_modules": DENSE, "max_loras_per_batch": 3}


@pytest.fixture(scope="module")
def folders(model_a: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Three adapters of model a."""
    root = tmp_path_factory.mktemp("adapters")
    return {name: write_adapter(root / name, model_a, seed=seed) for seed, name in enumerate(("v1", "v2", "v3"))}


@pytest.fixture(scope="module")
def references(model_a: Path, folders: dict[str, Path]) -> dict[str | None, Reference]:
    return {None: Reference(model_a), **{name: AdaptedReference(model_a, one) for name, one in folders.items()}}


@pytest.fixture
async def served(serving: Serving) -> AsyncIterator[Served]:
    async with serving(**ROOM) as one:
        yield one


async def load(served: Served, name: str, path: Path) -> tuple[int, Any]:
    return await served.post("/load_lora_adapter", {"lora_name": name, "lora_path": str(path)})


async def unload(served: Served, name: str) -> tuple[int, Any]:
    return await served.post("/unload_lora_adapter", {"lora_name": name})


def done(**loaded: Path) -> tuple[int, Any]:
    """The answer to a load or an unload that leaves these adapters loaded."""
    paths = {name: str(path) for name, path in loaded.items()}
    common = {"rid": None, "http_worker_ipc": None, "success": True, "error_message": ""}
    return 200, {**common, "loaded_adapters": paths}


def agrees(answer: Any, reference: Reference, *, prompt: list[int] = PROMPT) -> None:
    found = [logprob for logprob, _, _ in answer["meta_info"]["output_token_logprobs"]]
    assert found == pytest.approx(reference.logprobs(prompt + answer["output_ids"])[len(prompt) - 1 :], abs=1e-4)


async def refusal_of(served: Served, answer: tuple[int, Any]) -> str:
    status, body = answer
    assert (status, body["success"]) == (400, False)
    assert "\n" not in body["error_message"]
    assert body["loaded_adapters"] == served.engine.adapters.paths
    message: str = body["error_message"]
    return message


# --- what is served


async def test_requests_of_several_adapters_and_of_none_run_together_each_with_its_own(
    served: Served, folders: dict[str, Path], references: dict[str | None, Reference]
) -> None:
    for number, (name, folder) in enumerate(folders.items(), 1):
        assert await load(served, name, folder) == done(**dict(list(folders.items())[:number]))
    names = [None, *folders] * 2
    answers = await asyncio.gather(
        *(served.generate([*PROMPT, n], sampling=SHORT, lora_path=name) for n, name in enumerate(names))
    )
    for n, (name, answer) in enumerate(zip(names, answers, strict=True)):
        agrees(answer, references[name], prompt=[*PROMPT, n])
        assert answer["meta_info"]["weight_version"] == "default"
        assert answer["meta_info"]["weight_versions"] == [{"version": "default", "start": 0, "end": 12}]
        assert name is None or name not in str(answer)


async def test_what_a_server_says_of_its_adapters(served: Served, folders: dict[str, Path]) -> None:
    await load(served, "v1", folders["v1"])
    info = (await served.get("/server_info"))[1]
    assert info["version"] == "0.5.23"
    assert info["enable_lora"] is True
    assert (info["max_loras_per_batch"], info["max_lora_rank"], info["max_loaded_loras"]) == (3, RANK, None)
    assert info["lora_target_modules"] == [*DENSE]
    base, adapter = (await served.get("/v1/models"))[1]["data"]
    assert (base["id"], base["parent"]) == (served.engine.model_path, None)
    assert (adapter["id"], adapter["root"], adapter["parent"]) == ("v1", str(folders["v1"]), base["id"])


async def test_a_name_that_is_loaded_again_reads_no_kv_of_the_earlier_load(
    served: Served, folders: dict[str, Path], references: dict[str | None, Reference]
) -> None:
    for name in ("v1", "v2"):
        await load(served, "policy", folders[name])
        for cached in (0, len(PROMPT) - 1):
            answer = await served.generate(PROMPT, sampling=SHORT, lora_path="policy", extra_key="one")
            assert answer["meta_info"]["cached_tokens"] == cached
            agrees(answer, references[name])
        assert await unload(served, "policy") == done()
    assert (await served.generate(PROMPT, extra_key="one"))["meta_info"]["cached_tokens"] == 0


async def test_prompt_logprobs_are_those_of_the_adapter(
    served: Served, folders: dict[str, Path], references: dict[str | None, Reference]
) -> None:
    await load(served, "v2", folders["v2"])
    answer = await served.generate(PROMPT, sampling={"max_new_tokens": 0}, lora_path="v2", logprob_start_len=0)
    found = [logprob for logprob, _, _ in answer["meta_info"]["input_token_logprobs"][1:]]
    assert found == pytest.approx(references["v2"].logprobs(PROMPT), abs=1e-4)


async def test_a_retracted_request_continues_with_its_adapter(
    served: Served, folders: dict[str, Path], references: dict[str | None, Reference]
) -> None:
    await load(served, "v1", folders["v1"])
    sampling = {"max_new_tokens": 300, "ignore_eos": True}
    call = asyncio.create_task(served.generate(PROMPT, sampling=sampling, rid="a", lora_path="v1"))
    await started(served, "a")
    await pause(served, "retract")
    await resume(served)
    answer = await call
    assert answer["meta_info"]["num_retractions"] == 1
    agrees(answer, references["v1"])


async def started(served: Served, rid: str) -> None:
    async with asyncio.timeout(20):
        while rid not in served.engine.batcher.live:
            await served.get("/v1/loads")
    await until_tokens(served, rid, 5)


# --- loads


async def test_a_load_that_is_refused_changes_nothing(
    served: Served, folders: dict[str, Path], tmp_path: Path, references: dict[str | None, Reference]
) -> None:
    await load(served, "v1", folders["v1"])
    lacking = refill(shutil.copytree(folders["v2"], tmp_path / "lacking"), v_proj_lora_A_weight=None)
    wide = alter(shutil.copytree(folders["v2"], tmp_path / "wide"), r=RANK + 1)
    for name, path, says in (
        ("v1", folders["v2"], "Failed to load LoRA adapter v1 because it is already loaded"),
        ("v2", lacking, f"Failed to load LoRA adapter v2: lora_path: {lacking} lacks 2 tensors, first "),
        ("v2", wide, f"Failed to load LoRA adapter v2: lora_path: {wide} has rank 5, above --max-lora-rank 4"),
        ("v2", tmp_path / "absent", f"Failed to load LoRA adapter v2: lora_path: {tmp_path}/absent has no adapter_co"),
        ("v2", Path("x" * 5000), "Failed to load LoRA adapter v2: lora_path: xxx"),
        ("v2", Path("a\0b"), "Failed to load LoRA adapter v2: lora_path: a"),
    ):
        assert (await refusal_of(served, await load(served, name, path))).startswith(says)
    assert served.engine.adapters.paths == {"v1": str(folders["v1"])}
    agrees(await served.generate(PROMPT, sampling=SHORT, lora_path="v1"), references["v1"])
    status, body = await served.post("/load_lora_adapter", {"lora_name": "v2"})
    assert (status, body["object"]) == (400, "error")


async def test_a_load_beyond_the_places_is_refused_and_possible_after_an_unload(
    served: Served, folders: dict[str, Path]
) -> None:
    for name, folder in folders.items():
        await load(served, name, folder)
    refused = await refusal_of(served, await load(served, "v4", folders["v1"]))
    assert refused.startswith("Failed to load LoRA adapter v4: all 3 places are taken; unload one")
    await unload(served, "v2")
    assert (await load(served, "v4", folders["v1"]))[0] == 200


async def test_a_load_while_paused_or_busy_ends_no_request(
    served: Served, folders: dict[str, Path], references: dict[str | None, Reference]
) -> None:
    call, _ = await running(served, "a")
    await load(served, "v1", folders["v1"])
    await pause(served, "in_place")
    assert (await load(served, "v2", folders["v2"]))[0] == 200
    await resume(served)
    agrees(await served.generate(PROMPT, sampling=SHORT, lora_path="v2"), references["v2"])
    agrees(await call, references[None], prompt=[5, 6, 7, 8])


# --- unloads


async def test_an_unload_waits_for_the_requests_of_its_adapter_alone_and_a_load_waits_for_it(
    served: Served, folders: dict[str, Path], references: dict[str | None, Reference]
) -> None:
    for name in ("v1", "v2"):
        await load(served, name, folders[name])
    ours, _ = await running(served, "a", lora_path="v1")
    other, _ = await running(served, "b", lora_path="v2")
    unloading = asyncio.create_task(unload(served, "v1"))
    await until_gone(served, "v1")
    loading = asyncio.create_task(load(served, "v3", folders["v3"]))
    agrees(await served.generate(PROMPT, sampling=SHORT, lora_path="v2"), references["v2"])
    assert not unloading.done()
    assert not loading.done()
    await served.post("/abort_request", {"rid": "a"})
    assert await unloading == done(v2=folders["v2"])
    assert (await loading)[0] == 200
    assert (await ours)["meta_info"]["finish_reason"]["type"] == "abort"
    assert not other.done()
    agrees(await served.generate(PROMPT, sampling=SHORT, lora_path="v3"), references["v3"])
    await served.post("/abort_request", {"rid": "b"})
    agrees(await other, references["v2"], prompt=[5, 6, 7, 8])


async def until_gone(served: Served, name: str) -> None:
    async with asyncio.timeout(20):
        while name in served.engine.adapters.paths:
            await served.get("/v1/loads")


async def test_an_unload_ends_even_if_its_caller_has_gone(served: Served, folders: dict[str, Path]) -> None:
    await load(served, "v1", folders["v1"])
    call, _ = await running(served, "a", lora_path="v1")
    unloading = asyncio.create_task(unload(served, "v1"))
    await until_gone(served, "v1")
    unloading.cancel()  # closes its connection
    await asyncio.wait({unloading})
    loading = asyncio.create_task(load(served, "v2", folders["v2"]))
    for _ in range(3):
        await served.generate(PROMPT, sampling=SHORT)
    assert not loading.done()
    await served.post("/abort_request", {"rid": "a"})
    await call
    assert await loading == done(v2=folders["v2"])


async def test_an_adapter_that_is_not_loaded_cannot_be_unloaded(served: Served, folders: dict[str, Path]) -> None:
    await load(served, "v1", folders["v1"])
    message = await refusal_of(served, await unload(served, "v2"))
    assert message == "LoRA with name v2 does not exist; loaded: v1"


# --- names in /generate


async def test_a_name_that_was_never_loaded_is_refused_in_an_answer_and_in_a_stream(served: Served) -> None:
    body = {"input_ids": PROMPT, "lora_path": "v9"}
    status, answer = await served.post("/generate", body)
    assert (status, answer["error"]["message"]) == (400, "Got LoRA adapter that has never been loaded: v9")
    [error, end] = [event async for event in served.events(body)]
    assert (error["error"]["message"], error["error"]["code"]) == (answer["error"]["message"], 400)
    assert end == "[DONE]"
    status, answer = await served.post("/generate", {**body, "lora_path": ["v9"]})
    assert (status, answer["error"]["message"][:20]) == (400, "lora_path is a list:")
    assert (await served.generate(PROMPT, sampling=SHORT, lora_path=""))["meta_info"]["completion_tokens"] == 12


async def test_a_name_that_was_unloaded_is_loaded_again_from_its_folder(
    served: Served, folders: dict[str, Path], references: dict[str | None, Reference], tmp_path: Path
) -> None:
    folder = shutil.copytree(folders["v1"], tmp_path / "v1")
    await load(served, "v1", folder)
    await served.generate(PROMPT, lora_path="v1")
    await unload(served, "v1")
    answers = await asyncio.gather(*(served.generate(PROMPT, sampling=SHORT, lora_path="v1") for _ in range(3)))
    for answer in answers:
        agrees(answer, references["v1"])
    assert served.engine.adapters.paths == {"v1": str(folder)}
    await unload(served, "v1")
    shutil.rmtree(folder)
    status, answer = await served.post("/generate", {"input_ids": PROMPT, "lora_path": "v1"})
    assert status == 400
    assert answer["error"]["message"].startswith("Failed to implicitly load LoRA adapter v1: Failed to load LoRA adap")


# --- not enabled


@pytest.mark.parametrize("dialect", DIALECTS)
async def test_a_server_without_room_for_adapters_says_so(
    serving: Serving, folders: dict[str, Path], dialect: str
) -> None:
    async with serving(dialect=dialect) as served:
        status, answer = await load(served, "v1", folders["v1"])
        if dialect == "0.5.23":
            assert (status, answer["error_message"][:19]) == (400, "LoRA is not enabled")
        else:
            assert (status, answer) == (404, {"detail": "Not Found"})
        status, answer = await served.post("/generate", {"input_ids": PROMPT, "lora_path": "v1"})
        assert (status, answer["error"]["message"][:19]) == (400, "LoRA is not enabled")
        assert (await served.get("/server_info"))[1]["enable_lora"] is False
        assert len((await served.get("/v1/models"))[1]["data"]) == 1


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"dialect": "0.5.22"}, "adapters: not as SGLang 0.5.22 serves them; give --dialect 0.5.23"),
        ({"max_lora_rank": 0}, "adapters: give both --max-lora-rank and --lora-target-modules, or neither"),
        ({"lora_target_modules": ()}, "adapters: give both --max-lora-rank and --lora-target-modules, or neither"),
    ],
)
def test_options_that_do_not_fit_together_are_refused(model_a: Path, changes: dict[str, Any], says: str) -> None:
    with pytest.raises(ConfigError, match=f"^{says}$"):
        _ = ServeOptions(model_path=model_a, **{**ROOM, **changes}).adapters
