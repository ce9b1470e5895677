"""The tables that the audit builds from a journal, independent of the core's.

Invariant: they depend on recorded events and commands alone, never on a State.
"""

from __future__ import annotations

import hashlib
from collections import Counter, defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Final

from dora.core.commands import TrainMicroBatch
from dora.core.ids import GroupId, InstanceId, Subject, TrajectoryId
from dora.core.strategies import Settings

NO_END: Final = "no end recorded"
#: How a group leaves the ledger.
OUTCOMES: Final = ("trained", "filtered", "failed", "discarded")


@dataclass(slots=True)
class AuditedInstance:
    """One server."""

    incarnation: int = 0
    up: bool = False
    #: What it has by confirmed pushes or its take-over: one version if it has full weights, until the next push begins.
    holds: set[int] = field(default_factory=set)
    pushing: dict[int, int] = field(default_factory=dict)  #: of each push under way: attempt -> version
    #: Adapters that it has or may have: attempt of the push -> version.
    adapters: dict[int, int] = field(default_factory=dict)
    proved: set[int] = field(default_factory=set)  #: attempts of pushes that were confirmed
    unloading: dict[int, int] = field(default_factory=dict)  #: of each unload under way: attempt -> that of the push
    attempt: int = 0  #: of the latest push or unload
    barred: bool = False  #: drained on request
    was_barred: bool = False  #: `barred` before the last request, which the core may refuse
    residents: set[TrajectoryId] = field(default_factory=set)


@dataclass(slots=True)
class AuditedAnswer:
    """One trajectory."""

    version: int  #: the tag
    num_tokens: int = 0  #: known to be produced
    attempt: int = 0  #: of its last Generate
    instance: InstanceId | None = None  #: where it is resident
    started_from: int = 0  #: tokens that the attempt under way began with
    left: InstanceId | None = None  #: instance on which the controller stopped it, until it continues
    recovering: bool = False  #: its instance was lost and it has not continued yet
    failures: int = 0  #: failed requests, not counting lost servers
    is_given_up: bool = False  #: it failed permanently, or too often
    mixed: bool = False  #: a span has another version than its tag
    intent: bool = False  #: a turn ended with a call that is not ordered yet
    calling: int | None = None  #: attempt of the call under way
    finished: bool = False
    grading: int | None = None  #: attempt of the grading under way
    graded: bool = False
    turn_rewards: list[float] = field(default_factory=list)  #: of the turns that have ended
    reward: float | None = None


@dataclass(slots=True)
class AuditedGroup:
    """One prompt group that is not trained, filtered, failed or discarded."""

    version: int
    deadline: int
    step: int | None = None  #: the step it is committed to


@dataclass(slots=True)
class AuditedStep:
    """One training step since the oldest checkpoint that is kept."""

    groups: dict[GroupId, int] = field(default_factory=dict)  #: committed groups -> place in commit order
    closed: bool = False
    due: set[TrajectoryId] = field(default_factory=set)  #: graded siblings that are not in a micro-batch yet
    trajectories: list[TrajectoryId] = field(default_factory=list)  #: in micro-batches
    waves: list[TrainMicroBatch] = field(default_factory=list)


@dataclass(slots=True)
class AuditedVisits:
    """What is known of rows."""

    share: float  #: `task.revisit_share`
    seed: int  #: `run.seed`
    rows: list[tuple[int, int]] = field(default_factory=list)  #: (source, row) of each group
    of_source: defaultdict[int, Counter[int]] = field(default_factory=lambda: defaultdict(Counter))  #: visits of rows
    outcomes: dict[tuple[int, int], str] = field(default_factory=dict)  #: of the last group of each row
    known: dict[tuple[int, int], str] = field(default_factory=dict)  #: the same, when prompts were last ordered

    def is_left(self, source: int, row: int) -> bool:
        """Whether a row is passed over at its next visit."""
        if self.known.get((source, row)) != "filtered":
            return False
        text = f"{self.seed}/visit/{source}/{row}/{self.of_source[source][row]}"
        drawn = int.from_bytes(hashlib.blake2b(text.encode(), digest_size=16).digest(), "little")
        return drawn / 2**128 >= self.share


@dataclass(frozen=True, slots=True)
class Finding:
    """A violation without its excerpt."""

    rule: str
    subject: Subject
    message: str
    index: int  #: number of the event at which it was found


class AuditTables:
    """Everything read so far, and the findings."""

    def __init__(self, settings: Settings, *, visits: AuditedVisits | None = None) -> None:
        """`visits`: None if the configuration is not known."""
        self.settings = settings
        self.visits = visits
        self.index = -1  #: number of the current event
        self.now = 0.0
        self.findings: list[Finding] = []

        self.instances: dict[InstanceId, AuditedInstance] = {}
        self.removed: set[InstanceId] = set()  #: in this controller's epoch
        self.answers: dict[TrajectoryId, AuditedAnswer] = {}
        self.lengths: dict[TrajectoryId, int] = {}  #: of every finished answer, evaluation included
        self.groups: dict[GroupId, AuditedGroup] = {}  #: admitted, neither trained nor dropped
        self.steps: dict[int, AuditedStep] = {}

        self.num_prompts = 0  #: prompts that have arrived, in this controller's epoch
        self.source_dry = False
        self.admitted = 0
        self.forming = 0  #: step being formed
        self.open_step: int | None = None  #: step the trainer works on
        self.trained_steps = 0
        self.newest: int | None = None
        self.stored: set[int] = set()  #: versions published and not released
        self.untrained: Counter[int] = Counter()  #: groups by version, neither trained nor dropped
        self.evaluated: Counter[int] = Counter()  #: samples by version that are graded or given up
        self.reported: set[int] = set()  #: versions whose evaluation was reported

        self.chains: dict[int, str] = {}  #: by step, as first trained
        self.published: dict[int, Mapping[str, str]] = {}  #: files by version, as first published
        self.checkpoints: set[int] = set()  #: steps of the checkpoints that are kept
        self.replays_differ = 0  #: versions that a replay computed with other bytes

        self.outcomes: dict[GroupId, str] = {}  #: "trained" | "filtered" | "failed" | "discarded"
        self.reasons: Counter[str] = Counter()  #: why groups were dropped
        self.finished_ids: dict[str, list[TrajectoryId]] = {name: [] for name in OUTCOMES}
        self.staleness: Counter[int] = Counter()
        self.mixed_answers = 0  #: finished with tokens of another version than their tag: C1, by design
        self.aborted: dict[TrajectoryId, int] = {}  #: tokens of answers unfinished when their group was discarded
        self.max_live_versions = 0
        self.migrations = 0
        self.recovered = 0
        self.environment_failed = 0
        self.episode_replays = 0
        self.late_completions = 0
        self.proofs = 0  #: of adapters
        self.restarts = 0
        self.end = NO_END

    def find(self, rule: str, kind: str, id: int, message: str) -> None:
        """Record a violation."""
        self.findings.append(Finding(rule, Subject(kind, id), message, self.index))

    def instance(self, id: InstanceId) -> AuditedInstance:
        """Return the entry of an instance."""
        return self.instances.setdefault(id, AuditedInstance())

    def is_wanted(self, trajectory: TrajectoryId) -> bool:
        """Whether a trajectory is an evaluation sample, or its group is still in the ledger."""
        return trajectory < 0 or trajectory // self.settings.group_size in self.groups

    def siblings(self, group: GroupId) -> list[TrajectoryId]:
        """Return the ids of a group's trajectories."""
        size = self.settings.group_size
        return [TrajectoryId(group * size + i) for i in range(size)]
