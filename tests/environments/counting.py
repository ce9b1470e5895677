"""An environment that notes each of its calls in a file, and repeats what it was told."""

from __future__ import annotations

import os

from dora.environments.api import Environment, Observation, Reset, Turn


class Counting(Environment):
    def __init__(self, file: str) -> None:
        self.file = os.open(file, os.O_WRONLY | os.O_APPEND | os.O_CREAT)

    async def reset(self, row):
        self.row = row
        return Reset([{"role": "user", "content": "begin"}])

    async def step(self, turn: Turn):
        number, _, text = turn.content.partition(" ")
        os.write(self.file, f"{self.row['name']} {number} {os.getpid()}\n".encode())
        return Observation([{"role": "user", "content": f"{number} {text[::-1]}"}])

    def close(self):
        os.close(self.file)


class Replayed(Counting):
    can_replay = True
