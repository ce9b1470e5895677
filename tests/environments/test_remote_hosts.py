"""Hosts on another machine: real processes and sockets, through a relay that cuts connections at any byte.

What is expected is read from a file that the environment writes in its own process, and from the tables of processes.
"""

from __future__ import annotations

import asyncio
import json
import random
import re
import signal
import socket
import struct
import subprocess
import sys
from collections import Counter
from pathlib import Path

import psutil
import pytest

from dora.environments.api import Observation, Reset, Turn
from dora.environments.pool import EnvironmentPool
from dora.environments.replies import EnvironmentFailed
from dora.errors import ConfigError, RunFailed
from dora.pipes import HEADER
from tests.e2e.runs import alive, environment, until, until_gone
from tests.environments.cutting import CuttingRelay
from tests.environments.remote import WAIT_S, Served, pool_at, program, served

HERE = Path(__file__).parent
COUNTING = f"{HERE / 'counting.py'}:Counting"
WORLDS = f"{HERE / 'worlds.py'}:World"
FOREIGN = str(HERE / "foreign.py")


async def play(pool: EnvironmentPool, episode: int, *, calls: int, draw: random.Random, largest: int) -> None:
    """Play an episode, and compare every answer."""
    reset = await pool.start(episode, {"name": episode}, source="s", name=f"row {episode}")
    assert isinstance(reset, Reset), reset
    for number in range(calls):
        text = "".join(draw.choices("abcdefgh", k=int(10 ** draw.uniform(0, largest))))
        answer = await pool.step(episode, Turn(f"{number} {text}"))
        assert isinstance(answer, Observation), answer
        assert answer.messages[0]["content"] == f"{number} {text[::-1]}"
    await pool.close(episode)


def counted(file: Path) -> Counter[tuple[str, str]]:
    """How often each call was made, by episode and number."""
    return Counter(tuple(line.split()[:2]) for line in file.read_text().splitlines())


async def play_through_cuts(folder: Path, *, seed: int, episodes: int, calls: int, largest: int) -> CuttingRelay:
    """Play episodes over a relay that cuts; each call must have been made once, by one process."""
    file = folder / "calls"
    with served(folder) as server:
        async with CuttingRelay(server.port, seed=seed) as relay:
            options = {"file": str(file)}
            settings = {"options": options, "output_bytes": 1_000_000, "call_timeout_s": 120}
            async with pool_at(relay.port, server.token, COUNTING, **settings) as pool:
                draws = [random.Random(f"{seed} {episode}") for episode in range(episodes)]
                await asyncio.gather(
                    *(
                        play(pool, episode, calls=calls, draw=draws[episode], largest=largest)
                        for episode in range(episodes)
                    )
                )
    expected = {(str(episode), str(number)) for episode in range(episodes) for number in range(calls)}
    assert counted(file) == Counter(expected)
    assert len({line.split()[2] for line in file.read_text().splitlines()}) == 1
    return relay


@pytest.mark.deep
@pytest.mark.timeout(600)
async def test_each_call_is_made_once_although_connections_are_cut(tmp_path: Path) -> None:
    relay = await play_through_cuts(tmp_path, seed=3, episodes=4, calls=25, largest=4)
    assert relay.num_cut >= 2


@pytest.mark.deep
@pytest.mark.timeout(600)
@pytest.mark.parametrize("seed", range(4))
async def test_hundreds_of_calls_are_made_once_over_many_cuts(tmp_path: Path, seed: int) -> None:
    relay = await play_through_cuts(tmp_path, seed=seed, episodes=8, calls=60, largest=4)
    assert relay.num_cut >= 20
    assert relay.num_doubled >= 3


async def test_what_a_host_prints_and_why_it_ends_are_known_to_the_controller(tmp_path: Path) -> None:
    with served(tmp_path) as server:
        async with pool_at(server.port, server.token, WORLDS) as pool:
            pool.log_into(tmp_path)
            await pool.start(0, {"prompt": "p"}, source="s", name="a")
            failed = await pool.step(0, Turn("die"))
            assert isinstance(failed, EnvironmentFailed)
            assert failed.cause == "host"
            assert "dora: the host has ended: exit code 3: no license" in failed.reason
            assert isinstance(await pool.start(1, {"prompt": "p"}, source="s", name="a"), Reset)
        assert "no license" in (tmp_path / "host-0.log").read_text()


async def test_a_second_controller_has_hosts_of_its_own(tmp_path: Path) -> None:
    files = [tmp_path / "one", tmp_path / "two"]
    with served(tmp_path) as server:
        async with (
            pool_at(server.port, server.token, COUNTING, options={"file": str(files[0])}) as one,
            pool_at(server.port, server.token, COUNTING, options={"file": str(files[1])}) as two,
        ):
            draw = random.Random(0)
            await asyncio.gather(*(play(pool, 0, calls=20, draw=draw, largest=3) for pool in (one, two)))
    assert [sum(counted(file).values()) for file in files] == [20, 20]


def test_a_host_beyond_their_number_is_refused_until_a_controller_is_silent(tmp_path: Path) -> None:
    with served(tmp_path, "--hosts", "1", beat_s=0.4) as server:
        line = program("connect", f"127.0.0.1:{server.port}", "--token-file", server.token, beat_s=0.4)
        first = subprocess.Popen(line, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=environment())
        until(lambda: "host 1 starts" in server.log.read_text(), what="the first host")
        second = subprocess.Popen(line, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=environment())
        try:
            first.kill()
            first.wait()
            until(lambda: "host 2 starts" in server.log.read_text(), what="the second host")
            assert "host 1 has ended: the controller was not heard" in server.log.read_text()
        finally:
            for one in (first, second):
                one.kill()
                one.communicate()


# --- those who may not ----------------------------------------------------------------------------------------------


def connect(*words: object, token: Path | None, timeout_s: float = WAIT_S) -> subprocess.CompletedProcess[str]:
    option = ("--token-file", token) if token is not None else ()
    line = program("connect", *words, *option)
    return subprocess.run(
        line, input="", env=environment(), capture_output=True, text=True, timeout=timeout_s, check=False
    )


def test_another_token_and_none_are_refused_in_one_line(tmp_path: Path) -> None:
    wrong = tmp_path / "wrong"
    wrong.write_text("guess")
    with served(tmp_path) as server:
        address = f"127.0.0.1:{server.port}"
        for token, words in ((wrong, "the handshake with dora environments serve"), (None, "there is no token")):
            ended = connect(address, token=token)
            assert (ended.returncode, ended.stdout) == (2, "")
            assert re.fullmatch(rf"dora: {words}.*\n", ended.stderr), ended.stderr
        assert not server.below()  # nothing was started for them


async def test_the_pool_names_another_token_as_the_reason(tmp_path: Path) -> None:
    wrong = tmp_path / "wrong"
    wrong.write_text("guess")
    reason = r"no host started in 3 attempts \(exit code 2: dora: the handshake with"
    with served(tmp_path) as server, pytest.raises(RunFailed, match=reason):
        async with pool_at(server.port, wrong, WORLDS):
            pass


def test_hostile_bytes_start_nothing_and_stop_nothing(tmp_path: Path) -> None:
    draw = random.Random(7)
    greeting = b"\xff\x00\x00\x00\x00\x00\x00\x00\x01\x7f\x03\x01NULL" + bytes(48)
    pieces = [
        b"GET / HTTP/1.1\r\n\r\n",
        greeting + b"\x04\x05\x05READY" + draw.randbytes(200),
        greeting.replace(b"NULL\0", b"CURVE") + b"\x06" + struct.pack(">Q", 4 << 30) + draw.randbytes(1_000),
        HEADER.pack(0xFFFFFFFF) + b"{}",
        draw.randbytes(100_000),
    ]
    with served(tmp_path) as server:
        sockets = [socket.create_connection(("127.0.0.1", server.port)) for _ in range(40)]
        for number, one in enumerate(sockets):
            try:
                one.sendall(pieces[number % len(pieces)])
            except OSError:
                continue  # it was closed
        assert not server.below()
        memory = psutil.Process(server.process.pid).memory_info().rss
        assert memory < 300 << 20
        ended = connect(f"127.0.0.1:{server.port}", token=server.token)  # at the end of its input it ends
        assert (ended.returncode, ended.stderr) == (0, "")
        for one in sockets:
            one.close()


async def test_a_host_that_announces_4_gb_is_lost_and_nobody_reads_them(tmp_path: Path) -> None:
    command = ("--", sys.executable, "-S", FOREIGN, "endless frame")
    with served(tmp_path, command=command) as server:
        async with pool_at(server.port, server.token, "guess") as pool:
            await pool.start(1, {"number": 7}, source="s", name="a")
            failed = await pool.step(1, Turn("x"))
            assert isinstance(failed, EnvironmentFailed)
            assert failed.reason == "host died: host announced a reply of 4294967295 bytes"


async def test_an_environment_that_is_not_there_is_an_error_of_the_configuration(tmp_path: Path) -> None:
    with served(tmp_path) as server, pytest.raises(ConfigError, match=r"environment\.name: nowhere\.py"):
        async with pool_at(server.port, server.token, "nowhere.py:World"):
            pass


def test_what_cannot_be_served_is_said_in_one_line(tmp_path: Path) -> None:
    token = tmp_path / "token"
    token.write_text("t")
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        for words, reason in (
            (("--listen", "here"), "--listen: here is not an address; write it as HOST:PORT"),
            (("--listen", f"127.0.0.1:{port}"), f"--listen 127.0.0.1:{port}: Address already in use"),
            (("--python", "p", "--", "q"), "--python: has no effect with a command"),
        ):
            line = program("serve", "--token-file", token, *words)
            ended = subprocess.run(line, env=environment(), capture_output=True, text=True, timeout=WAIT_S, check=False)
            assert ended.returncode == 2
            assert ended.stderr.startswith(f"dora: {reason}")
            assert ended.stderr.count("\n") == 1


def test_what_is_no_pipe_is_said_in_one_line(tmp_path: Path) -> None:
    token = tmp_path / "token"
    token.write_text("t")
    line = program("connect", "127.0.0.1:1", "--token-file", token)
    ended = subprocess.run(
        line, stdin=subprocess.DEVNULL, env=environment(), capture_output=True, text=True, timeout=WAIT_S, check=False
    )
    says = "dora: dora environments connect: stdin and stdout must be pipes; a run starts it\n"
    assert (ended.returncode, ended.stderr) == (2, says)


async def test_a_command_that_is_not_there_is_named(tmp_path: Path) -> None:
    reason = "the host has ended: exit code 1: no-such-program: No such file"
    with served(tmp_path, command=("--", "no-such-program")) as server, pytest.raises(RunFailed, match=reason):
        async with pool_at(server.port, server.token, "guess"):
            pass


# --- those who end --------------------------------------------------------------------------------------------------


async def test_a_host_is_limited_with_all_that_it_starts(tmp_path: Path) -> None:
    with served(tmp_path, "--memory-mb", "300") as server:
        async with pool_at(server.port, server.token, f"{HERE / 'worlds.py'}:World") as pool:
            await pool.start(0, {"prompt": "p"}, source="s", name="a")
            failed = await pool.step(0, Turn("gather"))
            assert isinstance(failed, EnvironmentFailed)
            assert "MemoryError" in failed.reason or "300 MB" in failed.reason


async def test_if_the_other_side_was_restarted_the_host_is_lost_and_the_episode_is_played_again(tmp_path: Path) -> None:
    file = tmp_path / "calls"
    name = COUNTING.replace("Counting", "Replayed")
    with served(tmp_path) as server:
        async with pool_at(server.port, server.token, name, options={"file": str(file)}) as pool:
            await pool.start(0, {"name": "0"}, source="s", name="a", may_replay=True)
            await pool.step(0, Turn("0 ab"), may_replay=True)
            below = server.below()
            server.process.send_signal(signal.SIGKILL)
            server.process.wait()
            await asyncio.to_thread(until_gone, below)
            with served(tmp_path, port=server.port):
                failed = await pool.step(0, Turn("1 cd"), may_replay=True)
                assert isinstance(failed, EnvironmentFailed)
                assert failed.cause == "host"
                assert failed.reason.endswith(
                    ": it was restarted, or has ended this host, and does not know it any more"
                )
                await pool.start(1, {"name": "1"}, source="s", name="a", may_replay=True)
                assert isinstance(await pool.step(1, Turn("0 ab"), may_replay=True), Observation)
    assert counted(file) == Counter({("0", "0"): 1, ("1", "0"): 1})


async def test_when_the_other_side_is_stopped_it_says_so_and_leaves_nothing(tmp_path: Path) -> None:
    with served(tmp_path) as server:
        async with pool_at(server.port, server.token, WORLDS) as pool:
            await pool.start(0, {"prompt": "p"}, source="s", name="a")
            below = server.below()
            assert len(below) >= 3  # two guards and the host
            await asyncio.to_thread(server.end)
            assert not alive(below)
            failed = await pool.step(0, Turn("turns"))
            assert isinstance(failed, EnvironmentFailed)
            assert failed.reason.endswith(": it was stopped")


def hello(name: str, **options: str) -> bytes:
    fields = {"protocol": 1, "field": "environment", "environment": name, "options": options, "episodes": 4}
    limits = {"call_timeout_s": 30, "output_bytes": 8_192, "reply_bytes": 1 << 20, "max_tokens": 0}
    body = json.dumps({"id": 0, "type": "hello", **fields, **limits}).encode()
    return HEADER.pack(len(body)) + body


class Four:
    """The four processes of a host: `connect`, `serve`, a guard, and the host."""

    def __init__(self, folder: Path, *, beat_s: float) -> None:
        self.server = Served(folder, beat_s=beat_s)
        line = program("connect", f"127.0.0.1:{self.server.port}", "--token-file", self.server.token, beat_s=beat_s)
        self.connect = subprocess.Popen(
            line, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=environment()
        )
        assert self.connect.stdin is not None
        assert self.connect.stdout is not None
        self.connect.stdin.write(hello(WORLDS))
        self.connect.stdin.flush()
        assert b"ready" in self.connect.stdout.read(HEADER.unpack(self.connect.stdout.read(4))[0])
        self.below = self.server.below()
        by_age = sorted(self.below, key=lambda one: one.pid)
        self.pids = {
            "connect": self.connect.pid,
            "serve": self.server.process.pid,
            "guard": by_age[0].pid,
            "host": by_age[-1].pid,
        }


def end_one(folder: Path, which: str, *, beat_s: float, timeout_s: float) -> None:
    """Kill one of the four: nothing of the host is left, and the others end, or go on as they should."""
    four = Four(folder, beat_s=beat_s)
    try:
        psutil.Process(four.pids[which]).kill()
        until_gone(four.below, timeout_s=timeout_s)
        assert four.connect.stderr is not None
        code = None if which == "connect" else four.connect.wait(timeout_s)  # its stdin stays open
        error = "" if code is None else four.connect.stderr.read().decode()
        if which == "connect":
            until(lambda: "host 1 has ended: the controller was not heard" in four.server.log.read_text(), what="word")
        elif which == "serve":
            assert code == 1
            assert re.fullmatch(r"dora: dora environments serve at \S+ was not heard for 45 s\n", error)
        else:
            assert code == 1
            assert re.fullmatch(r"dora: the host has ended: SIGKILL\n", error)
        if which != "serve":
            assert connect(f"127.0.0.1:{four.server.port}", token=four.server.token).returncode == 0
    finally:
        four.connect.kill()
        four.connect.communicate()
        if four.server.process.poll() is None:
            four.server.end()


@pytest.mark.deep
@pytest.mark.timeout(600)
@pytest.mark.parametrize(("which", "beat_s"), [("connect", 0.2), ("serve", 0.2), ("guard", 1.0), ("host", 1.0)])
def test_when_one_of_the_four_is_killed_nothing_is_left(tmp_path: Path, which: str, beat_s: float) -> None:
    end_one(tmp_path, which, beat_s=beat_s, timeout_s=30)


@pytest.mark.deep
@pytest.mark.timeout(600)
@pytest.mark.parametrize("which", ["connect", "serve"])
def test_the_other_side_ends_within_the_time_that_is_stated(tmp_path: Path, which: str) -> None:
    end_one(tmp_path, which, beat_s=2.0, timeout_s=60)
