"""Servers of OpenEnv, made with openenv-core as its templates are: `openenv_server.py text|tools PORT`."""

from __future__ import annotations

import sys

import uvicorn
from fastmcp import FastMCP
from openenv.core.env_server import Environment, create_app
from openenv.core.env_server.mcp_environment import MCPEnvironment
from openenv.core.env_server.mcp_types import CallToolAction, CallToolObservation
from openenv.core.env_server.types import Action, Observation, State

TURNS = 3


class Said(Action):
    message: str


class Heard(Observation):
    text: str


class Text(Environment):
    """It is over after TURNS actions; the last reward is their number."""

    SUPPORTS_CONCURRENT_SESSIONS = True

    def __init__(self) -> None:
        self.steps = 0

    def reset(self, seed=None, episode_id=None) -> Heard:
        self.steps = 0
        return Heard(text=f"Say something about {seed}.")

    def step(self, action: Said) -> Heard:
        self.steps += 1
        done = self.steps == TURNS
        return Heard(text=f"heard {len(action.message)} characters", reward=float(TURNS * done), done=done)

    @property
    def state(self) -> State:
        return State(step_count=self.steps)


class Tools(MCPEnvironment):
    """A table of keys, drawn from the seed."""

    SUPPORTS_CONCURRENT_SESSIONS = True

    def __init__(self) -> None:
        tools = FastMCP("lookup")

        @tools.tool
        def look_up(key: str) -> str:
            """Look a key up."""
            return f"v{(self.seed + len(key)) % 20}"

        super().__init__(tools)
        self.seed = 0

    def reset(self, seed=0, episode_id=None, **kwargs) -> Observation:
        self.seed = seed
        return Heard(text="Where does k19 lead?")

    def _step_impl(self, action, timeout_s=None, **kwargs) -> Observation:
        return Observation()

    @property
    def state(self) -> State:
        return State(step_count=0)


kinds = {"text": (Text, Said, Heard), "tools": (Tools, CallToolAction, CallToolObservation)}
app = create_app(*kinds[sys.argv[1]], env_name="checked", max_concurrent_envs=64)
uvicorn.run(app, host="127.0.0.1", port=int(sys.argv[2]), log_level="warning")
