"""The job with a tool as a task set of verifiers: where does a key lead? (launch/configs/verifiers-cpu.toml)

Its harness plays in the process of the server. The usual one, `null`, starts a program for each rollout, and takes 2 s
of a core for each.
"""

import json
import random

import openai
import verifiers.v1 as vf

__all__ = ["LookUpHarness", "LookUpTasks"]

KEYS, VALUES = [f"k{number}" for number in range(32)], [f"v{number}" for number in range(20)]
LOOK_UP = {
    "type": "function",
    "function": {
        "name": "look_up",
        "description": "Look a key up.",
        "parameters": {  # in the order in which the shipped policy has seen it
            "additionalProperties": False,
            "properties": {"key": {"type": "string"}},
            "required": ["key"],
            "type": "object",
        },
    },
}


class LookUpData(vf.TaskData):
    table: dict[str, str]
    answer: str


class LookUp(vf.Task[LookUpData]):
    @vf.reward
    async def correct(self, trace) -> float:
        """Whether the last reply is the value to which the first key leads."""
        return float(trace.last_reply.strip() == self.data.answer)


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


class LookUpHarness(vf.Harness[vf.HarnessConfig]):
    EXECUTES_CODE = False
    NEEDS_CONTAINER = False
    shared = None  # its connections

    async def launch(self, ctx, trace, runtime, endpoint, secret, mcp_urls, data, tool_interception_url=None):
        """Let the model look up what it wants, until it answers."""
        LookUpHarness.shared = LookUpHarness.shared or openai.AsyncOpenAI(base_url=endpoint, api_key=secret)
        client = LookUpHarness.shared.with_options(base_url=endpoint, api_key=secret)
        messages = [{"role": "user", "content": data.prompt}]
        while True:
            reply = await client.chat.completions.create(model=ctx.model, messages=messages, tools=[LOOK_UP])
            message = reply.choices[0].message
            if not message.tool_calls:
                return vf.ProgramResult(exit_code=0, stdout="", stderr="")
            messages.append(message.model_dump(exclude_none=True))
            for call in message.tool_calls:
                found = data.table.get(json.loads(call.function.arguments).get("key"), "none")
                messages.append({"role": "tool", "tool_call_id": call.id, "content": found})
