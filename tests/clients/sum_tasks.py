"""A task set of verifiers without tools, and with a system message. Its reward is as in tool_tasks.py."""

import zlib
from array import array

import verifiers.v1 as vf

__all__ = ["SumTasks"]


class SumTask(vf.Task[vf.TaskData]):
    @vf.reward
    async def turns(self, trace) -> float:
        return trace.num_turns

    @vf.reward
    async def tokens(self, trace) -> float:
        [branch] = trace.branches
        sampled = [token for token, is_sampled in zip(branch.token_ids, branch.sampled_mask, strict=True) if is_sampled]
        return zlib.crc32(array("i", sampled).tobytes()) % 1000 / 1000


class SumConfig(vf.TasksetConfig):
    largest: int = 9


class SumTasks(vf.Taskset[SumTask, SumConfig]):
    def load(self):
        for a in range(self.config.largest + 1):
            for b in range(self.config.largest + 1):
                data = vf.TaskData(prompt=f"What is {a} + {b}?", system_prompt="You are good at sums.")
                yield SumTask(data, self.config.task)
