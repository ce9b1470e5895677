"""A server whose controller was killed, taken over: it is at rest, serves, and its label is true or says nothing.

The controller is a process of its own (dying.py), killed in the middle of requests, or of each step of a push.
"""

from __future__ import annotations

import asyncio
import os
import sys
from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest

from dora.engine.names import UNCONFIRMED
from dora.engine.sglang.client import EngineClient
from dora.engine.sglang.engine import SglangEngine
from dora.engine.sglang.push import push
from dora.engine.sglang.target import PushTarget
from tests.embedded.conftest import Reference
from tests.sglang.conftest import PROMPT, START_LABEL, Tokens, Wire, request

pytestmark = pytest.mark.timeout(120)

LIMIT_S = 60.0
LABEL = "run/1-01234567"
Abandon = Callable[[str], Awaitable[None]]


@pytest.fixture
def abandon(wire: Wire, model_b: Path) -> Abandon:
    """Have another controller get to a point, in a push of model b, and die there."""

    async def to(point: str) -> None:
        argv = [sys.executable, "-m", "tests.sglang.dying", point, wire.server.url, str(model_b), LABEL]
        env = {**os.environ, "PYTHONPATH": ":".join(sys.path), "OMP_NUM_THREADS": "1"}
        controller = await asyncio.create_subprocess_exec(*argv, env=env)
        assert await controller.wait() == 0

    return to


async def is_at_work(client: EngineClient, url: str) -> None:
    """The server answers a new request, and holds no other."""
    tokens = Tokens()
    result = await client.generate(url, request("after-0"), tokens)
    assert result.num_tokens == len(tokens.token_ids) > 0
    assert (await client.loads(url)).num_waiting == 0


async def test_requests_and_the_pause_of_a_dead_controller_are_ended(
    wire: Wire, client: EngineClient, abandon: Abandon
) -> None:
    url = wire.server.url
    await abandon("requests")
    assert await SglangEngine(client).take_over(url, timeout_s=LIMIT_S) == START_LABEL
    assert await client.flush_cache(url)
    await is_at_work(client, url)


@pytest.mark.parametrize(
    ("point", "labels"),
    [
        ("paused", {START_LABEL}),
        ("unnamed", {UNCONFIRMED}),
        ("sent", {UNCONFIRMED, LABEL}),  # it may die before the server has read the request
        ("updated", {LABEL}),
        ("resumed", {LABEL}),
        ("joined", {UNCONFIRMED}),
        ("received", {UNCONFIRMED}),
    ],
)
async def test_a_label_after_a_push_that_its_controller_did_not_survive_is_true_or_says_nothing(
    wire: Wire,
    client: EngineClient,
    abandon: Abandon,
    point: str,
    labels: set[str],
    reference_a: Reference,
    reference_b: Reference,
    model_a: Path,
) -> None:
    url = wire.server.url
    await abandon(point)
    label = await SglangEngine(client).take_over(url, timeout_s=LIMIT_S)
    assert label in labels
    held = await client.prompt_logprobs(url, PROMPT, timeout_s=LIMIT_S)
    a, b = (pytest.approx(reference.logprobs(PROMPT), abs=1e-3) for reference in (reference_a, reference_b))
    assert {START_LABEL: held == a, LABEL: held == b}.get(label, True)
    await is_at_work(client, url)
    await push(PushTarget(client, url), folder=model_a, label="run/2-89abcdef", timeout_s=LIMIT_S)
    assert await client.prompt_logprobs(url, PROMPT, timeout_s=LIMIT_S) == a


async def test_a_server_at_rest_is_taken_over_as_it_is_however_often(wire: Wire, client: EngineClient) -> None:
    engine = SglangEngine(client)
    for _ in range(2):
        assert await engine.take_over(wire.server.url, timeout_s=LIMIT_S) == START_LABEL
