"""Environments in real hosts: outcomes, faults, limits. Each fault fails the episodes that it must, and no others."""

import asyncio
import os
import signal
import sys
import time
from pathlib import Path

import psutil
import pytest
from structlog.testing import capture_logs

from dora.config.schema import EnvironmentConfig
from dora.environments import pool as pools
from dora.environments.api import End, Observation, Reset, ToolCall, Turn
from dora.environments.failures import NORMAL, FailureLimits
from dora.environments.pool import EnvironmentPool
from dora.environments.process import HostProcess
from dora.environments.replies import EnvironmentFailed
from dora.errors import ConfigError, RunFailed

WORLDS = Path(__file__).parent / "worlds.py"


def pool_of(name: str = "World", *, limits: FailureLimits = NORMAL, **settings) -> EnvironmentPool:
    settings = {"call_timeout_s": 20, "memory_mb": 1_024, **settings}
    return EnvironmentPool(EnvironmentConfig(name=f"{WORLDS}:{name}", **settings), limits=limits)


async def start(pool: EnvironmentPool, episode: int = 0, **row) -> None:
    reset = await pool.start(episode, {"prompt": str(episode), **row}, source="s", name=f"row {episode}")
    assert isinstance(reset, Reset), reset


async def answer(pool: EnvironmentPool, what: str, episode: int = 0) -> str:
    """The text of an observation."""
    observation = await pool.step(episode, Turn(what))
    assert isinstance(observation, Observation), observation
    return observation.messages[0]["content"]


async def failure(pool: EnvironmentPool, what: str, episode: int = 0) -> EnvironmentFailed:
    failed = await pool.step(episode, Turn(what))
    assert isinstance(failed, EnvironmentFailed), failed
    return failed


def calls(*named: tuple[str, dict]) -> Turn:
    made = [ToolCall(f"c{number}", name, arguments) for number, (name, arguments) in enumerate(named)]
    return Turn("", calls=tuple(made))


# --- episodes -------------------------------------------------------------------------------------------------------


async def test_an_episode_has_one_object_from_its_row_to_its_end(tmp_path):
    async with pool_of(options={"closed": str(tmp_path / "closed")}) as pool:
        reset = await pool.start(1, {"prompt": "one"}, source="s", name="a")
        assert reset == Reset([{"role": "user", "content": "one"}], [])
        await start(pool, 2, prompt="two")
        assert [await answer(pool, "turns", 1), await answer(pool, "turns", 1)] == ["1", "2"]
        assert await answer(pool, "turns", 2) == "1"
        assert await pool.step(1, Turn("finish")) == End(0.5, [{"role": "user", "content": "bye"}])
        await pool.close(2)
        assert pool.free == 256
        until(lambda: sorted((tmp_path / "closed").read_text().split()) == ["one", "two"])


async def test_of_a_conversation_that_is_rewritten_neither_the_first_prompt_nor_turns_are_cut():
    async with pool_of() as pool:
        await start(pool, prompt="rule " * 2_000)
        seen = await pool.step(0, Turn("rewrite"))
        assert isinstance(seen, Observation)
        first, turn, new = [message["content"] for message in seen.messages]
        assert (first, turn) == ("rule " * 2_000, "turn " * 2_000)
        assert new.endswith("\n[output cut: 10,000 bytes, 8,192 kept]")


async def test_an_environment_knows_whether_the_task_grades_it():
    async with pool_of() as pool:
        for is_graded, reward in ((True, None), (False, 0.25)):
            await pool.start(0, {}, source="s", name="row", is_graded=is_graded)
            assert await pool.step(0, Turn("finish_if_graded")) == End(reward, [])


async def test_tools_sync_and_async_answer_with_the_state_of_their_episode():
    async with pool_of("Shop") as pool:
        for episode, price in ((1, 2.5), (2, 40)):
            reset = await pool.start(
                episode, {"prompt": "How much?", "prices": {"tea": price}}, source="s", name=str(episode)
            )
            assert reset.messages == [{"role": "user", "content": "How much?"}]
            assert [each["function"]["name"] for each in reset.tools] == ["add", "shout", "price"]
        turn = calls(("price", {"item": "tea"}), ("add", {"a": "2"}), ("shout", {"words": "hi"}))
        for episode, price in ((2, "40"), (1, "2.5")):
            observation = await pool.step(episode, turn)
            assert [one["content"] for one in observation.messages] == [price, "3", "HI"]
            assert [one["tool_call_id"] for one in observation.messages] == ["c0", "c1", "c2"]
        assert await pool.step(1, Turn("It costs 2.5.")) == End(None, [])


async def test_an_error_of_a_tool_is_for_the_model_and_the_episode_goes_on():
    async with pool_of("Shop") as pool:
        await start(pool, prompt="p", prices={})
        bad = Turn("", calls=(ToolCall("c0", "", None, "{broken"),))
        assert (await pool.step(0, bad)).messages[0]["content"] == "error: not a valid tool call: {broken"
        turn = calls(("price", {"item": "tea"}), ("prise", {}), ("add", {"a": "x", "c": 1}))
        observation = await pool.step(0, turn)
        assert [one["content"] for one in observation.messages] == [
            "error: KeyError: 'tea'",
            "error: there is no tool 'prise'; there are add, price, shout",
            "error: arguments of add: a: Input should be a valid integer, unable to parse string as an integer; "
            "c: Unexpected keyword argument",
        ]


async def test_a_function_may_make_the_environment():
    async with pool_of("tools") as pool:
        await start(pool, prompt="p")
        assert (await pool.step(0, calls(("add", {"a": 1})))).messages[0]["content"] == "2"


@pytest.mark.parametrize(("name", "gives"), [("World", True), ("Shop", False), ("tools", False)])
async def test_an_environment_says_whether_it_gives_rewards(name, gives):
    async with pool_of(name) as pool:
        assert pool.gives_rewards is gives


@pytest.mark.parametrize("place", ["meet", "meet_in_threads"])
async def test_200_episodes_of_one_host_are_in_a_call_at_once(place):
    async with pool_of(call_timeout_s=60) as pool:
        await asyncio.gather(*(start(pool, episode) for episode in range(200)))
        assert await asyncio.gather(*(answer(pool, place, episode) for episode in range(200))) == ["met"] * 200


# --- calls that do not return ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("endless", ["block", "spin", "forget"])
async def test_a_call_that_never_returns_fails_its_episode_alone(endless):
    async with pool_of(call_timeout_s=2) as pool:
        await start(pool, 1)
        await start(pool, 2)
        before = await answer(pool, "pid", 2)
        hanging = asyncio.create_task(failure(pool, endless, 1))
        assert await answer(pool, "turns", 2) == "1"  # meanwhile
        assert not hanging.done()
        assert await hanging == EnvironmentFailed("timeout", "timed out after 2 s")
        assert await answer(pool, "pid", 2) == before
        assert (await failure(pool, "pid", 1)).reason == "the episode has ended, or never began"


@pytest.mark.deep
@pytest.mark.parametrize("endless", ["power", "stubborn"])
async def test_a_call_that_cannot_be_left_costs_the_host_and_names_itself(endless):
    async with pool_of(call_timeout_s=2) as pool:
        await start(pool, 1)
        await start(pool, 2)
        old = int(await answer(pool, "pid", 2))
        assert await failure(pool, endless, 1) == EnvironmentFailed("timeout", "timed out after 2 s")
        assert await failure(pool, "pid", 2) == EnvironmentFailed(
            "host", "host died: killed, because a call did not return within 2 s"
        )
        assert not psutil.pid_exists(old)
        await start(pool, 3)
        assert int(await answer(pool, "pid", 3)) != old


async def test_setting_up_has_the_same_limit():
    async with pool_of(call_timeout_s=2) as pool:
        failed = await pool.start(1, {"reset": "block"}, source="s", name="a")  # in the loop, as `reset` is async
        assert failed.cause == "timeout"
        assert failed.reason.startswith("timed out after 2 s, blocking all episodes of its host (worlds.py:")
        assert pool.free == 256


async def test_a_host_with_many_stuck_threads_takes_no_more_episodes_and_is_replaced_when_it_is_empty():
    async with pool_of(call_timeout_s=2) as pool:
        await start(pool, 100)
        old = await answer(pool, "pid", 100)
        for episode in range(8):
            await start(pool, episode)
        blocked = await asyncio.gather(*(failure(pool, "block", episode) for episode in range(8)))
        assert {failed.cause for failed in blocked} == {"timeout"}
        assert pool.free == 0
        waiting = asyncio.create_task(start(pool, 101))
        assert await answer(pool, "pid", 100) == old
        assert not waiting.done()
        await pool.close(100)
        await waiting
        assert await answer(pool, "pid", 101) != old


def stand_still(seconds: float) -> None:
    """Block the event loop, as if its process were stopped."""
    time.sleep(seconds)


@pytest.mark.deep
async def test_a_controller_that_stood_still_takes_the_reply_that_came_meanwhile():
    async with pool_of(call_timeout_s=2) as pool:
        await start(pool)
        stepping = asyncio.create_task(answer(pool, "turns"))
        for _ in range(5):
            await asyncio.sleep(0)
        stand_still(8.0)  # the host does not
        assert await stepping == "1"


# --- calls that fail, or end the host -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("what", "cause", "reason"),
    [
        ("fail", "raised", "raised KeyError: 'level' (worlds.py:"),
        ("leave", "raised", "raised SystemExit: no more (worlds.py:"),
        ("leave_the_loop", "raised", "raised SystemExit: no more (worlds.py:"),
        ("cancel_itself", "raised", "cancelled"),
        ("bomb", "raised", "raised MemoryError"),
        ("gather", "raised", "raised MemoryError"),
        ("missing", "raised", "raised KeyError: 'missing' (worlds.py:"),
        ("nothing", "invalid", "invalid reply: step returned NoneType, not Observation or End"),
        ("text", "invalid", "invalid reply: step returned str, not Observation or End"),
        ("no_message", "invalid", "invalid reply: observation without a message"),
        ("no_text", "invalid", "invalid reply: the content of a message is NoneType, not text"),
        ("stranger", "invalid", "invalid reply: a message of the role 'assistant', not system, tool, user"),
        ("no_id", "invalid", "invalid reply: a message of the role 'tool' without its tool_call_id"),
        ("not_json", "invalid", "invalid reply: Object of type object is not JSON serializable"),
        ("not_a_number", "invalid", "invalid reply: Out of range float values are not JSON compliant"),
        ("beyond_32_bits", "invalid", "invalid reply: the reward is 1e+39, expected a finite number of 32 bits"),
        ("endless_term", "invalid", "invalid reply: term 'right' is 1e+39, expected a finite number of 32 bits"),
        ("endless_metric", "invalid", "invalid reply: metric 'moves' is 1e+39, expected a finite number of 32 bits"),
        ("many_metrics", "invalid", "invalid reply: 65 metrics, expected at most 64 with names of at most 200 char"),
        ("half", "invalid", "invalid reply: Expected `float`, got `str` - at `$.reward`"),
        ("giant", "invalid", "invalid reply: 17,825,900 bytes; at most 16,777,216 are allowed"),
    ],
)
async def test_trouble_is_a_reason_and_never_a_reward_and_the_others_go_on(what, cause, reason, tmp_path):
    closed = tmp_path / "closed"
    async with pool_of(options={"closed": str(closed)}) as pool:
        await start(pool, 1)
        await start(pool, 2)
        before = await answer(pool, "pid", 2)
        failed = await failure(pool, what, 1)
        assert failed.cause == cause
        assert failed.reason.startswith(reason)
        assert await answer(pool, "pid", 2) == before
        assert (await failure(pool, "pid", 1)).reason == "the episode has ended, or never began"
        assert pool.free == 255
        until(lambda: closed.exists() and closed.read_text().split() == ["1"])


@pytest.mark.parametrize(("what", "how"), [("die", "exit code 3: no license"), ("segfault", "SIGSEGV")])
async def test_a_host_that_dies_in_a_call_fails_its_own_episodes_and_is_replaced(what, how):
    async with pool_of(hosts=2) as pool:
        for episode in range(4):  # two in each
            await start(pool, episode)
        pids = [await answer(pool, "pid", episode) for episode in range(4)]
        assert pids == [pids[0], pids[1]] * 2 != [pids[0]] * 4
        assert await failure(pool, what, 0) == EnvironmentFailed("host", f"host died: {how}")
        assert await failure(pool, "pid", 2) == EnvironmentFailed("host", f"host died: {how}")
        assert [await answer(pool, "pid", episode) for episode in (1, 3)] == [pids[1]] * 2
        await start(pool, 5)
        assert await answer(pool, "pid", 5) not in pids


async def test_a_host_that_is_killed_from_outside_is_replaced_and_no_call_is_sent_again(tmp_path):
    async with pool_of(options={"closed": str(tmp_path / "closed")}) as pool:
        await start(pool, 1)
        await start(pool, 2)
        old = int(await answer(pool, "pid", 1))
        calling = asyncio.create_task(pool.step(1, Turn("block")))
        await answer(pool, "pid", 2)
        os.kill(old, signal.SIGKILL)
        assert await calling == EnvironmentFailed("host", "host died: SIGKILL")
        assert pool.free == 256  # its places are free at once
        await start(pool, 3)
        assert await answer(pool, "turns", 3) == "1"
        assert await failure(pool, "turns", 2) == EnvironmentFailed("host", "host died: SIGKILL")
        await pool.close(2)
        assert pool.free == 255


async def test_an_episode_ends_once():
    async with pool_of() as pool:
        await start(pool)
        assert await pool.step(0, Turn("finish")) == End(0.5, [{"role": "user", "content": "bye"}])
        assert await failure(pool, "finish") == EnvironmentFailed("invalid", "the episode has ended, or never began")
        await pool.close(0)
        assert pool.free == 256


async def test_a_cancelled_call_ends_its_episode_and_leaves_no_reply_behind(tmp_path):
    closed = tmp_path / "closed"
    async with pool_of(options={"closed": str(closed)}, episodes_per_host=2) as pool:
        await start(pool, 1, prompt="first")
        await start(pool, 2, prompt="second")
        calling = asyncio.create_task(pool.step(1, Turn("forget")))
        assert await answer(pool, "turns", 2) == "1"
        calling.cancel()
        with pytest.raises(asyncio.CancelledError):
            await calling
        assert pool.free == 1
        await start(pool, 1)  # the same number
        assert await answer(pool, "turns", 1) == "1"
        until(lambda: closed.exists() and closed.read_text() == "first\n")


async def test_what_an_environment_prints_or_reads_does_not_touch_the_protocol():
    async with pool_of() as pool:
        await start(pool)
        assert await answer(pool, "chatty") == "read 0"
        assert await answer(pool, "chatty") == "read 0"


async def test_a_host_has_no_tokens_of_the_run(monkeypatch):
    monkeypatch.setenv("DORA_TOKEN", "secret")
    async with pool_of() as pool:
        await start(pool)
        assert await answer(pool, "token") == "False"


async def test_what_a_tool_started_ends_with_its_host(tmp_path):
    file = tmp_path / "pid"
    async with pool_of() as pool:
        await start(pool, file=str(file))
        hanging = asyncio.create_task(pool.step(0, Turn("child_and_hang")))
        child = int(await asyncio.to_thread(until, lambda: file.exists() and file.read_text().strip()))
        assert psutil.pid_exists(child)
    assert (await hanging).reason == "host died: killed"
    until(lambda: not psutil.pid_exists(child))


# --- output ---------------------------------------------------------------------------------------------------------


async def test_long_output_is_cut_with_a_mark_that_the_model_sees():
    async with pool_of() as pool:
        await start(pool)
        assert await answer(pool, "huge") == "é" * 4_096 + "\n[output cut: 10,000,000 bytes, 8,192 kept]"
        observation = await pool.step(0, Turn("huge_twice"))
        kept = [one["content"] for one in observation.messages]
        assert kept == ["a" * 6_000, "b" * 2_192 + "\n[output cut: 6,000 bytes, 2,192 kept]"]


async def test_text_that_has_no_utf8_is_mended():
    async with pool_of() as pool:
        await start(pool)
        assert await answer(pool, "surrogate") == "a?b"


async def test_a_row_that_cannot_be_sent_fails_its_episode_alone():
    async with pool_of() as pool:
        failed = await pool.start(1, {"number": 1 << 80, "thing": object()}, source="s", name="a")
        assert failed.cause == "invalid"
        await start(pool, 1)
        assert await answer(pool, "turns", 1) == "1"


# --- places ---------------------------------------------------------------------------------------------------------


async def test_episodes_beyond_the_places_wait_for_one_in_order():
    async with pool_of(hosts=2, episodes_per_host=1) as pool:
        assert pool.free == 2
        await start(pool, 1)
        await start(pool, 2)
        assert pool.free == 0
        third, fourth = (asyncio.create_task(start(pool, episode)) for episode in (3, 4))
        assert await answer(pool, "turns", 1) == "1"
        assert not third.done()
        assert pool.without_place == {3, 4}
        await pool.close(1)
        await third
        assert not fourth.done()
        assert pool.without_place == {4}
        await pool.close(2)
        await fourth
        assert pool.free == 0


async def test_a_cancelled_wait_takes_no_place():
    async with pool_of(episodes_per_host=1) as pool:
        await start(pool, 1)
        waiting = asyncio.create_task(start(pool, 2))
        for _ in range(3):
            await asyncio.sleep(0)
        waiting.cancel()
        late = asyncio.create_task(start(pool, 3))
        for _ in range(3):
            await asyncio.sleep(0)
        closing = asyncio.create_task(pool.close(1))
        await asyncio.sleep(0)
        late.cancel()  # it has just been given the place
        await asyncio.wait([waiting, late, closing])
        assert late.cancelled()
        assert pool.free == 1
        await start(pool, 4)


async def test_a_wait_that_is_cancelled_as_a_place_gets_free_takes_none():
    async with pool_of(episodes_per_host=1) as pool:
        await start(pool, 1)
        waiting = asyncio.create_task(start(pool, 2))
        for _ in range(3):
            await asyncio.sleep(0)
        closing = asyncio.create_task(pool.close(1))
        waiting.cancel()  # seen after the place is free
        await asyncio.wait([waiting, closing])
        assert waiting.cancelled()
        assert pool.free == 1


# --- starting -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "problem"),
    [
        ("no_such_module:World", r"environment.name: cannot import 'no_such_module' \(ModuleNotFoundError: "),
        ("no/such/file.py:World", r"environment.name: no/such/file.py: no such file"),
        (f"{WORLDS}:Wurld", r"environment.name: .*worlds.py has no function 'Wurld'"),
        (f"{WORLDS}:Untyped", r"Untyped cannot be created \(TypeError: tool price: parameter 'item' has no type \("),
        (f"{WORLDS}:WithoutStep", r"cannot be created \(TypeError: WithoutStep has no method 'step'\)"),
        (f"{WORLDS}:not_an_environment", r"cannot be created \(TypeError: it made str, not an Environment \("),
    ],
)
async def test_an_environment_that_cannot_be_made_is_one_clear_line_before_anything_else(name, problem):
    with pytest.raises(ConfigError, match=problem) as raised:
        async with EnvironmentPool(EnvironmentConfig(name=name)):
            pass
    assert "\n" not in str(raised.value)


async def test_options_that_the_environment_does_not_take_are_named():
    with pytest.raises(
        ConfigError, match=r"World cannot be created \(TypeError: .*unexpected keyword argument 'closd'"
    ):
        async with pool_of(options={"closd": ""}):
            pass


async def test_a_host_that_never_starts_ends_the_run_with_its_last_words(tmp_path):
    file = tmp_path / "dying.py"
    file.write_text("import os, sys\nsys.stderr.write('no license')\nsys.stderr.flush()\nos._exit(4)\n")
    with pytest.raises(RunFailed, match=r"environment: no host started in 3 attempts \(exit code 4: no license\)"):
        async with EnvironmentPool(EnvironmentConfig(name=f"{file}:World")):
            pass


@pytest.mark.parametrize(
    ("settings", "problem"),
    [
        ({"python": "/no/such/python"}, r"\(exit code 1: /no/such/python: No such file or directory\)"),
        ({"memory_mb": 16}, r"no host started in 3 attempts \(exit code "),
    ],
)
async def test_what_keeps_a_host_from_starting_is_named(settings, problem):
    with pytest.raises(RunFailed, match=problem):
        async with pool_of(**settings):
            pass


async def test_a_host_that_is_never_ready_is_given_up(tmp_path):
    file = tmp_path / "loading.py"
    file.write_text("import threading\nthreading.Event().wait()\n")
    with pytest.raises(RunFailed, match=r"no host started in 3 attempts \(not ready after 0.5 s\)"):
        async with EnvironmentPool(EnvironmentConfig(name=f"{file}:World", start_timeout_s=0.5)):
            pass


# --- failures -------------------------------------------------------------------------------------------------------


async def test_too_many_failures_of_one_source_end_the_run_and_name_the_commonest():
    async with pool_of(limits=FailureLimits(window=10, budget=0.3)) as pool:
        for episode in range(3):
            await start(pool, episode)
            await failure(pool, "fail" if episode else "text", episode)
        await start(pool, 3)
        with pytest.raises(
            RunFailed, match=r"4 of the last 4 episodes of source 's' failed.* 3 of them: raised KeyErr"
        ):
            await pool.step(3, Turn("fail"))


@pytest.mark.skipif(not hasattr(os, "sched_getaffinity"), reason="needs Linux")
async def test_each_host_may_have_cores_of_its_own():
    ours = sorted(os.sched_getaffinity(0), reverse=True)
    async with pool_of(hosts=2, cores=1, episodes_per_host=1) as pool:
        for host in range(2):
            await start(pool, host)
        found = [await answer(pool, "cores", host) for host in range(2)]
    assert found == [str(ours[0]), str(ours[1 % len(ours)])]
    async with pool_of() as pool:
        await start(pool)
        assert len((await answer(pool, "cores")).split(",")) == len(ours)


async def test_what_only_gives_a_prompt_does_not_dilute_the_failures():
    async with pool_of(limits=FailureLimits(window=4, budget=0.5)) as pool:
        for episode in range(3):
            await start(pool, episode)
        await failure(pool, "fail", 0)
        for prompt in range(10, 20):
            await start(pool, prompt)
            await pool.close(prompt)
        await failure(pool, "fail", 1)
        with pytest.raises(RunFailed, match="3 of the last 3 episodes"):
            await pool.step(2, Turn("fail"))


async def test_a_lost_host_is_one_failure_of_a_source_and_is_logged():
    async with pool_of(limits=FailureLimits(window=4, budget=0.3)) as pool:
        for episode in range(50):
            await start(pool, episode)
        with capture_logs() as logs:
            await failure(pool, "die", 0)
            for episode in range(1, 50):
                assert (await failure(pool, "turns", episode)).cause == "host"
            await start(pool, 0)
        assert [{**line, "log_level": ""} for line in logs] == [
            {"event": "host_lost", "reason": "exit code 3: no license", "episodes": 50, "log_level": ""},
            {"event": "host_replaced", "lost_in_a_row": 1, "log_level": ""},
        ]
        assert await answer(pool, "turns") == "1"


async def test_hosts_that_are_lost_before_they_answer_a_turn_end_the_run_in_the_end(monkeypatch):
    monkeypatch.setattr(pools, "LOST_IN_A_ROW", 3)
    async with pool_of(limits=FailureLimits(budget=1)) as pool:
        for _ in range(2):  # an answer between losses breaks the row
            for _ in range(2):
                await start(pool)
                await failure(pool, "die")
            await start(pool)
            await answer(pool, "turns")
            await pool.close(0)
        for _ in range(3):
            await start(pool)
            await failure(pool, "die")
        with pytest.raises(RunFailed, match=r"^environment: 3 hosts in a row were lost"):
            await start(pool)


async def test_a_row_that_fails_again_and_again_is_set_aside_and_named():
    async with pool_of(limits=FailureLimits(row=2)) as pool:
        for episode in range(2):
            assert not pool.set_aside
            await pool.start(episode, {}, source="s", name="rows.jsonl:7")
            with capture_logs() as logs:
                await failure(pool, "fail", episode)
        assert [line["event"] for line in logs] == ["row_set_aside"]
        assert list(pool.set_aside) == ["rows.jsonl:7"]
        failed = await pool.start(3, {}, source="s", name="rows.jsonl:7")
        assert failed.cause == "set_aside"
        assert failed.reason.startswith("rows.jsonl:7 is set aside; it failed: raised KeyError: 'level'")
        await start(pool, 4)


async def test_a_row_is_not_blamed_for_a_host_that_died_in_a_call_of_another():
    async with pool_of(limits=FailureLimits(row=1)) as pool:
        await start(pool, 1)
        await start(pool, 2)
        await failure(pool, "die", 1)
        await failure(pool, "pid", 2)
        assert list(pool.set_aside) == ["row 1"]


async def test_the_death_of_a_host_is_held_against_a_row_once_however_many_siblings_called():
    async with pool_of(limits=FailureLimits(row=2, budget=1)) as pool:
        for episode in range(8):
            await pool.start(episode, {}, source="s", name="shared")
        old = int(await answer(pool, "pid", 0))
        calls = [asyncio.create_task(failure(pool, "forget", episode)) for episode in range(8)]
        await answer_of_another(pool)
        os.kill(old, signal.SIGKILL)
        assert {failed.cause for failed in await asyncio.gather(*calls)} == {"host"}
        assert not pool.set_aside


async def answer_of_another(pool: EnvironmentPool) -> None:
    """Wait until the host has taken what was sent to it before."""
    await start(pool, 1_000)
    await answer(pool, "turns", 1_000)
    await pool.close(1_000)


def test_losses_that_a_host_survives_are_kept_apart_also_if_they_come_by_turns():
    host = HostProcess(EnvironmentConfig(name="a.py:A"), field="environment", on_lost=lambda _: None)
    first, second = host.death_of(1), host.death_of(2)
    assert host.death_of(1) is first
    assert host.death_of(2) is second is not first
    assert host.death_of(0) is not host.death_of(0)


async def test_a_death_that_a_replay_makes_good_is_no_failure_and_nobody_is_blamed():
    async with pool_of("Replayed", limits=FailureLimits(row=1, budget=0)) as pool:
        await start(pool)
        lost = await pool.step(0, Turn("die"), may_replay=True)
        assert (lost.cause, dict(pool.set_aside)) == ("host", {})
        await start(pool)
        with pytest.raises(RunFailed, match="1 of the last 1 episodes"):
            await pool.step(0, Turn("die"))  # the last attempt
        assert list(pool.set_aside) == ["row 0"]


async def test_what_its_caller_cannot_use_is_a_failure_of_the_episode_and_its_environment_is_closed(tmp_path):
    closed = tmp_path / "closed"
    async with pool_of(options={"closed": str(closed)}, limits=FailureLimits(row=1, budget=0)) as pool:
        await start(pool, 1)
        await answer(pool, "turns", 1)
        with pytest.raises(RunFailed, match=r"1 of the last 1 episodes .* 1 of them: no conversation"):
            pool.fail(1, EnvironmentFailed("invalid", "no conversation"))
        assert dict(pool.set_aside) == {"row 1": "no conversation"}
        assert pool.free == 256
        until(lambda: closed.exists() and closed.read_text().split() == ["1"])


# --- ends -----------------------------------------------------------------------------------------------------------


async def test_no_process_outlives_the_pool():
    async with pool_of(hosts=3) as pool:
        await asyncio.gather(*(start(pool, episode) for episode in range(9)))
        pids = {int(await answer(pool, "pid", episode)) for episode in range(9)}
        assert len(pids) == 3
    assert not any(psutil.pid_exists(pid) for pid in pids)


async def test_a_host_ends_with_the_process_that_started_it(tmp_path):
    script = tmp_path / "controller.py"
    script.write_text(
        "import asyncio, sys\n"
        "from dora.config.schema import EnvironmentConfig\n"
        "from dora.environments.pool import EnvironmentPool\n"
        "async def main():\n"
        f"    async with EnvironmentPool(EnvironmentConfig(name='{WORLDS}:World')):\n"
        "        print('ready', flush=True)\n"
        "        await asyncio.Event().wait()\n"
        "asyncio.run(main())\n"
    )
    controller = await asyncio.create_subprocess_exec(sys.executable, str(script), stdout=asyncio.subprocess.PIPE)
    assert await controller.stdout.readline() == b"ready\n"
    below = psutil.Process(controller.pid).children(recursive=True)
    assert len(below) == 3
    controller.kill()
    await controller.wait()
    until(lambda: not any(child.is_running() for child in below))


async def test_requests_to_a_host_that_is_gone_are_never_sent(monkeypatch):
    lost = HostProcess(EnvironmentConfig(name=f"{WORLDS}:World"), field="environment", on_lost=lambda _: None)
    await lost.start()
    await lost.kill()
    sent = []
    monkeypatch.setattr(lost._process, "write", sent.append)
    with pytest.raises(Exception, match="killed"):
        await lost.call({"type": "step"})
    assert sent == []


def until(ask, *, timeout_s: float = 30):
    """What another process shows, as soon as it does."""
    deadline = time.monotonic() + timeout_s
    while time.monotonic() < deadline:
        if found := ask():
            return found
        time.sleep(0.02)
    raise AssertionError(f"not within {timeout_s:g} s")


async def test_an_environment_knows_how_long_an_episode_may_become(tmp_path: Path) -> None:
    file = tmp_path / "long.py"
    file.write_text(
        "from dora.environments.api import End, Environment, Reset\n"
        "class Long(Environment):\n"
        "    def reset(self, row): return Reset([{'role': 'user', 'content': str(self.max_tokens)}])\n"
        "    def step(self, turn): return End(0.0)\n"
    )
    async with EnvironmentPool(EnvironmentConfig(name=f"{file}:Long", memory_mb=1_024), max_tokens=77) as pool:
        reset = await pool.start(0, {}, source="", name="row")
        assert isinstance(reset, Reset)
        assert reset.messages[0]["content"] == "77"
