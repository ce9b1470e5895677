"""mini-swe-agent with its default agent, of at most three steps, in an empty folder."""

from __future__ import annotations

import os
import tempfile
from importlib.resources import files

os.environ["MSWEA_COST_TRACKING"] = "ignore_errors"
os.environ["MSWEA_SILENT_STARTUP"] = "1"

import yaml
from minisweagent.agents.default import DefaultAgent
from minisweagent.environments.local import LocalEnvironment
from minisweagent.models.litellm_model import LitellmModel
from warm import Order, serve


def play(order: Order) -> int:
    config = yaml.safe_load(files("minisweagent").joinpath("config/mini.yaml").read_text())
    access = {"api_base": order["base_url"], "api_key": order["api_key"], "timeout": 600.0}
    with tempfile.TemporaryDirectory() as folder:
        model = LitellmModel(model_name="openai/policy", model_kwargs=access)
        limits = {"step_limit": 3, "cost_limit": 0.0}
        known = {name: config["agent"][name] for name in ("system_template", "instance_template")}
        agent = DefaultAgent(model, LocalEnvironment(cwd=folder), **known, **limits)
        agent.run(f"Print {order['row']['seed']}.")
    return agent.n_calls


serve(play)
