"""A task set of verifiers whose tool is served over MCP, by one server for all rollouts, with a table for each.

The reward is the number of turns, and a checksum of the tokens that were sampled in them.
"""

import random
import zlib
from array import array

import verifiers.v1 as vf
from pydantic import Field

__all__ = ["ToolTasks"]

KEYS, VALUES = [f"k{number}" for number in range(32)], [f"v{number}" for number in range(20)]


class TableState(vf.State):
    table: dict[str, str] = Field(default={})


class TableData(vf.TaskData):
    table: dict[str, str]


class TableTask(vf.Task[TableData, TableState]):
    async def setup(self, trace, runtime):
        trace.state.table = self.data.table

    @vf.reward
    async def turns(self, trace) -> float:
        return trace.num_turns

    @vf.reward
    async def tokens(self, trace) -> float:
        [branch] = trace.branches
        sampled = [token for token, is_sampled in zip(branch.token_ids, branch.sampled_mask, strict=True) if is_sampled]
        return zlib.crc32(array("i", sampled).tobytes()) % 1000 / 1000


class Tables(vf.Toolset[vf.SharedToolsetConfig, TableState]):
    TOOL_PREFIX = None

    @vf.tool
    def look_up(self, key: str) -> str:
        """Look a key up."""
        return self.state.table.get(key, "none")


class ToolTasks(vf.Taskset[TableTask, vf.TasksetConfig]):
    def load(self):
        rng = random.Random(0)
        for _ in range(64):
            first, second = rng.sample(KEYS, 2)
            table = {first: second, second: rng.choice(VALUES)}
            yield TableTask(TableData(prompt=first, table=table), self.config.task)

    @classmethod
    def toolsets(cls, config):
        return [Tables(vf.SharedToolsetConfig())]


if __name__ == "__main__":
    Tables.run()
