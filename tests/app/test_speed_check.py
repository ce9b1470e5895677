"""Measuring servers: two embedded engines on real sockets, and engines that fail as these tests say."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import pytest

from dora.app import speed_check, speed_file
from dora.app.check import ToMeasure, check
from dora.app.speed_check import MeasuredServer, ServerSpeeds, batches, measure_speeds
from dora.app.speed_file import curve, findings, measured_workload, recorded_job, require_new, write
from dora.app.trial_push import Held
from dora.config.load import load
from dora.config.schema import Config
from dora.core.decode_time import DecodeTime
from dora.embedded.server import ServeOptions, running
from dora.engine.api import GenerateRequest, GenerateResult, KvUse, OnTokens
from dora.engine.engines import open_engine
from dora.engine.errors import ServerGone
from dora.errors import ConfigError, RemoteError
from dora.sim.fitting import DecodeFit, DecodePoint, PushFit
from dora.sim.workload import LengthModel, Workload
from dora.sim.workload import load as load_workload
from tests.embedded.conftest import EOS, VOCAB, decoder_of, model_a  # noqa: F401 - a fixture

SLOTS = 4
KV_TOKENS = 512


def config_of(folder: Path, *changes: str) -> Config:
    values = (
        "task.max_prompt_tokens=32",
        "rollout.max_new_tokens=96",
        "rollout.max_staleness=0",
        f"run.folder={folder / 'runs'}",
        f"weights.memory_folder={folder / 'none'}",
    )
    return load(None, [*values, *changes], environ={})


@pytest.fixture(autouse=True)
def _short(monkeypatch: pytest.MonkeyPatch) -> None:
    """Measure for a moment only."""
    monkeypatch.setattr(speed_check, "DECODE_S", 0.1)
    monkeypatch.setattr(speed_check, "REPEATS", 1)
    monkeypatch.setattr(speed_check, "PREFILLS", 2)
    monkeypatch.setattr(speed_check, "IDLE_S", 1.0)


@pytest.fixture
async def urls(model_a: Path) -> AsyncIterator[list[str]]:  # noqa: F811
    """Two engines that serve the same model."""
    options = ServeOptions(
        model_path=model_a, slots=SLOTS, kv_tokens=KV_TOKENS, weight_version="theirs", incremental_streaming_output=True
    )
    async with AsyncExitStack() as stack:
        yield [
            (
                await stack.enter_async_context(
                    running(options, decoder_of(model_a, slots=SLOTS, kv_tokens=KV_TOKENS), None)
                )
            )[1]
            for _ in range(2)
        ]


def servers(urls: Sequence[str], *, is_model: bool = True) -> list[MeasuredServer]:
    held = [Held(url, "engine.urls", "theirs", is_model=is_model) for url in urls]
    return [MeasuredServer(one, slots=SLOTS, kv_tokens=KV_TOKENS) for one in held]


async def test_servers_are_measured_together_and_left_as_they_were(
    tmp_path: Path,
    urls: list[str],
    model_a: Path,  # noqa: F811
) -> None:
    config, told = config_of(tmp_path), list[str]()
    async with open_engine(config, max_connections=64) as engine:
        speeds = await measure_speeds(
            config, model=model_a, vocab_size=VOCAB, engine=engine, servers=servers(urls), show=told.append
        )
        for url in urls:
            assert (await engine.kv_use(url)).used_tokens == 0
            assert await engine.label(url) == "theirs"
    assert (speeds.num_servers, speeds.slots, speeds.kv_tokens, speeds.pushed_together) == (2, SLOTS, KV_TOKENS, 2)
    assert [point.batch for point in speeds.points[:3]] == [1, 2, 4]
    short, long = speeds.points[:3], speeds.points[3:]
    assert [point.batch for point in long] == [1, 2, 4][: len(long)] != []  # several may be too short to run together
    assert max(one.context for one in short) < min(one.context for one in long) <= config.longest_request
    assert all(0 < point.step_s < 1 for point in speeds.points)
    assert speeds.weight_bytes > 0
    assert 0.1 < speeds.crowding < 10
    assert speeds.pushes.fixed_s > 0
    assert speeds.pushes.bytes_s > 0
    assert told[0] == "warming up"
    assert told[-1] == "pushes"
    assert not (tmp_path / "runs").exists()


async def test_a_busy_server_is_not_measured(tmp_path: Path, urls: list[str], model_a: Path) -> None:  # noqa: F811
    config, running_now = config_of(tmp_path), asyncio.Event()
    request = GenerateRequest("other", [5], 400, 1.0, (), 1, "theirs", ignore_end=True)
    async with open_engine(config, max_connections=64) as engine:
        engine_of_another: Any = engine
        other = asyncio.create_task(engine.generate(urls[1], request, lambda ids, logprobs: running_now.set()))
        await running_now.wait()
        await engine_of_another.client.pause(urls[1], "in_place")  # it stays as busy as it is
        with pytest.raises(ConfigError, match=rf"engine.urls: {urls[1]} is busy \(\d+ tokens in KV\): others use it"):
            await measure_speeds(
                config, model=model_a, vocab_size=VOCAB, engine=engine, servers=servers(urls), show=str
            )
        other.cancel()
        await asyncio.wait({other})


class Idle:
    """An engine whose servers are idle and treat every request as `generate` of these tests says."""

    def __init__(self) -> None:
        self.asked: list[GenerateRequest] = []

    async def kv_use(self, url: str) -> KvUse:
        return KvUse(0, KV_TOKENS)

    async def generate(self, url: str, request: GenerateRequest, on_tokens: OnTokens) -> GenerateResult:
        self.asked.append(request)
        raise ServerGone(f"{url}: gone")


class Silent(Idle):
    async def generate(self, url: str, request: GenerateRequest, on_tokens: OnTokens) -> GenerateResult:
        await asyncio.Event().wait()
        raise AssertionError("unreachable")


class Hasty(Idle):
    """Every answer comes in one piece."""

    async def generate(self, url: str, request: GenerateRequest, on_tokens: OnTokens) -> GenerateResult:
        tokens = [0] * request.max_new_tokens
        on_tokens(tokens, [0.0] * len(tokens))
        return GenerateResult("length", (), len(tokens), 0)


async def measure(engine: Any, config: Config, *, is_model: bool = True) -> ServerSpeeds:
    return await measure_speeds(
        config,
        model=Path("unused"),
        vocab_size=VOCAB,
        engine=engine,
        servers=servers(["http://a", "http://b"], is_model=is_model),
        show=str,
    )


async def test_weights_that_could_not_be_restored_are_not_measured_at_all(tmp_path: Path) -> None:
    engine: Any = Idle()
    with pytest.raises(ConfigError, match=r"^engine.urls: http://a holds other weights \('theirs'\).*; start it with"):
        await measure(engine, config_of(tmp_path), is_model=False)
    assert engine.asked == []


async def test_servers_of_nodes_are_refused_before_anything_starts() -> None:
    config = load(None, ["nodes.expected=2", "nodes.servers=3"], environ={"DORA_TOKEN": "a" * 32})
    with pytest.raises(ConfigError, match=r"^--measure: the servers are started by nodes, and only for a run"):
        await check(config, lambda topic, text: None, measure=ToMeasure(str))


async def test_a_server_that_is_lost_ends_the_measurement(tmp_path: Path) -> None:
    engine = Idle()
    with pytest.raises(RemoteError, match=r"^http://[ab]: gone$"):
        await measure(engine, config_of(tmp_path))
    assert all(request.ignore_end and max(request.tokens) < VOCAB for request in engine.asked)
    assert len({request.id for request in engine.asked}) == len(engine.asked)


async def test_a_server_that_is_silent_is_waited_for_only_so_long(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(speed_check, "WAIT_S", 0.05)
    with pytest.raises(RemoteError, match=r"^the decoding of a batch of 4 with 16 \+ 32 tokens each did not end withi"):
        await measure(Silent(), config_of(tmp_path))


async def test_answers_that_come_in_one_piece_cannot_be_measured(tmp_path: Path) -> None:
    with pytest.raises(RemoteError, match=r"^http://a: no decoding step could be measured: answers of 128 tokens"):
        await measure(Hasty(), config_of(tmp_path))


def test_batches_are_the_powers_of_two_and_all_slots() -> None:
    assert [batches(slots) for slots in (1, 2, 3, 24)] == [[1], [1, 2], [1, 2, 3], [1, 2, 4, 8, 16, 24]]


# --- the file

SPEEDS = ServerSpeeds(
    num_servers=4,
    beside_trainer=False,
    slots=24,
    kv_tokens=16_384,
    points=(DecodePoint(1, 80.0, 0.004), DecodePoint(24, 310.0, 0.012)),
    decode=DecodeFit(DecodeTime(base_s=4e-3, per_request_s=8e-5, per_token_s=8e-7), 0.024),
    prefill_s_per_token=5e-5,
    answer_s=0.008,
    slowest=1.04,
    crowding=1.0,
    pushes=PushFit(0.005, 2e8, 0.0),
    pushed_together=4,
    weight_bytes=1_815_012,
)


def test_the_file_is_the_workload_that_was_measured(tmp_path: Path) -> None:
    config = load(None, ["rollout.group_size=4"], environ={})
    workload = measured_workload(config, SPEEDS, eval_samples=128)
    assert workload.fleet.server.decode == SPEEDS.decode.decode
    assert (workload.fleet.server.slots, workload.fleet.server.kv_tokens) == (24, 16_384)
    assert workload.push_s == pytest.approx(0.005 + 1_815_012 / 2e8)
    assert (workload.job.group_size, workload.job.max_staleness, workload.num_instances) == (4, 2, 4)
    assert (workload.job.eval_samples, workload.job.eval_every) == (128, 8)
    assert not workload.is_shared
    path = tmp_path / "measured.toml"
    write(path, workload, SPEEDS, heading="A heading\nof two lines.")
    assert load_workload(path) == workload
    assert [file.name for file in tmp_path.iterdir()] == ["measured.toml"]
    comments = [line for line in path.read_text().splitlines() if line.startswith("#")]
    assert comments[0] == "# A heading of two lines."
    assert max(map(len, comments)) <= 120


def recorded() -> Workload:
    """A finished run with groups of two answers."""
    lengths = LengthModel(regime="recorded", cap=160, prompts=(9,), answers=((5, 160),), rewards=((0.0, 1.0),))
    rates = {"tokens_s_per_device": 900.0, "update_s": 0.25}
    return msgspec.structs.replace(Workload().with_changes(train=rates), lengths=lengths)


def test_a_finished_run_gives_what_was_not_measured() -> None:
    config = load(None, ["rollout.group_size=2", "trainer.ranks=4", "trainer.parallel.context=2"], environ={})
    run = recorded()
    workload = measured_workload(config, SPEEDS, eval_samples=0, recorded=run)
    assert workload.lengths == run.lengths
    assert workload.grade == run.grade
    assert workload.train.update_s == 0.25
    assert (workload.num_ranks, workload.rank_tokens_s) == (2, 900.0)  # of the run: two groups of ranks


def test_a_run_of_another_job_is_refused_before_anything_is_measured(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(speed_file, "read_run", lambda folder: (recorded(), None))
    assert recorded_job(tmp_path, load(None, ["rollout.group_size=2"], environ={})) == recorded()
    with pytest.raises(ConfigError, match=r"--measure: lengths.answers.*: every prompt needs job.group_size = 8"):
        recorded_job(tmp_path, load(None, (), environ={}))
    assert recorded_job(None, load(None, (), environ={})) is None


def test_a_file_is_never_replaced_and_its_folder_is_needed(tmp_path: Path) -> None:
    path = tmp_path / "kept.toml"
    path.write_text("mine")
    workload = measured_workload(load(None, (), environ={}), SPEEDS, eval_samples=0)
    for use in (require_new, lambda path: write(path, workload, SPEEDS, heading="")):
        with pytest.raises(ConfigError, match=rf"^--measure {path}: exists"):
            use(path)
    assert path.read_text() == "mine"
    with pytest.raises(ConfigError, match=r"its folder does not exist$"):
        require_new(tmp_path / "none" / "new.toml")


def test_the_curve_has_a_line_for_each_point_and_the_findings_name_what_was_shared() -> None:
    assert list(curve(SPEEDS)) == [
        "batch  context  tokens/s  by the fit",
        "    1       80       250       241.3",
        "   24      310     2,000       2,022",
    ]
    decoding, prefill, push = findings(SPEEDS)
    assert decoding == (
        "decoding, 4 servers at the same time: a step takes 4 ms + 0.08 ms per request + 800 ns per token in KV; "
        "largest error of the fit 2.4 %"
    )
    assert prefill == "prefill: 50 us per token; 8 ms per request besides prefill and decoding"
    assert push.endswith("alone; 4 at the same time take no longer")
    crowded = replace(SPEEDS, pushes=PushFit(0.005, 2e8, 3e8), slowest=1.5, crowding=2.0, beside_trainer=True)
    assert "4 servers at the same time, beside a trainer at work: a step" in " ".join(findings(crowded))
    assert "one server alone is 2.00 times as fast as with all" in " ".join(findings(crowded))
    assert "a server was up to 1.50 times as slow as the mean" in " ".join(findings(crowded))
    assert " at the same time share " in " ".join(findings(crowded))
    assert "no other server" in " ".join(findings(replace(SPEEDS, num_servers=1, pushed_together=1)))
