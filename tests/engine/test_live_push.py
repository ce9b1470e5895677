"""A push among live requests, on an embedded server: streams continue under the new weights, as their spans show.

What `retract` and `in_place` mean is shown by log-probs: after the first every token was sampled as the new weights
alone would have it (where the server flushes over its queue, as SGLang does from 0.5.21), after the second, or in an
older dialect, over KV of the old ones.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from pathlib import Path

import pytest

from dora.core.strategies import Pause
from dora.embedded.server import ServeOptions, running
from dora.engine.api import GenerateRequest
from dora.engine.sglang.client import EngineClient
from dora.engine.sglang.push import push
from dora.engine.sglang.target import PushTarget
from tests.embedded.conftest import Reference, decoder_of, qwen3, save

PROMPT = (3, 9, 27, 17, 51, 25)
MAX_NEW_TOKENS = 600
BEFORE = 20  #: tokens that the old weights sample at least


class Stream:
    """The tokens delivered for one request."""

    def __init__(self) -> None:
        self.token_ids: list[int] = []
        self.logprobs: list[float] = []
        self.under_way = asyncio.Event()

    def __call__(self, token_ids: Sequence[int], logprobs: Sequence[float]) -> None:
        self.token_ids += token_ids
        self.logprobs += logprobs
        if len(self.token_ids) >= BEFORE:
            self.under_way.set()


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """Two policies that never end an answer by themselves, so that at any speed the push comes in the middle of one."""
    config = qwen3()
    config.eos_token_id = None
    root = tmp_path_factory.mktemp("endless")
    return save(root / "old", config, seed=1), save(root / "new", config, seed=2)


@pytest.mark.parametrize(("live", "dialect"), [("retract", "0.5.23"), ("retract", "0.5.20"), ("in_place", "0.5.23")])
async def test_a_stream_continues_under_the_new_weights(live: Pause, dialect: str, models: tuple[Path, Path]) -> None:
    old, new = models
    decoder = decoder_of(old, slots=2, kv_tokens=2048)
    options = ServeOptions(
        model_path=old, slots=2, kv_tokens=2048, skip_tokenizer_init=True, weight_version="r/0", dialect=dialect
    )
    stream = Stream()
    request = GenerateRequest("r-1", PROMPT, MAX_NEW_TOKENS, 1.0, (), 4, "r/0")
    async with (
        running(options, decoder, None) as (_, url, _),
        EngineClient(max_connections=2) as client,
        asyncio.timeout(60),
    ):
        call = asyncio.create_task(client.generate(url, request, stream))
        await stream.under_way.wait()
        await push(PushTarget(client, url), folder=new, label="r/1", timeout_s=30, live=live)
        assert not call.done()
        result = await call
        assert await client.weight_version(url) == "r/1"
    (first, start, border), (second, again, end) = result.spans
    assert (first, start, second, again, end) == ("r/0", 0, "r/1", border, len(stream.token_ids))
    sampled = stream.logprobs[border:]
    expected = Reference(new).logprobs([*PROMPT, *stream.token_ids])[len(PROMPT) - 1 + border :]
    assert len(sampled) == len(expected) > 0
    difference = max(abs(a - b) for a, b in zip(sampled, expected, strict=True))
    assert (difference < 1e-3) == ((live, dialect) == ("retract", "0.5.23"))
