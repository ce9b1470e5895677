"""A code agent of smolagents, of at most three steps."""

from __future__ import annotations

from smolagents import ActionStep, CodeAgent, OpenAIModel
from warm import Order, serve


def play(order: Order) -> int:
    model = OpenAIModel(
        model_id="policy", api_base=order["base_url"], api_key=order["api_key"], client_kwargs={"timeout": 600.0}
    )
    agent = CodeAgent(tools=[], model=model, max_steps=3, verbosity_level=0)
    agent.run(f"What is {order['row']['seed']} + 1?")
    steps = sum(isinstance(step, ActionStep) for step in agent.memory.steps)
    return steps  # the last one, which sums up at the limit, is a step, too


serve(play)
