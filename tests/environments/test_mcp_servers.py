"""MCP servers as tools: real processes and ports that speak the protocol, through a host (mcp_server.py)."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
from mcp.shared import jsonrpc_dispatcher

from dora.config.load import load
from dora.config.schema import EnvironmentConfig
from dora.environments.api import Observation, Reset, ToolCall, Turn
from dora.environments.mcp_connection import Connection, Losses
from dora.environments.pool import EnvironmentPool
from dora.environments.replies import EnvironmentFailed
from dora.errors import ConfigError, RunFailed

SERVER = [sys.executable, "-S", str(Path(__file__).parent / "mcp_server.py")]
WORLDS = Path(__file__).parent / "worlds.py"


def pool(*servers: dict[str, Any], **settings: Any) -> EnvironmentPool:
    return EnvironmentPool(EnvironmentConfig(mcp=servers or ({"command": SERVER},), **settings))


async def begin(pool: EnvironmentPool, episode: int = 1, **row: Any) -> Reset:
    reset = await pool.start(episode, {"prompt": "p", **row}, source="s", name=f"row {episode}")
    assert isinstance(reset, Reset), reset
    return reset


async def begin_for_ever(pool: EnvironmentPool) -> None:
    while True:
        await pool.start(1, {"prompt": "p"}, source="s", name="row")


async def turn(pool: EnvironmentPool, *calls: tuple[str, dict[str, Any]], episode: int = 1) -> Any:
    """Return the texts that the policy sees, or how the episode failed."""
    made = tuple(ToolCall(str(number), name, arguments) for number, (name, arguments) in enumerate(calls))
    outcome = await pool.step(episode, Turn("", calls=made))
    return [message["content"] for message in outcome.messages] if isinstance(outcome, Observation) else outcome


async def one(pool: EnvironmentPool, name: str, episode: int = 1, **arguments: Any) -> Any:
    outcome = await turn(pool, (name, arguments), episode=episode)
    return outcome[0] if isinstance(outcome, list) else outcome


def until_gone(process: int) -> None:
    with contextlib.suppress(psutil.NoSuchProcess):
        psutil.Process(process).wait(timeout=10.0)


@pytest.fixture
def url(monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """A server at a port, which wants a token."""
    monkeypatch.setenv("WANTED_TOKEN", "t0ken")
    with subprocess.Popen([*SERVER, "--http", "0"], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        yield f"http://127.0.0.1:{process.stdout.readline().strip()}/mcp"
        process.kill()


# --- what the model sees ----------------------------------------------------------------------------------------------


async def test_tools_are_in_the_first_prompt_with_the_schemas_of_the_server():
    async with pool() as hosts:
        reset = await begin(hosts)
        assert reset.messages == [{"role": "user", "content": "p"}]
        assert len(reset.tools) == 19  # of two pages
        schema = {"type": "object", "properties": {"text": {"type": "string"}}, "required": ["text"]}
        about = {"name": "echo", "description": "Say it again.", "parameters": schema}
        assert reset.tools[0] == {"type": "function", "function": about}
        assert not hosts.can_replay
        assert not hosts.gives_rewards


async def test_calls_of_a_turn_run_at_once_and_are_answered_in_their_order():
    async with pool() as hosts:
        await begin(hosts)
        said = await turn(hosts, ("meet", {}), ("echo", {"text": "a"}), ("meet", {}), ("meet", {}))
        assert said == ["met", "a", "met", "met"]


async def test_errors_and_what_is_no_text_are_told_to_the_model():
    async with pool(output_bytes=100) as hosts:
        await begin(hosts)
        assert await one(hosts, "fail") == "error: no such page"
        assert await one(hosts, "refuse") == "error: not with these arguments"
        assert await one(hosts, "image") == "look:\n[image left out]\na page"
        assert (await one(hosts, "nothing")).startswith("error: there is no tool 'nothing'; there are busy, die, ")
        assert await one(hosts, "echo", text="y" * 200) == "y" * 100 + "\n[output cut: 200 bytes, 100 kept]"


async def test_any_code_of_an_error_and_an_answer_that_cannot_be_read_are_told_to_the_model():
    async with pool(call_timeout_s=10.0) as hosts:
        await begin(hosts)
        assert await turn(hosts, ("busy", {}), ("half", {}), ("echo", {"text": "a"})) == [
            "error: busy, ask later",
            "error: the answer cannot be read",
            "a",
        ]


async def test_a_result_that_is_too_large_is_an_error_of_its_call_alone(url):
    remote = {"url": url, "token": "WANTED_TOKEN", "tools": ["stream_huge"]}
    async with pool({"command": SERVER, "tools": ["huge", "meet"]}, remote) as hosts:
        await begin(hosts)
        said = await turn(hosts, ("huge", {}), ("meet", {}), ("stream_huge", {}), ("meet", {}), ("meet", {}))
        large = "error: the result has more than 8 MiB"
        assert said == [large, "met", large, "met", "met"]


async def test_an_environment_has_the_tools_of_servers_beside_its_own():
    async with pool({"command": SERVER, "tools": ["echo"]}, name=f"{WORLDS}:Shop", options={}) as hosts:
        reset = await begin(hosts, prices={})
        assert [tool["function"]["name"] for tool in reset.tools][-1] == "echo"
        assert await turn(hosts, ("add", {"a": 1}), ("echo", {"text": "b"})) == ["2", "b"]


async def test_arguments_of_the_row_are_neither_seen_nor_chosen_by_the_model():
    async with pool({"command": SERVER, "tools": ["owner"], "arguments": {"owner": "user {id}"}}) as hosts:
        reset = await begin(hosts, id=7)
        parameters = reset.tools[0]["function"]["parameters"]
        assert (list(parameters["properties"]), parameters["required"]) == (["text"], ["text"])
        assert await one(hosts, "owner", text="a") == "user 7 says a"
        assert await one(hosts, "owner", text="b", owner="root") == "user 7 says b"
        failed = await hosts.start(2, {"prompt": "p"}, source="s", name="r")
        assert isinstance(failed, EnvironmentFailed)
        assert "the row has no column 'id'" in failed.reason


# --- what servers see -----------------------------------------------------------------------------------------------


async def test_a_server_sees_only_the_variables_that_are_named(monkeypatch):
    monkeypatch.setenv("KEY_OF_A", "a")
    monkeypatch.setenv("KEY_OF_B", "b")
    async with pool({"command": SERVER, "variables": ["KEY_OF_A"]}) as hosts:
        await begin(hosts)
        seen = (await one(hosts, "variables")).split()
        assert "KEY_OF_A" in seen
        assert "PATH" in seen
        assert not {"KEY_OF_B", "PYTHONPATH", "OMP_NUM_THREADS"} & {*seen}


async def test_episodes_share_a_server_unless_each_has_its_own():
    async with pool() as hosts:
        await begin(hosts, 1)
        await begin(hosts, 2)
        assert await one(hosts, "keep", 1, word="a") == "a"
        assert await one(hosts, "keep", 2, word="b") == "a b"
    async with pool({"command": SERVER, "per_episode": True}) as hosts:
        await begin(hosts, 1)
        await begin(hosts, 2)
        assert await one(hosts, "keep", 1, word="a") == "a"
        assert await one(hosts, "keep", 2, word="b") == "b"
        ended = int(await one(hosts, "pid", 1))
        await hosts.close(1)
        until_gone(ended)
        assert await one(hosts, "keep", 2, word="c") == "b c"


async def test_a_server_at_a_port_gets_the_token_and_answers_in_one_piece_or_by_events(url):
    async with pool({"url": url, "token": "WANTED_TOKEN"}) as hosts:
        await begin(hosts)
        assert await turn(hosts, ("echo", {"text": "a"}), *[("meet", {})] * 3) == ["a", "met", "met", "met"]
        assert await one(hosts, "fail") == "error: no such page"


async def test_servers_end_with_their_host():
    async with pool() as hosts:
        await begin(hosts)
        shared = int(await one(hosts, "pid"))
    until_gone(shared)


# --- servers that fail ----------------------------------------------------------------------------------------------


async def test_a_server_lost_in_a_call_fails_its_callers_and_no_others_and_is_started_again():
    other = {"command": SERVER, "tools": ["echo", "keep"]}
    async with pool({"command": SERVER, "tools": ["hang", "pid"]}, other) as hosts:
        for episode in (1, 2, 3):
            await begin(hosts, episode)
        await one(hosts, "keep", 3, word="a")
        lost = int(await one(hosts, "pid"))
        calls = [asyncio.create_task(one(hosts, "hang", episode)) for episode in (1, 2)]
        assert await one(hosts, "echo", 3, text="sent after these calls") == "sent after these calls"
        os.kill(lost, signal.SIGKILL)
        failed = EnvironmentFailed("host", "environment.mcp.0 was lost in a call of hang: ended with signal 9")
        assert await asyncio.gather(*calls) == [failed, failed]
        assert await one(hosts, "keep", 3, word="b") == "a b"
        assert int(await one(hosts, "pid", 3)) != lost
        await begin(hosts, 1)
        assert int(await one(hosts, "pid", 1)) != lost


@pytest.mark.parametrize(("is_remote", "number"), [(False, 59), (True, 5)])
async def test_many_calls_that_one_loss_fails_count_as_one(url, is_remote, number):
    where = {"url": url, "token": "WANTED_TOKEN", "per_episode": True} if is_remote else {"command": SERVER}
    async with pool({**where, "tools": ["hang", "pid"]}) as hosts:
        for episode in range(number + 1):
            await begin(hosts, episode)
        calls = [asyncio.create_task(one(hosts, "hang", episode)) for episode in range(number)]
        os.kill(int(await one(hosts, "pid", number)), signal.SIGKILL)
        assert {(await call).cause for call in calls} == {"host"}  # 59: more than half of the last hundred episodes
        assert sum(map(bool, hosts._failures._endings["s"])) == 1
        again = await hosts.start(0, {"prompt": "p"}, source="s", name="row 0")
        assert isinstance(again, EnvironmentFailed if is_remote else Reset)


async def test_starts_that_fail_at_the_same_time_count_as_one_and_the_host_goes_on(tmp_path):
    gone = tmp_path / "gone"
    script = f"import os, sys; os.path.exists({str(gone)!r}) and sys.exit(3); os.execv(sys.argv[1], sys.argv[1:])"
    async with pool({"command": [sys.executable, "-S", "-c", script, *SERVER], "per_episode": True}) as hosts:
        await begin(hosts, 100)
        gone.touch()
        starts = [hosts.start(episode, {"prompt": "p"}, source="s", name=f"row {episode}") for episode in range(8)]
        failed = EnvironmentFailed("host", "environment.mcp.0 cannot be started again: ended with exit code 3")
        assert await asyncio.gather(*starts) == [failed] * 8
        assert sum(map(bool, hosts._failures._endings["s"])) == 1
        gone.unlink()
        await begin(hosts, 0)
        assert await one(hosts, "echo", 100, text="a") == "a"


async def test_a_call_without_an_answer_fails_its_episode_alone():
    async with pool(call_timeout_s=0.5) as hosts:
        for episode in (1, 2):
            await begin(hosts, episode)
        assert await one(hosts, "hang", 1) == EnvironmentFailed("timeout", "timed out after 0.5 s")
        assert await one(hosts, "echo", 2, text="a") == "a"


async def test_a_server_that_answers_none_of_eight_calls_is_replaced():
    async with pool(call_timeout_s=1.0) as hosts:
        for episode in range(9):
            await begin(hosts, episode)
        frozen = int(await one(hosts, "pid", 8))
        asked = [one(hosts, "echo", episode, text="a") for episode in range(1, 8)]
        assert {failed.cause for failed in await asyncio.gather(one(hosts, "stop", 0), *asked)} == {"timeout"}
        until_gone(frozen)
        for episode in range(3):  # the first one may find the new server starting
            if isinstance(await hosts.start(episode, {"prompt": "p"}, source="s", name="r"), Reset):
                break
        assert int(await one(hosts, "pid", episode)) != frozen


async def test_a_server_that_has_closed_its_input_is_lost_and_started_again():
    async with pool({"command": [*SERVER, "--deaf"]}, call_timeout_s=20.0) as hosts:
        await begin(hosts)
        lost = EnvironmentFailed("host", "environment.mcp.0 was lost in a call of pid: closed its input")
        assert await one(hosts, "pid") == lost
        await begin(hosts)


async def test_a_call_to_a_server_that_reads_nothing_ends_when_it_should(monkeypatch):
    monkeypatch.setattr(jsonrpc_dispatcher, "_ABANDON_WRITE_TIMEOUT", 30.0)
    settings = {"command": SERVER, "url": "", "token": "", "variables": []}
    connection = Connection(settings, name="small", losses=Losses())
    await connection.open(timeout_s=20.0)
    stopped = psutil.Process(int(await connection.call("pid", {})))
    os.kill(stopped.pid, signal.SIGSTOP)
    calls = [asyncio.create_task(connection.call("echo", {"text": "a" * 300_000})) for _ in range(2)]
    await asyncio.wait(calls, timeout=0.2)
    for call in calls:
        call.cancel()
    ended, _ = await asyncio.wait(calls, timeout=10.0)
    connection._lose("stopped")
    await connection.close()
    until_gone(stopped.pid)
    assert {call for call in ended if call.cancelled()} == {*calls}


async def test_answers_at_a_port_that_are_lost_fail_the_episode(url):
    async with pool({"url": url, "token": "WANTED_TOKEN"}, call_timeout_s=10.0) as hosts:
        for episode in (1, 2):
            await begin(hosts, episode)
        assert await one(hosts, "status", 1) == EnvironmentFailed(
            "host", "environment.mcp.0 was lost in a call of status: answered with HTTP status 503"
        )
        assert await one(hosts, "echo", 2, text="a") == "a"
        await begin(hosts, 1)
        assert await one(hosts, "forget", 1) == EnvironmentFailed(
            "host", "environment.mcp.0 was lost in a call of forget: has forgotten its session"
        )
        assert await one(hosts, "echo", 2, text="a") == "a"
        assert (await one(hosts, "stream_die", 2)).cause == "host"
        failed = await hosts.start(3, {"prompt": "p"}, source="s", name="r")
        if isinstance(failed, Reset):  # the loss is seen when it is used
            failed = await one(hosts, "echo", 3, text="a")
        assert failed.cause == "host"
        assert "cannot be reached" in failed.reason


async def test_a_loss_that_a_replay_makes_good_is_no_failure_of_its_source():
    async with pool(options={"replays": True}) as hosts:
        assert hosts.can_replay
        for _ in range(3):
            await begin(hosts)
            turn_of_die = Turn("", calls=(ToolCall("0", "die", {}),))
            assert (await hosts.step(1, turn_of_die, may_replay=True)).cause == "host"
        assert not hosts.set_aside
        assert not any(hosts._failures._endings["s"])


@pytest.mark.deep
async def test_a_server_that_cannot_be_started_again_ends_the_run_with_its_name(tmp_path):
    marker = tmp_path / "gone"
    script = f"import os, sys; os.path.exists({str(marker)!r}) and sys.exit(3); os.execv(sys.argv[1], sys.argv[1:])"
    async with pool({"command": [sys.executable, "-S", "-c", script, *SERVER]}, call_timeout_s=20.0) as hosts:
        await begin(hosts)
        marker.touch()
        assert (await one(hosts, "die")).cause == "host"
        again = await hosts.start(1, {"prompt": "p"}, source="s", name="r")
        assert again.reason == "environment.mcp.0 cannot be started again: ended with exit code 3"
        with pytest.raises((ConfigError, RunFailed), match=r"environment.mcp.0: .* ended with exit code 3"):
            await begin_for_ever(hosts)


# --- what is refused at the start -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("servers", "reason"),
    [
        ([{"command": ["no-such-server"]}], r"mcp.0: no-such-server: no-such-server cannot be started \(No such file"),
        ([{"command": [sys.executable, "-c", "raise SystemExit(4)"]}], r"mcp.0: .*: ended with exit code 4"),
        ([{"url": "http://127.0.0.1:9/mcp"}], r"mcp.0: http://127.0.0.1:9/mcp: cannot be reached \(ConnectError"),
        ([{"command": SERVER, "tools": ["ecko"]}], r"mcp.0.tools: there is no 'ecko'; there are busy, die, "),
        ([{"command": SERVER, "variables": ["NO_KEY"]}], r"mcp.0.variables: the environment variable NO_KEY is not"),
        ([{"command": SERVER, "arguments": {"me": 1}}], r"mcp.0.arguments: no tool has a parameter 'me'"),
        ([{"command": SERVER}, {"command": SERVER}], r"mcp.1: the tool 'echo' is also one of environment.mcp.0"),
    ],
)
async def test_a_server_that_cannot_be_used_is_refused_with_its_name(servers, reason):
    with pytest.raises(ConfigError, match=f"^environment.{reason}"):
        async with pool(*servers):
            pass


async def test_a_server_that_is_never_ready_is_refused_with_its_name():
    with pytest.raises(ConfigError, match=r"^environment.mcp.0: sleep: not ready after"):
        async with pool({"command": ["sleep", "100"]}, start_timeout_s=3.0):
            pass


@pytest.mark.parametrize(
    ("names", "reason"),
    [
        ("a.b", r"the tool 'a.b' is no name that models may call"),
        ("a a", r"the tool 'a' is there twice"),
        (" ".join(f"t{number}" for number in range(129)), r"it has more than 128 tools"),
        ("", r"it has no tools"),
        ("a" * 65, r"the tool 'a+' is no name"),
    ],
)
async def test_tools_that_cannot_be_offered_are_refused(monkeypatch, names, reason):
    monkeypatch.setenv("NAMES", names)
    with pytest.raises(ConfigError, match=rf"^environment.mcp.0: .*: {reason}"):
        async with pool({"command": SERVER, "variables": ["NAMES"]}):
            pass


async def test_an_environment_that_cannot_have_these_tools_is_refused(monkeypatch):
    with pytest.raises(ConfigError, match=r"^environment.mcp: World is not a ToolEnvironment"):
        async with pool(name=f"{WORLDS}:World"):
            pass
    monkeypatch.setenv("NAMES", "add")
    with pytest.raises(ConfigError, match=r"^environment.mcp.0: the tool 'add' is also one of the environment; leave"):
        async with pool({"command": SERVER, "variables": ["NAMES"]}, name=f"{WORLDS}:Shop"):
            pass


async def test_a_token_that_is_wrong_is_refused(url, monkeypatch):
    monkeypatch.setenv("OTHER", "wrong")
    with pytest.raises(ConfigError, match=r"^environment.mcp.0: .*: answered with HTTP status 401"):
        async with pool({"url": url, "token": "OTHER"}):
            pass


def test_hosts_in_other_languages_have_no_servers():
    changes = ['environment.mcp=[{command=["a"]}]', 'environment.command=["node", "a.js"]', "eval.sets=[]"]
    with pytest.raises(ConfigError, match=r"environment.mcp: is served by hosts of DORA alone; remove it or"):
        load({}, changes, environ={})


@pytest.mark.parametrize("one", [{}, {"command": SERVER, "url": "http://a/"}, {"url": "ftp://a/"}])
def test_a_server_has_either_a_command_or_an_address(one):
    with pytest.raises(ValueError, match=r"needs either command|pattern"):
        EnvironmentConfig(mcp=(one,))
