"""An MCP server whose tool says where a key leads, and the rows of its job (launch/configs/mcp-cpu.toml).

It has the official SDK and nothing of DORA. One process serves all episodes: the table is drawn from the argument
`seed`, which the model neither sees nor chooses (`environment.mcp[].arguments`).
"""

import asyncio
import random

KEYS, VALUES = [f"k{number}" for number in range(32)], [f"v{number}" for number in range(20)]
SCHEMA = {
    "type": "object",
    "properties": {"key": {"type": "string"}, "seed": {"type": "integer"}},
    "required": ["key", "seed"],
    "additionalProperties": False,
}


def draw(seed: int) -> dict[str, str]:
    """Return a table in which the first key leads to another one, and that to a value."""
    rng = random.Random(seed)
    first, second = rng.sample(KEYS, 2)
    return {first: second, second: rng.choice(VALUES)}


def rows(first: int, count: int) -> list[dict]:
    """Return `count` rows with the seeds from `first` on: where does the key of the prompt lead in the end?"""
    found = []
    for seed in range(first, first + count):
        (key, _), (_, value) = draw(seed).items()
        found.append({"prompt": key, "answer": value, "seed": seed})
    return found


async def main() -> None:
    """Serve until stdin ends."""
    from mcp import types
    from mcp.server.lowlevel import Server
    from mcp.server.stdio import stdio_server

    async def list_tools(context, params) -> types.ListToolsResult:
        return types.ListToolsResult(
            tools=[types.Tool(name="look_up", description="Look a key up.", input_schema=SCHEMA)]
        )

    async def call_tool(context, params) -> types.CallToolResult:
        found = draw(params.arguments["seed"]).get(params.arguments["key"], "none")
        return types.CallToolResult(content=[types.TextContent(type="text", text=found)])

    server = Server("lookup", on_list_tools=list_tools, on_call_tool=call_tool)
    async with stdio_server() as streams:
        await server.run(*streams, server.create_initialization_options())


if __name__ == "__main__":
    asyncio.run(main())
