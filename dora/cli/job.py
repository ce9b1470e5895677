"""One run from its checked inputs to its end: build the parts, start what is ours, drive the controller.

Order: everything that can be refused is checked before a folder or a process exists. At the end, whatever the reason,
the exit stack undoes everything in reverse: processes first, then sockets and files. Called by `run`.
"""

from __future__ import annotations

import asyncio
import gc
import hashlib
import os
import secrets
import signal
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import partial
from importlib.metadata import version as package_version
from pathlib import Path

import structlog

from dora.cli import resume as resuming
from dora.cli.assemble import (
    SPARE_VERSIONS,
    Inputs,
    configure_message,
    model_bytes,
    open_inputs,
    rollout_only_settings,
    settings_of,
)
from dora.cli.summary import print_summary
from dora.config.load import dump
from dora.config.schema import Config, RewardConfig
from dora.controller.effects import Io
from dora.controller.fleet import ExternalServer, Fleet, Limits, Server
from dora.controller.loop import TICK_S, Controller, Outcome
from dora.controller.membership import Membership
from dora.controller.observer import RunObserver
from dora.controller.rollouts import RolloutWriter
from dora.controller.trainer_link import TrainerLink
from dora.controller.trajectories import Trajectories
from dora.core import events as ev
from dora.core.invariants import check as check_invariants
from dora.core.state import ControllerState
from dora.core.strategies import Settings
from dora.engine.client import EngineClient
from dora.engine.probe import is_alive
from dora.errors import ConfigError, RunFailed
from dora.journal.codec import FORMAT, Epoch, Header
from dora.journal.run_folder import RunFolder
from dora.journal.tokens import TokenWriter
from dora.journal.writer import JournalWriter
from dora.log import configure_logging
from dora.node.plan import plan_engines, plan_sender, plan_trainer
from dora.node.ports import require_free_ports
from dora.node.supervise import Node
from dora.status.facts import ShellFacts
from dora.status.server import StatusServer
from dora.status.terminal import show_progress
from dora.tasks.pool import GraderPool
from dora.transport.controller_end import ControllerEnd
from dora.weights.distributed import Distributed
from dora.weights.push import Disk, Transport
from dora.weights.senders import Senders
from dora.weights.store import VersionStore, choose_memory_root, claim, sweep_orphans

log = structlog.get_logger(__name__)

#: A search of everything takes 0.3 s at 10,000 instances and halts the event loop; the core makes no garbage in cycles,
#: so it comes a hundred times less often than Python's own rule has it.
GC_THRESHOLDS = (700, 10, 1000)
#: How long the ranks may take to end after Stop; the node's exit kills what is left.
STOP_TIMEOUT_S = 30.0
#: Open streams beyond one per slot: for requests that are just ending, and probes.
STREAM_MARGIN = 64
#: Instances that may join at run time: their streams are counted too.
MAX_JOINED = 32
REACH_TIMEOUT_S = 30.0


@dataclass(frozen=True)
class Job:
    """What is known before anything starts."""

    config: Config
    inputs: Inputs
    settings: Settings
    folder: RunFolder
    state: ControllerState
    started_at: float  # seconds since the run began; above 0 when resumed
    epoch: int  # of the controller; 0 for the first
    rollout_only: bool
    time_scale: float  # seconds of the run in one of the wall clock; only paced runs have another than 1


async def run_job(config: Config, *, earlier: RunFolder | None, rollout_only: bool, time_scale: float = 1.0) -> Outcome:
    """Check, build, drive."""
    inputs = await asyncio.to_thread(open_inputs, config)
    settings = settings_of(config, eval_prompt_tokens=inputs.evaluations.prompt_tokens)
    if rollout_only:
        settings = rollout_only_settings(settings)
    require_free_ports(config)
    async with AsyncExitStack() as stack:
        graders, eval_graders = await enter_graders(stack, config)
        connections = (config.num_instances + MAX_JOINED) * config.engine.slots + STREAM_MARGIN
        client = await stack.enter_async_context(
            EngineClient(
                max_connections=connections,
                api_key=config.engine.api_key,
                vocab_size=inputs.vocab_size,
            )
        )
        for url in config.engine.urls:
            if not await is_alive(client, url, timeout_s=REACH_TIMEOUT_S):
                raise ConfigError(f"engine.urls: {url} does not answer; start the server or correct the address")
        job = _prepare(config, inputs, settings, earlier=earlier, rollout_only=rollout_only, time_scale=time_scale)
        return await _Run(job, stack, client=client, graders=graders, eval_graders=eval_graders).drive()


async def enter_graders(stack: AsyncExitStack, config: Config) -> tuple[GraderPool, list[GraderPool]]:
    """One pool for training, and one for each held-out set that has rewards of its own."""
    task = config.task

    def pool(rewards: Sequence[RewardConfig], field: str) -> GraderPool:
        return GraderPool(
            rewards,
            graders=task.graders,
            timeout_s=task.grade_timeout_s,
            memory_mb=task.grader_memory_mb,
            field=field,
        )

    graders = await stack.enter_async_context(pool(task.rewards, "task.rewards"))
    eval_graders = []
    for index, one in enumerate(config.eval.sets):
        own = pool(one.rewards, f"eval.sets.{index}.rewards") if one.rewards else None
        eval_graders.append(await stack.enter_async_context(own) if own is not None else graders)
    return graders, eval_graders


def _prepare(
    config: Config,
    inputs: Inputs,
    settings: Settings,
    *,
    earlier: RunFolder | None,
    rollout_only: bool,
    time_scale: float,
) -> Job:
    """The run folder, and the state to begin with."""
    if earlier is None:
        folder = RunFolder.create(config.run.folder, name=config.run.name)
        folder.config.write_text(dump(config), encoding="utf-8")
        return Job(config, inputs, settings, folder, ControllerState(settings), 0.0, 0, rollout_only, time_scale)
    recorded, state, last_at, epoch = resuming.read_run(earlier)
    changed = [n for n in settings.__struct_fields__ if getattr(settings, n) != getattr(recorded, n)]
    if changed:
        raise ConfigError(f"--resume: {', '.join(changed)} cannot change within a run; start a new one for that")
    return Job(config, inputs, settings, earlier, state, last_at, epoch, rollout_only, time_scale)


class _Run:
    """The parts of one run and how they are tied together."""

    def __init__(
        self,
        job: Job,
        stack: AsyncExitStack,
        *,
        client: EngineClient,
        graders: GraderPool,
        eval_graders: list[GraderPool],
    ) -> None:
        self.job = job
        self.stack = stack
        self.client = client
        self.graders = graders
        self.eval_graders = eval_graders
        began = time.monotonic() - job.started_at / job.time_scale
        self.now: Callable[[], float] = lambda: (time.monotonic() - began) * job.time_scale
        self.first: list[ev.Event] = []  # facts known before the start
        self.controller: Controller | None = None

    async def drive(self) -> Outcome:
        """Build, run, end."""
        job, folder, state = self.job, self.job.folder, self.job.state
        configure_logging(folder.log, level=job.config.log.level, run=folder.run_id, role="controller")
        node = await self.stack.enter_async_context(Node(logs=folder.logs, lease=folder.lease))
        store = self._open_store()
        tokens = self.stack.enter_context(TokenWriter(folder.tokens))
        journal = self.stack.enter_context(JournalWriter(folder.journal, tokens=tokens))
        trajectories = Trajectories(tokens, group_size=job.settings.group_size)
        checkpoint = self._restore(trajectories, store)
        self._begin_journal(journal)
        fleet = self._fleet(node)
        observer = self._observer(trajectories, fleet)
        trainer: RolloutWriter | TrainerLink
        if job.rollout_only:
            trainer = self._rollout_writer(store, observer)
        else:
            trainer = await self._start_trainer(node, store, checkpoint=checkpoint, observer=observer)
        io = self._io(fleet, store, trajectories)
        self.controller = Controller(
            state, io=io, journal=journal, trainer=trainer, observer=observer, tick_s=TICK_S / job.time_scale
        )
        status = await self.stack.enter_async_context(
            StatusServer(
                observer.snapshot,
                host=job.config.status.host,
                port=job.config.status.port,
                requests=Membership(fleet, state=state, client=self.client, ask=self.controller.ask, now=self.now),
                token=job.config.status.token or self._draw_token(),
            )
        )
        _stop_on_signals(self.controller, node)
        gc.freeze()  # what the start made stays
        gc.set_threshold(*GC_THRESHOLDS)
        token = folder.status_token if job.config.status.token is None else None
        async with show_progress(observer.snapshot, status_url=status.url, folder=folder.root, token=token):
            try:
                outcome = await self.controller.run(self.first)
            except RunFailed as err:
                go_on = "" if state.finished and not state.stalled else f"; go on with dora run --resume {folder.root}"
                raise RunFailed(f"{err}; its logs are in {folder.logs}{go_on}") from err
            observer.end(outcome)
        check_invariants(state)
        if isinstance(trainer, TrainerLink) and outcome.finished:
            await self._end_trainer(trainer, node, outcome.reason)
        journal.sync()
        print_summary(observer.snapshot(), folder=folder)
        if outcome.finished and (lost := store.stranded(state.window.entries)):
            raise RunFailed(
                f"{folder.versions} has no room for the last version, {lost[-1]}; it is in {store.memory_root} alone, "
                "which is memory: copy it from there"
            )
        return outcome

    async def _emit(self, event: ev.Event) -> None:
        assert self.controller is not None, "nothing happens before the controller runs"
        await self.controller.emit(event)

    def _draw_token(self) -> str:
        """A token for this run, in a file that nobody else may read."""
        token = secrets.token_hex(16)
        path = self.job.folder.status_token
        path.touch(mode=0o600)
        path.chmod(0o600)
        path.write_text(token + "\n", encoding="utf-8")
        return token

    # -- parts ----------------------------------------------------------------------------------------------------

    def _open_store(self) -> VersionStore:
        """Live versions in memory where there is room for all of them, else in the run folder."""
        config, folder = self.job.config, self.job.folder
        sweep_orphans(config.weights.memory_folder)
        needed = (config.max_staleness + 1 + SPARE_VERSIONS) * 2 * model_bytes(self.job.inputs.model)
        root = choose_memory_root(
            config.weights.memory_folder, run_id=folder.run_id, needed_bytes=needed, fallback=folder.versions
        )
        if root != folder.versions:
            self.stack.enter_context(claim(root))
        store = VersionStore(memory_root=root, durable_root=folder.versions)
        self.stack.callback(self._close_store, store)
        store.sweep()
        return store

    def _close_store(self, store: VersionStore) -> None:
        """What a full disk had no room for is neither deleted nor passed over in silence."""
        needed = list(self.job.state.window.entries)
        if stranded := store.stranded(needed):
            log.error("versions_in_memory_only", versions=stranded, kept_in=str(store.memory_root))
        store.close(needed=needed)

    def _restore(self, trajectories: Trajectories, store: VersionStore) -> Path | None:
        """What an earlier controller left; returns the trainer's checkpoint."""
        job = self.job
        if not job.epoch:
            return None
        resumed = resuming.restore(
            job.folder, job.state, at=self.now(), epoch=job.epoch, trajectories=trajectories, inputs=job.inputs
        )
        resuming.require_versions(job.state, store)
        for version in store.stranded(job.state.window.entries):
            store.copy_durable(version)
        self.first.append(resumed.restarted)
        for instance in [i for i in job.state.instances if i >= job.config.num_instances]:
            sys.stderr.write(f"dora: instance {instance} had joined at run time and is forgotten; add it again\n")
            self.first.append(ev.InstanceRemoved(self.now(), instance))
        return resumed.checkpoint

    def _begin_journal(self, journal: JournalWriter) -> None:
        job = self.job
        if not job.epoch:
            created = datetime.now(UTC).isoformat(timespec="seconds")
            journal.append(Header(FORMAT, job.folder.run_id, created, package_version("dora-rl"), job.settings))
        digest = hashlib.sha256(job.folder.config.read_bytes()).hexdigest()
        journal.append(Epoch(job.epoch, job.started_at, digest))
        journal.flush()

    def _fleet(self, node: Node) -> Fleet:
        config = self.job.config
        servers: list[Server] = [ExternalServer(url, client=self.client) for url in config.engine.urls]
        lease = self.job.folder.lease.resolve()
        for plan in plan_engines(config, model=self.job.inputs.model, lease=lease, environ=os.environ):
            servers.append(node.add(plan, is_well=partial(is_alive, self.client, timeout_s=REACH_TIMEOUT_S)))
        return Fleet(
            servers,
            client=self.client,
            limits=Limits(
                instances=config.num_instances + MAX_JOINED,
                slots=config.engine.slots,
                kv_tokens=config.engine.kv_tokens,
                context_tokens=config.task.max_prompt_tokens + config.rollout.max_new_tokens,
                model=self.job.inputs.model,
                path_map=config.engine.path_map,
            ),
            emit=self._emit,
            fence=lambda instance: self.controller.fence(instance) if self.controller is not None else {},
            rows=self.job.state.instances,
            now=self.now,
        )

    def _observer(self, trajectories: Trajectories, fleet: Fleet) -> RunObserver:
        job = self.job
        observer = RunObserver(
            folder=job.folder,
            facts=ShellFacts(run_id=job.folder.run_id, strategy=job.config.rollout.strategy),
            state=job.state,
            trajectories=trajectories,
            evaluations=job.inputs.evaluations,
            tokenizer=job.inputs.tokenizer,
            keep_per_step=job.config.log.trajectories_per_step,
            urls=lambda: fleet.urls,
        )
        self.stack.callback(observer.close)
        return observer

    def _io(self, fleet: Fleet, store: VersionStore, trajectories: Trajectories) -> Io:
        config, inputs = self.job.config, self.job.inputs
        return Io(
            run_id=self.job.folder.run_id,
            seed=config.run.seed,
            group_size=config.rollout.group_size,
            max_new_tokens=config.rollout.max_new_tokens,
            temperature=config.rollout.temperature,
            push_timeout_s=config.engine.push_timeout_s,
            live=self.job.settings.rules.in_flight,
            transport=self._transport(),
            keep_versions=config.weights.keep,
            client=self.client,
            fleet=fleet,
            store=store,
            trajectories=trajectories,
            stream=inputs.stream,
            tokenizer=inputs.tokenizer,
            graders=self.graders,
            eval_graders=self.eval_graders,
            evaluations=inputs.evaluations,
            now=self.now,
        )

    def _transport(self) -> Transport:
        config, folder = self.job.config, self.job.folder
        disk = Disk(config.engine.path_map)
        if config.weights.transport == "disk":
            return disk
        plan = plan_sender(config, lease=folder.lease.resolve(), environ=os.environ)
        senders = Senders(plan.argv, env=plan.env, log=folder.logs / f"{plan.name}.log")
        self.stack.push_async_callback(senders.close)
        use_nccl = config.trainer.device == "cuda"
        return Distributed(senders, otherwise=disk, dtype=config.trainer.publish_dtype, use_nccl=use_nccl)

    def _rollout_writer(self, store: VersionStore, observer: RunObserver) -> RolloutWriter:
        """Without a trainer, nobody else publishes version 0: it is the model folder as it lies."""
        staged = store.stage(0)
        for path in sorted(self.job.inputs.model.iterdir()):
            if path.is_file():
                (staged / path.name).write_bytes(path.read_bytes())
        manifest = store.seal(0, staged)
        at = self.now()
        self.first.append(ev.VersionPublished(at, 0, manifest.num_bytes, dict(manifest.files)))
        self.first.append(ev.TrainerReady(at, 0))

        def emit(event: ev.Event) -> None:
            assert self.controller is not None
            self.controller.emit_soon(event)

        return RolloutWriter(
            self.job.folder.rollouts,
            groups_per_step=self.job.config.rollout.groups_per_step,
            group_size=self.job.settings.group_size,
            now=self.now,
            emit=emit,
            on_step=observer.on_step,
        )

    async def _start_trainer(
        self, node: Node, store: VersionStore, *, checkpoint: Path | None, observer: RunObserver
    ) -> TrainerLink:
        """Listen, start the ranks (or wait for those that others start), and have their orders ready."""
        config, folder = self.job.config, self.job.folder
        token = config.trainer.token or secrets.token_hex(16)
        ranks = config.trainer.ranks
        end = ControllerEnd(
            address=config.trainer.address, token=token, world_size=ranks, now=self.now, epoch=self.job.epoch
        )
        address = await end.start()
        self.stack.push_async_callback(end.close)
        lease = folder.lease.resolve()
        plan = plan_trainer(config, controller=address, token=token, lease=lease, environ=os.environ)
        child = node.add(plan) if plan is not None else None
        if child is not None:
            await child.start()
        else:
            sys.stderr.write(f"dora: waiting for {ranks} trainer ranks at {address} (DORA_CONTROLLER, DORA_TOKEN)\n")
        return TrainerLink(
            end=end,
            num_ranks=ranks,
            configure=configure_message(
                config,
                run_id=folder.run_id,
                model=self.job.inputs.model,
                memory_root=store.memory_root,
                durable_root=folder.versions,
                checkpoints=folder.checkpoints,
                resume_from=checkpoint,
                max_staleness=self.job.settings.max_lag,
            ),
            start_timeout_s=config.trainer.start_timeout_s,
            process_ended=child.ended if child is not None else None,
            now=self.now,
            emit=self._emit,
            on_step=observer.on_step,
        )

    async def _end_trainer(self, link: TrainerLink, node: Node, reason: str) -> None:
        """Let the ranks end by themselves; the node's exit ends what does not."""
        await link.stop(reason)
        child = node.children.get("trainer")
        if child is None:
            return
        try:
            async with asyncio.timeout(STOP_TIMEOUT_S):
                await child.ended()
        except TimeoutError:
            log.warning("trainer_did_not_end", after_s=STOP_TIMEOUT_S)


def _stop_on_signals(controller: Controller, node: Node) -> None:
    """The first Ctrl-C stops cleanly, the second ends at once."""
    signals = 0

    def stop() -> None:
        nonlocal signals
        signals += 1
        if signals > 1:
            node.kill_all()
            os._exit(130)
        sys.stderr.write("\ndora: stopping; everything in flight is kept (once more to end at once)\n")
        controller.interrupt()

    loop = asyncio.get_running_loop()
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, stop)
