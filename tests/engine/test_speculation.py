"""Speculative decoding: a server whose drafts decide something is refused before it gets work."""

from __future__ import annotations

import json
import math
import random
from collections.abc import AsyncIterator, Sequence
from typing import Any

import pytest
from aiohttp import web
from scripted_server import ScriptedServer, captured

from dora.engine.api import Capabilities
from dora.engine.sglang.client import EngineClient
from dora.engine.sglang.probe import probe
from dora.engine.sglang.target import PushTarget
from dora.errors import ConfigError, ProtocolError, RemoteError

VOCAB = 50


@pytest.fixture
async def client() -> AsyncIterator[EngineClient]:
    async with EngineClient(max_connections=1) as client:
        yield client


def logprob_of(token: int, *, after: Sequence[int]) -> float:
    """A model: the token after the last one is e times as probable as each of the others."""
    favoured = (after[-1] + 1) % VOCAB if after else 0
    return (1.0 if token == favoured else 0.0) - math.log(VOCAB - 1 + math.e)


class Speculating(ScriptedServer):
    """A server with drafts, each of whose properties a test can spoil."""

    def __init__(self, **arguments: Any) -> None:
        super().__init__()
        self.is_greedy = False
        self.is_certain = False  # of each token
        self.error = 0.0  # of the log-probs of answers
        self.missing = 0  # log-probs that the last chunk lacks
        self.unread = 0  # tokens of a prompt without log-probs
        self.is_stopped = False  # by others, before the first token
        info = {**captured("GET_server_info.json"), "speculative_algorithm": "NGRAM", **arguments}
        self.says("/server_info", info)
        self.says("/v1/loads", captured("GET_v1_loads.json"))
        self.says("/model_info", captured("GET_model_info.json"))
        self.answers["/generate"] = self._generate

    async def _generate(self, request: web.Request) -> web.Response:
        body = json.loads(await request.read())
        ids, asked = list(body["input_ids"]), body["sampling_params"]
        if body.get("logprob_start_len") == 0:
            found = [self._logprob(token, ids[:at]) for at, token in enumerate(ids)]
            triples = [
                [None if at == 0 else each, token, None]
                for at, (each, token) in enumerate(zip(found, ids, strict=True))
            ]
            return web.json_response({"meta_info": {"input_token_logprobs": triples[self.unread :]}})
        rng, triples = random.Random(asked["sampling_seed"]), []
        for _ in range(asked["max_new_tokens"]):
            token = (ids[-1] + 1) % VOCAB if self.is_greedy or asked["temperature"] == 0 else rng.randrange(VOCAB)
            token = 7 if self.is_certain else token
            triples.append([self._logprob(token, ids) + self.error, token, None])
            ids.append(token)
        if self.is_stopped:
            triples = []
        meta = {
            "finish_reason": {"type": "abort"} if self.is_stopped else {"type": "length", "length": len(triples)},
            "completion_tokens": len(triples),
            "output_token_logprobs": triples[: len(triples) - self.missing],
            "weight_versions": [{"version": "v9", "start": 0, "end": len(triples)}],
        }
        return web.Response(
            text=f"data: {json.dumps({'meta_info': meta})}\n\ndata: [DONE]\n\n", content_type="text/event-stream"
        )

    def _logprob(self, token: int, after: Sequence[int]) -> float:
        return -1e-3 if self.is_certain else logprob_of(token, after=after)


async def _done(_: web.Request) -> web.Response:
    return web.json_response({"success": True, "message": ""})


@pytest.fixture
async def speculating() -> AsyncIterator[Speculating]:
    async for running in Speculating().run():
        assert isinstance(running, Speculating)
        yield running


async def examined(client: EngineClient, server: ScriptedServer) -> Capabilities:
    return await probe(client, server.url, timeout_s=10)


async def test_a_server_that_samples_is_accepted_and_its_algorithm_is_known(
    client: EngineClient, speculating: Speculating
) -> None:
    found = await examined(client, speculating)
    assert found.speculation == "NGRAM"
    assert not found.slots_doubt


async def test_a_server_without_speculative_decoding_is_asked_for_one_token_only(
    client: EngineClient, speculating: Speculating
) -> None:
    speculating.says("/server_info", captured("GET_server_info.json"))
    assert not (await examined(client, speculating)).speculation
    assert speculating.paths().count("/generate") == 1


async def test_a_server_that_takes_the_most_probable_token_is_refused(
    client: EngineClient, speculating: Speculating
) -> None:
    speculating.is_greedy = True
    with pytest.raises(
        ConfigError, match=r"does not sample: two answers with different seeds are the same, of prob.*e\^-7"
    ):
        await examined(client, speculating)


async def test_a_model_that_is_certain_of_every_token_may_repeat_itself(
    client: EngineClient, speculating: Speculating
) -> None:
    speculating.is_certain = True
    assert (await examined(client, speculating)).speculation == "NGRAM"


@pytest.mark.parametrize("error", [0.2, -0.2])
async def test_logprobs_that_are_not_those_of_plain_decoding_are_refused(
    client: EngineClient, speculating: Speculating, error: float
) -> None:
    speculating.error = error
    with pytest.raises(
        ConfigError, match=r"--speculative-algorithm NGRAM, log-probs of an answer differ by .* \(limit 0.05\)"
    ):
        await examined(client, speculating)


async def test_in_float32_a_thousandth_is_the_limit(client: EngineClient, speculating: Speculating) -> None:
    speculating.error = 0.01
    assert (await examined(client, speculating)).speculation
    speculating.says(
        "/server_info", {**captured("GET_server_info.json"), "speculative_algorithm": "EAGLE3", "dtype": "float32"}
    )
    with pytest.raises(ConfigError, match=r"EAGLE3, log-probs of an answer differ by 1.0e-02 .* \(limit 0.001\)"):
        await examined(client, speculating)


async def test_an_answer_that_lacks_a_logprob_is_refused(client: EngineClient, speculating: Speculating) -> None:
    speculating.missing = 1
    with pytest.raises(ConfigError, match="log-probs"):
        await examined(client, speculating)


async def test_a_prompt_without_all_of_its_logprobs_proves_nothing(
    client: EngineClient, speculating: Speculating
) -> None:
    speculating.unread = 1
    with pytest.raises(ProtocolError, match=r"39 log-probs of a prompt of 40 tokens"):
        await examined(client, speculating)


async def test_a_probe_that_others_stop_proves_nothing(client: EngineClient, speculating: Speculating) -> None:
    speculating.is_stopped = True
    with pytest.raises(RemoteError, match=r"stopped a probe without being asked to"):
        await examined(client, speculating)


@pytest.mark.parametrize("name", ["speculative_accept_threshold_single", "speculative_accept_threshold_acc"])
async def test_a_threshold_that_accepts_what_was_not_sampled_is_refused(client: EngineClient, name: str) -> None:
    async for server in Speculating(**{name: 0.9}).run():
        with pytest.raises(ConfigError, match=f"--{name.replace('_', '-')} 0.9 accepts drafts that were not sampled"):
            await examined(client, server)


async def test_a_limit_of_requests_that_nobody_chose_is_refused_unless_it_is_named(
    client: EngineClient, speculating: Speculating
) -> None:
    loads = captured("GET_v1_loads.json")
    for load in loads["loads"]:
        load["max_running_requests"] = 48
    speculating.says("/v1/loads", loads)
    found = await examined(client, speculating)
    with pytest.raises(ConfigError, match=r"at most 48 requests .* --max-running-requests, or set engine.slots to 48"):
        found.require_meant(speculating.url, slots=None, transfer="disk")
    found.require_meant(speculating.url, slots=48, transfer="disk")


async def test_a_draft_model_is_never_overwritten(client: EngineClient, speculating: Speculating) -> None:
    info = {
        **captured("GET_server_info.json"),
        "speculative_algorithm": "EAGLE3",
        "speculative_draft_model_path": "/models/draft",
    }
    speculating.says("/server_info", info)
    found = await examined(client, speculating)
    with pytest.raises(ConfigError, match=r"overwrites its draft model; set weights.transfer to distributed"):
        found.require_meant(speculating.url, slots=48, transfer="disk")
    found.require_meant(speculating.url, slots=48, transfer="distributed")
    speculating.says("/server_info", {**info, "dp_size": 2})
    with pytest.raises(ConfigError, match=r"every push would overwrite its draft model; start it with --dp-size 1"):
        await examined(client, speculating)
    speculating.answers["/begin_weight_update"] = speculating.answers["/update_weights_from_distributed"] = _done
    target = PushTarget(client, speculating.url, {"group"})
    await target.begin_update()
    await target.receive("group", names=["a"], dtypes=["float32"], shapes=[[1]], timeout_s=10)
    assert [body["selector"] for path, body in speculating.calls if "update" in path] == ["target", "target"]
