"""`dora check`: validate everything, reach every server, print the plan. It changes nothing.

With engines of our own, one is started for a moment on a free port to be compared with the trainer, and ended.
"""

from __future__ import annotations

import asyncio
import os
import sys
import tempfile
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from functools import partial
from pathlib import Path

import numpy as np
import uvloop

from dora.cli.assemble import SPARE_VERSIONS, Inputs, model_bytes, open_inputs, settings_of
from dora.cli.estimate import Shapes, lines
from dora.cli.job import enter_graders
from dora.config.load import load
from dora.config.schema import Config
from dora.engine.client import EngineClient, GenerateRequest
from dora.engine.probe import Capabilities, is_alive, probe
from dora.engine.shapes import require_same_shapes
from dora.errors import ConfigError, RemoteError
from dora.journal.run_folder import RunFolder
from dora.node.plan import assign_gpus, plan_engines
from dora.node.ports import require_free_ports
from dora.node.supervise import Node

#: What is generated for the comparison of log-probs.
COMPARED_PROMPTS = 4
COMPARED_TOKENS = 16
#: Largest difference of one log-prob that two correct implementations may show, by type.
TOLERANCE = {"float32": 1e-3, "bfloat16": 5e-2}
PROBE_TIMEOUT_S = 60.0


def check(config_path: Path | None, overrides: Sequence[str]) -> None:
    """The command."""
    config = load(config_path, overrides, environ=os.environ)
    uvloop.run(_check(config))


async def _check(config: Config) -> None:
    inputs = await asyncio.to_thread(open_inputs, config)
    settings = settings_of(config, eval_prompt_tokens=inputs.evaluations.prompt_tokens)
    require_free_ports(config)
    RunFolder.require_possible(config.run.folder)
    async with AsyncExitStack() as stack:
        await enter_graders(stack, config)
        _say("inputs", f"model {inputs.model}, {inputs.tokenizer.vocab_size} tokens, prompts and rewards are readable")
        client = await stack.enter_async_context(EngineClient(max_connections=8, api_key=config.engine.api_key))
        async with _servers(config, inputs, client) as urls:
            for url in urls:
                await _check_server(config, inputs, client, url)
    _print_plan(config, inputs, num_samples=len(settings.eval_prompt_tokens))


@asynccontextmanager
async def _servers(config: Config, inputs: Inputs, client: EngineClient) -> AsyncIterator[Sequence[str]]:
    """The external servers, and one of those that a run would start, for as long as it takes."""
    if not config.num_managed:
        yield config.engine.urls
        return
    with tempfile.TemporaryDirectory(prefix="dora-check-") as folder:
        lease = Path(folder) / "lease"
        plan = plan_engines(config, model=inputs.model, lease=lease, environ=os.environ)[0]
        async with Node(logs=Path(folder), lease=lease) as node:
            try:
                url = await node.add(plan, is_well=partial(is_alive, client, timeout_s=PROBE_TIMEOUT_S)).start()
            except RemoteError as err:
                raise ConfigError(f"engine: {err}") from err
            yield [*config.engine.urls, url]


async def _check_server(config: Config, inputs: Inputs, client: EngineClient, url: str) -> None:
    try:
        found = await probe(client, url, timeout_s=PROBE_TIMEOUT_S)
        _check_room(config, found, url)
        require_same_shapes(url, found.model_path, model=inputs.model, path_map=config.engine.path_map)
        worst = await _compare_logprobs(config, inputs, client, url)
    except RemoteError as err:
        raise ConfigError(f"{_field(config, url)}: {err}") from err
    context = found.context_length or "unstated"
    _say("server", f"{url}: {found.server_version}, context {context}, {found.max_total_tokens} KV tokens, "
                   f"{found.max_running} slots, label '{found.label}'")  # fmt: skip
    limit = TOLERANCE[config.trainer.publish_dtype]
    verdict = "agree" if worst <= limit else "DIFFER: does the server hold the weights of model.path?"
    _say("log-probs", f"server and trainer {verdict} (largest difference {worst:.1e}, limit {limit:.0e})")
    if worst > limit and url not in config.engine.urls:
        raise ConfigError(
            f"engine: its log-probs differ from the trainer's by up to {worst:.1e} under the same weights"
        )


def _field(config: Config, url: str) -> str:
    """What a user would change about this server."""
    return "engine.urls" if url in config.engine.urls else "engine"


def _check_room(config: Config, found: Capabilities, url: str) -> None:
    longest = config.task.max_prompt_tokens + config.rollout.max_new_tokens
    room = min(found.context_length or found.max_total_tokens, found.max_total_tokens)
    if room < longest:
        raise ConfigError(
            f"{_field(config, url)}: {url} holds {room} tokens of one request, but task.max_prompt_tokens + "
            f"rollout.max_new_tokens is {longest}; lower one of them"
        )


async def _compare_logprobs(config: Config, inputs: Inputs, client: EngineClient, url: str) -> float:
    """Largest difference between the server's log-probs of a few answers and the trainer's own."""
    prompts = [p for p in (inputs.stream.at(i) for i in range(COMPARED_PROMPTS)) if p is not None]
    answers: list[tuple[list[int], list[float]]] = []
    for number, prompt in enumerate(prompts):
        tokens: list[int] = []
        logprobs: list[float] = []

        def take(ids: Sequence[int], values: Sequence[float], into: tuple[list[int], list[float]]) -> None:
            into[0].extend(ids)
            into[1].extend(values)

        into = (tokens, logprobs)
        request = GenerateRequest(
            rid=f"check-{os.getpid():08d}-{number:04d}",
            input_ids=prompt.tokens,
            max_new_tokens=COMPARED_TOKENS,
            temperature=config.rollout.temperature,
            stop_token_ids=inputs.tokenizer.eos_ids,
            seed=number,
            extra_key="check",
        )
        await client.generate(url, request, lambda ids, values, into=into: take(ids, values, into))  # type: ignore[misc]
        answers.append(into)
    from dora.trainer.score import score

    scored = await asyncio.to_thread(
        score,
        inputs.model,
        [[*p.tokens, *tokens] for p, (tokens, _) in zip(prompts, answers, strict=True)],
        prompt_lengths=[len(p.tokens) for p in prompts],
        temperature=config.rollout.temperature,
        device=config.trainer.device,
        dtype=config.trainer.dtype,
    )
    return max(
        float(np.abs(np.asarray(mine) - theirs).max()) for mine, (_, theirs) in zip(scored, answers, strict=True)
    )


def _print_plan(config: Config, inputs: Inputs, *, num_samples: int) -> None:
    rollout, engine, trainer = config.rollout, config.engine, config.trainer
    version_mb = model_bytes(inputs.model) * 2 / 2**20
    versions = config.max_staleness + 1 + SPARE_VERSIONS
    gpus = assign_gpus(config, environ=os.environ)
    ranks = "started by others" if trainer.external else f"started here on {trainer.device}"
    live = 1 if config.rules.in_flight else config.max_staleness + 1
    broken = "".join(f"; breaks {name} by design" for name in config.rules.broken_by_design)
    _say("strategy", f"{rollout.strategy}, K = {config.max_staleness} in force, "
                     f"at most {live} live versions (+ 1 under evaluation){broken}")  # fmt: skip
    _say("job", f"{config.run.steps} steps of {rollout.groups_per_step} groups x {rollout.group_size} answers, "
                f"at most {rollout.max_new_tokens} tokens each")  # fmt: skip
    _say("rollout", f"{len(engine.urls)} external servers, {config.num_managed} of kind {engine.kind} started here on "
                    f"{engine.device}")  # fmt: skip
    for index, names in enumerate(gpus):
        if names:
            _say("GPUs", f"instance {len(engine.urls) + index}: CUDA_VISIBLE_DEVICES={names}")
    _say("KV", f"{engine.slots} slots and {engine.kv_tokens} tokens per instance: every slot can hold "
               f"{engine.kv_tokens // engine.slots} tokens at once, the longest request has "
               f"{config.task.max_prompt_tokens + rollout.max_new_tokens}")  # fmt: skip
    _say(
        "trainer",
        f"{trainer.ranks} ranks {ranks}, {trainer.dtype}, {trainer.micro_batch_tokens} tokens per micro-batch",
    )
    for what, text in lines(config, Shapes.read(inputs.model)):
        _say(what, text)
    _say("weights", f"at most {version_mb:.1f} MB per version; in {config.weights.memory_folder} if it has room for "
                    f"{versions}, else in the run folder")  # fmt: skip
    _say("evaluation", f"{len(config.eval.sets)} sets, {num_samples} answers per evaluation")
    where = f"http://{config.status.host}:{config.status.port or '<free port>'}"
    _say("status", where)
    sys.stdout.write("everything is in order; nothing was changed\n")


def _say(what: str, text: str) -> None:
    sys.stdout.write(f"{what:<11}{text}\n")
