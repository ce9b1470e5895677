"""The job with a tool as a task set of verifiers: where does a key lead? (launch/configs/verifiers-cpu.toml)

One tool server serves all rollouts; which table it looks into is the state of the rollout that calls.
"""

import random

import verifiers.v1 as vf
from pydantic import Field

__all__ = ["LookUpTasks"]

KEYS, VALUES = [f"k{number}" for number in range(32)], [f"v{number}" for number in range(20)]


class LookUpState(vf.State):
    table: dict[str, str] = Field(default={})


class LookUpData(vf.TaskData):
    table: dict[str, str]
    answer: str


class LookUp(vf.Task[LookUpData, LookUpState]):
    async def setup(self, trace, runtime):
        trace.state.table = self.data.table

    @vf.reward
    async def correct(self, trace) -> float:
        """The value to which the first key leads."""
        return float(trace.last_reply.strip() == self.data.answer)

    @vf.metric
    async def num_turns(self, trace) -> float:
        return trace.num_turns


class Tables(vf.Toolset[vf.SharedToolsetConfig, LookUpState]):
    TOOL_PREFIX = None  # the tool is called look_up, and not tables_look_up

    @vf.tool
    def look_up(self, key: str) -> str:
        """Look a key up."""
        return self.state.table.get(key, "none")

    def register(self, mcp):
        super().register(mcp)
        mcp._tool_manager.get_tool("look_up").parameters = {  # in the order in which the shipped policy has seen it
            "additionalProperties": False,
            "properties": {"key": {"type": "string"}},
            "required": ["key"],
            "type": "object",
        }


class LookUpConfig(vf.TasksetConfig):
    num_tasks: int = 4096
    seed: int = 0


class LookUpTasks(vf.Taskset[LookUp, LookUpConfig]):
    def load(self):
        rng = random.Random(self.config.seed)
        for _ in range(self.config.num_tasks):
            first, second = rng.sample(KEYS, 2)
            table = {first: second, second: rng.choice(VALUES)}
            yield LookUp(LookUpData(prompt=first, table=table, answer=table[second]), self.config.task)

    @classmethod
    def toolsets(cls, config):
        return [Tables(vf.SharedToolsetConfig())]


if __name__ == "__main__":  # verifiers starts the tool server by running this file
    Tables.run()
