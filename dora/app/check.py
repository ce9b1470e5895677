"""Validate everything, reach every server, say what is planned. It changes nothing.

With engines of our own, one is started for a moment on a free port to be compared with the trainer, and ended.
"""

from __future__ import annotations

import asyncio
import itertools
import os
import tempfile
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from functools import partial
from pathlib import Path

import numpy as np

from dora.app.estimate import Shapes, lines
from dora.app.inputs import Inputs, model_bytes, open_inputs
from dora.app.job import enter_graders
from dora.app.managed import ManagedServer
from dora.app.settings import SPARE_VERSIONS, settings_of
from dora.app.trial_push import Held, push_once
from dora.config.schema import Config
from dora.controller.effects import Graders
from dora.engine.api import Capabilities, GenerateRequest, InferenceEngine
from dora.engine.engines import open_engine
from dora.engine.shapes import require_same_shapes
from dora.errors import ConfigError, RemoteError
from dora.journal.access import require_group, set_umask
from dora.journal.run_folder import RunFolder
from dora.node.cuda import require_cuda
from dora.node.plan import assign_gpus, plan_engines
from dora.node.ports import require_free_ports
from dora.node.supervise import Node
from dora.tasks.pool import Graded
from dora.tasks.prompts import Prompt
from dora.tasks.rewards import GradeRequest

#: What is generated for the comparison of log-probs.
COMPARED_PROMPTS = 4
COMPARED_TOKENS = 16
#: Of each source of prompts, graded as if the reference were the answer.
GRADED_ROWS = 4
#: Largest difference of one log-prob that two correct implementations may show, by type.
TOLERANCE = {"float32": 1e-3, "bfloat16": 5e-2}
PROBE_TIMEOUT_S = 60.0


#: What was found out, under a word for what it is about.
Say = Callable[[str, str], None]


async def check(config: Config, say: Say, *, push: bool = False) -> None:
    """`say` is given each thing as it is found to be in order; ConfigError at the first that is not. `push`: give each
    server a version as a run does; it interrupts whoever else uses the servers, so it has to be asked for."""
    inputs = await asyncio.to_thread(open_inputs, config)
    settings = settings_of(config, eval_prompt_tokens=inputs.evaluations.prompt_tokens)
    require_free_ports(config)
    await asyncio.to_thread(require_cuda, config, environ=os.environ)
    RunFolder.require_possible(config.run.folder)
    require_group(config.run.group)
    async with AsyncExitStack() as stack:
        graders = await enter_graders(stack, config, inputs)
        say("inputs", f"model {inputs.model}, {inputs.tokenizer.vocab_size} tokens, prompts and rewards are readable")
        await _check_rewards(config, inputs, graders, say=say)
        engine = await stack.enter_async_context(open_engine(config, max_connections=8))
        async with _servers(config, inputs, engine) as urls:
            servers = [await _check_server(config, inputs, engine, url, say=say) for url in urls]
            if push:
                set_umask(config.run.group)
                await push_once(config, model=inputs.model, engine=engine, servers=servers)
                for server in servers:
                    say("push", f"{server.url}: loaded the model from the version store, and holds what it held")
    _say_plan(config, inputs, num_samples=len(settings.eval_prompt_tokens), say=say)


async def _check_rewards(config: Config, inputs: Inputs, graders: Graders, *, say: Say) -> None:
    """Call every reward on the reference answers of a few real rows: what raises on these raises on all others."""
    rows = await asyncio.to_thread(_first_prompts, inputs, GRADED_ROWS)
    asked = [("task.rewards", config.task.rewards, rows, graders.training)]
    sets = zip(config.eval.sets, inputs.evaluations.sets, graders.held_out, strict=True)
    for index, (one, held_out, pool) in enumerate(sets):
        if one.rewards:
            asked.append((f"eval.sets.{index}.rewards", one.rewards, [*held_out.prompts[:GRADED_ROWS]], pool))
    problems: dict[str, None] = {}
    for field, rewards, prompts, pool in asked:
        outcomes = [await pool.grade(GradeRequest(p.text, p.answer, p.answer, p.metadata)) for p in prompts]
        scores = [f"{outcome.reward:g}" for outcome in outcomes if isinstance(outcome, Graded)]
        if scores:
            say("rewards", f"{field}: reference answers score {', '.join(scores)}")
        name = f"{field}.0" if len(rewards) == 1 else field
        for outcome in outcomes:
            if not isinstance(outcome, Graded):
                said = outcome.reason.removeprefix("error: ")
                problems[said if said.startswith(field) else f"{name}: {said}"] = None
    if problems:
        raise ConfigError(*(f"{problem}; asked for the reference answer of a row" for problem in problems))


def _first_prompts(inputs: Inputs, count: int) -> list[Prompt]:
    """Those that a run asks first; fewer if the source has fewer."""
    found: list[Prompt] = []
    for position in itertools.count():
        prompt = inputs.stream.at(position)
        if prompt is None or len(found) == count:
            return found
        if not prompt.skipped:
            found.append(prompt)
    raise AssertionError("unreachable: positions do not end")


@asynccontextmanager
async def _servers(config: Config, inputs: Inputs, engine: InferenceEngine) -> AsyncIterator[Sequence[str]]:
    """The external servers, and one of those that a run would start, for as long as it takes."""
    if not config.num_managed:
        yield config.engine.urls
        return
    with tempfile.TemporaryDirectory(prefix="dora-check-") as folder:
        lease = Path(folder) / "lease"
        plan = plan_engines(config, model=inputs.model, lease=lease, environ=os.environ)[0]
        async with Node(logs=Path(folder), lease=lease) as node:
            child = node.add(plan, is_well=partial(engine.is_alive, timeout_s=PROBE_TIMEOUT_S))
            try:
                url = await ManagedServer(child, engine=engine, api_key=config.engine.api_key).start()
            except RemoteError as err:
                raise ConfigError(f"engine: {err}") from err
            yield [*config.engine.urls, url]


async def _check_server(config: Config, inputs: Inputs, engine: InferenceEngine, url: str, *, say: Say) -> Held:
    try:
        found = await engine.examine(url, timeout_s=PROBE_TIMEOUT_S)
        _check_room(config, found, url)
        require_same_shapes(url, found.model_path, model=inputs.model, path_map=config.engine.path_map)
        worst = await _compare_logprobs(config, inputs, engine, url)
    except RemoteError as err:
        raise ConfigError(f"{_field(config, url)}: {err}") from err
    context = found.context_tokens or "unstated"
    say("server", f"{url}: {found.release}, context {context}, {found.kv_tokens} KV tokens, "
                   f"{found.slots} slots, label '{found.label}'")  # fmt: skip
    limit = TOLERANCE[config.trainer.publish_dtype]
    verdict = "agree" if worst <= limit else "DIFFER: does the server hold the weights of model.path?"
    say("log-probs", f"server and trainer {verdict} (largest difference {worst:.1e}, limit {limit:.0e})")
    if worst > limit and url not in config.engine.urls:
        raise ConfigError(
            f"engine: its log-probs differ from the trainer's by up to {worst:.1e} under the same weights"
        )
    return Held(url, _field(config, url), found.label, is_model=worst <= limit)


def _field(config: Config, url: str) -> str:
    """What a user would change about this server."""
    return "engine.urls" if url in config.engine.urls else "engine"


def _check_room(config: Config, found: Capabilities, url: str) -> None:
    longest = config.longest_request
    if found.longest_request < longest:
        raise ConfigError(
            f"{_field(config, url)}: {url} holds {found.longest_request} tokens of one request, but "
            f"task.max_prompt_tokens + rollout.max_new_tokens is {longest}; lower one of them"
        )


async def _compare_logprobs(config: Config, inputs: Inputs, engine: InferenceEngine, url: str) -> float:
    """Largest difference between the server's log-probs of a few answers and the trainer's own."""
    prompts = _first_prompts(inputs, COMPARED_PROMPTS)
    answers: list[tuple[list[int], list[float]]] = []
    for number, prompt in enumerate(prompts):
        tokens: list[int] = []
        logprobs: list[float] = []

        def take(ids: Sequence[int], values: Sequence[float], into: tuple[list[int], list[float]]) -> None:
            into[0].extend(ids)
            into[1].extend(values)

        into = (tokens, logprobs)
        request = GenerateRequest(
            id=f"check-{os.getpid():08d}-{number:04d}",
            tokens=prompt.tokens,
            max_new_tokens=COMPARED_TOKENS,
            temperature=config.rollout.temperature,
            stop_tokens=inputs.tokenizer.eos_ids,
            seed=number,
            label="check",
        )
        await engine.generate(url, request, lambda ids, values, into=into: take(ids, values, into))  # type: ignore[misc]
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


def _say_plan(config: Config, inputs: Inputs, *, num_samples: int, say: Say) -> None:
    rollout, engine, trainer = config.rollout, config.engine, config.trainer
    version_mb = model_bytes(inputs.model) * 2 / 2**20
    versions = config.max_staleness + 1 + SPARE_VERSIONS
    gpus = assign_gpus(config, environ=os.environ)
    ranks = "started by others" if trainer.external else f"started here on {trainer.device}"
    live = 1 if config.rules.in_flight else config.max_staleness + 1
    broken = "".join(f"; breaks {name} by design" for name in config.rules.broken_by_design)
    say("strategy", f"{rollout.strategy}, K = {config.max_staleness} in force, "
                     f"at most {live} live versions (+ 1 under evaluation){broken}")  # fmt: skip
    say("job", f"{config.run.steps} steps of {rollout.groups_per_step} groups x {rollout.group_size} answers, "
                f"at most {rollout.max_new_tokens} tokens each")  # fmt: skip
    say("rollout", f"{len(engine.urls)} external servers, {config.num_managed} of kind {engine.kind} started here on "
                    f"{engine.device}")  # fmt: skip
    for index, names in enumerate(gpus):
        if names:
            say("GPUs", f"instance {len(engine.urls) + index}: CUDA_VISIBLE_DEVICES={names}")
    say("KV", f"{engine.slots} slots and {engine.kv_tokens} tokens per instance: every slot can hold "
               f"{engine.kv_tokens // engine.slots} tokens at once, the longest request has "
               f"{config.task.max_prompt_tokens + rollout.max_new_tokens}")  # fmt: skip
    say(
        "trainer",
        f"{trainer.ranks} ranks {ranks}, {trainer.dtype}, {trainer.micro_batch_tokens} tokens per micro-batch",
    )
    for what, text in lines(config, Shapes.read(inputs.model)):
        say(what, text)
    say("weights", f"at most {version_mb:.1f} MB per version; in {config.weights.memory_folder} if it has room for "
                    f"{versions}, else in the run folder")  # fmt: skip
    if engine.urls and config.weights.transfer == "disk":
        readers = f"the group {config.run.group}" if config.run.group else "this user alone: set run.group"
        say("access", f"servers of other users read versions as members of run.group; now {readers}")
    say("evaluation", f"{len(config.eval.sets)} sets, {num_samples} answers per evaluation")
    where = f"http://{config.status.host}:{config.status.port or '<free port>'}"
    say("status", where)
