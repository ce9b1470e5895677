"""The client, the probe and the push against the embedded engine: real processes, a real model, a real kill -9."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

import pytest

from dora.config.load import load
from dora.config.schema import Config, EngineConfig, RolloutConfig
from dora.engine.api import GenerateRequest
from dora.engine.engines import installed_release, open_engine, require_engine
from dora.engine.errors import PushFailed, ServerGone
from dora.engine.names import UNCONFIRMED
from dora.engine.sglang.client import EngineClient
from dora.engine.sglang.engine import SglangEngine
from dora.engine.sglang.probe import probe
from dora.engine.sglang.push import push
from dora.engine.sglang.target import PushTarget
from dora.errors import ConfigError
from dora.weights.store import VersionStore

SERVE = """
import sys
from pathlib import Path
from dora.embedded.server import ServeOptions, run_server
run_server(ServeOptions(model_path=Path(sys.argv[1]), slots=8, kv_tokens=16384, weight_version="run/0",
                        skip_tokenizer_init=True, incremental_streaming_output=sys.argv[2] == "incremental"))
"""
REQUEST = GenerateRequest(
    id="r-1", tokens=[5, 6, 7, 8], max_new_tokens=24, temperature=1.0, stop_tokens=[], seed=11, label="run/0"
)
LONG = replace(REQUEST, id="r-long", max_new_tokens=4000)


class Tokens:
    """Collects what is handed on; `enough` is set once 32 tokens are there."""

    def __init__(self) -> None:
        self.token_ids: list[int] = []
        self.logprobs: list[float] = []
        self.enough = asyncio.Event()

    def __call__(self, token_ids: Any, logprobs: Any) -> None:
        self.token_ids += token_ids
        self.logprobs += logprobs
        if len(self.token_ids) >= 32:
            self.enough.set()


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> VersionStore:
    """Two versions of a tiny policy without an end-of-text token."""
    import torch
    from transformers import Qwen3Config, Qwen3ForCausalLM

    folder = tmp_path_factory.mktemp("versions")
    store = VersionStore(memory_root=folder, durable_root=folder)
    config = Qwen3Config(
        vocab_size=64,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=16,
        max_position_embeddings=8192,
        eos_token_id=None,
        bos_token_id=None,
    )
    for version in range(2):
        torch.manual_seed(version)
        staged = store.stage(version)
        Qwen3ForCausalLM(config).save_pretrained(staged)
        store.seal(version, staged)
    return store


@contextmanager
def serving(model: Path, form: str) -> Iterator[subprocess.Popen[str]]:
    command = [sys.executable, "-c", SERVE, str(model), form]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    with process:
        try:
            yield process
        finally:
            process.kill()


@pytest.fixture(scope="module")
def servers(store: VersionStore) -> Iterator[dict[str, tuple[str, subprocess.Popen[str]]]]:
    """A server per form of stream: (url, process), started at the same time."""
    model = store.folder(0)
    with serving(model, "cumulative") as first, serving(model, "incremental") as second:
        started = {}
        for form, process in (("cumulative", first), ("incremental", second)):
            assert process.stdout is not None
            ready, _, url = process.stdout.readline().strip().partition(" ")
            assert ready == "ready"
            started[form] = (url, process)
        yield started


@pytest.fixture
def url(servers: dict[str, tuple[str, subprocess.Popen[str]]]) -> str:
    return servers["cumulative"][0]


@pytest.fixture
async def client() -> AsyncIterator[EngineClient]:
    async with EngineClient(max_connections=8, vocab_size=64) as client:
        yield client


async def test_the_probe_accepts_it(url: str, client: EngineClient) -> None:
    capabilities = await probe(client, url, timeout_s=30)
    assert (capabilities.label, capabilities.slots, capabilities.kv_tokens) == ("run/0", 8, 16384)
    assert await SglangEngine(client).is_alive(url, timeout_s=30)


@pytest.mark.parametrize("kind", ["embedded", "sglang"])
async def test_an_external_server_is_spoken_to_in_the_same_way_whatever_the_kind_of_managed_ones(
    url: str, kind: Literal["embedded", "sglang"]
) -> None:
    config = Config(engine=EngineConfig(kind=kind, urls=(url,)), rollout=RolloutConfig(max_staleness=0))
    require_engine(config)
    async with open_engine(config, max_connections=1, vocab_size=64) as engine:
        assert (await engine.examine(url, timeout_s=30)).label == "run/0"
        assert (await engine.generate(url, REQUEST, Tokens())).num_tokens == 24


@pytest.mark.skipif(bool(installed_release("sglang")), reason="SGLang is installed")
def test_a_controller_whose_nodes_have_the_servers_needs_no_sglang() -> None:
    config = load(None, ["engine.kind=sglang", "engine.device=cuda"], environ={})
    with pytest.raises(ConfigError, match=r"^engine\.kind: sglang is not installed"):
        require_engine(config)
    require_engine(load(None, ["engine.kind=sglang", "engine.device=cuda", "nodes.expected=2"], environ={}))


async def test_both_forms_of_stream_give_the_same_tokens_and_logprobs(
    servers: dict[str, tuple[str, subprocess.Popen[str]]], client: EngineClient
) -> None:
    answers = {}
    for form, (url, _) in servers.items():
        answers[form] = Tokens()
        result = await client.generate(url, REQUEST, answers[form])
        assert (result.finish_reason, result.num_tokens) == ("length", 24)
        assert result.spans == (("run/0", 0, 24),)
    assert len(answers["cumulative"].token_ids) == 24
    assert answers["cumulative"].token_ids == answers["incremental"].token_ids
    assert answers["cumulative"].logprobs == answers["incremental"].logprobs


async def test_an_aborted_request_keeps_its_tokens_and_goes_on_from_them(url: str, client: EngineClient) -> None:
    """A migration, here to the same server: greedy, so that the joined answer can be compared with a whole one."""
    greedy = replace(LONG, temperature=0.0)
    first, second, whole = Tokens(), Tokens(), Tokens()
    async with asyncio.TaskGroup() as group:
        stopped = group.create_task(client.generate(url, greedy, first))
        await first.enough.wait()
        await client.abort(url, greedy.id)
        result = await stopped
    done = len(first.token_ids)
    assert (result.finish_reason, result.num_tokens, result.spans) == ("abort", done, (("run/0", 0, done),))
    rest = replace(greedy, id="r-2", tokens=[*greedy.tokens, *first.token_ids], max_new_tokens=16)
    await client.generate(url, rest, second)
    await client.generate(url, replace(greedy, id="r-3", max_new_tokens=done + 16), whole)
    assert first.token_ids + second.token_ids == whole.token_ids
    assert first.logprobs + second.logprobs == pytest.approx(whole.logprobs, abs=1e-4)


async def test_a_push_changes_the_weights_and_the_label_of_later_answers(
    url: str, client: EngineClient, store: VersionStore
) -> None:
    answers = {}
    for version in (0, 1, 0):
        label = f"run/{version}"
        await push(PushTarget(client, url), folder=store.folder(version), label=label, timeout_s=30)
        assert await client.weight_version(url) == label
        tokens = Tokens()
        result = await client.generate(url, replace(REQUEST, label=label), tokens)
        assert result.spans == ((label, 0, 24),)
        assert answers.setdefault(version, tokens.logprobs) == tokens.logprobs
    assert answers[0] != answers[1]


async def test_a_push_to_a_server_at_work_is_refused_and_disturbs_nothing(
    url: str, client: EngineClient, store: VersionStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("dora.engine.sglang.push.DRAIN_TIMEOUT_S", 0.2)
    tokens = Tokens()
    async with asyncio.TaskGroup() as group:
        generation = group.create_task(client.generate(url, LONG, tokens))
        await tokens.enough.wait()
        with pytest.raises(PushFailed, match="still holds requests") as failed:
            await push(PushTarget(client, url), folder=store.folder(1), label="run/1", timeout_s=30)
        await client.abort(url, LONG.id)
        result = await generation
    assert not failed.value.doubtful
    assert result.spans == (("run/0", 0, len(tokens.token_ids)),)


async def test_a_push_of_a_missing_folder_leaves_the_server_serving_without_a_label(
    url: str, client: EngineClient, tmp_path: Path
) -> None:
    with pytest.raises(PushFailed) as failed:
        await push(PushTarget(client, url), folder=tmp_path / "absent", label="run/9", timeout_s=30)
    assert (failed.value.stage, failed.value.doubtful) == ("update", True)
    assert await client.weight_version(url) == UNCONFIRMED
    assert (await client.generate(url, REQUEST, Tokens())).num_tokens == 24


async def test_a_killed_server_costs_no_token_already_streamed(
    servers: dict[str, tuple[str, subprocess.Popen[str]]], client: EngineClient
) -> None:
    url, process = servers["incremental"]
    tokens, whole = Tokens(), Tokens()
    async with asyncio.TaskGroup() as group:
        generation = group.create_task(_lost(client, url, tokens))
        await tokens.enough.wait()
        process.kill()
        await generation
    kept = len(tokens.token_ids)
    assert kept >= 32
    await client.generate(servers["cumulative"][0], replace(LONG, max_new_tokens=kept), whole)
    assert tokens.token_ids == whole.token_ids  # the same seed on the same weights: these are the tokens that were lost
    with pytest.raises(ServerGone, match="cannot connect"):
        await client.generate(url, REQUEST, Tokens())


async def _lost(client: EngineClient, url: str, tokens: Tokens) -> None:
    with pytest.raises(ServerGone):
        await client.generate(url, LONG, tokens)
