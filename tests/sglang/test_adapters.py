"""Adapters as the controller relies on them, on both servers: SGLang 0.5.23, and the embedded engine in its dialect."""

from __future__ import annotations

import asyncio
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from dora.embedded.dialect import dialect_of
from dora.engine.api import AdapterNeeds
from dora.engine.errors import RequestRefused
from dora.engine.sglang.adapters import require_adapters
from dora.engine.sglang.client import EngineClient
from tests.embedded.adapted import DENSE, RANK, AdaptedReference, alter, write_adapter
from tests.embedded.conftest import Reference
from tests.sglang.conftest import DIALECT, LONG, PROMPT, START_LABEL, Kind, Server, Wire, serving

pytestmark = pytest.mark.timeout(120, func_only=True)  # starting a server has a limit of its own

COUNT = 3
SHORT = {"max_new_tokens": 20, "ignore_eos": True}
SHARED = ("--max-lora-rank", str(RANK), "--max-loras-per-batch", str(COUNT + 1))
FLAGS: dict[Kind, tuple[str, ...]] = {
    "embedded": (*SHARED, "--lora-target-modules", ",".join(DENSE)),
    "sglang": (
        *(*SHARED, "--enable-lora", "--lora-strict-loading", "--lora-backend", "torch_native"),
        *("--lora-target-modules", *DENSE),
    ),
}


@pytest.fixture(scope="module")
def server(kind: Kind, model_a: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    if kind == "sglang" and not DIALECT.has_adapters:
        pytest.skip(f"adapters need DORA_SGLANG_RELEASE=0.5.23, this is {DIALECT.version}")
    logs = tmp_path_factory.mktemp("logs")
    with serving(kind, model_a, logs, dialect=dialect_of("0.5.23"), more=FLAGS[kind]) as server:
        yield server


@pytest.fixture(scope="module")
def folders(model_a: Path, tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    root = tmp_path_factory.mktemp("adapters")
    return [write_adapter(root / str(seed), model_a, seed=seed) for seed in range(COUNT)]


@pytest.fixture(scope="module")
def references(model_a: Path, folders: list[Path]) -> list[Reference]:
    """Those of the adapters, and of the model without one."""
    return [*(AdaptedReference(model_a, folder) for folder in folders), Reference(model_a)]


@pytest.fixture
async def wire(wire: Wire, request: pytest.FixtureRequest) -> Any:
    """Names are unique in this module, because a server loads a name again that it once had."""
    yield wire
    for card in (await wire.get("/v1/models"))[1]["data"][1:]:
        await wire.post("/abort_request", {"abort_all": True})
        await unload(wire, card["id"])


async def load(wire: Wire, name: str, folder: Path) -> tuple[int, Any]:
    return await wire.post("/load_lora_adapter", {"lora_name": name, "lora_path": str(folder)})


async def unload(wire: Wire, name: str) -> tuple[int, Any]:
    return await wire.post("/unload_lora_adapter", {"lora_name": name})


def is_from(answer: Any, reference: Reference) -> None:
    found = [logprob for logprob, _, _ in answer["meta_info"]["output_token_logprobs"]]
    assert found == pytest.approx(reference.logprobs(PROMPT + answer["output_ids"])[len(PROMPT) - 1 :], abs=1e-3)


async def test_requests_of_three_adapters_and_of_none_run_together(
    wire: Wire, folders: list[Path], references: list[Reference]
) -> None:
    for number, folder in enumerate(folders):
        status, answer = await load(wire, f"mixed-{number}", folder)
        assert (status, answer["success"]) == (200, True)
        assert answer["loaded_adapters"][f"mixed-{number}"] == str(folder)
    names = [*(f"mixed-{number}" for number in range(COUNT)), None]
    answers = await asyncio.gather(*(wire.generate(sampling=SHORT, lora_path=name) for name in names))
    for name, answer, reference in zip(names, answers, references, strict=True):
        is_from(answer, reference)
        assert answer["meta_info"]["weight_version"] == START_LABEL
        assert name is None or name not in str(answer)


async def test_a_server_says_what_it_has_room_for_and_what_is_loaded(
    wire: Wire, client: EngineClient, folders: list[Path]
) -> None:
    await require_adapters(client, wire.server.url, AdapterNeeds(COUNT, RANK, DENSE))
    info = (await wire.get("/server_info"))[1]
    assert (info["max_loras_per_batch"], info["max_lora_rank"], info["max_loaded_loras"]) == (COUNT + 1, RANK, None)
    await client.load_adapter(wire.server.url, "listed", str(folders[0]), timeout_s=30)
    assert await client.adapters(wire.server.url) == {"listed": str(folders[0])}


async def test_a_name_is_loaded_once(wire: Wire, client: EngineClient, folders: list[Path]) -> None:
    await load(wire, "once", folders[0])
    status, answer = await load(wire, "once", folders[1])
    assert (status, answer["success"]) == (400, False)
    assert "already loaded" in answer["error_message"]
    with pytest.raises(RequestRefused, match="already loaded"):
        await client.load_adapter(wire.server.url, "once", str(folders[1]), timeout_s=30)


async def test_what_does_not_fit_is_refused_and_nothing_changes(
    wire: Wire, client: EngineClient, folders: list[Path], tmp_path: Path
) -> None:
    refused = {
        "wide": alter(shutil.copytree(folders[0], tmp_path / "wide"), r=RANK + 1),
        "head": alter(shutil.copytree(folders[0], tmp_path / "head"), target_modules=["q_proj", "lm_head"]),
        "absent": tmp_path / "absent",
    }
    for name, folder in refused.items():
        status, answer = await load(wire, name, folder)
        assert (status, answer["success"]) == (400, False), name
        assert answer["error_message"]
    assert await client.adapters(wire.server.url) == {}
    assert (await wire.get("/health"))[0] == 200


async def test_a_name_that_was_never_loaded_is_refused(wire: Wire) -> None:
    status, answer = await wire.post("/generate", {"input_ids": PROMPT, "lora_path": "never"})
    assert status == 400
    assert "never been loaded: never" in answer["error"]["message"]
    async with wire.stream(sampling=SHORT, lora_path="never") as (stream, task):
        await task
    assert stream.events[0]["error"]["message"] == answer["error"]["message"]
    status, answer = await unload(wire, "never")
    assert (status, answer["success"]) == (400, False)
    assert "LoRA with name never does not exist" in answer["error_message"]


async def test_an_unload_waits_for_the_requests_of_its_adapter(
    wire: Wire, folders: list[Path], references: list[Reference]
) -> None:
    await load(wire, "busy", folders[0])
    await load(wire, "other", folders[1])
    async with wire.stream(sampling=LONG, lora_path="busy", rid="busy-0") as (stream, task):
        await stream.until(5)
        unloading = asyncio.create_task(unload(wire, "busy"))
        is_from(await wire.generate(sampling=SHORT, lora_path="other"), references[1])
        assert not unloading.done()
        await wire.post("/abort_request", {"rid": "busy-0"})
        status, answer = await unloading
        await task
    assert (status, answer["success"], [*answer["loaded_adapters"]]) == (200, True, ["other"])


async def test_a_name_that_was_unloaded_is_loaded_again_without_the_kv_of_before(
    wire: Wire, folders: list[Path], references: list[Reference], tmp_path: Path
) -> None:
    folder = shutil.copytree(folders[0], tmp_path / "again")
    await load(wire, "again", folder)
    is_from(await wire.generate(sampling=SHORT, lora_path="again"), references[0])
    await unload(wire, "again")
    shutil.rmtree(folder)
    shutil.copytree(folders[1], folder)
    answer = await wire.generate(sampling=SHORT, lora_path="again")
    assert answer["meta_info"]["cached_tokens"] == 0
    is_from(answer, references[1])


async def test_the_scale_is_alpha_over_rank_whatever_use_rslora_says(
    wire: Wire, folders: list[Path], references: list[Reference], tmp_path: Path
) -> None:
    await load(wire, "rslora", alter(shutil.copytree(folders[0], tmp_path / "rslora"), use_rslora=True))
    is_from(await wire.generate(sampling=SHORT, lora_path="rslora"), references[0])
