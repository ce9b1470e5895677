"""What episodes of several turns need in addition to a run's other inputs: environment hosts and a renderer."""

from __future__ import annotations

import asyncio
from contextlib import AsyncExitStack
from dataclasses import dataclass

from dora.app.inputs import Inputs, open_inputs
from dora.app.task_sets import hosted, with_task_sets
from dora.config.schema import Config
from dora.controller.episodes import Conversations
from dora.environments.pool import EnvironmentPool
from dora.environments.renderer import Renderer, open_renderer
from dora.errors import ConfigError
from dora.seed.policy import model_folder
from dora.tasks.tokenizer import load_tokenizer


@dataclass(frozen=True)
class EpisodeInputs:
    """The environment of a run."""

    pool: EnvironmentPool
    renderer: Renderer
    converse: Conversations


async def enter_inputs(
    stack: AsyncExitStack, config: Config, *, own_prompts: bool = True
) -> tuple[Inputs, EpisodeInputs | None]:
    """Open the inputs of a run, and its environment if it has one.

    `own_prompts`: episodes may begin with prompts of their own, which are not known yet; else one is begun for each.
    """
    config = await asyncio.to_thread(with_task_sets, stack, config)
    episodes = await _enter_environment(stack, config, own_prompts=own_prompts and config.environment.own_prompts)
    converse = episodes.converse if episodes is not None else None
    return await asyncio.to_thread(open_inputs, config, converse=converse), episodes


async def _enter_environment(stack: AsyncExitStack, config: Config, *, own_prompts: bool) -> EpisodeInputs | None:
    """Open the renderer and start a host; None if the run has no environment. ConfigError names the invalid field."""
    if not config.environment.name:
        return None
    model = model_folder(config.model.path, revision=config.model.revision)
    tokenizer = await asyncio.to_thread(load_tokenizer, model, thinking=config.model.thinking)
    renderer = await asyncio.to_thread(open_renderer, tokenizer, settings=config.environment.renderer)
    settings = hosted(config.environment, model=model, renderer=renderer.settings)
    pool = await stack.enter_async_context(EnvironmentPool(settings, max_tokens=config.longest_request))
    if not (pool.gives_rewards or config.task.rewards):
        raise ConfigError(
            f"task.rewards: {config.environment.name} ends its episodes without a reward of its own, so they must be "
            "graded; add [[task.rewards]], or override step of the environment and return End(reward=...)"
        )
    return EpisodeInputs(pool, renderer, Conversations(pool, renderer, own_prompts=own_prompts))
