"""Effects: one order in, one fact out, whatever the server, the store or the grader does."""

from __future__ import annotations

import asyncio
import base64
import itertools
import json
from array import array
from collections.abc import AsyncIterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from aiohttp import web

from dora.adapter_files import PROOF, Proof
from dora.config.schema import RewardConfig, SourceConfig, TaskConfig
from dora.controller import effects
from dora.controller.evaluations import EvalSet, Evaluations
from dora.controller.fleet import ExternalServer
from dora.controller.holders import OwnStore
from dora.controller.in_flight import InFlight
from dora.controller.inbox import Inbox
from dora.controller.published import Published
from dora.controller.served import ServedAdapters
from dora.controller.trajectories import Trajectories, TrajectoryRecord
from dora.core import commands as cmd
from dora.core import events as ev
from dora.core.ids import FOREIGN_VERSION, GroupId, InstanceId, TrajectoryId, VersionId
from dora.core.phases import GroupPhase, WeightsPhase
from dora.core.tables import Server as Row
from dora.engine.names import UNCONFIRMED, request_id
from dora.engine.sglang.client import EngineClient
from dora.engine.sglang.engine import SglangEngine
from dora.engine.sglang.push import Disk
from dora.errors import RunFailed
from dora.journal.tokens import TokenWriter
from dora.routing import RoutingShape
from dora.seed.policy import path as seed_path
from dora.tasks.pool import GraderPool
from dora.tasks.prompts import open_stream
from dora.tasks.tokenizer import load_tokenizer
from dora.weights.store import ADAPTER, VersionStore
from tests.controller.fakes import (
    MAX_NEW_TOKENS,
    RUN_ID,
    FakeGraders,
    FakeServer,
    Surroundings,
    make_fleet,
    prompt,
    settings_of,
)
from tests.engine.scripted_server import ScriptedServer, captured

ANSWER = (10, 11, 12)
OLD_RUN = "yesterdays-run"


@pytest.fixture
async def server() -> AsyncIterator[ScriptedServer]:
    async for running in ScriptedServer().run():
        yield running


@pytest.fixture
async def io(server: ScriptedServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Surroundings]:
    """Group 0 is admitted; instance 0 is the scripted server."""
    monkeypatch.setattr(effects, "FAILURE_PAUSE_S", 0.0)
    ticks = itertools.count(1)
    settings = settings_of()
    tokenizer = load_tokenizer(seed_path(), thinking=None)
    with TokenWriter(tmp_path / "tokens.bin") as tokens:
        async with EngineClient(max_connections=8) as client:
            trajectories = Trajectories(tokens, group_size=settings.group_size)
            fleet = make_fleet(
                [FakeServer(server.url)],
                engine=SglangEngine(client),
                inbox=Inbox(),
                in_flight=InFlight(trajectories, rows={}),
                rows={},
                version_of=PUBLISHED.version_of,
                now=lambda: 0.0,
            )
            fleet.urls[InstanceId(0)] = server.url
            trajectories.prompts[GroupId(0)] = prompt(0)
            trajectories.admit(GroupId(0))
            yield Surroundings(
                engine=SglangEngine(client),
                fleet=fleet,
                now=lambda: float(next(ticks)),
                trajectories=trajectories,
                tokenizer=tokenizer,
                stream=open_stream(TaskConfig(), tokenizer=tokenizer, seed=0),
                published=PUBLISHED,
                evaluations=Evaluations([EvalSet("heldout", [prompt(0)], 1, 0.25)]),
            )


def eos(io: Surroundings) -> int:
    return io.tokenizer.eos_ids[0]


#: By version.
PUBLISHED = Published(RUN_ID, files={version: {"model.safetensors": f"{version}"} for version in range(10)})
LABEL = PUBLISHED.label(4)


def chunk(*tokens: int, finish: str | None = None, label: str = LABEL, **more: Any) -> bytes:
    """A whole cumulative stream so far; with `finish` its last chunk."""
    meta = {
        "output_token_logprobs": [[-0.5, token, None] for token in tokens],
        "completion_tokens": len(tokens),
        "finish_reason": {"type": finish} if finish else None,
        "weight_versions": [{"version": label, "start": 0, "end": len(tokens)}] if finish else None,
        **more,
    }
    return f"data: {json.dumps({'meta_info': meta})}\n\n".encode()


def order(attempt: int = 1, *, trajectory: int = 0, num_tokens: int = 0, instance: int = 0) -> cmd.Generate:
    return cmd.Generate(TrajectoryId(trajectory), attempt, InstanceId(instance), 4, num_tokens)


def record(io: Surroundings) -> Any:
    return io.trajectories.records[TrajectoryId(0)]


async def stopped(io: Surroundings, server: ScriptedServer, *chunks: bytes) -> ev.Event:
    """Stop a request once it has arrived; the server then sends these chunks."""
    is_stopped = asyncio.Event()
    server.streams(is_stopped, *chunks)
    server.says("/abort_request", {})
    running = asyncio.create_task(io.generate(order()))
    while not server.paths().count("/generate"):  # noqa: ASYNC110 - the server has no event for it
        await asyncio.sleep(0)
    await effects.StopAttempt(io.engine, io.fleet, io.ids)(cmd.StopRequest(TrajectoryId(0), 1, InstanceId(0)))
    is_stopped.set()
    return await running


async def test_an_answer_is_streamed_into_its_record_and_finished(io: Surroundings, server: ScriptedServer) -> None:
    server.streams(chunk(*ANSWER), chunk(*ANSWER, eos(io), finish="stop"), b"data: [DONE]\n\n")
    event = await io.generate(order())
    assert event == ev.GenerationFinished(1.0, TrajectoryId(0), 1, 4, False, ((4, 0, 4),))
    assert record(io).tokens.tolist() == [*ANSWER, eos(io)]
    assert record(io).logprobs.tolist() == [-0.5] * 4
    assert not record(io).truncated


async def test_the_steps_of_speculative_decoding_are_told_and_those_of_other_servers_are_not(
    io: Surroundings, server: ScriptedServer
) -> None:
    server.streams(chunk(*ANSWER, eos(io), finish="stop", spec_verify_ct=2))
    await io.generate(order())
    assert io.steps_taken == [(4, 2)]
    server.streams(chunk(*ANSWER, eos(io), finish="stop"))
    await io.generate(order(2))
    assert io.steps_taken == [(4, 2)]


async def test_a_request_carries_what_makes_it_exact(io: Surroundings, server: ScriptedServer) -> None:
    server.streams(chunk(eos(io), finish="stop"))
    await io.generate(order())
    ((_, body),) = server.calls
    assert body["input_ids"] == [3, 4, 5]
    assert body["extra_key"] == LABEL
    assert body["sampling_params"]["max_new_tokens"] == MAX_NEW_TOKENS
    assert body["sampling_params"]["temperature"] == 1.0
    assert set(body["sampling_params"]["stop_token_ids"]) == set(io.tokenizer.eos_ids)


#: Of one layer: 2 experts of 4 for each token.
ROUTING = RoutingShape(num_layers=1, layers=(0,), num_experts=4, top_k=2)


@pytest.fixture
def replaying(io: Surroundings) -> Surroundings:
    """The same run, in which choices of experts are kept."""
    io.trajectories.routing = ROUTING
    io.trajectories.admit(GroupId(0))
    return io


def routed(*experts: int) -> str:
    return base64.b64encode(np.array(experts, "<i4").tobytes()).decode()


async def test_the_choice_of_experts_is_asked_for_from_the_first_unknown_token_and_kept(
    replaying: Surroundings, server: ScriptedServer
) -> None:
    io, choices = replaying, record(replaying).choices
    await stopped(io, server, chunk(10, finish="abort", routed_experts=routed(0, 1, 1, 2, 2, 3)))
    server.streams(chunk(11, eos(io), finish="stop", routed_experts=routed(3, 0, 0, 2)))
    await io.generate(order(2, num_tokens=1))
    bodies = [body for path, body in server.calls if path == "/generate"]
    assert [body["return_routed_experts"] for body in bodies] == [True, True]
    assert [body["routed_experts_start_len"] for body in bodies] == [0, 3]
    assert choices.experts(np.arange(6)).tolist() == [[0, 1], [1, 2], [2, 3], [3, 0], [0, 2], [0, 0]]
    assert choices.marks(np.arange(6)).tolist() == [1, 1, 1, 1, 1, 0]


async def test_choices_after_a_retraction_are_not_those_with_which_tokens_were_sampled(
    replaying: Surroundings, server: ScriptedServer
) -> None:
    more = {"routed_experts": routed(0, 1, 1, 2, 2, 3, 3, 0), "num_retractions": 1}
    server.streams(chunk(10, eos(replaying), finish="stop", **more))
    await replaying.generate(order())
    assert record(replaying).choices.marks(np.arange(5)).tolist() == [1, 1, 2, 2, 0]


async def test_without_replay_no_choice_is_asked_for(io: Surroundings, server: ScriptedServer) -> None:
    server.streams(chunk(*ANSWER, eos(io), finish="stop"))
    await io.generate(order())
    ((_, body),) = server.calls
    assert not [key for key in body if "experts" in key]


@pytest.mark.parametrize(
    ("more", "reason"),
    [
        ({}, "came without the choice of experts; start the server with"),
        ({"routed_experts": routed(0, 1, 1, 2, 2, 4)}, "expert 4 of 4"),
        ({"routed_experts": routed(0, 1, 0, 0, 2, 3)}, "token 1 has an expert twice in layer 0"),
    ],
)
async def test_a_server_that_does_not_tell_its_choice_ends_the_run(
    replaying: Surroundings, server: ScriptedServer, more: dict[str, str], reason: str
) -> None:
    server.streams(chunk(eos(replaying), finish="stop", **more))
    with pytest.raises(RunFailed, match=reason) as failed:
        await replaying.generate(order())
    assert str(failed.value).startswith(server.url)
    assert "\n" not in str(failed.value)


async def test_requests_of_two_controllers_have_different_ids(io: Surroundings, server: ScriptedServer) -> None:
    """A server may still be at what a controller that died had asked of it."""
    for epoch in (0, 3):
        server.streams(chunk(eos(io), finish="stop"))
        io.trajectories.records[TrajectoryId(0)].tokens = array("i")
        await replace(io, epoch=epoch).generate(order())
    rids = [body["rid"] for _, body in server.calls]
    assert rids == [request_id(RUN_ID, epoch=epoch, trajectory=0, attempt=1) for epoch in (0, 3)]
    assert rids[0] != rids[1]


async def test_a_resumed_request_goes_on_from_exactly_the_tokens_kept(io: Surroundings, server: ScriptedServer) -> None:
    server.streams(chunk(*ANSWER), None)
    failed = await io.generate(order())
    assert failed == ev.GenerationFailed(1.0, TrajectoryId(0), 1, 3, True, failed.reason)
    server.streams(chunk(13, eos(io), finish="stop"))
    event = await io.generate(order(2, num_tokens=3))
    assert event == ev.GenerationFinished(2.0, TrajectoryId(0), 2, 5, False, ((4, 3, 5),))
    first, second = [body for path, body in server.calls if path == "/generate"]
    assert second["input_ids"] == [3, 4, 5, *ANSWER]
    assert second["sampling_params"]["max_new_tokens"] == MAX_NEW_TOKENS - 3
    assert second["sampling_params"]["sampling_seed"] != first["sampling_params"]["sampling_seed"]
    assert record(io).tokens.tolist() == [*ANSWER, 13, eos(io)]


async def test_seeds_differ_between_siblings_and_are_the_same_in_every_process(io: Surroundings) -> None:
    sampling = io.generate.sampling
    seeds = {sampling.seed_of(TrajectoryId(t), n) for t in range(20) for n in range(5)}
    assert len(seeds) == 100
    assert max(seeds) < 2**63
    assert sampling.seed_of(TrajectoryId(7), 3) == io.generate.sampling.seed_of(TrajectoryId(7), 3)
    assert sampling.seed_of(TrajectoryId(7), 3) != replace(sampling, seed=1).seed_of(TrajectoryId(7), 3)


@pytest.mark.parametrize(("observed", "limit", "asked"), [([], 0, 9), ([], 4, 4), ([(1, 3)], 4, 7), ([(1, 3)], 99, 9)])
def test_a_turn_ends_at_its_limit_or_at_that_of_the_answer(
    observed: list[tuple[int, int]], limit: int, asked: int
) -> None:
    sampling = effects.Sampling(
        seed=0, max_new_tokens=9, temperature=1.0, eos_ids=(1,), evaluations=Evaluations([]), has_turns=True
    )
    record = TrajectoryRecord(prompt(0))
    record.observed, record.turn_tokens = observed, limit
    record.tokens.extend([5] * max((end for _, end in observed), default=0))
    assert sampling.turn_bound(TrajectoryId(0), record) == asked
    request = sampling.request(TrajectoryId(0), record, id="r", label="l")
    assert request.max_new_tokens == asked - len(record.tokens)
    record.tokens.extend([5] * request.max_new_tokens)
    assert sampling.is_over(TrajectoryId(0), record)
    record.tokens.pop()
    assert not sampling.is_over(TrajectoryId(0), record)


async def test_the_seed_of_a_held_out_answer_does_not_depend_on_the_version(io: Surroundings) -> None:
    evaluations = Evaluations([EvalSet("held out", [prompt(0), prompt(1)], 3, 1.0)])
    sampling = replace(io.generate.sampling, evaluations=evaluations)
    seeds = [[sampling.seed_of(t, 0) for t in evaluations.ids(VersionId(version))] for version in (0, 5)]
    assert seeds[0] == seeds[1]
    assert len({*seeds[0]}) == 6
    assert sampling.seed_of(TrajectoryId(-1), 0) != replace(sampling, seed=1).seed_of(TrajectoryId(-1), 0)


@pytest.mark.parametrize("budget_used_up", [False, True])
async def test_an_answer_without_its_final_chunk_is_finished_without_another_request(
    io: Surroundings, server: ScriptedServer, budget_used_up: bool
) -> None:
    """Its last token came, its last chunk did not: to ask for more would sample beyond its end."""
    tokens = [*range(10, 10 + MAX_NEW_TOKENS)] if budget_used_up else [*ANSWER, eos(io)]
    server.streams(chunk(*tokens), None)
    failed = await io.generate(order())
    assert isinstance(failed, ev.GenerationFailed)
    assert failed.server_gone
    event = await io.generate(order(2, num_tokens=len(tokens), instance=7))
    assert event == ev.GenerationFinished(2.0, TrajectoryId(0), 2, len(tokens), budget_used_up, ())
    assert server.paths().count("/generate") == 1


async def test_a_stopped_request_keeps_its_tokens(io: Surroundings, server: ScriptedServer) -> None:
    event = await stopped(io, server, chunk(*ANSWER, finish="abort"))
    assert event == ev.GenerationStopped(1.0, TrajectoryId(0), 1, 3, ((4, 0, 3),))
    assert record(io).tokens.tolist() == [*ANSWER]


async def test_a_request_stopped_before_its_first_token_is_no_answer(io: Surroundings, server: ScriptedServer) -> None:
    event = await stopped(io, server, chunk(finish="abort"))
    assert isinstance(event, ev.GenerationStopped)
    assert event.num_tokens == 0


@pytest.mark.parametrize("tokens", [(), ANSWER])
async def test_a_request_that_ends_with_abort_although_nobody_stopped_it_has_failed(
    io: Surroundings, server: ScriptedServer, tokens: tuple[int, ...]
) -> None:
    """Sent again without a pause or a limit, it would be sent a thousand times a second."""
    server.streams(chunk(*tokens, finish="abort"))
    event = await io.generate(order())
    assert isinstance(event, ev.GenerationFailed)
    assert (event.num_tokens, event.final, event.server_gone) == (len(tokens), False, False)
    assert "without being asked to" in event.reason
    assert not io.unstopped


async def test_a_stop_that_comes_after_the_last_token_stops_nothing(io: Surroundings, server: ScriptedServer) -> None:
    assert isinstance(await stopped(io, server, chunk(*ANSWER, eos(io), finish="abort")), ev.GenerationFinished)


async def test_an_answer_that_used_up_its_budget_is_length_capped(io: Surroundings, server: ScriptedServer) -> None:
    server.streams(chunk(*range(10, 10 + MAX_NEW_TOKENS), finish="length"))
    event = await io.generate(order())
    assert isinstance(event, ev.GenerationFinished)
    assert event.length_capped
    assert record(io).truncated == "tokens"


@pytest.mark.parametrize(
    "label",
    [LABEL.replace(RUN_ID, OLD_RUN), f"{RUN_ID}/4", f"{LABEL}0", LABEL[:-1] + "?", "default", f"{RUN_ID}/x-00", "4"],
)
async def test_a_label_that_is_not_of_this_run_is_foreign(io: Surroundings, server: ScriptedServer, label: str) -> None:
    server.streams(chunk(eos(io), finish="stop", label=label))
    event = await io.generate(order())
    assert isinstance(event, ev.GenerationFinished)
    assert event.spans == ((FOREIGN_VERSION, 0, 1),)


async def test_a_full_queue_refuses_a_request_without_losing_the_server(
    io: Surroundings, server: ScriptedServer
) -> None:
    server.says("/generate", {"error": {"message": "The request queue is full."}}, status=503)
    event = await io.generate(order())
    assert isinstance(event, ev.GenerationFailed)
    assert not event.server_gone
    assert not event.final
    assert event.reason == f"{server.url}: The request queue is full. (503)"


async def test_a_refusal_that_the_next_server_would_repeat_is_final(io: Surroundings, server: ScriptedServer) -> None:
    server.says("/generate", {"error": {"message": "Input is too long."}}, status=400)
    event = await io.generate(order())
    reason = f"{server.url}: Input is too long. (400)"
    assert event == ev.GenerationFailed(1.0, TrajectoryId(0), 1, 0, False, reason, final=True)


async def test_a_broken_stream_does_not_lose_a_healthy_server(io: Surroundings, server: ScriptedServer) -> None:
    server.streams(chunk(*ANSWER), None)
    server.says("/health", "")
    server.says("/model_info", {"weight_version": LABEL})
    event = await io.generate(order())
    assert isinstance(event, ev.GenerationFailed)
    assert (event.num_tokens, event.server_gone, event.final) == (3, False, False)


async def test_a_server_that_was_started_again_under_a_stream_is_lost_with_its_weights(
    io: Surroundings, server: ScriptedServer
) -> None:
    server.streams(chunk(*ANSWER), None)
    server.says("/health", "")
    server.says("/model_info", {"weight_version": "default"})
    event = await io.generate(order())
    assert isinstance(event, ev.GenerationFailed)
    assert event.server_gone


@pytest.fixture
def external(io: Surroundings, server: ScriptedServer) -> Surroundings:
    """The same run, in which the server belongs to others."""
    row = Row(InstanceId(0))
    row.full.phase, row.full.version = WeightsPhase.SERVING, VersionId(4)
    fleet = make_fleet(
        [ExternalServer(server.url, engine=io.engine)],
        engine=io.engine,
        inbox=Inbox(),
        in_flight=InFlight(io.trajectories, rows={}),
        rows={InstanceId(0): row},
        version_of=PUBLISHED.version_of,
        now=lambda: 0.0,
    )
    fleet.urls[InstanceId(0)] = server.url
    server.says("/health", "")
    server.says("/model_info", {"weight_version": LABEL})
    return replace(io, fleet=fleet)


@pytest.mark.parametrize(("label", "status"), [("default", 200), (LABEL, 503)])
async def test_an_idle_external_server_that_was_started_again_is_lost_before_it_samples_a_token(
    external: Surroundings, server: ScriptedServer, label: str, status: int
) -> None:
    server.says("/health", "", status=status)
    server.says("/model_info", {"weight_version": label})
    server.streams(chunk(eos(external), finish="stop", label=label))
    event = await external.generate(order())
    reason = "instance 0: does not answer, or was started again and has lost its versions"
    assert event == ev.GenerationFailed(1.0, TrajectoryId(0), 1, 0, True, reason)
    assert "/generate" not in server.paths()


async def test_an_external_server_is_asked_for_its_label_by_the_first_of_several_requests(
    external: Surroundings, server: ScriptedServer
) -> None:
    goes_on = asyncio.Event()
    server.streams(goes_on, chunk(eos(external), finish="stop"))
    requests = [asyncio.create_task(external.generate(order(trajectory=t))) for t in (0, 1)]
    while server.paths().count("/generate") < 1:  # noqa: ASYNC110 - the server has no event for it
        await asyncio.sleep(0)
    asked = server.paths().count("/model_info")
    record = external.trajectories.records[TrajectoryId(0)]
    external.trajectories.records[TrajectoryId(2)] = TrajectoryRecord(record.prompt)
    requests.append(asyncio.create_task(external.generate(order(trajectory=2))))
    while server.paths().count("/generate") < 3:  # noqa: ASYNC110 - the server has no event for it
        await asyncio.sleep(0)
    goes_on.set()
    assert [type(event) for event in await asyncio.gather(*requests)] == [ev.GenerationFinished] * 3
    assert (asked, server.paths().count("/model_info")) == (1, 1)


async def test_a_request_that_is_stopped_before_it_is_sent_is_not_sent(
    external: Surroundings, server: ScriptedServer
) -> None:
    async def stop(_: web.Request) -> web.Response:
        stop = effects.StopAttempt(external.engine, external.fleet, external.ids)
        await stop(cmd.StopRequest(TrajectoryId(0), 1, InstanceId(0)))
        return web.json_response({"weight_version": LABEL})

    server.answers["/model_info"] = stop
    server.says("/abort_request", {})
    assert await external.generate(order()) == ev.GenerationStopped(1.0, TrajectoryId(0), 1, 0, ())
    assert "/generate" not in server.paths()


async def test_an_unhealthy_server_with_a_broken_stream_is_lost(io: Surroundings, server: ScriptedServer) -> None:
    server.streams(chunk(*ANSWER), None)
    server.says("/health", "", status=503)
    event = await io.generate(order())
    assert isinstance(event, ev.GenerationFailed)
    assert event.server_gone


async def test_an_answer_that_is_not_the_protocol_is_a_refusal(io: Surroundings, server: ScriptedServer) -> None:
    server.streams(b"data: {not json}\n\n")
    event = await io.generate(order())
    assert isinstance(event, ev.GenerationFailed)
    assert not event.server_gone


async def test_a_request_to_an_instance_that_is_down_fails_with_server_gone(io: Surroundings) -> None:
    event = await io.generate(order(instance=7))
    assert event == ev.GenerationFailed(1.0, TrajectoryId(0), 1, 0, True, "instance 7 is down")


async def test_a_sample_of_an_evaluation_is_drawn_at_its_sets_temperature(
    io: Surroundings, server: ScriptedServer
) -> None:
    io.trajectories.open(TrajectoryId(-1), prompt(0))
    server.streams(chunk(eos(io), finish="stop"))
    await io.generate(order(trajectory=-1))
    assert server.calls[0][1]["sampling_params"]["temperature"] == 0.25


async def test_a_prompt_over_the_limit_is_sent_to_no_server(io: Surroundings, server: ScriptedServer) -> None:
    record(io).prompt = replace(prompt(0), tokens=(), skipped="rows.jsonl:1: the prompt has 301 tokens")
    event = await io.generate(order())
    assert event == ev.GenerationFailed(1.0, TrajectoryId(0), 1, 0, False, ev.NoPrompt.TOO_LONG, final=True)
    assert not server.calls


# -- grading --------------------------------------------------------------------------------------------------------


async def test_an_answer_is_graded_by_its_text_and_a_failure_is_no_reward(io: Surroundings) -> None:
    rewards = [RewardConfig(kind="regex", pattern=r"(\d\d)$")]
    record(io).tokens.extend([*io.tokenizer.encode("03"), eos(io)])
    grade = cmd.GradeTrajectory(TrajectoryId(0), 2)
    async with GraderPool(rewards, graders=1, timeout_s=20, memory_mb=2048, field="task.rewards") as pool:
        io = replace(io, graders=pool)
        assert await io.grade(grade) == ev.TrajectoryGraded(1.0, TrajectoryId(0), 2, 1.0)
        assert record(io).reward == 1.0
        record(io).prompt = replace(prompt(0), metadata={"unpackable": object()})
        event = await io.grade(grade)
    assert isinstance(event, ev.TrajectoryGraded)
    assert event.reward is None
    assert event.reason.startswith("error: ")


async def test_a_reward_is_told_length_budget_ending_and_source(io: Surroundings) -> None:
    graders = FakeGraders()
    record(io).tokens.extend(io.tokenizer.encode("03"))
    record(io).truncated = "tokens"
    record(io).prompt = replace(prompt(0), label="hard")
    await replace(io, graders=graders).grade(cmd.GradeTrajectory(TrajectoryId(0), 0))
    (asked,) = graders.asked
    assert (asked.num_tokens, asked.max_tokens, asked.finish, asked.source) == (2, MAX_NEW_TOKENS, "length", "hard")


async def test_an_answer_that_a_budget_ended_may_get_no_reward(io: Surroundings) -> None:
    graders = FakeGraders()
    io = replace(io, graders=graders, fails_truncated=True)
    record(io).tokens.extend(io.tokenizer.encode("03"))
    record(io).truncated = "turns"
    event = await io.grade(cmd.GradeTrajectory(TrajectoryId(0), 3))
    assert isinstance(event, ev.TrajectoryGraded)
    assert (event.attempt, event.reward, event.reason) == (3, None, "truncated: turns")
    assert graders.asked == []
    record(io).truncated = ""
    assert (await io.grade(cmd.GradeTrajectory(TrajectoryId(0), 4))).reason == ""
    assert len(graders.asked) == 1


async def test_without_terms_of_the_reward_an_episode_that_a_budget_ended_has_the_rewards_of_its_turns(
    io: Surroundings,
) -> None:
    record(io).tokens.extend(io.tokenizer.encode("03"))
    record(io).turn_rewards = [0.25, 0.5]
    record(io).truncated = "tokens"
    event = await replace(io, graders=None).grade(cmd.GradeTrajectory(TrajectoryId(0), 3))
    assert event == ev.TrajectoryGraded(1.0, TrajectoryId(0), 3, 0.0)
    assert (record(io).reward, record(io).terms) == (0.75, ())


# -- weights --------------------------------------------------------------------------------------------------------


def accepts_pushes(server: ScriptedServer, *, holds: str) -> None:
    server.says("/v1/loads", captured("GET_v1_loads.json"))
    for path in ("/pause_generation", "/continue_generation", "/update_weight_version"):
        server.says(path, {"status": "ok"})
    server.says("/flush_cache", "Cache flushed.")
    server.says("/update_weights_from_disk", {"success": True, "message": ""})
    server.says("/model_info", {"weight_version": holds})


@pytest.fixture
def store(tmp_path: Path) -> VersionStore:
    """Holds version 4."""
    store = VersionStore(memory_root=tmp_path / "live", durable_root=tmp_path / "durable")
    staged = store.stage(4)
    (staged / "model.safetensors").write_bytes(b"weights")
    store.seal(4, staged)
    return store


PUSH = cmd.PushWeights(InstanceId(0), 3, 4)


async def test_tokens_of_a_push_that_failed_have_no_version(io: Surroundings, server: ScriptedServer) -> None:
    event = await stopped(io, server, chunk(*ANSWER, finish="abort", label=UNCONFIRMED))
    reason = "3 of its tokens were sampled after a push that failed"
    assert event == ev.GenerationFailed(1.0, TrajectoryId(0), 1, 3, False, reason)


async def test_a_request_stopped_in_a_push_before_its_first_token_saw_no_other_version(
    io: Surroundings, server: ScriptedServer
) -> None:
    assert await stopped(io, server, chunk(finish="abort", label=UNCONFIRMED)) == ev.GenerationStopped(
        1.0, TrajectoryId(0), 1, 0, ()
    )


async def test_a_push_is_finished_when_the_label_was_read_back(
    io: Surroundings, server: ScriptedServer, store: VersionStore
) -> None:
    accepts_pushes(server, holds=LABEL)
    seen = Disk({str(store.memory_root): "/seen/by/server"})
    io = replace(io, store=store, engine=replace(io.engine, transfer=seen))
    assert await io.push(PUSH) == ev.WeightPushFinished(1.0, InstanceId(0), 3, 4)
    update = next(body for path, body in server.calls if path == "/update_weights_from_disk")
    assert update["model_path"] == f"/seen/by/server/{store.folder(4).name}"
    assert update["weight_version"] == LABEL


async def test_a_push_among_live_requests_pauses_as_the_strategy_says_and_drains_nothing(
    io: Surroundings, server: ScriptedServer, store: VersionStore
) -> None:
    accepts_pushes(server, holds=LABEL)
    event = await replace(io, store=store, live="retract").push(PUSH)
    assert isinstance(event, ev.WeightPushFinished)
    assert server.calls[0] == ("/pause_generation", {"mode": "retract"})
    assert "/v1/loads" not in [path for path, _ in server.calls]


async def test_a_push_fails_when_the_server_says_that_it_holds_something_else(
    io: Surroundings, server: ScriptedServer, store: VersionStore
) -> None:
    accepts_pushes(server, holds=f"{OLD_RUN}/4")
    event = await replace(io, store=store).push(PUSH)
    assert isinstance(event, ev.WeightPushFailed)
    assert (event.instance, event.attempt) == (0, 3)
    assert f"{OLD_RUN}/4" in event.reason


async def test_a_push_of_a_version_that_is_gone_or_to_an_instance_that_is_down_fails(
    io: Surroundings, server: ScriptedServer, store: VersionStore
) -> None:
    accepts_pushes(server, holds=f"{RUN_ID}/5")
    io = replace(io, store=store)
    gone = await io.push(cmd.PushWeights(InstanceId(0), 3, 5))
    assert isinstance(gone, ev.WeightPushFailed)
    assert "version 5 is complete neither in" in gone.reason
    down = await io.push(cmd.PushWeights(InstanceId(7), 3, 4))
    assert isinstance(down, ev.WeightPushFailed)
    assert down.reason == "instance 7 is down"
    assert server.calls == []


# -- prompts --------------------------------------------------------------------------------------------------------


async def test_prompts_are_kept_by_group_until_the_source_is_dry(io: Surroundings, tmp_path: Path) -> None:
    rows = tmp_path / "rows.jsonl"
    rows.write_text("".join(json.dumps({"prompt": f"a{i}=", "answer": f"0{i}"}) + "\n" for i in range(3)))
    task = TaskConfig(sources=(SourceConfig(kind="jsonl", path=rows),), epochs=1, shuffle=False)
    io = replace(io, stream=open_stream(task, tokenizer=io.tokenizer, seed=0))
    length = len(io.tokenizer.encode("a0="))
    first = await io.fetch(cmd.FetchPrompts(GroupId(0), 2))
    assert first == ev.PromptsArrived(1.0, GroupId(0), (length, length), False)
    last = await io.fetch(cmd.FetchPrompts(GroupId(2), 2))
    assert last == ev.PromptsArrived(2.0, GroupId(2), (length,), True)
    assert [io.trajectories.prompts[GroupId(g)].text for g in range(3)] == ["a0=", "a1=", "a2="]
    none = await io.fetch(cmd.FetchPrompts(GroupId(3), 2))
    assert none == ev.PromptsArrived(3.0, GroupId(3), (), True)


async def test_prompts_of_rows_that_may_be_passed_over_arrive_with_their_visits(
    io: Surroundings, tmp_path: Path
) -> None:
    rows = tmp_path / "rows.jsonl"
    rows.write_text("".join(json.dumps({"prompt": f"a{i}=", "answer": f"0{i}"}) + "\n" for i in range(4)))
    task = TaskConfig(sources=(SourceConfig(kind="jsonl", path=rows),), epochs=2, shuffle=False, revisit_share=0.05)
    io = replace(io, stream=open_stream(task, tokenizer=io.tokenizer, seed=0))

    first = await io.fetch(cmd.FetchPrompts(GroupId(0), 4))
    assert isinstance(first, ev.PromptsArrived)
    assert first.visits == tuple(ev.Visit(0, row) for row in range(4))
    io.visits.apply(first, [])
    io.visits.apply(
        ev.Ticked(0.0),
        [
            *(cmd.DropGroup(GroupId(g), GroupPhase.FILTERED, "zero variance", (1.0, 1.0)) for g in range(3)),
            cmd.FetchPrompts(GroupId(4), 4),
        ],
    )
    last = await io.fetch(cmd.FetchPrompts(GroupId(4), 4))
    assert isinstance(last, ev.PromptsArrived)
    assert (last.visits, last.dry) == ((ev.Visit(0, 3, (0, 1, 2)),), True)
    assert io.trajectories.prompts[GroupId(4)].text == "a3="


@dataclass(frozen=True)
class OtherHost(OwnStore):
    """Servers of another host, which has versions elsewhere."""

    async def folder(self, instance: InstanceId, version: VersionId) -> Path:
        return Path(f"/there/v{version}")


@dataclass
class Adapters:
    """The effects on adapters, of servers on another host."""

    load: effects.LoadAdapter
    unload: effects.UnloadAdapter
    served: ServedAdapters


LOAD = cmd.PushWeights(InstanceId(0), 3, VersionId(5))
UNLOAD = cmd.UnloadVersion(InstanceId(0), 4, VersionId(5), load=3)


@pytest.fixture
def adapters(io: Surroundings, store: VersionStore, tmp_path: Path) -> Adapters:
    """Version 5 is an adapter with its proof, version 6 one without."""
    for version, files in ((5, {PROOF: msgspec.json.encode(Proof("float32", [1, 2, 3], [-0.5, -0.25]))}), (6, {})):
        staged = store.stage(VersionId(version))
        (staged / ADAPTER).mkdir()
        (staged / "config.json").write_bytes(b"{}")
        for name, data in files.items():
            (staged / ADAPTER / name).write_bytes(data)
        store.seal(VersionId(version), staged)
    holders, served = OtherHost(store), ServedAdapters(RUN_ID, 0, {InstanceId(0): "base"})
    return Adapters(
        effects.LoadAdapter(io.engine, io.fleet, holders, io.published, served, 5.0, io.now),
        effects.UnloadAdapter(io.engine, io.fleet, holders, served, 5.0, io.now),
        served,
    )


def computes(server: ScriptedServer, *logprobs: float) -> None:
    """Have the server load and unload adapters, and compute these log-probs of a prompt."""
    for path in ("/load_lora_adapter", "/unload_lora_adapter"):
        server.says(path, {"success": True, "loaded_adapters": {}})
    triples = [[None, 1, None], *([logprob, 2, None] for logprob in logprobs)]
    server.says("/generate", {"meta_info": {"input_token_logprobs": triples}})


async def test_a_server_reads_an_adapter_where_its_host_has_it_and_is_compared_with_the_proof_here(
    adapters: Adapters, server: ScriptedServer
) -> None:
    computes(server, -0.5, -0.25)
    loaded = await adapters.load(LOAD)
    assert loaded == ev.WeightPushFinished(1.0, InstanceId(0), 3, 5)
    name = adapters.served.adapter(InstanceId(0), VersionId(5))
    assert server.calls[0] == ("/load_lora_adapter", {"lora_name": name, "lora_path": "/there/v5/adapter"})
    unloaded = await adapters.unload(UNLOAD)
    assert unloaded == ev.VersionUnloaded(2.0, InstanceId(0), 4)
    assert server.paths() == ["/load_lora_adapter", "/generate", "/generate", "/unload_lora_adapter"]


async def test_an_adapter_that_computes_otherwise_is_disproved_and_then_unloaded_as_it_is(
    adapters: Adapters, server: ScriptedServer
) -> None:
    computes(server, -0.5, -0.25)
    await adapters.load(LOAD)
    computes(server, -0.5, -0.75)
    failed = await adapters.unload(UNLOAD)
    assert isinstance(failed, ev.VersionUnloadFailed)
    assert failed.disproved
    assert await adapters.unload(UNLOAD) == ev.VersionUnloaded(3.0, InstanceId(0), 4)


async def test_an_adapter_without_a_proof_is_not_loaded(adapters: Adapters, server: ScriptedServer) -> None:
    failed = await adapters.load(cmd.PushWeights(InstanceId(0), 3, VersionId(6)))
    assert isinstance(failed, ev.WeightPushFailed)
    assert "proof.json: cannot tell which adapter a server has" in failed.reason
    assert server.calls == []
