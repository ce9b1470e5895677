"""Environments that fail as users' environments do. A comment marks each line that the failure must name."""

import asyncio
import json
import os
import sys
import threading
import time
from itertools import count

from dora.environments.api import AT_ONCE, End, Environment, Observation, Reset, ToolEnvironment, Turn, tool


class Clumsy(Environment):
    """The content of a turn names the method that answers it."""

    async def reset(self, row):
        return Reset([{"role": "user", "content": "hello"}])

    async def step(self, turn: Turn):  # returns_nothing
        return await getattr(self, turn.content)()

    async def pid(self):
        return says(str(os.getpid()))

    async def raises_in_a_library(self):
        return json.loads("{")  # raises_in_a_library

    async def raises_in_a_thread(self):
        return await asyncio.to_thread(json.loads, "{")  # raises_in_a_thread

    async def returns_nothing(self):
        return None

    async def sleeps(self):
        time.sleep(1_000)  # noqa: ASYNC251  # sleeps

    async def sleeps_in_a_task_of_its_own(self):
        await asyncio.create_task(self.sleeps())

    async def computes(self):
        return [sum(range(1_000)) for _ in count()]  # computes

    async def waits_a_little(self):
        await asyncio.sleep(0.1)
        return says("waited")

    async def forks(self):
        return fork()

    async def forks_in_a_thread(self):
        return await asyncio.to_thread(fork)

    async def prints(self):
        print("Z" + chr(0xFC) + chr(27) + "[31mred")  # noqa: T201
        sys.stderr.write("a warning" + chr(10))
        return says("printed")


class Forgetful(Clumsy):
    def step(self):  # Forgetful
        return End(1.0)


class Picky(Clumsy):
    def __init__(self, level):  # Picky
        self.level = level


def says(text):
    return Observation([{"role": "user", "content": text}])


def fork():
    """Return in both processes, in that of the environment once the other one has ended."""
    child = os.fork()
    if child:
        os.waitpid(child, 0)
    return says("parent" if child else "child")


async def slow(words: str) -> str:
    """Block the loop."""
    time.sleep(1_000)  # noqa: ASYNC251  # slow
    return words


IN_LOOP, IN_THREADS = ({of: kind(of) for of in (3, AT_ONCE)} for kind in (asyncio.Barrier, threading.Barrier))


async def meet(words: str, of: int = 3) -> str:
    """Return when so many calls are here."""
    await IN_LOOP[of].wait()
    return words


def meet_in_threads(words: str, of: int = 3) -> str:
    """Return when so many calls are here."""
    IN_THREADS[of].wait()
    return words


BEFORE, BEFORE_IN_THREADS = asyncio.Event(), threading.Event()


async def before(words: str) -> str:
    """Let the others return."""
    BEFORE.set()
    BEFORE_IN_THREADS.set()
    return words


async def after(words: str) -> str:
    """Return after the other."""
    await BEFORE.wait()
    BEFORE.clear()
    return words


def after_in_threads(words: str) -> str:
    """Return after the other."""
    BEFORE_IN_THREADS.wait()
    return words


def crash(words: str) -> str:
    """Fail."""
    raise SystemExit(json.loads(words))  # crash


class Workshop(ToolEnvironment):
    """Tools that share a state, beside functions that share none."""

    def __init__(self):
        super().__init__([slow, meet, meet_in_threads, before, after, after_in_threads, crash])
        self.under_way = self.number = 0

    @tool
    def take_a_number(self) -> str:
        """Return the next number, and how many others take one meanwhile."""
        self.under_way += 1
        self.number += 1
        others = max(self.under_way - 1 for _ in range(1_000_000))
        self.under_way -= 1
        return f"{self.number} {others}"
