"""Tiny models on disk, one per session, and an engine on a real socket for each test that asks for one."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import aiohttp
import msgspec
import pytest
import torch
from transformers import AutoModelForCausalLM, GPT2Config, LlamaConfig, PreTrainedConfig, Qwen3Config
from transformers.utils.logging import disable_progress_bar

from dora.embedded.decoder import CausalDecoder
from dora.embedded.engine_state import EngineState
from dora.embedded.server import ServeOptions, running

VOCAB = 64
CONTEXT = 8192
EOS = 1

torch.set_num_threads(1)


def qwen3(*, hidden: int = 32) -> Qwen3Config:
    return Qwen3Config(
        vocab_size=VOCAB,
        hidden_size=hidden,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        max_position_embeddings=CONTEXT,
        tie_word_embeddings=True,
        bos_token_id=0,
        eos_token_id=EOS,
    )


def save(folder: Path, config: PreTrainedConfig, *, seed: int, scale: float = 5.0) -> Path:
    """A random model with weights large enough that its distributions are far from uniform."""
    disable_progress_bar()
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(config)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim > 1:
                parameter.mul_(scale)
    model.save_pretrained(folder)
    return folder


@pytest.fixture(scope="session")
def model_a(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save(tmp_path_factory.mktemp("models") / "a", qwen3(), seed=1)


@pytest.fixture(scope="session")
def model_b(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save(tmp_path_factory.mktemp("models") / "b", qwen3(), seed=2)


@pytest.fixture(scope="session")
def model_of_other_shape(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save(tmp_path_factory.mktemp("models") / "wide", qwen3(hidden=48), seed=3)


@pytest.fixture(scope="session")
def other_architectures(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("models")
    llama = LlamaConfig(
        vocab_size=VOCAB,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=1,
        max_position_embeddings=512,
    )
    gpt2 = GPT2Config(vocab_size=VOCAB, n_embd=32, n_layer=2, n_head=4, n_positions=512)
    return {"llama": save(root / "llama", llama, seed=4), "gpt2": save(root / "gpt2", gpt2, seed=5)}


class Reference:
    """The same checkpoint in plain transformers: one forward over a whole sequence."""

    def __init__(self, folder: Path) -> None:
        self._model = AutoModelForCausalLM.from_pretrained(folder, attn_implementation="eager").eval()

    @torch.inference_mode()
    def logprobs(self, token_ids: list[int], *, temperature: float = 1.0) -> list[float]:
        """Log-prob of each token after the first, given those before it."""
        logits = self._model(torch.tensor([token_ids])).logits[0, :-1] / temperature
        table = logits.log_softmax(dim=-1)
        return [float(row[token]) for row, token in zip(table, token_ids[1:], strict=True)]

    @torch.inference_mode()
    def greedy(self, token_ids: list[int], count: int) -> list[int]:
        ids = list(token_ids)
        for _ in range(count):
            ids.append(int(self._model(torch.tensor([ids])).logits[0, -1].argmax()))
        return ids[len(token_ids) :]


@pytest.fixture(scope="session")
def reference_a(model_a: Path) -> Reference:
    return Reference(model_a)


@pytest.fixture(scope="session")
def reference_b(model_b: Path) -> Reference:
    return Reference(model_b)


def decoder_of(folder: Path, *, slots: int = 8, kv_tokens: int = 4096, **options: Any) -> CausalDecoder:
    return CausalDecoder(folder, slots=slots, kv_tokens=kv_tokens, device="cpu", dtype="float32", threads=1, **options)


@dataclass
class Served:
    """One running engine and a client session to it."""

    engine: EngineState
    http: aiohttp.ClientSession

    async def post(self, path: str, body: Any = None) -> tuple[int, Any]:
        """Status, and the body: decoded if it is JSON, else text."""
        async with self.http.post(path, json={} if body is None else body) as answer:
            raw = await answer.text()
            return answer.status, msgspec.json.decode(raw) if "json" in answer.content_type else raw

    async def get(self, path: str) -> tuple[int, Any]:
        async with self.http.get(path) as answer:
            raw = await answer.text()
            return answer.status, msgspec.json.decode(raw) if "json" in answer.content_type else raw

    async def generate(self, input_ids: list[int], *, sampling: dict[str, Any] | None = None, **fields: Any) -> Any:
        """The 200 answer of a unary call with log-probs."""
        body = {"input_ids": input_ids, "sampling_params": sampling or {}, "return_logprob": True, **fields}
        status, answer = await self.post("/generate", body)
        assert status == 200, answer
        return answer

    async def events(self, body: dict[str, Any]) -> AsyncIterator[Any]:
        """The JSON events of a stream, in order, then the text `[DONE]`."""
        async with self.http.post("/generate", json={"stream": True, **body}) as answer:
            assert answer.status == 200
            assert answer.headers["Content-Type"] == "text/event-stream; charset=utf-8"
            async for line in answer.content:
                if line.startswith(b"data: "):
                    data = line[6:].strip()
                    yield data.decode() if data == b"[DONE]" else msgspec.json.decode(data)


Serving = Callable[..., Any]


@pytest.fixture
def serving(model_a: Path) -> Serving:
    """`async with serving(slots=2) as served:` an engine with these options on a free port, no tokenizer."""

    @asynccontextmanager
    async def start(folder: Path | None = None, **changes: Any) -> AsyncIterator[Served]:
        given = {"slots": 8, "kv_tokens": 8192, "skip_tokenizer_init": True, **changes}
        options = ServeOptions(model_path=folder or model_a, **given)
        decoder = decoder_of(
            options.model_path,
            slots=options.slots,
            kv_tokens=options.kv_tokens,
            adapters=options.adapters,
            returns_experts=options.routed_experts,
        )
        async with running(options, decoder, None) as (engine, url, _), aiohttp.ClientSession(url) as http:
            yield Served(engine, http)

    return start


@pytest.fixture
async def served(serving: Serving) -> AsyncIterator[Served]:
    async with serving() as one:
        yield one
