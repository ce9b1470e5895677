"""Runs one job from start to end: check, build the parts, start processes, drive the controller.

Invalid input is refused before a folder or a process exists. At the end, whatever the reason, the exit stack closes
everything in reverse order: processes first, then sockets and files. Only then is a finished run audited, which may
take hours. Messages go to a `Frontend`; nothing is printed.
"""

from __future__ import annotations

import asyncio
import gc
import os
import secrets
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from contextlib import AbstractAsyncContextManager, AsyncExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Protocol

import structlog

from dora.app import resume as resuming
from dora.app.build import (
    REACH_TIMEOUT_S,
    enter_pushing,
    make_controller,
    make_fleet,
    start_trainer,
)
from dora.app.episodes import EpisodeInputs, enter_inputs
from dora.app.fetch import at_recorded_commits, fetch
from dora.app.held_out import write_results
from dora.app.inputs import Inputs
from dora.app.node_servers import let_nodes_leave
from dora.app.nodes import open_cluster, require_token
from dora.app.opening import Opened
from dora.app.prepare import Job, Pacing, new_folder, prepare
from dora.app.saved_status import saved_status
from dora.app.tracking import tracking
from dora.config.schema import Config, RewardConfig
from dora.controller.clock import RunClock
from dora.controller.effects import Graders
from dora.controller.loop import Controller, Outcome
from dora.controller.recorder import Recorder
from dora.controller.reporters import TICK_S
from dora.controller.rollouts import RolloutWriter
from dora.controller.trainer_link import TrainerLink
from dora.controller.user_requests import UserRequests
from dora.core.events import Event
from dora.core.ids import FIRST_VERSION, VersionId
from dora.core.invariants import check as check_invariants
from dora.core.phases import ImpossibleChange
from dora.engine.api import InferenceEngine
from dora.engine.engines import open_engine, require_engine
from dora.errors import ConfigError, DoraError, RunFailed
from dora.journal.access import require_group, set_umask
from dora.journal.audit import audit
from dora.journal.replay import add_excerpt
from dora.journal.run_folder import RunFolder
from dora.log import configure_logging
from dora.node.cuda import require_cuda
from dora.node.holder import hold_run
from dora.node.limits import allow_open_files
from dora.node.ports import require_free_ports
from dora.node.supervise import Node
from dora.observe.groups import GroupRow, forming
from dora.observe.snapshot import Snapshot
from dora.status.server import StatusServer
from dora.tasks.pool import GraderPool

log = structlog.get_logger(__name__)

#: A full garbage collection takes 0.3 s at 10,000 instances and blocks the event loop. The core creates no reference
#: cycles, so full collections run a hundred times less often than by Python's default.
GC_THRESHOLDS = (700, 10, 1000)
#: Time in which the ranks must exit after Stop; then they are killed.
STOP_TIMEOUT_S = 30.0
#: Connections beyond one per slot, for requests that are ending and for probes.


@dataclass(frozen=True)
class Running:
    """A running job, as given to its frontend."""

    folder: RunFolder
    status_url: str
    token_file: Path | None  # the generated token of the status endpoint; None if the user configured one
    stop_timeout_s: float  # maximum time that a clean stop waits for the trainer; 0: there is none
    snapshot: Callable[[], Snapshot]
    interrupt: Callable[[], None]  # stop cleanly; leave out the audit of a run that has finished
    kill: Callable[[], None]  # kill all processes


class Frontend(Protocol):
    """The user interface of a run."""

    def tell(self, line: str) -> None:
        """Show a message to the user."""

    def show(self, text: str) -> None:
        """Show how far a download is, in place of what was shown before."""

    def watch(self, run: Running) -> AbstractAsyncContextManager[None]:
        """Show progress while the controller runs."""

    def ended(self, snapshot: Snapshot, *, folder: RunFolder, violations: int | None) -> None:
        """Show the result; `violations`: the number found by the audit, None if there was none."""


async def run_job(
    config: Config,
    frontend: Frontend,
    *,
    earlier: RunFolder | None = None,
    reserved: RunFolder | None = None,
    rollout_only: bool = False,
    accept_changes: bool = False,
    trust_folder: bool = False,
    pacing: Pacing | None = None,
) -> Outcome:
    """Run a job to its end. `earlier`: the folder of the run to resume. `reserved`: the folder of a new run. The caller
    holds their lock. `trust_folder`: execute what the earlier folder names even if this user has not signed its
    configuration."""
    require_group(config.run.group)
    require_token(config)
    set_umask(config.run.group)
    recorded = resuming.take_up(earlier, config, trust_folder=trust_folder) if earlier is not None else None
    if recorded is not None:
        config = at_recorded_commits(config, recorded.configuration)
    require_free_ports(config)
    require_engine(config)
    await asyncio.to_thread(require_cuda, config, environ=os.environ)  # before gigabytes are downloaded for nothing
    config = await fetch(config, tell=frontend.tell, show=frontend.show)
    async with AsyncExitStack() as held:
        async with AsyncExitStack() as stack:
            inputs, episodes = await enter_inputs(stack, config)
            job = prepare(
                config,
                inputs,
                recorded=recorded,
                rollout_only=rollout_only,
                accept_changes=accept_changes,
                pacing=pacing,
            )
            streams = allow_open_files(config.num_instances * (config.engine.slots or 1))
            graders = await enter_graders(stack, config, inputs)
            engine = await _enter_engine(stack, config, inputs, streams=streams)
            folder = earlier or new_folder(config, reserved)
            if earlier is None and reserved is None:
                held.enter_context(hold_run(folder.lock))
            run = _Run(job, folder, stack, frontend, held=held, streams=streams)
            ended = await run.drive(engine, graders, episodes)
        return await run.report(ended)


async def enter_graders(stack: AsyncExitStack, config: Config, inputs: Inputs) -> Graders:
    """Start a pool for training, and one for each held-out set with its own rewards."""
    task = config.task

    def pool(rewards: Sequence[RewardConfig], field: str) -> GraderPool:
        return GraderPool(
            rewards,
            graders=task.graders,
            timeout_s=task.grade_timeout_s,
            memory_mb=task.grader_memory_mb,
            field=field,
        )

    is_graded = task.rewards or not config.environment.name  # otherwise the environment alone gives rewards
    training = await stack.enter_async_context(pool(task.rewards, "task.rewards")) if is_graded else None
    held_out = []
    for index, eval_set in enumerate(config.eval.sets):
        own = pool(eval_set.rewards, f"eval.sets.{index}.rewards") if eval_set.rewards else None
        held_out.append(await stack.enter_async_context(own) if own is not None else training)
    return Graders(training, held_out, inputs.evaluations)


async def _enter_engine(stack: AsyncExitStack, config: Config, inputs: Inputs, *, streams: int) -> InferenceEngine:
    """Open the engine, with at most this number of streams; ConfigError if an external server does not answer."""
    engine = await stack.enter_async_context(open_engine(config, max_connections=streams, vocab_size=inputs.vocab_size))
    for url in config.engine.urls:
        if not await engine.is_alive(url, timeout_s=REACH_TIMEOUT_S):
            raise ConfigError(f"engine.urls: {url} does not answer; start the server or correct the address")
    return engine


@dataclass(frozen=True)
class _Ended:
    """The end of a run. `stranded`: versions that are only in `memory`. `lost`: a line about lost versions, or ""."""

    outcome: Outcome
    snapshot: Snapshot
    stranded: Sequence[VersionId]
    memory: Path
    lost: str


class _Run:
    """A run whose folder exists."""

    def __init__(
        self,
        job: Job,
        folder: RunFolder,
        stack: AsyncExitStack,
        frontend: Frontend,
        *,
        held: AsyncExitStack,
        streams: int,
    ) -> None:
        """`stack` closes at the end of the run, `held` after its audit."""
        self._job = job
        self._folder = folder
        self._lease = folder.lease(job.epoch)
        self._stack = stack
        self._held = held
        self._frontend = frontend
        self._streams = streams
        self._interrupted = asyncio.Event()
        self._last: Snapshot | None = None  # once it has ended
        self._now = RunClock(at=job.started_at, scale=job.time_scale, tick_s=TICK_S / job.time_scale)

    async def drive(self, engine: InferenceEngine, graders: Graders, episodes: EpisodeInputs | None) -> _Ended:
        """Build the parts, run the controller, and end."""
        job, folder = self._job, self._folder
        configure_logging(folder.log, level=job.config.log.level, run=folder.run_id, role="controller")
        if episodes is not None:
            episodes.pool.log_into(folder.logs)
        folder.remove_leases()
        self._stack.callback(folder.remove_leases)
        node = await self._stack.enter_async_context(Node(logs=folder.logs, lease=self._lease))
        if job.config.nodes.checkpoints is not None:
            folder.checkpoints = job.config.nodes.checkpoints.resolve() / folder.run_id
            try:
                folder.checkpoints.mkdir(parents=True, exist_ok=True)
            except OSError as err:
                raise ConfigError(f"nodes.checkpoints: cannot create {folder.checkpoints} ({err.strerror})") from err
        opened = await asyncio.to_thread(
            Opened,
            job,
            folder,
            self._stack,
            now=self._now,
            tell=self._frontend.tell,
            can_replay=episodes is not None and episodes.pool.can_replay,
        )
        await self._stack.enter_async_context(
            tracking(job.config.tracking, folder, node, lease=self._lease, tell=self._frontend.tell)
        )
        cluster = await self._stack.enter_async_context(open_cluster(opened)) if job.config.nodes.expected else None
        fleet = make_fleet(opened, node, engine=engine, streams=self._streams, cluster=cluster, lease=self._lease)
        recorder = opened.recorder(fleet, renderer=episodes.renderer if episodes is not None else None)
        trainer: TrainerLink | RolloutWriter
        if job.rollout_only:
            trainer = opened.rollout_writer(recorder)
        else:
            trainer = await start_trainer(
                opened, node, self._stack, recorder=recorder, cluster=cluster, lease=self._lease
            )
        controller = make_controller(
            opened,
            engine=await enter_pushing(self._stack, job.config, engine, logs=folder.logs, lease=self._lease),
            fleet=fleet,
            graders=graders,
            episodes=episodes,
            trainer=trainer,
            recorder=recorder,
            cluster=cluster,
        )
        requests = UserRequests(fleet, state=job.state, engine=engine, inbox=opened.inbox, now=self._now)
        if cluster is not None:
            self._stack.push_async_callback(let_nodes_leave(cluster, requests, fleet, opened))
        status_url = await self._serve_status(recorder, requests)
        outcome = await self._watch(controller, opened.first, node, recorder, status_url)
        check_invariants(job.state)
        if isinstance(trainer, TrainerLink) and outcome.finished:
            await _end_trainer(trainer, outcome.reason)
        if cluster is not None and outcome.finished:
            await cluster.end(outcome.reason)
        return await self._end(outcome, recorder, opened)

    async def _serve_status(self, recorder: Recorder, requests: UserRequests) -> str:
        status = self._job.config.status
        server = await self._held.enter_async_context(
            StatusServer(
                lambda: self._last or recorder.snapshot(),
                host=status.host,
                port=status.port,
                requests=requests,
                token=status.token or self._draw_token(),
                groups=self._forming,
                folder=self._folder,
            )
        )
        return server.url

    def _forming(self) -> list[GroupRow]:
        return forming(self._job.state)

    def _draw_token(self) -> str:
        """Generate a token for this run and store it in a file that only the owner can read."""
        token = secrets.token_hex(16)
        path = self._folder.status_token
        path.touch(mode=0o600)
        path.chmod(0o600)
        path.write_text(token + "\n", encoding="utf-8")
        return token

    async def _watch(
        self, controller: Controller, first: list[Event], node: Node, recorder: Recorder, status_url: str
    ) -> Outcome:
        """Run the controller while the frontend shows it."""
        config, folder = self._job.config, self._folder

        def interrupt() -> None:
            self._interrupted.set()
            controller.interrupt()

        running = Running(
            folder=folder,
            status_url=status_url,
            token_file=folder.status_token if config.status.token is None else None,
            stop_timeout_s=0.0 if self._job.rollout_only else config.trainer.stop_timeout_s,
            snapshot=recorder.snapshot,
            interrupt=interrupt,
            kill=node.kill_all,
        )
        gc.freeze()  # objects made at startup stay alive
        gc.set_threshold(*GC_THRESHOLDS)
        saved = saved_status(folder.status, recorder.snapshot, url=status_url, groups=self._forming)
        async with saved, self._frontend.watch(running):
            self._now.watch()
            try:
                outcome = await controller.run(first)
            except DoraError as err:
                recorder.fail(err)
                if (explained := self._explain(err)) is None:
                    raise
                raise explained from err
            recorder.end(outcome)
        return outcome

    def _explain(self, err: DoraError) -> RunFailed | None:
        """Return the error with advice for the user; None if the error already contains advice."""
        state, folder = self._job.state, self._folder
        if not folder.root.is_dir():
            return RunFailed(f"{folder.root} was deleted during the run ({err})")
        if isinstance(err, ImpossibleChange):
            add_excerpt(err, folder.journal)
            log.error("impossible_change", reason=str(err), excerpt=err.excerpt)
        if not isinstance(err, RunFailed):
            return None
        command = "run" if self._job.config.run.steps else "eval"
        resume = (
            "" if state.finished and not state.stalled else f"; continue with dora {command} --resume {folder.root}"
        )
        return RunFailed(f"{err}; logs: {folder.logs}{resume}")

    async def _end(self, outcome: Outcome, recorder: Recorder, opened: Opened) -> _Ended:
        self._last = recorder.snapshot()
        if outcome.finished and not self._job.config.run.steps:
            await asyncio.to_thread(write_results, self._folder)
            opened.store.discard(FIRST_VERSION)  # a copy of the model
        stranded = opened.store.stranded(self._job.state.window.entries)
        return _Ended(outcome, self._last, stranded, opened.store.memory_root, opened.lost_versions())

    async def report(self, ended: _Ended) -> Outcome:
        """Audit a finished run and show the result. An interrupted run is not audited, so that stopping is fast."""
        folder, outcome = self._folder, ended.outcome
        violations = await audit_until(self._interrupted, folder) if outcome.finished else None
        self._frontend.ended(ended.snapshot, folder=folder, violations=violations)
        if outcome.finished and ended.stranded:
            raise RunFailed(
                f"{folder.versions} has no room for the last version, {ended.stranded[-1]}, which is only in memory "
                f"({ended.memory}): copy it from there"
            )
        if outcome.finished and ended.lost:
            self._frontend.tell(ended.lost)
        return replace(outcome, violations=violations or 0)


async def audit_until(interrupted: asyncio.Event, folder: RunFolder) -> int | None:
    """Return the number of violations in a finished run; None if it was interrupted before this was known.

    The audit has no time limit and its thread cannot be stopped, so the thread is one that does not delay the exit.
    """
    found: Future[int] = Future()

    def work() -> None:
        try:
            found.set_result(len(audit(folder).violations))
        except Exception as err:  # noqa: BLE001 - raised again where the result is awaited
            found.set_exception(err)

    if interrupted.is_set():
        return None
    found.set_running_or_notify_cancel()  # from here on, nothing takes the result away from the thread
    threading.Thread(target=work, name="audit", daemon=True).start()
    audited, stopped = asyncio.wrap_future(found), asyncio.create_task(interrupted.wait(), name="interrupted")
    either: list[asyncio.Future[Any]] = [audited, stopped]
    try:
        await asyncio.wait(either, return_when=asyncio.FIRST_COMPLETED)
        return audited.result() if audited.done() else None
    finally:
        for future in either:
            future.cancel()


async def _end_trainer(link: TrainerLink, reason: str) -> None:
    """Wait until the ranks exit by themselves; their node kills those that do not."""
    if not await link.stop(reason):
        return
    try:
        async with asyncio.timeout(STOP_TIMEOUT_S):
            await link.ranks.ended()
    except TimeoutError:
        log.warning("trainer_did_not_end", after_s=STOP_TIMEOUT_S)
