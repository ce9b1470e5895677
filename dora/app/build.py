"""Builds the parts of a run and connects packages that do not import each other.

Invariant: every part receives its dependencies in its constructor; nothing is filled in later.
"""

from __future__ import annotations

import os
import secrets
from collections.abc import Callable
from contextlib import AsyncExitStack
from functools import partial
from pathlib import Path

from dora.app.episodes import EpisodeInputs
from dora.app.managed import ManagedServer
from dora.app.node_ranks import NodeRanks
from dora.app.node_servers import add_servers
from dora.app.nodes import NodeVersions
from dora.app.opening import Opened
from dora.app.ranks import HostRanks
from dora.config.schema import Config
from dora.controller.copies import Copies
from dora.controller.effects import (
    Dismiss,
    Effects,
    Fetch,
    GradeAnswer,
    Graders,
    LoadAdapter,
    Push,
    RequestIds,
    Sampling,
    SendWave,
    StopAttempt,
    StreamAttempt,
    UnloadAdapter,
)
from dora.controller.episodes import EpisodeLimits, Episodes, NoEpisodes
from dora.controller.fleet import ExternalServer, Fleet, FleetLimits, KeptServer
from dora.controller.holders import Holders, OwnStore
from dora.controller.loop import Controller
from dora.controller.orders import Orders
from dora.controller.recorder import Recorder
from dora.controller.reporters import TICK_S, Reporters
from dora.controller.rollouts import RolloutWriter
from dora.controller.run_tasks import RunTasks
from dora.controller.served import Served, ServedAdapters, ServedWeights
from dora.controller.trainer_link import TrainerLink
from dora.core import commands as cmd
from dora.core.ids import InstanceId
from dora.engine.api import InferenceEngine
from dora.engine.engines import adapter_needs
from dora.errors import RemoteError, RunFailed
from dora.node.cluster import Cluster
from dora.node.plan import plan_engines, plan_sender
from dora.node.supervise import Node
from dora.transport.controller_end import ControllerEnd

REACH_TIMEOUT_S = 30.0


def make_fleet(
    opened: Opened, node: Node, *, engine: InferenceEngine, streams: int, cluster: Cluster | None, lease: Path
) -> Fleet:
    """Create the fleet: external servers first, then managed ones. `streams`: connections that this host allows."""
    config, model = opened.job.config, opened.job.inputs.model
    servers: list[KeptServer] = [ExternalServer(url, engine=engine) for url in config.engine.urls]
    plans = plan_engines(config, model=model, lease=lease, environ=os.environ) if cluster is None else []
    for plan in plans:
        child = node.add(plan, is_well=partial(engine.is_alive, timeout_s=REACH_TIMEOUT_S))
        servers.append(ManagedServer(child, engine=engine, api_key=config.engine.api_key))
    fleet = Fleet(
        servers,
        engine=engine,
        limits=FleetLimits(
            streams=streams,
            slots=config.engine.slots,
            kv_tokens=config.engine.kv_tokens,
            context_tokens=config.longest_request,
            model=model,
            path_map=config.engine.path_map,
            adapters=adapter_needs(config) if opened.job.settings.adapters else None,
            transfer=config.weights.transfer,
            routing=opened.job.inputs.routing is not None,
        ),
        inbox=opened.inbox,
        in_flight=opened.in_flight,
        rows=opened.job.state.instances,
        removed=opened.job.state.removed,
        version_of=opened.published.version_of,
        now=opened.now,
    )
    if cluster is not None:
        add_servers(fleet, cluster, config, engine=engine)
    return fleet


async def enter_pushing(
    stack: AsyncExitStack, config: Config, engine: InferenceEngine, *, logs: Path, lease: Path
) -> InferenceEngine:
    """Return the engine that pushes versions the way `weights.transfer` says: through folders or sender processes."""
    if config.weights.transfer == "disk":
        return engine
    plan = plan_sender(config, lease=lease, environ=os.environ)
    log, dtype, on_gpu = logs / f"{plan.name}.log", config.trainer.publish_dtype, config.trainer.device == "cuda"
    sending = engine.sending(plan.argv, env=plan.env, log=log, dtype=dtype, on_gpu=on_gpu)
    return await stack.enter_async_context(sending)


async def listen_for_ranks(
    config: Config, stack: AsyncExitStack, *, now: Callable[[], float], epoch: int = 0
) -> tuple[ControllerEnd, str, str]:
    """Listen for the ranks; return the endpoint, its address and the token that they need."""
    token, address = config.trainer.token or secrets.token_hex(16), config.trainer.address
    if config.num_training_nodes:
        address = f"{config.nodes.address.rpartition(':')[0]}:{address.rpartition(':')[2]}"
    size = None if config.trainer.min_ranks is not None else config.trainer.ranks
    end = ControllerEnd(address=address, token=token, world_size=size, now=now, epoch=epoch)
    address = await end.start()
    stack.push_async_callback(end.close)
    return end, address, token


async def start_trainer(
    opened: Opened,
    node: Node,
    stack: AsyncExitStack,
    *,
    recorder: Recorder,
    cluster: Cluster | None,
    lease: Path,
) -> TrainerLink:
    """Start the ranks; return the link to them."""
    job, config = opened.job, opened.job.config
    end, address, token = await listen_for_ranks(config, stack, now=opened.now, epoch=job.epoch)
    if cluster is not None and config.num_training_nodes:
        nodes = NodeRanks(cluster, opened, port=int(address.rpartition(":")[2]))
        try:
            await nodes.start()
        except RemoteError as err:
            raise RunFailed(str(err)) from err
        keep = nodes.keep if nodes.are_apart else None
        return opened.trainer_link(end, recorder, ranks=nodes, num_ranks=nodes.num_ranks, paths=nodes.paths, keep=keep)
    ranks = HostRanks(config, node, address=address, token=token, lease=lease, opened=opened)
    await ranks.start()
    return opened.trainer_link(end, recorder, ranks=ranks, num_ranks=config.trainer.ranks)


def make_controller(
    opened: Opened,
    *,
    engine: InferenceEngine,
    fleet: Fleet,
    graders: Graders,
    trainer: TrainerLink | RolloutWriter,
    recorder: Recorder,
    episodes: EpisodeInputs | None = None,
    cluster: Cluster | None = None,
) -> Controller:
    """Create the controller and everything through which it acts."""
    job, config = opened.job, opened.job.config
    ids = RequestIds(opened.folder.run_id, job.epoch)
    tasks = RunTasks()
    holders: Holders = OwnStore(opened.store)
    if cluster is not None and config.nodes.store == "relay":
        holders = NodeVersions(cluster, opened.store)
    effects = _effects(
        opened,
        engine,
        fleet,
        holders,
        ids,
        graders=graders,
        episodes=episodes,
        on_push_stage=recorder.on_push_stage,
        on_steps=recorder.on_steps,
    )
    calls = _episodes(opened, episodes, graders) if episodes is not None else NoEpisodes()
    orders = Orders(
        effects={**effects, cmd.CallEnvironment: calls} if isinstance(calls, Episodes) else effects,
        episodes=calls,
        stop=StopAttempt(engine, fleet, ids),
        train=SendWave(job.state.feed, opened.trajectories, opened.lineage, trainer, job.settings.group_size),
        restart=trainer.restart if isinstance(trainer, TrainerLink) else None,
        copies=_copies(opened, trainer, holders, tasks),
        fleet=fleet,
        trajectories=opened.trajectories,
        evaluations=job.inputs.evaluations,
        observer=recorder,
        inbox=opened.inbox,
        in_flight=opened.in_flight,
        commits=opened.commits,
        tasks=tasks,
    )
    reporters = _reporters(opened, engine, fleet, recorder)
    return Controller(
        job.state,
        inbox=opened.inbox,
        in_flight=opened.in_flight,
        orders=orders,
        journal=opened.journal,
        commits=opened.commits,
        trainer=trainer,
        beside=(reporters, fleet, opened.lines, *([cluster] if cluster is not None else [])),
        observer=recorder,
        now=opened.now,
        stop_timeout_s=config.trainer.stop_timeout_s,
    )


def _copies(opened: Opened, trainer: TrainerLink | RolloutWriter, holders: Holders, tasks: RunTasks) -> Copies:
    return Copies(
        opened.store,
        checkpoints=opened.folder.checkpoints,
        published=opened.published,
        window=opened.job.state.window,
        commits=opened.commits,
        tasks=tasks,
        keep=opened.job.config.weights.keep,
        holders=holders,
        drop_elsewhere=trainer.drop_checkpoint if isinstance(trainer, TrainerLink) else None,
    )


def _reporters(opened: Opened, engine: InferenceEngine, fleet: Fleet, recorder: Recorder) -> Reporters:
    return Reporters(
        opened.job.state.instances,
        trajectories=opened.trajectories,
        fleet=fleet,
        engine=engine,
        inbox=opened.inbox,
        commits=opened.commits,
        observer=recorder,
        now=opened.now,
        watchdog_s=opened.job.settings.watchdog_s,
        tick_s=TICK_S / opened.job.time_scale,
    )


def _effects(
    opened: Opened,
    engine: InferenceEngine,
    fleet: Fleet,
    holders: Holders,
    ids: RequestIds,
    *,
    graders: Graders,
    episodes: EpisodeInputs | None,
    on_push_stage: Callable[[InstanceId, str], None],
    on_steps: Callable[[int, int], None],
) -> Effects:
    config, inputs = opened.job.config, opened.job.inputs
    trajectories, published, now = opened.trajectories, opened.published, opened.now
    sampling = Sampling(
        seed=config.run.seed,
        max_new_tokens=config.rollout.max_new_tokens,
        temperature=config.rollout.temperature,
        eos_ids=inputs.tokenizer.eos_ids if episodes is None else episodes.renderer.stop_ids,
        evaluations=inputs.evaluations,
        has_turns=episodes is not None,
        max_row_tokens=config.max_row_tokens,
    )
    live, timeout_s = opened.job.settings.rules.in_flight, config.engine.push_timeout_s
    served: Served = ServedWeights(published)
    push: Push | LoadAdapter = Push(engine, fleet, holders, published, live, timeout_s, now, on_push_stage)
    unload: dict[type[cmd.Command], UnloadAdapter] = {}
    if opened.job.settings.adapters:
        served = ServedAdapters(ids.run_id, ids.epoch, fleet.labels)
        push = LoadAdapter(engine, fleet, holders, published, served, timeout_s, now)
        unload = {cmd.UnloadVersion: UnloadAdapter(engine, fleet, holders, served, timeout_s, now)}
    budget, fails = config.rollout.max_new_tokens, config.objective.truncated == "fail"
    return {
        cmd.Generate: StreamAttempt(engine, fleet, trajectories, published, served, sampling, ids, now, on_steps),
        cmd.GradeTrajectory: GradeAnswer(trajectories, inputs.tokenizer, graders, budget, fails, now),
        cmd.PushWeights: push,
        **unload,
        cmd.DismissInstance: Dismiss(fleet, now),
        cmd.FetchPrompts: Fetch(inputs.stream, opened.folded.visits, trajectories, now),
    }


def _episodes(opened: Opened, inputs: EpisodeInputs, graders: Graders) -> Episodes:
    config = opened.job.config
    return Episodes(
        inputs.pool,
        inputs.renderer,
        trajectories=opened.trajectories,
        is_graded=lambda trajectory: graders.of(trajectory) is not None,
        own_prompts=config.environment.own_prompts,
        limits=EpisodeLimits(
            max_turns=config.environment.max_turns,
            max_prompt_tokens=config.task.max_prompt_tokens,
            max_tokens=config.rollout.max_new_tokens,
            max_row_tokens=config.max_row_tokens,
            timeout_s=config.environment.episode_timeout_s,
        ),
        now=opened.now,
    )
