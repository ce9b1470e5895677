"""An agent of OpenAI's Agents SDK with a tool, over the Responses API: in one piece, and streamed."""

from __future__ import annotations

import asyncio

import openai
from agents import Agent, MaxTurnsExceeded, OpenAIResponsesModel, Runner, function_tool, set_tracing_disabled
from warm import Order, serve

TURNS = 3


@function_tool
def look_up(key: str) -> str:
    """Look a key up."""
    return "k7"


def play(order: Order) -> int:
    return asyncio.run(talk(order))


async def talk(order: Order) -> int:
    async with openai.AsyncOpenAI(base_url=order["base_url"], api_key=order["api_key"], timeout=600.0) as client:
        model = OpenAIResponsesModel(model="policy", openai_client=client)
        agent = Agent(name="keys", instructions="You look up keys.", tools=[look_up], model=model)
        try:
            first = await Runner.run(agent, "Where is k3?", max_turns=TURNS)
        except MaxTurnsExceeded as err:
            return len(err.run_data.raw_responses) if err.run_data else 0
        history = [*first.to_input_list(), {"role": "user", "content": "And k4?"}]
        second = Runner.run_streamed(agent, history, max_turns=TURNS)
        try:
            async for _ in second.stream_events():
                pass
        except MaxTurnsExceeded:
            pass
        return len(first.raw_responses) + len(second.raw_responses)


set_tracing_disabled(True)
serve(play)
