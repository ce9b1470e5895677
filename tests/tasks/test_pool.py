import asyncio
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

import dora
from dora.config.schema import RewardConfig
from dora.errors import ConfigError, RunFailed
from dora.tasks.cgroup import make_cgroup
from dora.tasks.pool import Graded, GraderPool, GradingFailed
from dora.tasks.rewards import GradeRequest

REWARDS = """
import ctypes, os, signal, subprocess, sys

def grade(*, prompt, response, answer, metadata):
    return globals()[response](answer)

def pid(answer): return float(os.getpid())
def spin(answer):
    while True: pass
def power(answer): return float(9 ** 9 ** 9)  # one endless C call: no Python signal handler ever runs
def die(answer): os._exit(3)
def leave(answer): sys.exit("no more")
def segfault(answer): os.kill(os.getpid(), 11)
def bomb(answer): return float(len(bytearray(1 << 30)))
def gather(answer):
    hoard = []
    while True: hoard.append(bytes(range(256)) * (1 << 18))
def nan(answer): return float("nan")
def nothing(answer): return None
def fail(answer): raise KeyError("level")
def chatty(answer):
    print("x" * 500_000); sys.stdout.flush(); os.write(1, b"y" * 500_000); sys.stderr.write("z" * 500_000)
    return 1.0
def read(answer): return float(len(sys.stdin.read()))
def parent_of(answer):
    child = subprocess.Popen(["sleep", "1000"])
    open(answer, "w").write(str(child.pid))
    while True: pass
def leave_behind(answer):
    # Three processes in sessions of their own: a child, and two whose parents have ended.
    open(answer, "a").close()
    def orphan():
        os.setsid()
        if os.fork():
            os._exit(0)
        open(answer, "a").write(f"{os.getpid()} ")
        os.execvp("sleep", ["sleep", "1000"])
    for _ in range(2):
        if os.fork() == 0:
            orphan()
        os.wait()
    child = subprocess.Popen(["sleep", "1000"], start_new_session=True)
    while len(open(answer).read().split()) < 2: pass
    open(answer, "a").write(f"{child.pid}\\n")
    return 1.0
def leave_behind_and_hang(answer):
    leave_behind(answer)
    while True: pass
def leave_behind_and_die(answer):
    leave_behind(answer)
    os._exit(3)
def parent_of_parent():
    return int(open(f"/proc/{os.getppid()}/stat").read().rpartition(")")[2].split()[1])
def kill_guard(answer, pid=None):
    leave_behind(answer)
    os.kill(pid or os.getppid(), signal.SIGKILL)
    while True: pass
def kill_first_guard(answer): kill_guard(answer, parent_of_parent())
def kill_guard_and_stay(answer):
    ctypes.CDLL(None).prctl(1, 0)  # it no longer dies with its parent
    kill_guard(answer)
def kill_both_guards(answer):
    leave_behind(answer)
    ctypes.CDLL(None).prctl(1, 0)
    for pid in (parent_of_parent(), os.getppid()): os.kill(pid, signal.SIGKILL)
    while True: pass
def kill_and_stop_guards(answer):
    leave_behind(answer)
    first = parent_of_parent()
    os.kill(os.getppid(), signal.SIGSTOP)
    os.kill(first, signal.SIGKILL)
    while True: pass
def stop_guards(answer):
    leave_behind(answer)
    for pid in (os.getppid(), parent_of_parent()): os.kill(pid, signal.SIGSTOP)
    while True: pass
def return_twice(answer):
    child = os.fork()
    if child == 0:
        if answer == "raises": raise ValueError("in the child")
        return 7.0
    os.waitpid(child, 0)
    return 1.0
def take(mb): return bytes(range(256)) * (mb << 12)
def children_take(answer):
    leave_behind(answer)
    for number in range(4):
        if os.fork() == 0:
            if number % 2:  # an orphan in another session
                os.setsid()
                if os.fork():
                    os._exit(0)
            hoard = take(200)
            signal.pause()
    while True: pass
def children_share(answer):
    hoard = take(200)
    for _ in range(4):
        if os.fork() == 0:
            sum(hoard[::4096])
            signal.pause()
    subprocess.run(["sleep", answer])
    return 1.0
def many_share(answer):
    hoard = take(200)
    for _ in range(100):
        if os.fork() == 0:
            os.setsid()
            signal.pause()
    open(answer, "w").write(f"{os.getpid()}")
    return 1.0
def token(answer): return float("DORA_TOKEN" in os.environ)
def holds(answer):
    links = [f"/proc/self/fd/{number}" for number in range(256)]
    return float(answer in [os.readlink(link) for link in links if os.path.lexists(link)])
"""

#: How its exceptions name it.
TERM = "task.rewards.0 (function pool_rewards:grade)"


@pytest.fixture
def module(tmp_path, monkeypatch) -> Path:
    """A folder with a reward module, on the path of the graders."""
    (tmp_path / "pool_rewards.py").write_text(REWARDS)
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(tmp_path), str(Path(dora.__file__).parents[1])]))
    return tmp_path


def pool_of(
    *, name: str = "pool_rewards:grade", graders: int = 1, timeout_s: float = 30, memory_mb: int = 2048
) -> GraderPool:
    rewards = [RewardConfig(kind="function", name=name)]
    return GraderPool(rewards, graders=graders, timeout_s=timeout_s, memory_mb=memory_mb, field="task.rewards")


def ask(response: str, answer: str = "") -> GradeRequest:
    return GradeRequest(prompt="p", response=response, answer=answer, metadata={})


@pytest.mark.usefixtures("module")
@pytest.mark.parametrize("endless", ["spin", "power"])
async def test_a_hanging_grader_is_killed_and_replaced_and_its_answer_has_no_reward(endless):
    async with pool_of(timeout_s=0.5) as pool:
        first = (await pool.grade(ask("pid"))).reward
        assert await pool.grade(ask(endless)) == GradingFailed("timeout")
        assert not psutil.pid_exists(int(first))
        second = (await pool.grade(ask("pid"))).reward
        assert second != first


def stand_still(seconds: float) -> None:
    """Block the event loop, as if its process were stopped."""
    time.sleep(seconds)


@pytest.mark.usefixtures("module")
async def test_a_controller_that_stood_still_takes_the_reply_that_came_meanwhile():
    async with pool_of(timeout_s=1) as pool:
        assert isinstance(await pool.grade(ask("pid")), Graded)  # it is warm
        grading = asyncio.create_task(pool.grade(ask("pid")))
        for _ in range(5):
            await asyncio.sleep(0)
        stand_still(3.0)  # the grader does not
        assert isinstance(await grading, Graded)


async def test_children_of_a_hanging_grader_die_with_it(module):
    async with pool_of(timeout_s=1) as pool:
        assert await pool.grade(ask("parent_of", str(module / "pid"))) == GradingFailed("timeout")
    child = int((module / "pid").read_text())
    assert not psutil.pid_exists(child) or psutil.Process(child).status() == psutil.STATUS_ZOMBIE


@pytest.mark.parametrize("response", ["leave_behind", "leave_behind_and_hang", "leave_behind_and_die"])
async def test_what_a_grader_started_in_other_sessions_ends_with_it(module, response):
    async with pool_of(timeout_s=3) as pool:
        await pool.grade(ask(response, str(module / "pids")))
        left = written(module / "pids")
        assert len(left) == 3
        if response != "leave_behind":
            until_gone(left)
    until_gone(left)


@pytest.mark.parametrize("response", ["kill_guard", "kill_first_guard", "kill_guard_and_stay"])
async def test_a_grader_that_kills_its_guard_ends_with_all_that_it_started(module, response):
    async with pool_of(timeout_s=60) as pool:
        grader = (await pool.grade(ask("pid"))).reward
        assert await pool.grade(ask(response, str(module / "pids"))) == GradingFailed("crashed: SIGKILL")
        left = [*written(module / "pids"), int(grader)]
        assert len(left) == 4
        until_gone(left)
        assert isinstance(await pool.grade(ask("pid")), Graded)


async def test_a_grader_that_stops_its_guards_is_killed_with_all_that_it_started(module):
    async with pool_of(timeout_s=300) as pool:
        grader = psutil.Process(int((await pool.grade(ask("pid"))).reward))
        guards = grader.parents()[:2]
        grading = asyncio.create_task(pool.grade(ask("stop_guards", str(module / "pids"))))
        await asyncio.to_thread(until, lambda: all(guard.status() == psutil.STATUS_STOPPED for guard in guards))
        grading.cancel()
        with pytest.raises(asyncio.CancelledError):
            await grading
        until_gone([*written(module / "pids"), grader.pid])


async def test_a_grader_that_kills_one_guard_and_stops_the_other_is_killed_with_all_that_it_started(module):
    async with pool_of(timeout_s=300) as pool:
        grader = psutil.Process(int((await pool.grade(ask("pid"))).reward))
        second, first = grader.parents()[:2]
        grading = asyncio.create_task(pool.grade(ask("kill_and_stop_guards", str(module / "pids"))))
        gone = lambda: not first.is_running() and second.status() == psutil.STATUS_STOPPED  # noqa: E731
        await asyncio.to_thread(until, gone)
        grading.cancel()
        with pytest.raises(asyncio.CancelledError):
            await grading
        until_gone([*written(module / "pids"), grader.pid])


async def test_a_control_group_ends_even_a_grader_that_ends_both_guards_at_once(module):
    """Run under `systemd-run --user --scope -p Delegate=yes`, or where this user may divide its group otherwise."""
    if (group := make_cgroup(1 << 30)) is None:
        pytest.skip("the system gives no control group (cgroup v2)")
    await group.close()
    assert not group.path.exists()
    async with pool_of(timeout_s=60) as pool:
        grader = (await pool.grade(ask("pid"))).reward
        assert isinstance(await pool.grade(ask("kill_both_guards", str(module / "pids"))), GradingFailed)
        until_gone([*written(module / "pids"), int(grader)])
    assert not [*group.path.parent.glob("grader-*")]


async def test_what_a_grader_starts_counts_towards_its_memory_even_in_other_sessions(module):
    async with pool_of(memory_mb=512) as pool:
        outcome = await pool.grade(ask("children_take", str(module / "pids")))
        told = f"memory: {TERM}: it and all that it started took more than 512 MB together"
        assert outcome == GradingFailed(told)
        until_gone(written(module / "pids"))
        assert isinstance(await pool.grade(ask("pid")), Graded)


@pytest.mark.usefixtures("module")
async def test_memory_that_processes_share_counts_once():
    async with pool_of(memory_mb=768) as pool:
        assert await pool.grade(ask("children_share", "1")) == Graded(1.0, (("pool_rewards:grade", 1.0),))


async def test_many_processes_whose_memory_takes_long_to_measure_end_with_their_grader(module):
    async with pool_of(memory_mb=1024) as pool:
        assert isinstance(await pool.grade(ask("many_share", str(module / "pid"))), Graded)
        grader = psutil.Process(int((module / "pid").read_text()))
        left = [grader.pid, *(child.pid for child in grader.children())]
        assert len(left) == 101
    until_gone(left)


@pytest.mark.usefixtures("module")
@pytest.mark.parametrize(
    ("response", "reason"),
    [
        ("die", "crashed: exit code 3"),
        ("leave", "crashed: exit code 1: no more"),
        ("segfault", "crashed: SIGSEGV"),
        ("bomb", f"error: {TERM}: MemoryError"),
        ("gather", f"error: {TERM}: MemoryError"),
        ("nan", f"error: {TERM}: ValueError: it is nan, expected"),
        ("nothing", f"error: {TERM}: TypeError: "),
        ("fail", f"error: {TERM}: KeyError: 'level' (pool_rewards.py:"),
    ],
)
async def test_trouble_is_a_reason_and_never_a_reward_and_the_next_answer_is_graded(response, reason):
    async with pool_of(memory_mb=512) as pool:
        outcome = await pool.grade(ask(response))
        assert isinstance(outcome, GradingFailed)
        assert outcome.reason.startswith(reason)
        assert isinstance(await pool.grade(ask("pid")), Graded)


@pytest.mark.usefixtures("module")
async def test_what_a_reward_prints_or_reads_does_not_touch_the_protocol():
    async with pool_of() as pool:
        assert (await pool.grade(ask("chatty"))).reward == 1.0
        assert (await pool.grade(ask("read"))).reward == 0.0
        assert (await pool.grade(ask("chatty"))).reward == 1.0


@pytest.mark.usefixtures("module")
@pytest.mark.parametrize("child", ["raises", "returns"])
async def test_a_process_that_a_reward_forks_and_lets_return_answers_nothing(child):
    async with pool_of(timeout_s=5) as pool:
        grader = await pool.grade(ask("pid"))
        assert (await pool.grade(ask("return_twice", child))).reward == 1.0
        assert await pool.grade(ask("pid")) == grader


@pytest.mark.usefixtures("module")
async def test_graders_inherit_neither_sockets_nor_tokens(monkeypatch):
    monkeypatch.setenv("DORA_TOKEN", "secret")
    with socket.create_server(("127.0.0.1", 0)) as server:
        os.set_inheritable(server.fileno(), True)  # even then
        name = os.readlink(f"/proc/self/fd/{server.fileno()}")
        assert name.startswith("socket:")
        async with pool_of() as pool:
            assert (await pool.grade(ask("token"))).reward == 0.0
            assert (await pool.grade(ask("holds", name))).reward == 0.0


@pytest.mark.usefixtures("module")
async def test_more_answers_than_graders_wait_and_are_all_graded():
    async with pool_of(graders=2) as pool:
        outcomes = await asyncio.gather(*(pool.grade(ask("pid")) for _ in range(20)))
    assert len({outcome.reward for outcome in outcomes}) == 2


@pytest.mark.usefixtures("module")
async def test_a_cancelled_request_leaves_no_answer_behind_for_the_next_one():
    async with pool_of() as pool:
        hanging = asyncio.create_task(pool.grade(ask("spin")))
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(hanging, timeout=0.3)
        assert isinstance(await pool.grade(ask("pid")), Graded)


@pytest.mark.usefixtures("module")
async def test_an_idle_grader_that_was_killed_is_replaced_without_cost_to_the_next_answer():
    async with pool_of() as pool:
        os.kill(int((await pool.grade(ask("pid"))).reward), signal.SIGKILL)
        await asyncio.wait_for(pool._graders[0].process._process.wait(), timeout=10)  # the loop has heard of it
        assert isinstance(await pool.grade(ask("pid")), Graded)


async def test_an_outcome_has_the_weighted_terms_of_its_reward():
    rewards = [RewardConfig(weight=2), RewardConfig(kind="length", weight=0.5), RewardConfig(sources=("hard",))]
    async with GraderPool(rewards, graders=1, timeout_s=30, memory_mb=2048, field="task.rewards") as pool:
        outcome = await pool.grade(GradeRequest("p", "a", "a", num_tokens=25, max_tokens=100, source="easy"))
    assert outcome == Graded(1.875, (("exact", 2.0), ("length", -0.125)))


@pytest.mark.usefixtures("module")
async def test_no_process_outlives_the_pool():
    async with pool_of(graders=3) as pool:
        outcomes = await asyncio.gather(*(pool.grade(ask("pid")) for _ in range(12)))
    assert not any(psutil.pid_exists(int(outcome.reward)) for outcome in outcomes)


async def test_metadata_that_cannot_be_sent_is_an_error_of_that_answer_alone():
    async with GraderPool([RewardConfig()], graders=1, timeout_s=30, memory_mb=2048, field="task.rewards") as pool:
        huge = GradeRequest(prompt="", response="a", answer="a", metadata={"number": 10**5000})
        assert (await pool.grade(huge)).reason.startswith("error: ")
        assert (await pool.grade(GradeRequest("", "a", "a", {}))).reward == 1.0


async def test_a_reward_gets_numbers_of_any_size(module):
    metadata = {"small": -(10**30), "large": 10**30, "none": float("nan"), "most": float("inf")}
    (module / "sizes.py").write_text(
        "def grade(metadata):\n    m = metadata\n"
        "    return [m['small'], m['large'], m['none'] != m['none'], m['most']] == [-10**30, 10**30, True, 1e999]\n"
    )
    async with pool_of(name="sizes:grade") as pool:
        assert (await pool.grade(GradeRequest("p", "r", metadata=metadata))).reward == 1.0


async def test_a_silent_endpoint_is_an_error_with_a_name_and_costs_no_process():
    with socket.create_server(("127.0.0.1", 0)) as silent:
        rewards = [RewardConfig(kind="http", url=f"http://127.0.0.1:{silent.getsockname()[1]}/")]
        async with GraderPool(rewards, graders=1, timeout_s=2, memory_mb=2048, field="task.rewards") as pool:
            reason = (await pool.grade(ask("x"))).reason
            assert reason.startswith(f"error: task.rewards.0 (http {rewards[0].url}): TimeoutError: timed out")


# --- starting ------------------------------------------------------------------------------------------------------


@pytest.mark.usefixtures("module")
async def test_a_reward_that_does_not_import_is_a_config_error_before_anything_is_graded():
    rewards = [RewardConfig(kind="function", name="no_such_module:f")]
    with pytest.raises(ConfigError, match=r"task.rewards.0.name: cannot import 'no_such_module'"):
        async with GraderPool(rewards, graders=1, timeout_s=5, memory_mb=2048, field="task.rewards"):
            pass


async def test_a_grader_that_never_starts_ends_the_run_with_its_last_words(module):
    (module / "dying.py").write_text(
        "import os, sys\nsys.stderr.write('no license')\nsys.stderr.flush()\nos._exit(4)\n"
    )
    with pytest.raises(RunFailed, match=r"no grader started in 3 attempts \(exit code 4: no license\)"):
        async with pool_of(name="dying:f"):
            pass


# --- orphans -------------------------------------------------------------------------------------------------------


#: A run's process, reduced to its pool: prints the process that the reward starts, and hangs with the reward.
CONTROLLER = """
import asyncio, sys, uvloop
from dora.config.schema import RewardConfig
from dora.tasks.pool import GraderPool
from dora.tasks.rewards import GradeRequest
async def main():
    rewards = [RewardConfig(kind="function", name="pool_rewards:grade")]
    async with GraderPool(rewards, graders=1, timeout_s=300, memory_mb=2048, field="task.rewards") as pool:
        await pool.grade(GradeRequest(prompt="p", response=sys.argv[1], answer=sys.argv[2], metadata={}))
uvloop.run(main())
"""


@pytest.mark.parametrize("hangs", ["leave_behind_and_hang", "power"])
def test_a_grader_and_all_that_it_started_end_with_a_controller_that_is_killed(module, hangs):
    pids = module / "pids"
    controller = subprocess.Popen([sys.executable, "-c", CONTROLLER, hangs, str(pids)])
    try:
        started = written(pids) if hangs != "power" else []
        below = until(lambda: len(found := children_of(controller.pid)) >= 3 + len(started) and found)
        assert {*below} >= {*started}
    finally:
        controller.kill()
        controller.wait()
    until_gone(below)


def test_a_grader_that_a_controller_leaves_idle_ends_with_it(module):
    idle = CONTROLLER.replace("await pool.grade(", "await asyncio.Event().wait(); (")
    controller = subprocess.Popen([sys.executable, "-c", idle, "", ""])
    try:
        below = until(lambda: len(found := children_of(controller.pid)) == 3 and found)
    finally:
        controller.kill()
        controller.wait()
    until_gone(below)


def children_of(pid: int) -> list[int]:
    return [child.pid for child in psutil.Process(pid).children(recursive=True)]


def written(pids: Path) -> list[int]:
    """The processes that a reward started, once it has written their ids down."""
    text = until(lambda: pids.exists() and pids.read_text().endswith("\n") and pids.read_text())
    return [int(pid) for pid in text.split()]


def until_gone(pids: list[int]) -> None:
    until(lambda: not any(psutil.pid_exists(pid) for pid in pids), timeout_s=5)


def until(ask, *, timeout_s: float = 60):
    """What another process shows, as soon as it does."""
    deadline = time.monotonic() + timeout_s
    while time.monotonic() < deadline:
        if found := ask():
            return found
        time.sleep(0.02)
    raise AssertionError(f"not within {timeout_s:g} s")
