"""Opens a run folder: checks and restores the state of an earlier controller, and creates the parts that write to it.

Invariant: once an `Opened` exists, everything read from the folder is durable and the journal has this controller's
epoch; no process has been started. The exit stack closes everything in reverse order.
"""

from __future__ import annotations

import secrets
import shutil
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import AsyncExitStack, suppress
from datetime import UTC, datetime
from functools import partial
from importlib.metadata import version as package_version
from pathlib import Path

import msgspec
import structlog

from dora import files, foreign
from dora.app import resume as resuming
from dora.app.held_out import HELD_OUT_SET
from dora.app.inputs import model_files, weights_digest
from dora.app.lost_rows import lost_rows, ranges
from dora.app.prepare import Job
from dora.app.settings import RankPaths, configure_message, drift_watch, lineage_settings, live_bytes
from dora.app.trust import write_config
from dora.config.load import dump
from dora.config.schema import Config
from dora.controller.fleet import Fleet
from dora.controller.in_flight import InFlight
from dora.controller.inbox import Inbox
from dora.controller.line_files import LineFiles
from dora.controller.lineage import Lineage, base_chain
from dora.controller.published import Published
from dora.controller.recorder import Recorder, last_step_at
from dora.controller.rollouts import RolloutWriter
from dora.controller.samples import Samples
from dora.controller.trainer_link import Ranks, TrainerLink
from dora.controller.trajectories import Trajectories
from dora.core import events as ev
from dora.core.ids import FIRST_VERSION, StepId, TrajectoryId, VersionId
from dora.core.phases import TrajectoryPhase
from dora.environments.renderer import Renderer
from dora.errors import ConfigError, RunFailed
from dora.journal.codec import FORMAT, Epoch, Header, Note
from dora.journal.commits import Commits
from dora.journal.run_folder import RunFolder
from dora.journal.spans import read_spans, read_timeline
from dora.journal.tokens import TokenWriter
from dora.journal.writer import JournalWriter
from dora.node.places import NODE_NAME, Known, KnownNode
from dora.observe.episodes import EpisodeStats
from dora.observe.facts import ShellFacts
from dora.observe.lanes import Lanes
from dora.observe.observed import Folded, Observed
from dora.transport.controller_end import ControllerEnd
from dora.transport.messages import CheckpointWritten
from dora.weights.fence import raise_fence, raise_fence_patiently
from dora.weights.store import (
    MANIFEST,
    Manifest,
    StoreError,
    VersionStore,
    choose_memory_root,
    claim,
    clear_errors,
    sweep_orphans,
)

log = structlog.get_logger(__name__)

#: 100 bytes for each node.
MAX_NODES_BYTES = 1 << 20


def read_nodes(path: Path) -> Known:
    """Return the nodes that have joined the run, by name; none if there is no file."""
    try:
        data = foreign.read(path, max_bytes=MAX_NODES_BYTES)
        found = msgspec.json.decode(data, type=dict[str, KnownNode])
    except FileNotFoundError:
        return {}
    except (OSError, msgspec.MsgspecError, UnicodeDecodeError, RecursionError, foreign.ForeignFileError) as err:
        raise ConfigError(f"{path}: cannot be read ({err}); delete it if all nodes are new") from err
    if not all(map(NODE_NAME.fullmatch, found)) or len({node.place for node in found.values()}) < len(found):
        raise ConfigError(f"{path}: no run wrote these names and places; delete it if all nodes are new")
    return found


def open_store(config: Config, folder: RunFolder, model: Path, stack: AsyncExitStack) -> VersionStore:
    """Open the version store: in memory if all live versions fit there, else in the run folder.

    If the ranks are on nodes, nothing on this host reads versions, so they are only in the run folder. If nothing is
    trained, the only version is read once by each server.
    """
    if config.num_training_nodes or not config.run.steps:
        return VersionStore(memory_root=folder.versions, durable_root=folder.versions)
    root = choose_memory_root(
        config.weights.memory_folder,
        run_id=folder.run_id,
        needed_bytes=live_bytes(config, model),
        fallback=folder.versions,
        group=config.run.group,
    )
    if root != folder.versions:
        stack.enter_context(claim(root, durable_root=folder.versions))
    return VersionStore(memory_root=root, durable_root=folder.versions)


def publish_model(store: VersionStore, model: Path, *, chain: str = "") -> Manifest:
    """Publish the files of the model folder as version 0."""
    staged = store.stage(FIRST_VERSION)
    with clear_errors(f"cannot copy the model {model}", remove=staged):
        for path in model_files(model):
            if path.name != MANIFEST:  # that of another run's version
                shutil.copyfile(path, staged / path.name)
    return store.seal(FIRST_VERSION, staged, chain=chain)


class Opened:
    """The parts of a run that use its folder."""

    def __init__(
        self,
        job: Job,
        folder: RunFolder,
        stack: AsyncExitStack,
        *,
        now: Callable[[], float],
        tell: Callable[[str], None],
        can_replay: bool = False,
    ) -> None:
        """Read the folder; this blocks. `tell` receives messages for the user, one line each.

        `can_replay`: calls of the environment that were under way are made again.
        """
        self.job = job
        self.folder = folder
        self.now = now
        self.tell = tell
        self.first: list[ev.Event] = []  #: events that precede the start
        self._stack = stack
        self._can_replay = can_replay
        self.nodes = self._known_nodes()  #: that have joined the run before
        self.missing: list[VersionId] = []  #: versions that the trainer must recompute
        sweep_orphans(job.config.weights.memory_folder, run_id=folder.run_id)
        self.store = open_store(job.config, folder, job.inputs.model, stack)
        stack.callback(self._close_store)
        self.tokens = stack.enter_context(TokenWriter(folder.tokens, epoch=job.epoch))
        self.journal = stack.enter_context(JournalWriter(folder.journal))
        self.commits = Commits(journal=self.journal, tokens=self.tokens)
        self.lines = LineFiles(folder, job.state)
        stack.callback(self.lines.close)
        for line in self.lines.removed():
            tell(line)
        self.folded = job.recorded.folded if job.recorded is not None else Folded.new(job.settings.group_size)
        self.lanes = Lanes(
            job.state,
            num_ranks=0 if job.rollout_only else job.config.trainer.ranks,
            time_scale=job.time_scale,
            spans=read_spans(folder.spans),
            rows=read_timeline(folder.timeline),
            step_at=last_step_at(folder.metrics),
        )
        self.trajectories = Trajectories(
            self.tokens,
            group_size=job.settings.group_size,
            ledger=self.folded.tokens,
            on_first_token=lambda trajectory: self.lanes.on_first_token(trajectory, at=now()),
            routing=job.inputs.routing,
        )
        self.inbox = Inbox()
        self.in_flight = InFlight(self.trajectories, rows=job.state.instances)
        self.term = job.epoch << 32 | secrets.randbits(32)  #: two copies of a run folder differ in it
        raise_fence(folder.fence, epoch=self.term)  # before reading anything that an old rank could still change
        model_chain = base_chain(weights_digest(job.inputs))
        self.start = self._restore(model_chain)  #: where the trainer starts
        self.lineage = Lineage(
            base=model_chain,
            settings=lineage_settings(job.config),
            trained=job.recorded.chains if job.recorded is not None else {},
        )
        self.published = Published(
            folder.run_id, files=job.recorded.files if job.recorded is not None else {}, missing=self.missing
        )
        self._begin_journal()

    def _known_nodes(self) -> Known:
        """Read which nodes had joined, without those that have left or for which there is no room now."""
        config, removed = self.job.config, self.job.state.removed
        if not config.nodes.expected:
            return {}
        return {
            name: known
            for name, known in read_nodes(self.folder.nodes).items()
            if known.servers == config.servers_of_node
            and known.place < config.max_nodes
            and known.first_instance not in removed
        }

    def _close_store(self) -> None:
        """Close the store, but keep and report versions that did not fit on the disk."""
        needed = self._promised
        if stranded := self.store.stranded(needed):
            log.error("versions_in_memory_only", versions=stranded, kept_in=str(self.store.memory_root))
        self.store.close(needed=needed)

    @property
    def _promised(self) -> list[VersionId]:
        """Versions that are needed, and versions for which `weights.keep` promises a durable copy."""
        window, keep = self.job.state.window, self.job.config.weights.keep
        if window.newest is None or self.job.rollout_only:
            return sorted(window.entries)
        oldest = max(0, window.newest - keep + 1) if keep else 0
        return sorted({*window.entries, *map(VersionId, range(oldest, window.newest + 1))})

    def lost_versions(self) -> str:
        """Say which versions the run folder lacks although `weights.keep` promises them, and where they are, or ""."""
        if self.job.rollout_only or not (lost := sorted({*self._promised} - {*self.store.durable()})):
            return ""
        in_memory = self.store.stranded(lost)
        where = f"; {ranges(in_memory)} in {self.store.memory_root}: copy them from there" if in_memory else ""
        return f"{self.folder.versions} lacks versions {ranges(lost)}, for which the disk had no room{where}"

    def _restore(self, model_chain: str) -> resuming.Start:
        """Restore the state of an earlier controller; return where the trainer starts."""
        job, recorded, store = self.job, self.job.recorded, self.store
        if recorded is None:
            return resuming.Start((), may_start_over=True, step=0)
        if recorded.base_chain not in (None, model_chain):
            reference, adapter = job.config.objective.kl_reference, job.config.model.adapter
            also = f", or objective.kl_reference: {reference} is not its reference" if reference else ""
            also += f", or model.adapter: {adapter} is not its adapter" if adapter else ""
            raise RunFailed(
                f"model.path: {job.inputs.model} is not the model that the run began with{also}; restore it"
            )
        resuming.require_same_held_out(recorded, job.inputs.evaluations)
        counts = resuming.restore(
            self.folder, job.state, trajectories=self.trajectories, inputs=job.inputs, visits=self.folded.visits
        )
        self.missing = resuming.recover_versions(store, recorded, tell=self.tell)
        start = resuming.choose_start(self.folder, recorded, missing=self.missing, tell=self.tell)
        resuming.require_same_history(recorded, start, settings=lineage_settings(job.config), config=job.config)
        if lost := lost_rows(self.folder.metrics, recorded, again_from=start.step):
            self.tell(lost)
        self._keep_live(store)
        given = job.settings
        added = given.steps if given.steps > recorded.settings.steps else 0
        calling = [t.id for t in job.state.trajectories.values() if t.phase is TrajectoryPhase.CALLING]
        self.first.append(
            ev.ControllerRestarted(
                self.now(),
                job.epoch,
                counts,
                steps=added,
                missing=tuple(self.missing),
                max_episodes=given.max_episodes,
                replayable=tuple(calling) if self._can_replay else (),
                limits=ev.TimeLimits(given.watchdog_s, given.no_progress_s, given.call_limit_s),
            )
        )
        begun = {*range(job.config.num_instances)}
        for known in self.nodes.values():
            begun |= {*range(known.first_instance or 0, (known.first_instance or 0) + known.servers)}
        for instance in [i for i in job.state.instances if i not in begun]:
            self.tell(f"instance {instance} had joined at run time and is no longer in the fleet; add it again")
            self.first.append(ev.InstanceRemoved(self.now(), instance))
        return start

    def _keep_live(self, store: VersionStore) -> None:
        """Copy needed versions from memory to disk, and release those that nothing needs any more."""
        needed = self.job.state.window.entries
        for version in store.stranded(needed):
            store.copy_durable(version)
        for version in store.live():
            if version not in needed:
                with suppress(StoreError):
                    store.copy_durable(version)
                store.release(version)

    def _begin_journal(self) -> None:
        """Record the epoch durably before any process starts, so that no epoch is used twice."""
        job, folder = self.job, self.folder
        if self.journal.torn_bytes:
            self.tell(f"{self.journal.path}: removed a torn end of {self.journal.torn_bytes} bytes")
        if job.recorded is not None:
            for change in job.changes:
                self.tell(f"changed: {change}")
            write_config(folder, job.config, run_id=job.recorded.run_id)
        else:
            created = datetime.now(UTC).isoformat(timespec="seconds")
            version = package_version("dora-rl")
            self.journal.append(Header(FORMAT, folder.run_id, created, version, job.settings, job.rollout_only))
            self.journal.append(Note(0.0, resuming.HELD_OUT, {"digest": job.inputs.evaluations.digest}))
            for eval_set in job.inputs.evaluations.sets:
                self.journal.append(Note(0.0, HELD_OUT_SET, eval_set.facts))
        self.journal.append(Epoch(job.epoch, job.started_at, dump(job.config), job.changes))
        self.commits.sync()

    # -- parts that write to the folder -------------------------------------------------------------------------------

    def recorder(self, fleet: Fleet, *, renderer: Renderer | None = None) -> Recorder:
        """Create the recorder, which keeps metrics and status. `renderer`: if the run has episodes."""
        job, records, episodes = self.job, self.trajectories.records, self.folded.episodes
        has_environment = bool(job.config.environment.name)

        def episode_stats(ids: Sequence[TrajectoryId]) -> EpisodeStats | None:
            return episodes.stats({id: records[id] for id in ids}) if has_environment else None

        facts = ShellFacts(
            run_id=self.folder.run_id,
            strategy=job.config.rollout.strategy,
            task=job.config.task.description,
            has_environment=has_environment,
            num_servers=job.config.num_instances,
            num_ranks=0 if job.rollout_only else job.config.trainer.ranks,
            held_out=tuple(eval_set.name for eval_set in job.inputs.evaluations.sets),
        )
        recorder = Recorder(
            Observed(
                job.state,
                facts=facts,
                folded=self.folded,
                lanes=self.lanes,
                drift=drift_watch(job.config),
                episode_stats=episode_stats,
                cpu_s=time.process_time(),
            ),
            state=job.state,
            lines=self.lines,
            trajectories=self.trajectories,
            evaluations=job.inputs.evaluations,
            samples=Samples(
                self.trajectories,
                evaluations=job.inputs.evaluations,
                tokenizer=job.inputs.tokenizer,
                episodes=episodes,
                tags={group.id: group.version for group in job.state.ledger.groups.values()},
                keep=job.config.log.trajectories_per_step,
                renderer=renderer,
            ),
            max_kept_bytes=job.config.log.trajectories_mb * 2**20,
            urls=fleet.urls,
            down=fleet.down,
            now=self.now,
            then=self.commits.then,
        )
        self._stack.callback(recorder.close)
        self.commits.on_full = recorder.on_full
        return recorder

    async def fence_ranks(self, incarnation: int) -> None:
        """Let only ranks of this incarnation make anything visible, and find out where they start."""
        await raise_fence_patiently(self.folder.fence, epoch=self.term, incarnation=incarnation)
        self.start = resuming.start_again(self.folder, self.job.state)

    def rollout_writer(self, recorder: Recorder) -> RolloutWriter:
        """Create the rollout writer and publish the model as version 0, since there is no trainer to do so."""
        base = self.lineage.base
        manifest = publish_model(self.store, self.job.inputs.model, chain=base)
        at = self.now()
        self.first.append(ev.VersionPublished(at, FIRST_VERSION, manifest.num_bytes, dict(manifest.files), base))
        self.first.append(ev.TrainerReady(at, StepId(0)))
        return RolloutWriter(
            self.folder.rollouts,
            groups_per_step=self.job.config.rollout.groups_per_step,
            group_size=self.job.settings.group_size,
            now=self.now,
            emit=self.inbox.emit,
            on_step=recorder.on_step,
            durable=self.commits.durable,
        )

    def trainer_link(
        self,
        end: ControllerEnd,
        recorder: Recorder,
        *,
        ranks: Ranks,
        num_ranks: int,
        paths: Callable[[int], RankPaths] | None = None,
        keep: Callable[[Mapping[int, CheckpointWritten]], Awaitable[str]] | None = None,
    ) -> TrainerLink:
        """Create the link to the ranks that connect to `end`.

        `paths`: the folders of each rank, if it is on another host; `keep` then copies its checkpoints.
        """
        job, config = self.job, self.job.config

        def here(rank: int) -> RankPaths:
            return RankPaths.here(
                self.folder,
                model=job.inputs.model,
                reference=job.inputs.reference,
                adapter=job.inputs.adapter,
                memory_root=self.store.memory_root,
                resume_from=self.start.folders,
            )

        return TrainerLink(
            end=end,
            ranks=ranks,
            num_ranks=num_ranks,
            configure=lambda rank: configure_message(
                config,
                (paths or here)(rank),
                run_id=self.folder.run_id,
                may_start_over=self.start.may_start_over,
                chain=self.lineage.base,
                epoch=self.term,
                max_staleness=job.settings.max_lag,
            ),
            keep=keep,
            start_timeout_s=config.trainer.start_timeout_s,
            now=self.now,
            emit=self.inbox.emit,
            on_ready=recorder.on_ready,
            on_step=recorder.on_step,
            spans=recorder,
            on_logprobs=recorder.samples.on_logprobs,
            on_flight_record=partial(keep_flight_record, self.folder.logs),
            durable=self.commits.durable,
            lineage=self.lineage,
            tell=self.tell,
            recall=lambda step: resuming.recall(
                self.folder,
                job.state,
                step,
                offset_of=self.tokens.offset_of,
                trajectories=self.trajectories,
                inputs=job.inputs,
                visits=self.folded.visits,
            ),
        )


def keep_flight_record(logs: Path, rank: int, record: str) -> None:
    """Write the last collectives of a rank without progress to the logs, in place of whatever is there."""
    path = logs / f"flight-rank-{rank}.json"
    try:
        files.replace(path, record.encode())
    except OSError as err:
        log.warning("flight_record_not_kept", path=str(path), reason=str(err))
