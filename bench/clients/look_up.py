"""The environment of bench/episodes.py: a tool that answers after a while."""

from __future__ import annotations

import asyncio

from dora.environments.api import End, Observation, ToolEnvironment, Turn, tool


class LookUp(ToolEnvironment):
    """Ends after so many turns; each of its calls takes `call_s`."""

    def __init__(self, *, turns: int, call_s: float) -> None:
        self.left = turns
        self.call_s = call_s

    async def step(self, turn: Turn) -> Observation | End:
        self.left -= 1
        outcome = await super().step(turn)
        return outcome if self.left else End(reward=1.0)

    @tool
    async def look_up(self, key: str, count: int) -> str:
        """Look a key up."""
        await asyncio.sleep(self.call_s)
        return f"{key} is in place {count} of the table, where nothing else is."
