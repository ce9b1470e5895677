"""An agent that finds where a key leads, with OpenAI's client and nothing of DORA (launch/configs/agent-cpu.toml).

A warm program: each line of stdin is an episode, with the address and the key of its session, and any number of them
run at a time. What it prints for each is the reward.
"""

import asyncio
import json
import random
import sys

import openai

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


async def solve(client: openai.AsyncOpenAI, row: dict) -> float:
    """Let the model look up what it wants; return 1 if it says the value to which the first key leads."""
    rng = random.Random(row["seed"])
    first, second = rng.sample(KEYS, 2)
    table = {first: second, second: rng.choice(VALUES)}
    messages: list = [{"role": "user", "content": first}]
    while True:
        reply = await client.chat.completions.create(model="policy", messages=messages, tools=[LOOK_UP])
        message = reply.choices[0].message
        if not message.tool_calls:
            return float((message.content or "").strip() == table[second])
        messages.append(message.model_dump(exclude_none=True))
        for call in message.tool_calls:
            key = json.loads(call.function.arguments).get("key")
            found = {"role": "tool", "tool_call_id": call.id, "content": table.get(key, "none")}
            messages.append(found)


async def serve(client: openai.AsyncOpenAI, order: dict) -> None:
    """Play one episode, and print its reward."""
    own = client.with_options(base_url=order["base_url"], api_key=order["api_key"])  # shares its connections
    try:
        done = {"reward": await solve(own, order["row"])}
    except Exception as err:
        done = {"error": repr(err)}
    print(json.dumps({"episode": order["episode"], **done}), flush=True)


async def main() -> None:
    """Read orders until stdin ends."""
    lines = asyncio.StreamReader()
    await asyncio.get_running_loop().connect_read_pipe(lambda: asyncio.StreamReaderProtocol(lines), sys.stdin)
    playing = set()
    http = openai.DefaultAioHttpClient()  # the usual one takes 1.7 times the CPU with many requests open
    async with openai.AsyncOpenAI(base_url="http://127.0.0.1", api_key="of each session", http_client=http) as client:
        while line := await lines.readline():
            playing.add(task := asyncio.create_task(serve(client, json.loads(line))))
            task.add_done_callback(playing.discard)


asyncio.run(main())
