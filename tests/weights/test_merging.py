"""Versions that nodes make of the model and an adapter: the same bytes, of which few cross the link."""

from __future__ import annotations

import asyncio
import json
import os
from collections.abc import Callable
from contextlib import AsyncExitStack
from pathlib import Path
from threading import Event
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from structlog.testing import capture_logs

from dora.weights import merging
from dora.weights.file_plan import plan_files
from dora.weights.merging import MATRICES, RECIPE, Merge, is_weights
from dora.weights.store import MANIFEST, Manifest, StoreError, VersionStore
from tests.weights.adapted import make_model, publish_adapted
from tests.weights.nodes import WAIT_S, Proxy, fetcher, held, left_in, node, store_at

MORE = 12_000  # headers of requests and answers, at most


def small_bytes(store: VersionStore, version: int = 3) -> int:
    return sum(len(content) for name, content in held(store, version).items() if not is_weights(name))


async def fetched(store: VersionStore, manifest: Manifest, proxy: Proxy, model: Path | None) -> list[dict[str, Any]]:
    """Fetch a version; return what is logged."""
    with capture_logs() as logged:
        async with asyncio.timeout(WAIT_S):
            await fetcher(store).fetch(manifest, lambda: [proxy.source()], model=model)
    return logged  # type: ignore[return-value]


# ---- bytes ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("stored", "held_type", "dtype"),
    [
        ("BF16", "BF16", "BF16"),
        ("F32", "F32", "F32"),
        ("F32", "BF16", "F32"),
        ("BF16", "F32", "BF16"),
        ("F16", "F32", "F16"),
        ("F64", "BF16", "F16"),
    ],
)
async def test_every_node_of_a_chain_makes_the_weights_of_the_adapter(
    tmp_path: Path, stored: str, held_type: str, dtype: str
) -> None:
    model = make_model(tmp_path / "model", stored)
    maker, stores = store_at(tmp_path / "maker"), [store_at(tmp_path / name) for name in "abc"]
    manifest = publish_adapted(maker, model, held=held_type, dtype=dtype)
    async with asyncio.timeout(WAIT_S), AsyncExitStack() as stack:
        links = [(await stack.enter_async_context(node(maker)))[1]]
        async with asyncio.TaskGroup() as tasks:
            for store in stores:
                relay, link = await stack.enter_async_context(node(store))
                tasks.create_task(relay.fetch(manifest, lambda link=links[-1]: [link.source()], model=model))
                links.append(link)
    assert all(held(store) == held(maker) and store.manifest(3) == manifest for store in stores)
    size = small_bytes(maker)
    assert size < 0.15 * manifest.num_bytes
    assert all(size < link.num_bytes < size + MORE for link in links[:-1])


async def test_files_of_the_model_may_be_cut_in_another_way(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model, maker, a = (
        make_model(tmp_path / "model", "BF16", split=True),
        store_at(tmp_path / "m"),
        store_at(tmp_path / "a"),
    )
    monkeypatch.setitem(plan_files.__kwdefaults__, "max_bytes", 200_000)
    manifest = publish_adapted(maker, model, max_bytes=200_000)
    assert len([name for name in manifest.files if is_weights(name)]) == 4
    async with node(maker) as (_, proxy):
        assert await fetched(a, manifest, proxy, model) == []
        assert proxy.num_bytes < small_bytes(maker) + MORE
    assert held(a) == held(maker)


async def test_a_node_without_the_model_gets_the_weights_from_one_that_makes_them(tmp_path: Path) -> None:
    model = make_model(tmp_path / "model", "BF16")
    maker, a, b = (store_at(tmp_path / name) for name in ("maker", "a", "b"))
    manifest = publish_adapted(maker, model)
    async with (
        asyncio.timeout(WAIT_S),
        node(maker, after=2_000) as (_, from_maker),
        node(a) as (relay_a, from_a),
        asyncio.TaskGroup() as tasks,
    ):
        tasks.create_task(relay_a.fetch(manifest, lambda: [from_maker.source()], model=model))
        tasks.create_task(fetcher(b).fetch(manifest, lambda: [from_a.source()]))
        await from_a.until_asked()
        from_maker.open()
    assert held(a) == held(b) == held(maker)
    assert from_maker.num_bytes < small_bytes(maker) + MORE


# ---- what does not fit ----------------------------------------------------------------------------------------------


async def test_with_another_model_versions_are_fetched_whole_and_that_is_told_once(tmp_path: Path) -> None:
    model, other = make_model(tmp_path / "model", "BF16"), make_model(tmp_path / "other", "BF16", seed=1)
    maker, a = store_at(tmp_path / "maker"), store_at(tmp_path / "a")
    manifests = [publish_adapted(maker, model, version=version) for version in (3, 4)]
    async with asyncio.timeout(WAIT_S), node(maker) as (_, proxy):
        relay = fetcher(a)
        with capture_logs() as logged:
            for manifest in manifests:
                before = proxy.num_bytes
                await relay.fetch(manifest, lambda: [proxy.source()], model=other)
                assert manifest.num_bytes < proxy.num_bytes - before < 1.1 * manifest.num_bytes
    assert all(held(a, version) == held(maker, version) for version in (3, 4))
    [told] = logged
    assert (told["event"], told["version"]) == ("versions_not_merged", 3)
    assert "model.safetensors would have another checksum; is the model another one?" in told["reason"]


async def test_only_files_from_the_first_that_differs_on_are_fetched(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, maker, a = make_model(tmp_path / "model", "BF16"), store_at(tmp_path / "maker"), store_at(tmp_path / "a")
    monkeypatch.setitem(plan_files.__kwdefaults__, "max_bytes", 200_000)
    manifest = publish_adapted(maker, model, max_bytes=200_000)
    tensors = load_file(model / "model.safetensors")
    tensors["c_attn.weight"][5, 7] += 0.5
    save_file(tensors, model / "model.safetensors")
    async with node(maker) as (_, proxy):
        [told] = await fetched(a, manifest, proxy, model)
    assert "model-00003-of-00004.safetensors would have another checksum" in told["reason"]
    assert held(a) == held(maker)
    asked = {name for name, _ in proxy.asked if is_weights(name)}
    assert asked == {"model-00003-of-00004.safetensors", "model-00004-of-00004.safetensors"}


def edited(change: Callable[[dict[str, Any]], object]) -> Callable[[Path], None]:
    def edit(folder: Path) -> None:
        recipe = json.loads((folder / RECIPE).read_bytes())
        change(recipe)
        (folder / RECIPE).write_text(json.dumps(recipe))

    return edit


def of_q_proj(**values: object) -> Callable[[Path], None]:
    return edited(lambda recipe: recipe["tensors"][2].update(values))


def matrices(change: Callable[[dict[str, torch.Tensor]], object]) -> Callable[[Path], None]:
    def edit(folder: Path) -> None:
        tensors = load_file(folder / MATRICES)
        change(tensors)
        save_file(tensors, folder / MATRICES)

    return edit


A, B = "base_model.model.q_proj.lora_A.weight", "base_model.model.q_proj.lora_B.weight"


def header(**changes: object) -> Callable[[Path], None]:
    """Claim something else of A in the header of the adapter."""

    def edit(folder: Path) -> None:
        data = (folder / MATRICES).read_bytes()
        length = int.from_bytes(data[:8], "little")
        entries = json.loads(data[8 : 8 + length])
        entries[A].update(changes)
        text = json.dumps(entries).encode()
        (folder / MATRICES).write_bytes(len(text).to_bytes(8, "little") + text + data[8 + length :])

    return edit


DAMAGED: dict[str, tuple[Callable[[Path], object], str]] = {
    "not JSON": (lambda folder: (folder / RECIPE).write_bytes(b"{"), "truncated"),
    "deep": (lambda folder: (folder / RECIPE).write_bytes(b"[" * 100_000), "Expected `object`"),
    "no UTF-8": (lambda folder: (folder / RECIPE).write_bytes(b'{"tensors": [{"name": "\xff"}]}'), "utf-8|UTF-8"),
    "too long": (lambda folder: (folder / RECIPE).write_bytes(b" " * (1 << 21)), "has more than"),
    "another type": (edited(lambda recipe: recipe.update(scale="1")), "Expected `float`, got `str`"),
    "endless": (edited(lambda recipe: recipe.update(scale=1e400)), "number out of range|malformed|invalid"),
    "twice": (edited(lambda recipe: recipe["tensors"].append(recipe["tensors"][0])), "a tensor is named twice"),
    "missing": (edited(lambda recipe: recipe["tensors"].clear()), "its files would be others"),
    "huge": (of_q_proj(shape=[1 << 47, 1 << 47]), "no tensor 'q_proj.weight' of shape"),
    "larger": (of_q_proj(shape=[1 << 49, 64]), "Expected `int` <= "),
    "negative": (of_q_proj(shape=[-200, 64]), "Expected `int` >= 0"),
    "many dimensions": (of_q_proj(shape=[1] * 9), "length <= 8"),
    "unknown tensor": (of_q_proj(name="../../q_proj"), "no tensor '../../q_proj'"),
    "endless name": (of_q_proj(name="\n\x1b" * 10_000), "no tensor '\\n\\x1b\\n"),
    "unknown type": (of_q_proj(dtype="F8_E8M0"), "'q_proj.weight' cannot be converted"),
    "integers": (of_q_proj(held="I16"), "'q_proj.weight' cannot be converted"),
    "unknown module": (of_q_proj(module="k_proj"), "no matrices of 'k_proj'"),
    "another module": (of_q_proj(module="c_attn"), "the matrices of 'c_attn' do not fit 'q_proj.weight'"),
    "transposed": (of_q_proj(is_transposed=True), "do not fit"),
    "no rank": (matrices(lambda t: t.update({A: t[A][:0], B: t[B][:, :0].contiguous()})), "do not fit"),
    "high rank": (matrices(lambda t: t.update({A: torch.zeros(129, 64), B: torch.zeros(200, 129)})), "do not fit"),
    "two ranks": (matrices(lambda t: t.update({A: t[A][:2]})), "do not fit"),
    "three dimensions": (matrices(lambda t: t.update({A: t[A][None]})), "do not fit"),
    "matrices of integers": (matrices(lambda t: t.update({A: t[A].int()})), "do not fit"),
    "claimed shape": (header(shape=[1 << 40, 64]), "damaged header"),
    "claimed size": (header(shape=[1 << 40, 64], data_offsets=[0, 256 << 40]), "damaged header"),
    "backwards": (header(data_offsets=[1024, 0]), "damaged header"),
    "no header": (lambda folder: (folder / MATRICES).write_bytes(b"\xff" * 100), "is not a safetensors file"),
    "empty": (lambda folder: (folder / MATRICES).write_bytes(b""), "is not a safetensors file"),
    "another scale": (edited(lambda recipe: recipe.update(scale=1.0)), "would have another checksum"),
}  # fmt: skip


@pytest.mark.parametrize("what", DAMAGED)
async def test_what_is_damaged_or_hostile_is_refused_and_the_version_fetched_whole(
    tmp_path: Path, what: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    damage, says = DAMAGED[what]
    monkeypatch.setattr(merging, "_MAX_RECIPE_BYTES", 1 << 20)
    model, maker, a = make_model(tmp_path / "model", "BF16"), store_at(tmp_path / "maker"), store_at(tmp_path / "a")
    manifest = publish_adapted(maker, model, damage=damage)
    async with node(maker) as (_, proxy):
        [told] = await fetched(a, manifest, proxy, model)
    assert told["event"] == "versions_not_merged"
    assert told["reason"].startswith(f"cannot make version 3 of {model}: ")
    assert any(part in told["reason"] for part in says.split("|")), told["reason"]
    assert len(told["reason"].splitlines()) == 1
    assert len(told["reason"]) < 1_000
    assert held(a) == held(maker)
    assert [path.name for path in left_in(a)] == ["v000003"]


def replace_by(make: Callable[[Path], object]) -> Callable[[Path], None]:
    def replace(path: Path) -> None:
        path.unlink()
        make(path)

    return replace


@pytest.mark.parametrize("name", [RECIPE, MATRICES, "model"])
@pytest.mark.parametrize(
    ("make", "says"),
    [
        (lambda path: path.symlink_to("/dev/zero"), "is a link|is a device"),
        (os.mkfifo, "is a pipe"),
        (lambda path: None, "No such file|has no tensor|not a safetensors"),
        (lambda path: path.write_bytes(b"\xff" * 9), "not a safetensors|truncated|malformed|utf-8|UTF-8"),
    ],
    ids=["link", "pipe", "absent", "noise"],
)
def test_only_regular_files_are_read(tmp_path: Path, name: str, make: Callable[[Path], object], says: str) -> None:
    model, maker = make_model(tmp_path / "model", "BF16"), store_at(tmp_path / "maker")
    manifest = publish_adapted(maker, model)
    folder = maker.folder(3)
    replace_by(make)(model / "model.safetensors" if name == "model" else folder / name)
    before = sorted(path.name for path in folder.iterdir())
    with pytest.raises(StoreError) as caught:
        Merge(model, folder, manifest)
    assert any(part in str(caught.value) for part in says.split("|")), caught.value
    assert len(str(caught.value).splitlines()) == 1
    assert sorted(path.name for path in folder.iterdir()) == before


def unmade(maker: VersionStore) -> Path:
    """The folder of a version, without its weights."""
    folder = maker.folder(3)
    (folder / "model.safetensors").unlink()
    return folder


def test_a_file_that_cannot_be_made_is_not_left(tmp_path: Path) -> None:
    model, maker = make_model(tmp_path / "model", "BF16"), store_at(tmp_path / "maker")
    manifest = publish_adapted(maker, model)
    folder = unmade(maker)
    merge = Merge(model, folder, manifest)
    stop = Event()
    stop.set()
    with pytest.raises(StoreError, match="it is not wanted any more"):
        merge.write("model.safetensors", stop=stop)
    whole = (model / "model.safetensors").read_bytes()
    (model / "model.safetensors").write_bytes(whole[:-100_000])
    with pytest.raises(StoreError, match="ends early"):
        merge.write("model.safetensors", stop=Event())
    assert {path.name for path in folder.iterdir()} == {"adapter", "config.json", MANIFEST}
    (model / "model.safetensors").write_bytes(whole)
    merge.write("model.safetensors", stop=Event())
    assert maker.damaged(3) == []


# ---- released meanwhile ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("after", [2_000, None], ids=["while the adapter comes", "while the weights are made"])
async def test_a_version_that_is_released_meanwhile_is_here_whole_or_not_at_all(
    tmp_path: Path, after: int | None
) -> None:
    model, maker, a = make_model(tmp_path / "model", "BF16"), store_at(tmp_path / "maker"), store_at(tmp_path / "a")
    manifest = publish_adapted(maker, model)
    async with asyncio.timeout(WAIT_S), node(maker, after=after) as (_, proxy):
        relay = fetcher(a)
        fetching = asyncio.create_task(relay.fetch(manifest, lambda: [proxy.source()], model=model))
        await proxy.until(after or small_bytes(maker))
        await relay.stop(3)
        [ended] = await asyncio.gather(fetching, return_exceptions=True)
    if ended is None:
        assert held(a) == held(maker)
    else:
        assert str(ended) == "versions/3 was released meanwhile"
        assert left_in(a) == []
