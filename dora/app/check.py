"""Validates a configuration, contacts every server, and reports the plan; changes nothing.

If the run starts its own servers, one of them is started briefly on a free port and compared with the trainer. To
measure servers, all of them are.
"""

from __future__ import annotations

import asyncio
import os
import tempfile
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AsyncExitStack, ExitStack, asynccontextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np

from dora.app.checkpoint_time import interval_s, measure_rate, time_of_checkpoint
from dora.app.episodes import enter_inputs
from dora.app.estimate import Shapes, lines
from dora.app.fetch import look
from dora.app.inputs import Inputs
from dora.app.job import enter_graders
from dora.app.length_check import sample_lengths
from dora.app.loss_check import check_loss
from dora.app.managed import ManagedServer
from dora.app.sample_check import SourceSamples, first_prompts, sample_sources
from dora.app.settings import SPARE_VERSIONS, settings_of, version_bytes
from dora.app.speed_check import MeasuredServer, ServerSpeeds, measure_speeds
from dora.app.trainer_check import CheckedTrainer, check_trainer
from dora.app.trainer_load import shares_cores, working_trainer
from dora.app.trial_push import Held, push_once
from dora.config.schema import Config
from dora.controller.effects import Graders
from dora.engine.api import Capabilities, GenerateRequest, InferenceEngine
from dora.engine.engines import adapter_needs, open_engine, require_engine
from dora.engine.model_check import require_same_shapes
from dora.errors import ConfigError, RemoteError, one_line
from dora.journal.access import require_group, set_umask
from dora.journal.run_folder import RunFolder
from dora.node.cuda import require_cuda
from dora.node.limits import allow_open_files
from dora.node.plan import ProcessPlan, assign_gpus, plan_engines
from dora.node.ports import require_free_ports
from dora.node.supervise import Node
from dora.sim.workload import LengthModel
from dora.tasks.pool import Graded, GraderPool
from dora.tasks.prompts import Prompt
from dora.tasks.rewards import GradeRequest
from dora.trackers.kinds import require_installed

#: Number and length of the answers whose log-probs are compared.
COMPARED_PROMPTS = 4
COMPARED_TOKENS = 16
#: Number of rows whose reference answers are graded, for each list of rewards.
GRADED_ROWS = 4
#: Largest difference of a log-prob between two correct implementations, by dtype.
TOLERANCE = {"float32": 1e-3, "bfloat16": 5e-2}
PROBE_TIMEOUT_S = 60.0


#: Receives one finding: a topic and a text.
Report = Callable[[str, str], None]


@dataclass(frozen=True, slots=True)
class ToMeasure:
    """What is to be measured."""

    show: Callable[[str], None]  #: receives lines about the progress
    num_prompts: int = 0  #: whose answers are sampled for their lengths


@dataclass(frozen=True, slots=True)
class Measured:
    """What was measured."""

    speeds: ServerSpeeds
    lengths: LengthModel | None  #: if answers were to be sampled


@dataclass(frozen=True, slots=True)
class Checked:
    """What a check found beside its lines."""

    is_all_here: bool  #: otherwise not all was checked: what is not here yet is not downloaded
    measured: Measured | None = None  #: if servers were to be measured, and all is here
    eval_samples: int = 0  #: answers of one evaluation


async def check(config: Config, report: Report, *, push: bool = False, measure: ToMeasure | None = None) -> Checked:
    """Report each finding; raise ConfigError at the first problem.

    `push`: also push a version to each server, as a run does. `measure`: also measure the servers, which pushes too.
    Both interrupt other users of the servers.
    """
    if measure is not None and config.nodes.expected:
        raise ConfigError(
            "--measure: the servers are started by nodes, and only for a run; start one on each node, and name them in "
            "engine.urls, with nodes.expected = 0"
        )
    if measure is not None and measure.num_prompts and config.environment.name:
        raise ConfigError(
            "--sample: would sample single answers, but the run plays whole episodes (environment.name); omit it, "
            "and add [tools] to the measured workload"
        )
    config, missing = await look(config)
    for one in missing:
        report("download", str(one))
    if any(one.snapshot.repo.field != "model.path" for one in missing):
        report("not checked", "prompts, rewards, trainer and servers: they need what dora run will download")
        report_job(config, report)
        return Checked(is_all_here=False)
    async with AsyncExitStack() as stack:
        # A rollout may take seconds until it asks for something, so one of each source is begun, as by a run.
        own_prompts = config.environment.kind == "verifiers"
        inputs, episodes = await enter_inputs(stack, config, own_prompts=own_prompts)
        settings = settings_of(config, eval_prompt_tokens=inputs.evaluations.prompt_tokens)
        require_free_ports(config)
        require_engine(config)
        await asyncio.to_thread(require_cuda, config, environ=os.environ)
        RunFolder.require_possible(config.run.folder)
        require_group(config.run.group)
        require_installed(config.tracking.trackers)
        graders = await enter_graders(stack, config, inputs)
        report(
            "inputs", f"model {inputs.model}, {inputs.tokenizer.vocab_size} tokens, prompts and rewards are readable"
        )
        if episodes is not None:
            name, family = config.environment.name, episodes.renderer.family
            report("environment", f"{name} gives a first prompt; renderer {family} continues its turns exactly")
            if episodes.converse.tools:
                report("tools", one_line(", ".join(sorted(episodes.converse.tools))))
        if finding := await asyncio.to_thread(check_loss, config.objective):
            report("objective", finding)
        if (routing := inputs.routing) is not None:
            report("routing", f"replayed: {routing.top_k} of {routing.num_experts} experts in {len(routing.layers)} of "
                   f"{routing.num_layers} layers, {routing.row_bytes} bytes for each token")  # fmt: skip
        await _check_rewards(config, inputs, graders, report=report)
        if missing:
            report("not checked", "trainer and servers: they need the weights, which dora run will download")
            report_job(config, report)
            return Checked(is_all_here=False)
        if config.nodes.expected:
            report("nodes", "servers and ranks are theirs: none was tried here; dora check --nodes asks the nodes")
            _report_plan(config, inputs, num_samples=len(settings.eval_prompt_tokens), report=report)
            return Checked(is_all_here=True)
        trained = await asyncio.to_thread(check_trainer, config, inputs.model, stack.enter_context(ExitStack()))
        for topic, text in trained.lines:
            report(topic, text)
        report("checkpoint", await asyncio.to_thread(_check_checkpoint, config, inputs, trained.checkpoint_bytes))
        measured = await _check_servers(
            config,
            inputs,
            graders.training if episodes is None else None,
            trained,
            report=report,
            push=push,
            measure=measure,
        )
    num_samples = len(settings.eval_prompt_tokens)
    _report_plan(config, inputs, num_samples=num_samples, report=report)
    return Checked(is_all_here=True, measured=measured, eval_samples=num_samples)


async def _check_servers(
    config: Config,
    inputs: Inputs,
    grader: GraderPool | None,
    trained: CheckedTrainer,
    *,
    report: Report,
    push: bool,
    measure: ToMeasure | None,
) -> Measured | None:
    """Start or contact the servers and check them, with a sample if it can be graded; measure them if asked."""
    streams = 8 if measure is None else allow_open_files(config.num_instances * (config.slots or 1))
    async with (
        open_engine(config, max_connections=streams) as engine,
        _servers(config, inputs, engine, all_managed=measure is not None) as urls,
    ):
        servers = [await _check_server(config, inputs, engine, url, trained, report=report) for url in urls]
        if grader is None:
            report("sample", "none: an answer would be a single turn, and only a run plays whole episodes")
        else:
            samples = await _sample(config, inputs, grader, engine, urls[0])
            for topic, text in samples.lines:
                report(topic, text)
            if samples.has_failed:
                raise ConfigError("task.rewards: a reward failed on the answer above; correct it, then check again")
        if push:
            set_umask(config.run.group)
            held = [server.held for server in servers]
            await push_once(config, model=inputs.model, engine=engine, servers=held)
            for url in urls:
                report("push", f"{url}: loaded the model from the version store; its label is restored")
        if measure is None:
            return None
        speeds = await _measure_speeds(config, inputs, engine, servers, show=measure.show)
        lengths = None
        if measure.num_prompts and grader is not None:
            lengths = await sample_lengths(
                config,
                inputs,
                grader,
                engine=engine,
                servers=servers,
                num_prompts=measure.num_prompts,
                show=measure.show,
            )
        return Measured(speeds, lengths)


async def _measure_speeds(
    config: Config,
    inputs: Inputs,
    engine: InferenceEngine,
    servers: Sequence[MeasuredServer],
    *,
    show: Callable[[str], None],
) -> ServerSpeeds:
    """Measure the servers, beside a trainer if a run has one on the same cores."""
    set_umask(config.run.group)
    beside = shares_cores(config)
    if beside:
        show("starting a trainer")
    async with working_trainer(config, inputs.model) if beside else nullcontext():
        return await measure_speeds(
            config,
            model=inputs.model,
            vocab_size=inputs.vocab_size,
            engine=engine,
            servers=servers,
            show=show,
            beside_trainer=beside,
        )


async def _check_rewards(config: Config, inputs: Inputs, graders: Graders, *, report: Report) -> None:
    """Grade the reference answers of a few rows: a reward that raises on these would raise on every answer."""
    rows = await asyncio.to_thread(first_prompts, inputs, GRADED_ROWS)
    cases = [("task.rewards", config.task.rewards, rows, graders.training)]
    if graders.training is None:
        report("rewards", "only those of the environment; task.rewards has no term")
    sets = zip(config.eval.sets, inputs.evaluations.sets, graders.held_out, strict=True)
    for index, (one, held_out, pool) in enumerate(sets):
        if one.rewards:
            cases.append((f"eval.sets.{index}.rewards", one.rewards, [*held_out.prompts[:GRADED_ROWS]], pool))
    problems: dict[str, None] = {}
    for field, rewards, prompts, pool in cases:
        if pool is None:
            continue
        requests = [_reference(prompt, inputs, max_tokens=config.rollout.max_new_tokens) for prompt in prompts]
        outcomes = [await pool.grade(request) for request in requests]
        graded = zip(prompts, outcomes, strict=True)
        scores = [f"{o.reward:g}" for prompt, o in graded if prompt.answer and isinstance(o, Graded)]
        if scores:
            report("rewards", f"{field}: reference answers score {', '.join(scores)}")
        name = f"{field}.0" if len(rewards) == 1 else field
        for outcome in outcomes:
            if not isinstance(outcome, Graded):
                reason = outcome.reason.removeprefix("error: ")
                problems[reason if reason.startswith(field) else f"{name}: {reason}"] = None
    if problems:
        raise ConfigError(*(f"{problem} (when grading a row's reference answer)" for problem in problems))


def _check_checkpoint(config: Config, inputs: Inputs, num_bytes: int) -> str:
    rate, interval = measure_rate(config, num_bytes), interval_s(config, Shapes.read(inputs.model))
    return time_of_checkpoint(config, num_bytes, rate=rate, interval=interval)


def _reference(prompt: Prompt, inputs: Inputs, *, max_tokens: int) -> GradeRequest:
    """Return the request for a response that equals the reference answer."""
    num_tokens = len(inputs.tokenizer.encode(prompt.answer, special_tokens=False)) + 1
    return GradeRequest(
        prompt.text,
        prompt.answer,
        prompt.answer,
        prompt.metadata,
        num_tokens=num_tokens,
        max_tokens=max_tokens,
        source=prompt.label,
    )


@asynccontextmanager
async def _servers(
    config: Config, inputs: Inputs, engine: InferenceEngine, *, all_managed: bool
) -> AsyncIterator[Sequence[str]]:
    """Yield the URLs of the external servers and of one or all managed servers, which run while the context is open."""
    if not config.num_managed:
        yield config.engine.urls
        return
    with tempfile.TemporaryDirectory(prefix="dora-check-") as folder:
        lease = Path(folder) / "lease"
        plans = plan_engines(config, model=inputs.model, lease=lease, environ=os.environ)
        async with Node(logs=Path(folder), lease=lease) as node:

            async def start(plan: ProcessPlan) -> str:
                child = node.add(plan, is_well=partial(engine.is_alive, timeout_s=PROBE_TIMEOUT_S))
                return (await ManagedServer(child, engine=engine, api_key=config.engine.api_key).start()).url

            try:
                found = [await start(plan) for plan in (plans if all_managed else plans[:1])]
            except RemoteError as err:
                raise ConfigError(f"engine: {err}") from err
            yield [*config.engine.urls, *found]


async def _check_server(
    config: Config, inputs: Inputs, engine: InferenceEngine, url: str, trained: CheckedTrainer, *, report: Report
) -> MeasuredServer:
    try:
        found = await engine.examine(url, timeout_s=PROBE_TIMEOUT_S)
        found.require_meant(
            url, slots=config.engine.slots, transfer=config.weights.transfer, routing=inputs.routing is not None
        )
        if (needs := adapter_needs(config)) is not None:
            await engine.require_adapters(url, needs)
        _check_room(config, found, url)
        require_same_shapes(url, found.model_path, model=inputs.model, path_map=config.engine.path_map)
        worst = await _compare_logprobs(config, inputs, engine, url, trained)
    except RemoteError as err:
        raise ConfigError(f"{_field(config, url)}: {err}") from err
    context = found.context_tokens or "unstated"
    speculation = f", speculative decoding ({found.speculation})" if found.speculation else ""
    report("server", f"{url}: {found.release}, context {context}, {found.kv_tokens} KV tokens, "
                   f"{found.slots} slots, label '{found.label}'{speculation}")  # fmt: skip
    limit = TOLERANCE[config.trainer.publish_dtype]
    verdict = "agree" if worst <= limit else "DIFFER: does the server hold the weights of model.path?"
    under = " under model.path, without model.adapter" if inputs.adapter is not None else ""
    report("log-probs", f"server and trainer {verdict}{under} (largest difference {worst:.1e}, limit {limit:.0e})")
    if worst > limit and url not in config.engine.urls:
        raise ConfigError(
            f"engine: its log-probs differ from the trainer's by up to {worst:.1e} under the same weights"
        )
    if worst > limit and config.engine.adapters:
        raise ConfigError(
            f"engine.urls: {url} has other weights than model.path, and with engine.adapters a run loads only "
            "adapters; start it with the model"
        )
    return MeasuredServer(
        Held(url, _field(config, url), found.label, is_model=worst <= limit),
        slots=min(found.slots, config.engine.slots or found.slots),
        kv_tokens=min(found.kv_tokens, config.engine.kv_tokens or found.kv_tokens),
    )


async def _sample(config: Config, inputs: Inputs, pool: GraderPool, engine: InferenceEngine, url: str) -> SourceSamples:
    try:
        return await sample_sources(config, inputs, pool, engine, url)
    except RemoteError as err:
        raise ConfigError(f"{_field(config, url)}: {err}") from err


def _field(config: Config, url: str) -> str:
    """Return the setting to which an error about this server refers."""
    return "engine.urls" if url in config.engine.urls else "engine"


def _check_room(config: Config, found: Capabilities, url: str) -> None:
    longest = config.longest_request
    if found.longest_request < longest:
        raise ConfigError(
            f"{_field(config, url)}: {url} accepts requests of up to {found.longest_request} tokens, but "
            f"task.max_prompt_tokens + rollout.max_new_tokens is {longest}; lower one of them"
        )


async def _compare_logprobs(
    config: Config, inputs: Inputs, engine: InferenceEngine, url: str, trained: CheckedTrainer
) -> float:
    """Return the largest difference between the server's log-probs and the trainer's, over a few answers."""
    prompts = await asyncio.to_thread(first_prompts, inputs, COMPARED_PROMPTS)

    async def answer(number: int, prompt: Prompt) -> tuple[list[int], list[float]]:
        tokens: list[int] = []
        logprobs: list[float] = []

        def collect(new_tokens: Sequence[int], new_logprobs: Sequence[float]) -> None:
            tokens.extend(new_tokens)
            logprobs.extend(new_logprobs)

        request = GenerateRequest(
            id=f"check-{os.getpid():08d}-{number:04d}",
            tokens=prompt.tokens,
            max_new_tokens=COMPARED_TOKENS,
            temperature=config.rollout.temperature,
            stop_tokens=inputs.tokenizer.eos_ids,
            seed=number,
            label="check",
        )
        await engine.generate(url, request, collect)
        return tokens, logprobs

    answers = [await answer(number, prompt) for number, prompt in enumerate(prompts)]
    scored = await asyncio.to_thread(
        trained.score,
        [[*p.tokens, *tokens] for p, (tokens, _) in zip(prompts, answers, strict=True)],
        prompt_lengths=[len(p.tokens) for p in prompts],
    )
    return max(
        float(np.abs(np.asarray(mine) - theirs).max()) for mine, (_, theirs) in zip(scored, answers, strict=True)
    )


def report_job(config: Config, report: Report) -> None:
    """Report what the configuration alone says about the run."""
    rollout, engine, trainer = config.rollout, config.engine, config.trainer
    where = f"on {config.num_training_nodes} nodes" if config.num_training_nodes else "here"
    live = 1 if config.rules.in_flight else config.max_staleness + 1
    broken = "".join(f"; breaks {name} by design" for name in config.rules.broken_by_design)
    report("strategy", f"{rollout.strategy}, K = {config.max_staleness} in force, "
                       f"at most {live} live versions (+ 1 under evaluation){broken}")  # fmt: skip
    if config.task.description:
        report("task", config.task.description)
    report("job", f"{config.run.steps} steps of {rollout.groups_per_step} groups x {rollout.group_size} answers, "
                  f"at most {rollout.max_new_tokens} tokens each")  # fmt: skip
    num_rolling = config.nodes.expected - config.num_training_nodes
    there = f"on {num_rolling} nodes" if num_rolling else "here"
    managed = f"{config.num_managed} of kind {engine.kind} started {there} on {engine.device}"
    report("rollout", f"{len(engine.urls)} external servers, {managed}")
    room = "slots and tokens as each server reports"
    if config.slots is not None and config.kv_tokens is not None:
        room = (f"{config.slots} slots and {config.kv_tokens} tokens per instance: every slot can hold "
                f"{config.kv_tokens // config.slots} tokens at once")  # fmt: skip
    report("KV", f"{room}; the longest request has {config.longest_request} tokens")
    report(
        "trainer",
        f"{trainer.ranks} ranks started {where} on {trainer.device}, {trainer.dtype}, {trainer.micro_batch_tokens} "
        "tokens per micro-batch",
    )


def _report_plan(config: Config, inputs: Inputs, *, num_samples: int, report: Report) -> None:
    report_job(config, report)
    if config.tracking.trackers:
        report("tracking", ", ".join(config.tracking.trackers))
    for index, names in enumerate(assign_gpus(config, environ=os.environ) if not config.nodes.expected else []):
        if names:
            report("GPUs", f"instance {len(config.engine.urls) + index}: CUDA_VISIBLE_DEVICES={names}")
    for topic, text in lines(config, Shapes.read(inputs.model)):
        report(topic, text)
    version_mb = version_bytes(config, inputs.model) / 2**20
    versions = config.max_staleness + 1 + SPARE_VERSIONS
    report("weights", f"at most {version_mb:.1f} MB per version; in {config.weights.memory_folder} if {versions} "
                      "versions fit there, else in the run folder")  # fmt: skip
    if config.engine.urls and config.weights.transfer == "disk":
        readers = f"members of group {config.run.group}" if config.run.group else "this user only (run.group is unset)"
        report("access", f"versions are readable by {readers}")
    report(
        "evaluation",
        f"held-out sets: {len(config.eval.sets)}; {num_samples} answers per evaluation",
    )
    report("status", f"http://{config.status.host}:{config.status.port or '<free port>'}")
