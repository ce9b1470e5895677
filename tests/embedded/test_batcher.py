"""The batcher's rules, with a decoder that counts instead of computing."""

from __future__ import annotations

import asyncio
import os
import signal
import threading
import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from dora.embedded.batcher import Batcher, Joined, Joiner, waves
from dora.embedded.generation import ABORTED, ABORTED_WAITING, NOT_FINITE, QUEUE_FULL, Generation, SamplingParams
from dora.embedded.server import ServeOptions, serve

WAIT_S = 20.0


class CountingDecoder:
    """The next token of a row is the row's length. The test releases `steps` one by one, or lets the decoder run."""

    context_tokens, vocab_size, eos_token_ids, model_type = 10_000, 1_000_000, frozenset[int](), "counting"
    cached_tokens, adapters, can_verify = 0, None, False

    def __init__(self) -> None:
        self.architectures: list[str] = []
        self.rows: list[int] = []  # tokens of each row
        self.most_rows = 0
        self.joins: list[list[Joiner]] = []
        self.steps = threading.Semaphore(0)
        self.unlimited = True
        self.logprob = -1.0
        self.loaded: list[Path] = []
        self.began: list[float] = []  # monotonic, of each step

    def join(self, joiners: Sequence[Joiner]) -> list[Joined]:
        self.joins.append(list(joiners))
        self.rows += [len(joiner.token_ids) for joiner in joiners]
        self.most_rows = max(self.most_rows, len(self.rows))
        return [Joined(index, 0, None) for index in range(len(joiners))]

    def step(self) -> tuple[list[int], list[float]]:
        if not self.unlimited:
            assert self.steps.acquire(timeout=WAIT_S), "the test handed out no step"
        self.began.append(time.monotonic())
        tokens, self.rows = self.rows, [tokens + 1 for tokens in self.rows]
        return tokens, [self.logprob] * len(tokens)

    def experts(self, row: int, *, begin: int, end: int) -> bytes:
        assert end == self.rows[row] - 1, "the last token was not read"
        return bytes(range(begin, end))

    def leave(self, row: int) -> None:
        last = self.rows.pop()
        if row < len(self.rows):
            self.rows[row] = last

    def load(self, folder: Path) -> None:
        self.loaded.append(folder)

    def flush(self) -> None:
        pass


class CyclingDecoder(CountingDecoder):
    """The next token of a row is the row's length modulo 3, so that it repeats what drafts are made of."""

    can_verify = True

    def __init__(self) -> None:
        super().__init__()
        self.verified: list[int] = []  # the lengths that rows would have with all of their drafts and a token more

    def step(self) -> tuple[list[int], list[float]]:
        tokens, logprobs = super().step()
        return [token % 3 for token in tokens], logprobs

    def verify(self, drafts: Sequence[Sequence[int]]) -> list[tuple[list[int], list[float]]]:
        self.verified += [length + len(draft) + 1 for length, draft in zip(self.rows, drafts, strict=True) if draft]
        found = []
        for row, draft in enumerate(drafts):
            tokens = [self.rows[row] % 3]
            while len(tokens) <= len(draft) and draft[len(tokens) - 1] == tokens[-1]:
                tokens.append((self.rows[row] + len(tokens)) % 3)
            self.rows[row] += len(tokens)
            found.append((tokens, [self.logprob] * len(tokens)))
        return found


class Rig:
    def __init__(self, batcher: Batcher, decoder: CountingDecoder) -> None:
        self.batcher, self.decoder = batcher, decoder

    def submit(self, rid: str, *, prompt: int = 4, namespace: str = "", **sampling: Any) -> Generation:
        given = {"max_new_tokens": 5, **sampling}
        one = Generation(rid=rid, prompt_ids=[7] * prompt, sampling=SamplingParams(**given), namespace=namespace)
        self.batcher.submit(one)
        return one

    async def until(self, one: Generation, condition: Callable[[], bool]) -> None:
        async with asyncio.timeout(WAIT_S):
            while not condition():
                await one.next_news()

    async def ended(self, *generations: Generation) -> None:
        for one in generations:
            await self.until(one, lambda one=one: one.done)  # type: ignore[misc]


@asynccontextmanager
async def rig(*, decoder: CountingDecoder | None = None, **changes: Any) -> AsyncIterator[Rig]:
    decoder = decoder or CountingDecoder()
    given = {"slots": 4, "kv_tokens": 1000, "max_queued_requests": None, **changes}
    batcher = Batcher(decoder, weight_version="v0", **given)
    loop = asyncio.create_task(batcher.run(), name="batcher")
    try:
        yield Rig(batcher, decoder)
    finally:
        decoder.unlimited = True
        decoder.steps.release(1000)
        loop.cancel()
        await asyncio.wait({loop})
        batcher.close()
    assert batcher.used_tokens == sum(len(one.prompt_ids) + len(one.output_ids) for one in batcher.rows)


async def test_a_request_gets_its_tokens_in_order_and_a_finish_reason() -> None:
    async with rig() as it:
        one = it.submit("a", max_new_tokens=5)
        await it.ended(one)
        assert one.output_ids == [4, 5, 6, 7, 8]
        assert one.output_logprobs == [-1.0] * 5
        assert one.finish_reason == {"type": "length", "length": 5}
        assert it.batcher.live == {}


async def test_a_stop_token_ends_the_request_and_stays_in_its_output() -> None:
    async with rig() as it:
        one = it.submit("a", max_new_tokens=50, stop_ids=frozenset({7}))
        await it.ended(one)
        assert one.output_ids == [4, 5, 6, 7]
        assert one.finish_reason == {"type": "stop", "matched": 7}


async def test_a_stop_token_at_the_length_limit_counts_as_length() -> None:
    async with rig() as it:
        one = it.submit("a", max_new_tokens=4, stop_ids=frozenset({7}))
        await it.ended(one)
        assert one.finish_reason == {"type": "length", "length": 4}


async def test_zero_new_tokens_means_prefill_only() -> None:
    async with rig() as it:
        one = it.submit("a", max_new_tokens=0)
        await it.ended(one)
        assert (one.output_ids, one.finish_reason) == ([], {"type": "length", "length": 0})
        assert len(it.decoder.joins) == 1


async def test_requests_beyond_the_slots_wait_and_join_when_one_leaves() -> None:
    async with rig(slots=2) as it:
        it.decoder.unlimited = False
        short, long, third = it.submit("short", max_new_tokens=2), it.submit("long"), it.submit("third")
        it.decoder.steps.release(2)
        await it.ended(short)
        assert long.finish_reason is None
        it.decoder.unlimited = True
        it.decoder.steps.release(1)
        await it.ended(long, third)
        assert it.decoder.most_rows == 2
        assert third.output_ids == [4, 5, 6, 7, 8]


async def test_a_prompt_that_does_not_fit_the_kv_waits_and_blocks_those_behind_it() -> None:
    async with rig(kv_tokens=100) as it:
        it.decoder.unlimited = False
        big, bigger, small = (it.submit(name, prompt=tokens) for name, tokens in (("b", 60), ("c", 61), ("d", 1)))
        it.decoder.steps.release(1)
        await it.until(big, lambda: big.published >= 1)
        assert list(it.batcher.waiting) == [bigger, small]
        it.decoder.unlimited = True
        it.decoder.steps.release(1)
        await it.ended(big, bigger, small)
        assert bigger.num_retractions == small.num_retractions == 0


async def test_when_the_kv_is_full_the_youngest_request_is_retracted_and_loses_no_token() -> None:
    async with rig(kv_tokens=100) as it:
        old = it.submit("old", prompt=10, max_new_tokens=80)
        young = it.submit("young", prompt=10, max_new_tokens=60)
        await it.ended(old, young)
        assert (old.num_retractions, young.num_retractions) == (0, 1)
        assert old.output_ids == list(range(10, 90))
        assert young.output_ids == list(range(10, 70))
        again = it.decoder.joins[-1][0]
        kept = len(again.token_ids) - 10
        assert list(again.token_ids) == [7] * 10 + young.output_ids[:kept]
        assert kept > 20


async def test_aborting_a_running_request_keeps_its_tokens() -> None:
    async with rig() as it:
        it.decoder.unlimited = False
        one = it.submit("a")
        it.decoder.steps.release(2)
        await it.until(one, lambda: one.published >= 1)
        it.batcher.abort("a")
        it.decoder.steps.release(2)
        await it.ended(one)
        assert one.finish_reason == ABORTED
        assert one.output_ids == [4, 5, 6, 7, 8][: len(one.output_ids)]
        assert 1 <= len(one.output_ids) < 5


async def test_aborting_a_waiting_request_answers_at_once() -> None:
    async with rig(slots=1) as it:
        it.decoder.unlimited = False
        running, waiting = it.submit("a"), it.submit("b")
        it.batcher.abort("b")
        it.decoder.steps.release(1)
        await it.ended(waiting)
        assert (waiting.finish_reason, waiting.output_ids) == (ABORTED_WAITING, [])
        assert running.finish_reason is None


async def test_an_abort_ends_all_rids_it_is_a_prefix_of_but_only_if_it_is_live_itself() -> None:
    async with rig() as it:
        await it.batcher.between_steps(lambda: it.batcher.hold(retract=False))
        r1, r10, other = it.submit("r1"), it.submit("r10"), it.submit("x")
        it.batcher.abort("r")
        it.batcher.abort("r1")
        await it.ended(r1, r10)
        assert other.finish_reason is None


async def test_abort_all_ends_everything() -> None:
    async with rig(slots=1) as it:
        it.decoder.unlimited = False
        generations = [it.submit(str(i), max_new_tokens=100) for i in range(3)]
        it.batcher.abort_all()
        it.decoder.steps.release(3)
        await it.ended(*generations)
        assert {one.finish_reason["type"] for one in generations if one.finish_reason} == {"abort"}


async def test_a_full_queue_refuses() -> None:
    async with rig(slots=1, max_queued_requests=1) as it:
        await it.batcher.between_steps(lambda: it.batcher.hold(retract=False))
        queued, refused = it.submit("a"), it.submit("b")
        assert (refused.done, refused.finish_reason) == (True, QUEUE_FULL)
        assert queued.finish_reason is None
        assert "b" not in it.batcher.live


async def test_a_logprob_that_is_not_a_number_ends_the_request_as_an_error() -> None:
    async with rig() as it:
        it.decoder.logprob = float("nan")
        one, last = it.submit("a"), it.submit("b", max_new_tokens=1)
        await it.ended(one, last)
        assert one.finish_reason == last.finish_reason == NOT_FINITE
        assert (one.output_ids, one.output_logprobs, last.output_ids) == ([], [], [])  # JSON has no such number


class FailingDecoder(CountingDecoder):
    """Fails at the second step."""

    def step(self) -> tuple[list[int], list[float]]:
        if self.began:
            raise RuntimeError("out of memory")
        return super().step()


async def test_a_model_that_fails_while_the_server_drains_ends_it(capsys: pytest.CaptureFixture[str]) -> None:
    decoder = FailingDecoder()
    decoder.unlimited = False
    serving = asyncio.create_task(serve(ServeOptions(model_path=Path(), skip_tokenizer_init=True), decoder, None))
    url = ""
    async with asyncio.timeout(WAIT_S):
        while not url.startswith("ready "):
            await asyncio.sleep(0)
            url += capsys.readouterr().out
    async with aiohttp.ClientSession(url.split()[1]) as http:
        call = asyncio.create_task(http.post("/generate", json={"input_ids": [5]}))
        while not (await (await http.get("/v1/loads")).json())["loads"][0]["num_running_reqs"]:
            pass
        os.kill(os.getpid(), signal.SIGTERM)
        while (await http.get("/health")).status != 503:
            pass
        decoder.steps.release(2)
        async with asyncio.timeout(WAIT_S):
            with pytest.raises(RuntimeError, match="out of memory"):
                await serving
        await asyncio.wait({call})
    assert isinstance(call.exception(), aiohttp.ClientError)


async def test_a_pause_in_place_keeps_rows_and_a_pause_with_retract_empties_them() -> None:
    async with rig() as it:
        it.decoder.unlimited = False
        first, second = it.submit("a", max_new_tokens=9), it.submit("b", max_new_tokens=9)
        it.decoder.steps.release(1)
        await it.until(first, lambda: first.published >= 1)
        it.decoder.steps.release(1)
        await it.batcher.between_steps(lambda: it.batcher.hold(retract=False))
        assert [one.rid for one in it.batcher.rows] == ["a", "b"]
        await it.batcher.between_steps(lambda: it.batcher.hold(retract=True))
        assert it.batcher.rows == []
        assert [one.rid for one in it.batcher.waiting] == ["a", "b"]
        assert it.batcher.used_tokens == 0
        it.decoder.unlimited = True
        await it.batcher.between_steps(it.batcher.release)
        await it.ended(first, second)
        assert first.output_ids == second.output_ids == list(range(4, 13))
        assert first.num_retractions == 1


async def test_a_relabel_starts_a_new_span_for_tokens_not_yet_sampled() -> None:
    async with rig(slots=1) as it:
        it.decoder.unlimited = False
        running, waiting = it.submit("a"), it.submit("b")
        it.decoder.steps.release(1)
        await it.until(running, lambda: running.published >= 1)
        it.decoder.steps.release(1)

        def relabel() -> int:
            it.batcher.relabel("v1")
            return len(running.output_ids)

        before = await it.batcher.between_steps(relabel)
        it.decoder.unlimited = True
        it.decoder.steps.release(1)
        await it.ended(running, waiting)
        assert running.spans() == [
            {"version": "v0", "start": 0, "end": before},
            {"version": "v1", "start": before, "end": 5},
        ]
        assert waiting.spans() == [{"version": "v1", "start": 0, "end": 5}]


async def test_orders_run_in_order_and_pass_on_their_errors() -> None:
    async with rig() as it:
        seen: list[int] = []
        await asyncio.gather(*(it.batcher.between_steps(lambda i=i: seen.append(i)) for i in range(5)))  # type: ignore[misc]
        assert seen == list(range(5))

        def fail() -> None:
            raise ValueError("the caller's")

        with pytest.raises(ValueError, match="the caller's"):
            await it.batcher.between_steps(fail, on_thread=True)
        await it.ended(it.submit("still alive"))


async def test_a_flush_is_refused_while_a_request_is_resident() -> None:
    async with rig() as it:
        await it.batcher.between_steps(lambda: it.batcher.hold(retract=False))
        one = it.submit("a")
        assert not await it.batcher.between_steps(it.batcher.flush)
        assert not await it.batcher.emptied(timeout_s=0.01)
        await it.batcher.between_steps(it.batcher.release)
        await it.ended(one)
        assert await it.batcher.emptied(timeout_s=WAIT_S)
        assert await it.batcher.between_steps(it.batcher.flush)


async def test_only_a_held_server_flushes_over_its_queue() -> None:
    def flush(it: Rig) -> bool:
        return it.batcher.flush(over_queue=True)

    async with rig() as it:
        one = it.submit("a")
        assert not await it.batcher.between_steps(lambda: flush(it))  # orders run before admission: "a" waits
        await it.ended(one)
        await it.batcher.between_steps(lambda: it.batcher.hold(retract=False))
        two = it.submit("b")
        assert await it.batcher.between_steps(lambda: flush(it))
        await it.batcher.between_steps(it.batcher.release)
        await it.ended(two)


async def test_with_a_least_duration_as_many_steps_take_at_least_as_many_times_that_long() -> None:
    async with rig(min_step_s=0.02) as it:
        for rid in ("from idle", "from idle again"):
            submitted_at, before = time.monotonic(), len(it.decoder.began)
            one = it.submit(rid, max_new_tokens=5)
            await it.ended(one)
            assert len(it.decoder.began) - before == 5
            assert it.decoder.began[-1] - submitted_at >= 5 * 0.02
            assert one.output_ids == [4, 5, 6, 7, 8]


async def test_requests_that_join_do_not_shorten_the_steps() -> None:
    async with rig(min_step_s=0.02, slots=20) as it:
        submitted_at = time.monotonic()
        generations = [it.submit("0", max_new_tokens=6)]
        while not generations[0].done:  # each submission ends the wait
            if len(generations) < 20:
                generations.append(it.submit(str(len(generations)), max_new_tokens=1))
            await generations[-1].next_news()
        await it.ended(*generations)
        assert it.decoder.began[-1] - submitted_at >= len(it.decoder.began) * 0.02


async def test_aborts_and_orders_do_not_wait_for_the_step() -> None:
    async with rig(min_step_s=1_000.0) as it:
        first, second = it.submit("a"), it.submit("b")
        rows = [await it.batcher.between_steps(lambda: [*it.batcher.rows]) for _ in range(2)]
        assert rows[-1] == [first, second]  # admitted between the two orders
        it.batcher.abort("a")
        await it.ended(first)
        assert (first.finish_reason, first.output_ids) == (ABORTED, [])
        await it.batcher.between_steps(lambda: it.batcher.hold(retract=True))
        assert list(it.batcher.waiting) == [second]
        await it.batcher.between_steps(it.batcher.release)
        it.batcher.abort("b")
        await it.ended(second)
        assert await it.batcher.between_steps(it.batcher.flush)
        assert it.decoder.began == []


def generation(rid: str, prompt: list[int], *, namespace: str = "") -> Generation:
    return Generation(rid=rid, prompt_ids=prompt, sampling=SamplingParams(), namespace=namespace)


async def test_siblings_are_prefilled_after_the_first_and_lengths_are_not_mixed() -> None:
    given = [
        generation("a", [1] * 10),
        generation("a2", [1] * 10),
        generation("long", [2] * 100),
        generation("b", [3] * 15),
        generation("a in another namespace", [1] * 10, namespace="v2"),
        generation("long2", [2] * 100),
    ]
    assert [[one.rid for one in wave] for wave in waves(given)] == [
        ["a", "a in another namespace", "b"],
        ["long"],
        ["a2", "long2"],
    ]


# --- drafts


@pytest.mark.parametrize("kv_tokens", [1000, 45], ids=["room", "little room"])
async def test_drafts_change_no_answer_and_end_where_it_ends(kv_tokens: int) -> None:
    answers, drafted = [], 0
    for draft_tokens in (0, 4):
        decoder = CyclingDecoder()
        async with rig(decoder=decoder, draft_tokens=draft_tokens, kv_tokens=kv_tokens) as it:
            asked = [
                it.submit(f"{length}", prompt=length, max_new_tokens=30, stop_ids=frozenset({9}))
                for length in (3, 4, 5, 6)
            ]
            stopped = it.submit("stopped", prompt=2, max_new_tokens=30, min_new_tokens=0, stop_ids=frozenset({1}))
            await it.ended(*asked, stopped)
        answers.append([(one.output_ids, one.finish_reason) for one in (*asked, stopped)])
        drafted += len(decoder.verified)
        assert {one.num_steps is None for one in asked} == {draft_tokens == 0}
    assert answers[0] == answers[1]
    assert drafted > 0


async def test_a_draft_is_cut_at_a_stop_token_and_never_goes_beyond_the_limit() -> None:
    decoder = CyclingDecoder()
    async with rig(decoder=decoder, draft_tokens=4, slots=1) as it:
        await it.ended(*(it.submit(f"first {n}", prompt=3, max_new_tokens=40) for n in range(3)))
        assert max(decoder.verified) == 3 + 40
        ends = [it.submit(f"{n}", prompt=3, max_new_tokens=n) for n in range(1, 12)]
        await it.ended(*ends)
        assert [len(one.output_ids) for one in ends] == list(range(1, 12))
        stopped = it.submit("stopped", prompt=3, max_new_tokens=40, stop_ids=frozenset({2}))
        await it.ended(stopped)
        assert stopped.output_ids == [0, 1, 2]
        assert it.batcher.metrics.generated_tokens == 120 + sum(range(1, 12)) + 3


async def test_steps_with_drafts_are_fewer_and_counted() -> None:
    async with rig(decoder=CyclingDecoder(), draft_tokens=4, slots=1, min_step_s=0.002) as it:
        one = it.submit("a", prompt=3, max_new_tokens=300)
        await it.ended(one)
        assert one.num_steps is not None
        assert one.num_steps < 150
        assert one.num_drafted >= 300 - one.num_steps
        assert it.batcher.metrics.drafted_steps == one.num_steps
