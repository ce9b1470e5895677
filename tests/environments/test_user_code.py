"""What users see of their own code in hosts: the line that failed, and what it printed; and calls that run
concurrently."""

from __future__ import annotations

import asyncio
import os
import re
from pathlib import Path
from typing import Any

import pytest
from structlog.testing import capture_logs

from dora.config.schema import EnvironmentConfig
from dora.environments.api import AT_ONCE, Observation, Reset, ToolCall, Turn
from dora.environments.logs import KEPT_BYTES, MAX_BYTES, HostLog
from dora.environments.pool import EnvironmentPool
from dora.errors import ConfigError

CLUMSY = Path(__file__).parent / "clumsy.py"


def pool_of(name: str = "Clumsy", **settings: Any) -> EnvironmentPool:
    settings = {"call_timeout_s": 20, "memory_mb": 1_024, **settings}
    return EnvironmentPool(EnvironmentConfig(name=f"{CLUMSY}:{name}", **settings))


def place(comment: str) -> str:
    """The line of clumsy.py that ends with a comment."""
    lines = CLUMSY.read_text().splitlines()
    (number,) = [number for number, line in enumerate(lines, 1) if line.endswith(f"  # {comment}")]
    return f"clumsy.py:{number}"


async def start(pool: EnvironmentPool, episode: int = 0) -> None:
    reset = await pool.start(episode, {"prompt": "hello"}, source="s", name="row")
    assert isinstance(reset, Reset), reset


async def answers(pool: EnvironmentPool, turn: Turn | str, episode: int = 0) -> list[str]:
    outcome = await pool.step(episode, Turn(turn) if isinstance(turn, str) else turn)
    assert isinstance(outcome, Observation), outcome
    return [message["content"] for message in outcome.messages]


def calls(*named: tuple[str, dict[str, Any]]) -> Turn:
    return Turn("", calls=tuple(ToolCall(f"c{n}", name, arguments) for n, (name, arguments) in enumerate(named)))


# --- lines ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "what", "reason"),
    [
        ("Clumsy", "raises_in_a_library", "raised json.decoder.JSONDecodeError: Expecting property name"),
        ("Clumsy", "raises_in_a_thread", "raised json.decoder.JSONDecodeError: Expecting property name"),
        ("Clumsy", "returns_nothing", "invalid reply: step returned NoneType, not Observation or End"),
        ("Forgetful", "Forgetful", "raised TypeError: Forgetful.step() takes 1 positional argument but 2 were given"),
    ],
)
async def test_a_failure_names_the_line_of_the_users_own_code(name: str, what: str, reason: str) -> None:
    async with pool_of(name) as pool:
        await start(pool)
        failed = await pool.step(0, Turn(what))
        assert failed.reason.startswith(reason)
        assert failed.reason.endswith(f" ({place(what)})")


@pytest.mark.parametrize(
    ("source", "said"),
    [
        ("import os\nos.no_such\n", r"AttributeError: .*no_such' \(broken.py:2\)"),
        ("import os\nimport json\njson.loads('x')\n", r"JSONDecodeError: .* \(broken.py:3\)"),
        ("one = 1\ntwo = (\n", r"SyntaxError: '\(' was never closed \(broken.py:2\)"),
        ("class World:\n    def __init__(self, level):\n        pass\n", r"'level' \(broken.py:2\)"),
    ],
)
async def test_what_keeps_an_environment_from_being_made_is_located(tmp_path: Path, source: str, said: str) -> None:
    (tmp_path / "broken.py").write_text(source)
    with pytest.raises(ConfigError, match=rf"^environment.name: .*{said}\)$"):
        async with EnvironmentPool(EnvironmentConfig(name=f"{tmp_path}/broken.py:World")):
            pass


async def test_a_row_without_a_prompt_is_told_so() -> None:
    async with pool_of("Workshop") as pool:
        failed = await pool.start(0, {"question": "?"}, source="s", name="row")
        assert failed.reason == "raised ValueError: the row has no column 'messages' or 'prompt'; it has question"


# --- calls that block the loop --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("what", "line"), [("sleeps", "sleeps"), ("sleeps_in_a_task_of_its_own", "sleeps"), ("computes", "computes")]
)
async def test_an_async_call_that_blocks_the_loop_costs_itself_alone(what: str, line: str) -> None:
    async with pool_of(call_timeout_s=1) as pool:
        await start(pool, 1)
        await start(pool, 2)
        before = await answers(pool, "pid", 1)
        other, blocking = asyncio.gather(answers(pool, "waits_a_little", 2)), pool.step(1, Turn(what))
        failed = await blocking
        assert failed.cause == "timeout"
        assert failed.reason == f"timed out after 1 s, blocking all episodes of its host ({place(line)})"
        assert await other == [["waited"]]
        assert await answers(pool, "pid", 2) == before, "the host lives"


async def test_calls_that_are_done_when_the_loop_goes_on_have_not_timed_out() -> None:
    async with pool_of(call_timeout_s=1) as pool:
        for episode in range(40):
            await start(pool, episode)
        others = [asyncio.create_task(answers(pool, "waits_a_little", episode)) for episode in range(1, 40)]
        blocking = asyncio.create_task(pool.step(0, Turn("sleeps")))  # after them
        assert (await blocking).cause == "timeout"
        assert await asyncio.gather(*others) == [["waited"]] * 39


async def test_an_async_tool_that_blocks_the_loop_fails_its_turn() -> None:
    async with pool_of("Workshop", call_timeout_s=1) as pool:
        await start(pool)
        failed = await pool.step(0, calls(("slow", {"words": "a"}), ("slow", {"words": "b"})))
        assert failed.reason.endswith(f"blocking all episodes of its host ({place('slow')})")


@pytest.mark.parametrize("forks", ["forks", "forks_in_a_thread"])
async def test_a_process_that_a_call_forks_and_lets_return_answers_nothing(forks: str) -> None:
    async with pool_of(call_timeout_s=5) as pool:
        await start(pool)
        for _ in range(2):
            assert await answers(pool, forks) == ["parent"]


# --- calls of one turn ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("meeting", ["meet", "meet_in_threads"])
async def test_calls_of_one_turn_run_concurrently_and_are_answered_in_their_order(meeting: str) -> None:
    async with pool_of("Workshop") as pool:
        await start(pool)
        for _ in range(2):
            assert await answers(pool, calls(*((meeting, {"words": word}) for word in "abc"))) == ["a", "b", "c"]


async def test_methods_that_share_the_state_of_an_episode_run_one_after_the_other_in_the_order_of_the_calls() -> None:
    async with pool_of("Workshop") as pool:
        await start(pool)
        numbers = [("take_a_number", {})] * 5
        meeting = [("meet_in_threads", {"words": word}) for word in "abc"]
        got = await answers(pool, calls(*numbers[:3], *meeting, *numbers[3:]))
        assert got == ["1 0", "2 0", "3 0", "a", "b", "c", "4 0", "5 0"]


async def test_answers_have_the_order_of_the_calls_whichever_is_done_first() -> None:
    async with pool_of("Workshop") as pool:
        await start(pool)
        for names in (("after", "before"), ("after_in_threads", "before")):
            assert await answers(pool, calls(*((name, {"words": name}) for name in names))) == [*names]


async def test_many_calls_of_one_turn_are_answered_all() -> None:
    async with pool_of("Workshop") as pool:
        await start(pool)
        many = AT_ONCE * 4  # each of those that run at once is followed by as many others
        for meeting in ("meet", "meet_in_threads"):
            words = [str(number) for number in range(many)]
            made = [(meeting, {"words": word, "of": AT_ONCE}) for word in words]
            assert await answers(pool, calls(*made)) == words


async def test_a_tool_that_exits_is_an_error_of_its_call_alone() -> None:
    async with pool_of("Workshop") as pool:
        await start(pool)
        got = await answers(pool, calls(("crash", {"words": "3"}), ("take_a_number", {})))
        assert got == ["error: SystemExit: 3", "1 0"]


# --- what they print ------------------------------------------------------------------------------------------------


async def test_prints_and_tracebacks_of_a_host_are_in_its_log(tmp_path: Path) -> None:
    async with pool_of(hosts=2) as pool:
        await start(pool)
        await answers(pool, "prints")
        pool.log_into(tmp_path)
        await pool.step(0, Turn("raises_in_a_library"))
    log = (tmp_path / "host-0.log").read_text()
    assert "Zü\ufffd[31mred\na warning\n" in log, "what came before there was a folder is kept, without escapes"
    assert re.search(r"^\| Traceback .*^\| .*clumsy.py\", line \d+, in raises_in_a_library\n", log, re.M | re.S)
    assert (tmp_path / "host-1.log").read_text() == ""


async def test_a_failure_that_a_host_survived_does_not_explain_its_death() -> None:
    async with pool_of() as pool:
        await start(pool, 1)
        await start(pool, 2)
        (pid,) = await answers(pool, "pid", 1)
        await pool.step(1, Turn("raises_in_a_library"))
        os.kill(int(pid), 9)
        assert (await pool.step(2, Turn("pid"))).reason == "host died: SIGKILL"


def test_a_log_is_bounded_and_has_the_end_of_what_was_written(tmp_path: Path) -> None:
    log = HostLog()
    log.write(b"early" + b"." * 10 * KEPT_BYTES)
    log.open(tmp_path / "host-0.log")
    assert (tmp_path / "host-0.log").stat().st_size == KEPT_BYTES
    for number in range(200):
        log.write(b"%d" % number + b"x" * 65_536)
    log.close()
    sizes = {path.name: path.stat().st_size for path in tmp_path.iterdir()}
    assert set(sizes) == {"host-0.log", "host-0.log.1"}
    assert all(size <= MAX_BYTES + 70_000 for size in sizes.values())
    assert "199xxx" in (tmp_path / "host-0.log").read_text()


@pytest.mark.parametrize("kind", ["link", "hard link", "pipe", "folder"])
def test_a_log_is_not_written_to_what_lies_in_its_place(tmp_path: Path, kind: str) -> None:
    path, other = tmp_path / "host-0.log", tmp_path / "other"
    other.write_text("kept")
    {
        "link": lambda: path.symlink_to(other),
        "hard link": lambda: path.hardlink_to(other),
        "pipe": lambda: os.mkfifo(path),
        "folder": path.mkdir,
    }[kind]()
    log = HostLog()
    with capture_logs() as said:
        log.open(path)
        log.write(b"lost")
        log.close()
    assert [line["event"] for line in said] == ["host_log_ended"]
    assert other.read_text() == "kept"
