"""An adapter on a real engine has to prove itself, with what peft computes: when it is loaded, and before it goes."""

from __future__ import annotations

import os
import shutil
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import msgspec
import pytest

from dora.adapter_files import PROOF, Proof, read_proof
from dora.core.ids import VersionId
from dora.engine.errors import AdapterDisproved, RequestRefused
from dora.engine.names import adapter_name
from dora.engine.sglang.client import EngineClient
from dora.engine.sglang.engine import SglangEngine
from dora.errors import ConfigError
from tests.embedded.adapted import AdaptedReference, write_adapter
from tests.embedded.conftest import model_a  # noqa: F401 - a fixture
from tests.engine.adapter_server import serving_adapters
from tests.engine.test_against_embedded import REQUEST, Tokens

TOKENS = [1, 5, 9, 2, 6, 11, 3]


@dataclass(frozen=True)
class Served:
    """A server and its client."""

    url: str
    client: EngineClient
    engine: SglangEngine

    async def load(self, name: str, folder: Path) -> None:
        proof = read_proof(folder)
        await self.engine.load_adapter(self.url, name=name, folder=folder, proof=proof, timeout_s=30)

    async def unload(self, name: str, folder: Path | None) -> None:
        proof = read_proof(folder) if folder is not None else None
        await self.engine.unload_adapter(self.url, name=name, proof=proof, timeout_s=30)

    async def loaded(self) -> set[str]:
        return {*await self.client.adapters(self.url)}


@pytest.fixture(scope="module")
def url(model_a: Path) -> Iterator[str]:  # noqa: F811
    with serving_adapters(model_a) as url:
        yield url


@pytest.fixture
async def served(url: str) -> AsyncIterator[Served]:
    async with EngineClient(max_connections=8, vocab_size=64) as client:
        yield Served(url, client, SglangEngine(client))
        for name in await client.adapters(url):
            await client.unload_adapter(url, name, timeout_s=30)


def proven(folder: Path, model: Path, *, seed: int) -> Path:
    """Write an adapter with its proof."""
    write_adapter(folder, model, seed=seed)
    logprobs = AdaptedReference(model, folder).logprobs(TOKENS)
    (folder / PROOF).write_bytes(msgspec.json.encode(Proof("float32", TOKENS, [float(one) for one in logprobs])))
    return folder


@pytest.fixture
def folders(model_a: Path, tmp_path: Path) -> list[Path]:  # noqa: F811
    """Two adapters with their proofs."""
    return [proven(tmp_path / str(seed), model_a, seed=seed) for seed in (1, 2)]


async def test_an_adapter_is_served_once_it_has_proved_itself(
    served: Served,
    model_a: Path,  # noqa: F811
    folders: list[Path],
) -> None:
    one, two = folders
    await served.load("dora-1", one)
    await served.load("dora-2", two)
    for name, folder in (("dora-1", one), ("dora-2", two)):
        tokens, prompt = Tokens(), list(REQUEST.tokens)
        await served.client.generate(served.url, replace(REQUEST, adapter=name), tokens)
        expected = AdaptedReference(model_a, folder).logprobs(prompt + tokens.token_ids)[len(prompt) - 1 :]
        assert tokens.logprobs == pytest.approx(expected, abs=1e-4)
    await served.unload("dora-1", one)
    assert await served.loaded() == {"dora-2"}


async def test_an_adapter_with_other_values_is_refused_as_it_is_loaded(served: Served, folders: list[Path]) -> None:
    one, two = folders
    shutil.copy(two / PROOF, one / PROOF)
    with pytest.raises(AdapterDisproved, match="dora-1 is another adapter: the log-probs differ by up to"):
        await served.load("dora-1", one)
    await served.unload("dora-1", None)
    assert await served.loaded() == set()


async def test_an_adapter_that_was_replaced_under_its_name_is_found_before_it_goes(
    served: Served, folders: list[Path]
) -> None:
    one, two = folders
    await served.load("dora-1", one)
    await served.client.unload_adapter(served.url, "dora-1", timeout_s=30)
    await served.client.load_adapter(served.url, "dora-1", str(two), timeout_s=30)
    with pytest.raises(AdapterDisproved, match="dora-1 is another adapter"):
        await served.unload("dora-1", one)
    await served.unload("dora-1", None)
    assert await served.loaded() == set()


@pytest.mark.parametrize("damaged", [None, b"", b"[]", b'{"dtype": "float32", "token_ids": [1], "logprobs": []}'])
def test_a_damaged_proof_is_named(tmp_path: Path, damaged: bytes | None) -> None:
    if damaged is not None:
        (tmp_path / PROOF).write_bytes(damaged)
    with pytest.raises(ConfigError, match=r"proof\.json: cannot tell which adapter a server has"):
        read_proof(tmp_path)


@pytest.mark.timeout(30)
@pytest.mark.parametrize("kind", ["pipe", "link"])
def test_only_a_regular_file_is_read_as_a_proof(tmp_path: Path, kind: str) -> None:
    if kind == "pipe":
        os.mkfifo(tmp_path / PROOF)
    else:
        (tmp_path / PROOF).symlink_to("/dev/zero")
    with pytest.raises(ConfigError, match=r"proof\.json: cannot tell which adapter a server has"):
        read_proof(tmp_path)


async def test_what_was_never_loaded_counts_as_unloaded(served: Served) -> None:
    await served.unload("dora-1", None)


async def test_the_adapters_of_an_earlier_controller_are_unloaded_and_those_of_others_stay(
    served: Served, folders: list[Path]
) -> None:
    folder, _ = folders
    earlier = adapter_name("run", epoch=3, instance=0, attempt=7, version=VersionId(2))
    await served.client.load_adapter(served.url, earlier, str(folder), timeout_s=30)
    await served.engine.clear_adapters(served.url, timeout_s=30)
    assert await served.loaded() == set()
    await served.client.load_adapter(served.url, "theirs", str(folder), timeout_s=30)
    with pytest.raises(ConfigError, match="has adapters of others: theirs; unload them"):
        await served.engine.clear_adapters(served.url, timeout_s=30)
    assert await served.loaded() == {"theirs"}


async def test_a_load_that_the_server_refuses_leaves_nothing_behind(served: Served, folders: list[Path]) -> None:
    folder, _ = folders
    await served.load("dora-1", folder)
    with pytest.raises(RequestRefused, match="already loaded"):
        await served.load("dora-1", folder)
    assert await served.loaded() == {"dora-1"}
