"""How a server of either kind ends: by a signal, by a kill, and by weights that cannot be loaded. One server per
test."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import aiohttp
import psutil
import pytest

from dora.engine.errors import PushFailed, ServerGone
from dora.engine.sglang.client import EngineClient
from dora.engine.sglang.push import push
from dora.engine.sglang.target import PushTarget
from tests.sglang.conftest import DIALECT, LONG, START_LABEL, Kind, Server, Tokens, Wire, request, serving

pytestmark = pytest.mark.timeout(120, func_only=True)  # starting a server has a limit of its own

END_LIMIT_S = 60.0


@pytest.fixture
def server(kind: Kind, model_a: Path, tmp_path: Path) -> Iterator[Server]:
    with serving(kind, model_a, tmp_path / "logs") as server:
        yield server


@pytest.fixture
async def wire(server: Server) -> AsyncIterator[Wire]:
    """A plain client of a server that need not be emptied again: it is gone when the test ends."""
    async with aiohttp.ClientSession(server.url, connector=aiohttp.TCPConnector(force_close=True)) as http:
        yield Wire(server, http)


async def until_gone(process: psutil.Process) -> None:
    await asyncio.to_thread(psutil.wait_procs, [process], timeout=END_LIMIT_S)
    assert not process.is_running() or process.status() == psutil.STATUS_ZOMBIE


@pytest.mark.deep
async def test_sigterm_lets_running_requests_finish_and_ends_the_server(wire: Wire) -> None:
    main = wire.server.main_process()
    async with wire.stream(sampling=LONG) as (stream, task):
        await stream.until(1)
        main.send_signal(signal.SIGTERM)
        while (await wire.get("/health"))[0] != 503:  # each question is answered, so this ends
            pass
        assert (await wire.get("/model_info"))[0] == 200
        await task
    assert stream.done
    assert stream.meta["finish_reason"]["type"] == "length"
    await until_gone(main)


async def test_a_model_process_that_is_killed_costs_no_token_already_streamed(wire: Wire, client: EngineClient) -> None:
    main, model = wire.server.main_process(), wire.server.model_process()
    tokens = Tokens()
    call = asyncio.create_task(client.generate(wire.server.url, request("killed-0", endless=True), tokens))
    await tokens.until(10)
    model.kill()
    with pytest.raises(ServerGone):
        await call
    assert len(tokens.token_ids) >= 10
    await until_gone(main)
    with pytest.raises(ServerGone, match="cannot connect"):
        await client.weight_version(wire.server.url)


async def test_a_checkpoint_of_another_shape_ends_the_server_and_the_push_says_so(
    wire: Wire, client: EngineClient, model_of_other_shape: Path
) -> None:
    main = wire.server.main_process()
    endpoint = PushTarget(client, wire.server.url)
    with pytest.raises(PushFailed) as failed:
        await push(endpoint, folder=model_of_other_shape, label="run/1", timeout_s=END_LIMIT_S)
    assert (failed.value.stage, failed.value.doubtful) == ("update", True)
    await until_gone(main)


@pytest.mark.parametrize("mode", ["in_place", "retract"])
async def test_an_update_that_flushes_under_a_paused_request_is_what_our_client_must_never_send(
    wire: Wire, model_b: Path, mode: str
) -> None:
    """The default of the call. It ends the server, or changes its weights and answers 400, or works: by release."""
    main = wire.server.main_process()
    works = mode == "retract" and DIALECT.flushes_over_queue
    async with wire.stream(sampling=LONG) as (stream, task):
        await stream.until(5)
        await wire.post("/pause_generation", {"mode": mode})
        if not works and not DIALECT.outlives_failed_flush:
            with pytest.raises(aiohttp.ClientError):
                await wire.update(model_b, "run/1", flush_cache=True)
            await asyncio.wait({task})
            assert not stream.done
            await until_gone(main)
            return
        status, answer = await wire.update(model_b, "run/1", flush_cache=True)
        assert (status, answer["success"]) == ((200, True) if works else (400, False))
        assert await wire.weight_version() == ("run/1" if works else START_LABEL)
        await wire.post("/continue_generation")
        await task
    assert [span["version"] for span in stream.meta["weight_versions"]] == [START_LABEL, "run/1"]
