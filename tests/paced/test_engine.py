"""A paced engine over HTTP: the turns of the table, in the time of the simulated server, and never earlier."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import aiohttp
import msgspec
import pytest

from dora.core.decode_time import DecodeTime
from dora.embedded.generation import ABORTED_WAITING, Generation, SamplingParams
from dora.embedded.server import ServeOptions, listening
from dora.engine.names import request_id
from dora.paced.engine import PacedEngine, trajectory_of
from dora.paced.servers import paced_model
from dora.seed.policy import path as seed_path
from dora.sim.answers import Answers, SimulatedGroup
from dora.sim.server import SimulatedServer
from dora.sim.tools import Call

SCALE = 10.0
STEP_S = 0.02
READ_S = 1e-3
#: Groups of two siblings. One ends by itself and is rewarded, one is cut at the cap; one calls twice, one never.
CAP = 400
CALLING, CALLS = 2, (Call(30, 1.0, 100), Call(150, 2.0, 10))
TABLE = [
    SimulatedGroup(prompt_tokens=5, lengths=[150, CAP], rewards=[1.0, 0.0]),
    SimulatedGroup(prompt_tokens=5, lengths=[165, 30], rewards=[1.0, 0.0], calls=[CALLS, ()]),
]
EOS, ZERO, ONE = 1, 3, 4
SERVER = SimulatedServer(slots=8, kv_tokens=4096, decode=DecodeTime(STEP_S, 0.0, 0.0), prefill_s_per_token=READ_S)


class Paced:
    """One engine, and a session to it."""

    def __init__(self, engine: PacedEngine, http: aiohttp.ClientSession) -> None:
        self.engine = engine
        self.http = http

    async def post(self, path: str, body: dict[str, Any] | None = None) -> Any:
        async with self.http.post(path, json=body or {}) as answer:
            assert answer.status == 200, await answer.text()
            return await answer.json() if answer.content_type == "application/json" else None

    async def ask(self, sibling: int, *, produced: int = 0, attempt: int = 0) -> Any:
        """The answer of a sibling, or its next turn, from the tokens produced so far."""
        return await self.post("/generate", body_of(sibling, produced=produced, attempt=attempt))

    async def begun(self) -> asyncio.Task[Any]:
        """The answer of sibling 0, once its first tokens are told."""
        told = asyncio.Event()

        async def read() -> Any:
            async with self.http.post("/generate", json={**body_of(0), "stream": True}) as answer:
                async for line in answer.content:
                    if line.startswith(b"data: {"):
                        last = msgspec.json.decode(line[6:])
                        told.set()
            return last

        reading = asyncio.create_task(read())
        await told.wait()
        return reading


def body_of(sibling: int, *, produced: int = 0, attempt: int = 0) -> dict[str, Any]:
    return {
        "rid": rid(sibling, attempt=attempt),
        "input_ids": [ZERO] * (5 + produced),
        "sampling_params": {"max_new_tokens": CAP - produced},
        "return_logprob": True,
    }


def rid(sibling: int, *, attempt: int = 0) -> str:
    return request_id("run", epoch=0, trajectory=sibling, attempt=attempt)


@pytest.fixture
async def paced() -> AsyncIterator[Paced]:
    answers = Answers("recorded", seed=0, group_size=2, cap=CAP, recorded=TABLE)
    model = paced_model(seed_path(), context_tokens=2048)
    engine = PacedEngine(model, answers=answers, server=SERVER, slowness=1.0, push_s=0.1, time_scale=SCALE)
    options = ServeOptions(model_path=seed_path(), slots=8, kv_tokens=4096, skip_tokenizer_init=True)
    async with listening(options, engine, None) as (_, url, _), aiohttp.ClientSession(url) as http:
        yield Paced(engine, http)


async def test_an_answer_has_the_length_and_the_reward_of_the_table(paced: Paced) -> None:
    answer = await paced.ask(0)
    assert answer["output_ids"] == [ONE, *[ZERO] * 148, EOS]
    assert len(answer["meta_info"]["output_token_logprobs"]) == 150
    assert answer["meta_info"]["finish_reason"] == {"type": "stop", "matched": EOS}


async def test_an_answer_at_the_cap_is_cut_there(paced: Paced) -> None:
    answer = await paced.ask(1)
    assert answer["output_ids"] == [ZERO] * CAP
    assert answer["meta_info"]["finish_reason"] == {"type": "length", "length": CAP}


async def test_an_answer_is_no_earlier_than_the_model_predicts(paced: Paced) -> None:
    begun = asyncio.get_running_loop().time()
    await paced.ask(0)
    assert (asyncio.get_running_loop().time() - begun) * SCALE >= 149 * STEP_S  # the step under way is shared


async def test_a_stopped_answer_continues_to_the_same_end(paced: Paced) -> None:
    asking = await paced.begun()
    await paced.post("/abort_request", {"rid": rid(0)})
    stopped = await asking
    assert stopped["meta_info"]["finish_reason"]["type"] == "abort"
    produced = len(stopped["output_ids"])
    assert 0 < produced < 150
    rest = await paced.ask(0, produced=produced, attempt=1)
    assert stopped["output_ids"] + rest["output_ids"] == [ONE, *[ZERO] * 148, EOS]


async def test_a_turn_ends_with_a_call_and_the_next_one_reads_only_the_result(paced: Paced) -> None:
    use = paced.engine._instance.use
    first = await paced.ask(CALLING)
    assert first["output_ids"] == [ONE, *[ZERO] * 28, EOS]
    assert first["meta_info"]["finish_reason"] == {"type": "stop", "matched": EOS}
    assert use.prefill_s == pytest.approx(5 * READ_S)
    second = await paced.ask(CALLING, produced=130, attempt=1)
    assert second["output_ids"] == [*[ZERO] * 19, EOS]
    assert (use.prefill_s, use.again_s) == (pytest.approx(105 * READ_S), 0.0)
    assert paced.engine.used_tokens == 0, "what can be dropped is not used"
    last = await paced.ask(CALLING, produced=160, attempt=2)
    assert last["output_ids"] == [*[ZERO] * 4, EOS]


async def test_an_answer_whose_kv_is_gone_or_old_is_read_again(paced: Paced) -> None:
    use = paced.engine._instance.use
    await paced.ask(CALLING)
    await paced.post("/flush_cache")
    second = await paced.ask(CALLING, produced=130, attempt=1)
    assert len(second["output_ids"]) == 20
    assert use.prefill_s + use.again_s == pytest.approx((5 + 5 + 130) * READ_S)
    last = await paced.ask(CALLING, produced=162, attempt=3)  # two tokens of its last turn are from elsewhere
    assert len(last["output_ids"]) == 3
    assert use.prefill_s + use.again_s == pytest.approx((5 + 5 + 130 + 5 + 162) * READ_S)


async def test_a_stopped_turn_continues_to_its_own_end(paced: Paced) -> None:
    begun = await paced.ask(CALLING, produced=10)
    assert begun["output_ids"] == [*[ZERO] * 19, EOS]


async def test_a_request_stopped_before_it_began_ends_as_in_a_queue(paced: Paced) -> None:
    """Without counts of a prompt that was never read: a client takes them for numbers."""
    generation = Generation(rid=rid(0), prompt_ids=[ZERO] * 5, sampling=SamplingParams(max_new_tokens=CAP))
    paced.engine.submit(generation)
    paced.engine.abort_only(generation.rid)
    while not generation.done:
        await generation.next_news()
    assert generation.finish_reason == ABORTED_WAITING


@pytest.mark.parametrize("mode", ["in_place", "retract"])
async def test_the_time_of_a_pause_decodes_nothing(paced: Paced, mode: str) -> None:
    clock = asyncio.get_running_loop().time
    begun = clock()
    asking = await paced.begun()
    await paced.post("/pause_generation", {"mode": mode})
    paused = clock()
    await asyncio.sleep(160 * STEP_S / SCALE)  # time enough for the whole answer passes
    assert not asking.done()
    paused = clock() - paused
    await paced.post("/continue_generation")
    assert len((await asking)["output_ids"]) == 150
    assert (clock() - begun - paused) * SCALE >= 149 * STEP_S


async def test_an_update_gives_later_answers_its_label(paced: Paced) -> None:
    await paced.post("/update_weights_from_disk", {"model_path": str(seed_path()), "weight_version": "run/1"})
    answer = await paced.ask(0)
    assert answer["meta_info"]["weight_versions"] == [{"version": "run/1", "start": 0, "end": 150}]


async def test_a_probe_is_answered_at_once_and_takes_no_slot(paced: Paced) -> None:
    answer = await paced.post("/generate", {"input_ids": [0], "sampling_params": {"max_new_tokens": 1}})
    assert len(answer["output_ids"]) == 1
    async with paced.http.get("/health") as health:
        assert health.status == 200


@pytest.mark.parametrize("trajectory", [0, 7, -7, 10**12 - 1, 1 - 10**12])
def test_the_trajectory_of_a_request_is_in_its_id(trajectory: int) -> None:
    assert trajectory_of(request_id("run", epoch=2, trajectory=trajectory, attempt=3)) == trajectory


def test_a_probe_asks_for_no_trajectory() -> None:
    assert trajectory_of("HEALTH_CHECK_0") is None
