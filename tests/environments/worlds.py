"""Environments that run in the hosts of the tests. The content of a turn names the function below that answers it."""

import asyncio
import os
import signal
import subprocess
import sys
import threading
from collections import Counter
from pathlib import Path

from dora.environments.api import End, Environment, Observation, Reset, ToolEnvironment, Turn, tool


def says(text: str) -> Observation:
    return Observation([{"role": "user", "content": text}])


class World(Environment):
    """What a turn names is called in a thread; what it returns may be awaited."""

    def __init__(self, closed: str = "") -> None:
        self.closed = closed

    async def reset(self, row):
        self.row = row
        if "reset" in row:
            return globals()[row["reset"]](self)
        return Reset([{"role": "user", "content": row.get("prompt", "hello")}])

    def step(self, turn: Turn):
        self.turn = turn
        return globals()[turn.content](self)

    def close(self):
        if self.closed:
            with Path(self.closed).open("a") as file:
                file.write(f"{self.row.get('prompt')}\n")


class Replayed(World):
    """A world that can be replayed, as far as its functions can."""

    can_replay = True


def pid(world):
    return says(str(os.getpid()))


def cores(world):
    return says(",".join(map(str, sorted(os.sched_getaffinity(0)))))


def finish(world):
    return End(0.5, [{"role": "user", "content": "bye"}])


def finish_if_graded(world):
    return End() if world.is_graded else End(0.25)


def finish_of_the_turn(world):
    return says(world.turn.finish)


def finish_ungraded(world):
    return End()


def turns(world):
    world.number = getattr(world, "number", 0) + 1
    return says(str(world.number))


# --- calls that do not return ---------------------------------------------------------------------------------------


def block(world):
    threading.Event().wait()


def spin(world):
    while True:
        pass


def power(world):
    return 9**9**9  # one endless C call: no other thread runs


async def forget(world):
    await asyncio.Event().wait()


async def stubborn(world):
    while True:
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            continue


# --- calls that end the host, or fail --------------------------------------------------------------------------------


def die(world):
    sys.stderr.write("no license")
    sys.stderr.flush()
    os._exit(3)


def die_once(world):
    """Kill the host of the first call, and answer the next one with the number of turns so far."""
    marker = Path(world.row["file"])
    if not marker.exists():
        marker.touch()
        os._exit(3)
    return turns(world)


def segfault(world):
    os.kill(os.getpid(), signal.SIGSEGV)


def leave(world):
    sys.exit("no more")


async def leave_the_loop(world):
    sys.exit("no more")


def fail(world):
    raise KeyError("level")


async def cancel_itself(world):
    raise asyncio.CancelledError


def raise_at_first(world):
    """Raise, unless the file that the row names is there."""
    file = Path(world.row["file"])
    if not file.exists():
        file.touch()
        raise ConnectionError("the service is being started")
    return Reset([{"role": "user", "content": "hello"}])


def bomb(world):
    return says(str(len(bytearray(1 << 40))))


def gather(world):
    hoard = []
    while True:
        hoard.append(bytearray(1 << 26))


def impossible(world):
    """Answer with what no template renders: a call without a function, in the policy's own turn."""
    messages = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b", "tool_calls": [{}]}]
    return Observation([*messages, {"role": "user", "content": "c"}], rewrites=True)


def odd_message(world):
    return Observation([{"role": "user", "content": "a", "tool_call_id": []}])


def rewrite(world):
    """Answer with the whole conversation: the first prompt, a long turn, and a long message."""
    first, turn = {"role": "user", "content": world.row["prompt"]}, {"role": "assistant", "content": "turn " * 2_000}
    return Observation([first, turn, {"role": "user", "content": "word " * 2_000}], rewrites=True)


def long(world):
    return says("word " * 10_000)


def odd_tool(world):
    return Reset([{"role": "user", "content": "a"}], tools=[{"type": "function", "function": "look_up"}])


def impossible_prompt(world):
    return Reset([{"role": "assistant", "content": "I begin"}])


def die_at_first(world):
    """Begin only if an earlier host has died."""
    marker = Path(world.row["file"])
    if not marker.exists():
        marker.touch()
        os._exit(3)
    return Reset([{"role": "user", "content": "hello"}])


# --- answers --------------------------------------------------------------------------------------------------------


def huge(world):
    return says("é" * 5_000_000)


def huge_twice(world):
    return Observation([{"role": "user", "content": "a" * 6_000}, {"role": "user", "content": "b" * 6_000}])


def surrogate(world):
    return says("a\udc80b")


def giant(world):
    return Observation([{"role": "user", "content": "a", "extra": "b" * (17 << 20)}])


def nothing(world):
    return None


def text(world):
    return "text"


def no_message(world):
    return Observation([])


def no_text(world):
    return Observation([{"role": "user", "content": None}])


def stranger(world):
    return Observation([{"role": "assistant", "content": "I"}])


def no_id(world):
    return Observation([{"role": "tool", "content": "7"}])


def not_json(world):
    return Observation([{"role": "user", "content": object()}])


def not_a_number(world):
    return End(float("nan"))


def beyond_32_bits(world):
    return End(1e39)


def endless_term(world):
    return End(1.0, terms={"right": 1e39})


def endless_metric(world):
    return End(1.0, metrics={"moves": 1e39})


def many_metrics(world):
    return End(1.0, metrics={f"{i}": 1.0 for i in range(65)})


def half(world):
    return Observation([{"role": "user", "content": "a"}], reward="much")


def chatty(world):
    print("x" * 500_000)  # noqa: T201
    sys.stdout.flush()
    os.write(1, b"y" * 500_000)
    sys.stderr.write("z" * 500_000)
    return says(f"read {len(sys.stdin.read())}")


def token(world):
    return says(str("DORA_TOKEN" in os.environ))


def child_and_hang(world):
    child = subprocess.Popen(["sleep", "1000"], start_new_session=True)
    Path(world.row["file"]).write_text(f"{child.pid}\n")
    threading.Event().wait()


# --- many at once ---------------------------------------------------------------------------------------------------

ARRIVED: Counter[str] = Counter()
ALL_THERE = asyncio.Event()
IN_THREADS = threading.Barrier(200)


async def meet(world):
    """Return when 200 episodes are here."""
    ARRIVED["async"] += 1
    if ARRIVED["async"] == 200:
        ALL_THERE.set()
    await ALL_THERE.wait()
    return says("met")


def meet_in_threads(world):
    IN_THREADS.wait()
    return says("met")


# --- tools ----------------------------------------------------------------------------------------------------------


def add(a: int, b: int = 1) -> int:
    """Add two numbers."""
    return a + b


async def shout(words: str) -> str:
    """Say it louder."""
    await asyncio.sleep(0)
    return words.upper()


class Shop(ToolEnvironment):
    """A table that only the host knows."""

    def __init__(self) -> None:
        super().__init__([add, shout])

    def reset(self, row):
        self.prices = row["prices"]
        return super().reset(row)

    @tool
    def price(self, item: str) -> float:
        """Look up a price."""
        return self.prices[item]


class WithoutStep(Environment):
    def reset(self, row: dict) -> Reset:
        return Reset([{"role": "user", "content": row["prompt"]}])


class Untyped(ToolEnvironment):
    @tool
    def price(self, item) -> float:
        """Look up a price."""
        return 1.0


def tools():
    return ToolEnvironment([add, shout])


def not_an_environment():
    return "text"
