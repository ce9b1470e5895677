"""The experts kept beside KV: those of a plain forward pass, whatever happens to a row, and returned as SGLang does."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from dora.embedded.batcher import Joiner
from dora.embedded.decoder import CausalDecoder
from dora.embedded.server import ServeOptions
from dora.engine.api import AskedRouting, GenerateRequest, GenerateResult
from dora.engine.errors import RequestRefused
from dora.engine.sglang.client import EngineClient
from dora.engine.sglang.probe import probe
from dora.errors import ConfigError
from dora.routing import RoutingShape
from tests.embedded.conftest import Served, Serving, decoder_of
from tests.embedded.experts import PlainChoice
from tests.embedded.rows import churn, join, prompt_of, step
from tests.families import SHAPE, make_model

VOCAB = SHAPE["vocab_size"]
#: The layers with experts of each family.
LAYERS = {"qwen3_moe": (0, 1, 2, 3), "mixtral": (0, 1, 2, 3), "deepseek_v3": (1, 2, 3), "qwen3_next": (0, 1, 2, 3)}
PROMPT = [5, 6, 7, 8, 9, 10]


def shape_of(family: str) -> RoutingShape:
    return RoutingShape(num_layers=4, layers=LAYERS[family], num_experts=4, top_k=2)


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("experts")
    for name in (*LAYERS, "qwen3"):
        make_model(name).save_pretrained(root / name)
    make_model("qwen3_moe", seed=1).save_pretrained(root / "next")
    make_model("qwen3_moe", max_position_embeddings=512).save_pretrained(root / "long")
    return {name: root / name for name in (*LAYERS, "qwen3", "next", "long")}


class Watched(CausalDecoder):
    """Takes note of the experts of each row that leaves."""

    def __init__(self, folder: Path) -> None:
        self.left: list[NDArray[np.int32]] = []
        super().__init__(
            folder, slots=8, kv_tokens=4096, device="cpu", dtype="float32", threads=1, returns_experts=True
        )
        self.left.clear()

    def leave(self, row: int) -> None:
        self.left.append(self.kept(row))
        super().leave(row)

    def kept(self, row: int) -> NDArray[np.int32]:
        found = self.experts(row, begin=0, end=self._lengths[row])
        return np.sort(np.frombuffer(found, "<i4").reshape(-1, 4, 2), axis=-1)


@pytest.mark.parametrize("family", LAYERS)
def test_experts_are_those_of_a_plain_forward_while_rows_join_and_leave(folders: dict[str, Path], family: str) -> None:
    decoder, choice = Watched(folders[family]), PlainChoice(folders[family])
    rows = churn(decoder, random.Random(0), lengths=[1, 2, 5, 40], turns=40, vocab=VOCAB, room=100)
    running = [decoder.kept(row) for row in range(len(rows) - len(decoder.left))]
    for row, found in zip(rows, [*decoder.left, *running], strict=True):
        tokens = [*row.joiner.token_ids, *row.output_ids]
        assert found.tolist() == choice(tokens)[:-1].tolist()


@pytest.mark.parametrize("family", ["qwen3_moe", "qwen3_next"])
def test_cached_tokens_have_the_experts_that_were_chosen_when_they_were_computed(
    folders: dict[str, Path], family: str
) -> None:
    rng, decoder, rows = random.Random(1), Watched(folders[family]), []
    ids = prompt_of(rng, 25, vocab=VOCAB)
    first = Joiner(token_ids=ids, namespace="", seed=1)
    join(decoder, rows, [first])
    asked = [first, replace(first, token_ids=[*ids, 5, 6, 7]), replace(first, token_ids=[*ids[:20], 9, 9]), first]
    cached = join(decoder, rows, asked)
    assert sum(cached) >= 48
    for _ in range(3):
        step(decoder, rows)
    choice = PlainChoice(folders[family])
    for at, row in enumerate(rows):
        assert decoder.kept(at).tolist() == choice([*row.joiner.token_ids, *row.output_ids])[:-1].tolist()


def test_experts_stay_when_rows_outgrow_the_cache(folders: dict[str, Path]) -> None:
    decoder, rows = Watched(folders["long"]), []
    join(decoder, rows, [Joiner(token_ids=prompt_of(random.Random(2), 126, vocab=VOCAB), namespace="", seed=1)])
    for _ in range(6):
        step(decoder, rows)
    tokens = [*rows[0].joiner.token_ids, *rows[0].output_ids]
    assert decoder.kept(0).tolist() == PlainChoice(folders["long"])(tokens)[:-1].tolist()


def test_experts_follow_the_weights(folders: dict[str, Path]) -> None:
    decoder, rows = Watched(folders["qwen3_moe"]), []
    one = Joiner(token_ids=PROMPT, namespace="old", seed=1)
    join(decoder, rows, [one])
    decoder.load(folders["next"])
    join(decoder, rows, [replace(one, namespace="new")])
    before, after = PlainChoice(folders["qwen3_moe"])(PROMPT)[:-1], PlainChoice(folders["next"])(PROMPT)[:-1]
    assert before.tolist() != after.tolist()
    assert (decoder.kept(0).tolist(), decoder.kept(1).tolist()) == (before.tolist(), after.tolist())


def test_a_model_without_experts_is_refused(folders: dict[str, Path]) -> None:
    with pytest.raises(ConfigError, match="qwen3 has no routers of experts"):
        decoder_of(folders["qwen3"], returns_experts=True)


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"dialect": "0.5.20"}, "--routed-experts: not as SGLang 0.5.20 does; give --dialect 0.5.23"),
        ({"draft_tokens": 2}, "--routed-experts: .*; drop --draft-tokens"),
    ],
)
def test_options_that_do_not_go_together_are_refused(tmp_path: Path, changes: dict[str, Any], says: str) -> None:
    options = ServeOptions(model_path=tmp_path, **{"dialect": "0.5.23", "routed_experts": True, **changes})
    with pytest.raises(ConfigError, match=f"^{says}$"):
        options.require_possible()


# --- over HTTP


class Asking:
    """A client that asks a served model for experts, and compares them with a plain forward pass."""

    def __init__(self, served: Served, client: EngineClient, folder: Path, family: str) -> None:
        self.served, self.client, self.url = served, client, str(served.http._base_url).rstrip("/")
        self._family, self._choice = family, PlainChoice(folder)
        self.token_ids: list[int] = []
        self.begun = asyncio.Event()

    def _take(self, token_ids: Sequence[int], _: Sequence[float]) -> None:
        self.token_ids += token_ids
        self.begun.set()

    async def generate(
        self, name: str, prompt: list[int], *, start: int = 0, count: int = 8, label: str = "v"
    ) -> GenerateResult:
        self.token_ids = []
        request = GenerateRequest(
            id=name,
            tokens=prompt,
            max_new_tokens=count,
            temperature=1.0,
            stop_tokens=[],
            seed=1,
            label=label,
            routing=AskedRouting(shape_of(self._family), start),
        )
        return await self.client.generate(self.url, request, self._take)

    async def begin(self, name: str, *, count: int) -> asyncio.Task[GenerateResult]:
        """Ask, and wait for the first token."""
        self.begun.clear()
        task = asyncio.create_task(self.generate(name, PROMPT, count=count))
        await self.begun.wait()
        return task

    def agrees(self, result: GenerateResult, prompt: list[int], *, start: int = 0) -> None:
        expected = self._choice([*prompt, *self.token_ids])[start:-1, LAYERS[self._family]]
        assert result.chosen is not None
        assert result.chosen.start == start
        assert np.sort(result.chosen.experts, axis=-1).tolist() == expected.tolist()


@pytest.fixture
def asking(serving: Serving, folders: dict[str, Path]) -> Any:
    @asynccontextmanager
    async def start(family: str = "qwen3_moe", **options: Any) -> AsyncIterator[Asking]:
        given = {"routed_experts": True, "dialect": "0.5.23", "incremental_streaming_output": True, **options}
        async with serving(folders[family], **given) as served, EngineClient(max_connections=8) as client:
            yield Asking(served, client, folders[family], family)

    return start


@pytest.mark.parametrize("family", ["qwen3_moe", "deepseek_v3"])
async def test_an_answer_its_repetition_and_the_next_turn_have_the_experts_of_their_tokens(
    asking: Any, family: str
) -> None:
    async with asking(family) as one:
        for name, cached in (("first", 0), ("again", len(PROMPT) - 1)):
            result = await one.generate(name, PROMPT)
            assert result.cached_tokens == cached
            one.agrees(result, PROMPT)
        known = [*PROMPT, *one.token_ids]
        result = await one.generate("next turn", [*known, 3, 4], start=len(known) - 1)
        one.agrees(result, [*known, 3, 4], start=len(known) - 1)
        result = await one.generate("continued where nothing is cached", known, label="other server")
        assert result.cached_tokens == 0
        one.agrees(result, known)
        found = await probe(one.client, one.url, timeout_s=30)
        assert found.routing_doubt == ""


async def test_requests_side_by_side_have_their_own(asking: Any) -> None:
    async with asking() as one:
        bodies = [
            {"input_ids": [at, *PROMPT[: at + 1]], "sampling_params": {"max_new_tokens": 12}, "rid": f"r{at}"}
            for at in range(4)
        ]
        asked = {"return_routed_experts": True, "return_logprob": True, "extra_key": "v"}
        answers = await asyncio.gather(*[one.served.post("/generate", body | asked) for body in bodies])
        alone = [await one.served.post("/generate", {**body, **asked, "extra_key": "w"}) for body in bodies]
        for (status, answer), (_, other) in zip(answers, alone, strict=True):
            assert status == 200
            assert len(answer["meta_info"]["routed_experts"]) > 100
            if answer["output_ids"] == other["output_ids"]:
                assert answer["meta_info"]["routed_experts"] == other["meta_info"]["routed_experts"]


async def test_a_stop_returns_those_of_the_tokens_so_far_and_none_from_the_queue(asking: Any) -> None:
    async with asking(slots=1, min_step_ms=20.0) as one:
        running = await one.begin("running", count=100)
        asked = {"return_routed_experts": True, "sampling_params": {"max_new_tokens": 8}}
        body = {"input_ids": PROMPT, "rid": "waiting", **asked}
        waiting = asyncio.create_task(one.served.post("/generate", body))
        while len(one.served.engine.batcher.live) < 2:  # noqa: ASYNC110 - the engine has no event for it
            await asyncio.sleep(0.01)
        await one.client.abort(one.url, "waiting")
        assert "routed_experts" not in (await waiting)[1]["meta_info"]
        await one.client.abort(one.url, "running")
        result = await running
        assert result.was_stopped
        one.agrees(result, PROMPT)


async def test_a_retracted_request_has_those_of_its_second_reading_and_none_while_it_waits(asking: Any) -> None:
    async with asking(min_step_ms=5.0) as one:
        for name, is_aborted in (("continued", False), ("aborted", True)):
            task = await one.begin(name, count=40)
            await one.client.pause(one.url, "retract")
            if is_aborted:
                await one.client.abort(one.url, name)
                result = await task
                assert (result.was_stopped, result.num_tokens > 0, result.chosen) == (True, True, None)
            await one.client.resume(one.url)
            if not is_aborted:
                result = await task
                assert result.num_rereads == 1
                one.agrees(result, PROMPT)


async def test_weights_that_change_in_a_pause_change_the_experts_from_there_on(
    asking: Any, folders: dict[str, Path]
) -> None:
    async with asking(min_step_ms=5.0) as one:
        task = await one.begin("r", count=40)
        await one.client.pause(one.url, "in_place")
        await one.client.update_weights_from_disk(one.url, str(folders["next"]), "next", timeout_s=30)
        await one.client.resume(one.url)
        result = await task
        (_, _, border), _ = result.spans
        assert result.chosen is not None
        rows = len(PROMPT) + border - 1
        own = PlainChoice(folders["qwen3_moe"])([*PROMPT, *one.token_ids])[:rows]
        assert np.sort(result.chosen.experts, axis=-1)[:rows].tolist() == own.tolist()
        assert len(result.chosen.experts) == len(PROMPT) + 40 - 1


async def test_an_engine_that_keeps_none_refuses_the_question_and_a_start_beyond_the_prompt_is_refused(
    asking: Any,
) -> None:
    async with asking(routed_experts=False) as one:
        with pytest.raises(RequestRefused, match="was started without --routed-experts"):
            await one.generate("r", PROMPT)
        found = await probe(one.client, one.url, timeout_s=30)
        assert "start it with --enable-return-routed-experts" in found.routing_doubt
    async with asking() as one:
        for start in (-1, len(PROMPT) + 1):
            asked = {"return_routed_experts": True, "routed_experts_start_len": start}
            body = {"input_ids": PROMPT, "sampling_params": {"max_new_tokens": 8}, **asked}
            status, answer = await one.served.post("/generate", body)
            assert (status, answer["error"]["message"][:24]) == (400, "routed_experts_start_len")


async def test_without_a_question_an_answer_has_none(asking: Any) -> None:
    async with asking() as one:
        answer = await one.served.generate(PROMPT, sampling={"max_new_tokens": 3})
        assert "routed_experts" not in answer["meta_info"]
