"""Facts: everything the decision core ever learns, in the past tense, one type each.

Invariant: an event says what happened, never what to do; time is `at` (seconds since the run began, from the
shell's clock); counts are tokens. Events are journaled as they arrive, so the state at any moment is the fold of
the journal. Completions carry the `attempt` of their command: one with an old attempt is counted and ignored.

They are structs rather than frozen dataclasses for the sake of speed (bench/core.py).
"""

from __future__ import annotations

import msgspec

from dora.core.ids import GroupId, InstanceId, StepId, TrajectoryId, VersionId

#: (version, start, end): half-open, positions in the whole answer; those of an attempt begin where it began.
#: FOREIGN_VERSION for a foreign label.
Span = tuple[int, int, int]


class Event(msgspec.Struct, frozen=True, gc=False, tag=True, forbid_unknown_fields=True):
    """Base of all facts."""

    at: float


# -- instances ----------------------------------------------------------------------------------------------------


class InstanceUp(Event, frozen=True):
    """A server answers and can be given weights. Whatever it holds counts as unloaded."""

    instance: InstanceId
    incarnation: int  #: grows each time the server comes back; facts of an older one are ignored
    slots: int  #: requests decoded at the same time
    kv_tokens: int  #: KV room


class InstanceLost(Event, frozen=True):
    """A server is gone, or treated as gone. `num_tokens` is what had been streamed of each resident trajectory."""

    instance: InstanceId
    incarnation: int
    num_tokens: dict[TrajectoryId, int]
    reason: str


class ProgressReported(Event, frozen=True):
    """Tokens produced so far by the residents of an instance; at most once per second and instance."""

    instance: InstanceId
    num_tokens: dict[TrajectoryId, int]


class PrefillReported(Event, frozen=True):
    """The instance's own KV use grew to a new height although no resident got a token: it reads a long prompt."""

    instance: InstanceId


class KvPressureReported(Event, frozen=True):
    """The instance's KV is nearly full or it retracted requests (`pressed`), or that has passed."""

    instance: InstanceId
    pressed: bool


class WeightPushFinished(Event, frozen=True):
    """The instance read back the version it was given."""

    instance: InstanceId
    attempt: int
    version: VersionId


class WeightPushFailed(Event, frozen=True):
    """The push failed, or nobody can say whether it worked."""

    instance: InstanceId
    attempt: int
    reason: str


class InstanceDrainRequested(Event, frozen=True):
    """Somebody wants the instance empty: to rest until it is recalled, or to `leave` the run."""

    instance: InstanceId
    leave: bool


class InstanceRecalled(Event, frozen=True):
    """Somebody wants a drained instance back at work."""

    instance: InstanceId


class InstanceRemoved(Event, frozen=True):
    """Nobody watches the instance any more. What is told of it later is late: its id comes back, as another instance,
    after ControllerRestarted at the earliest."""

    instance: InstanceId


# -- trajectories -------------------------------------------------------------------------------------------------


class PromptsArrived(Event, frozen=True):
    """The next prompts of the stream; `num_prompt_tokens[i]` belongs to group `first + i`."""

    first: GroupId
    num_prompt_tokens: tuple[int, ...]
    dry: bool  #: nothing comes after these


class GenerationFinished(Event, frozen=True):
    """The answer is complete: a stop token, or the token budget (`length_capped`)."""

    trajectory: TrajectoryId
    attempt: int
    num_tokens: int  #: of the whole answer, earlier attempts included
    length_capped: bool
    spans: tuple[Span, ...]


class GenerationStopped(Event, frozen=True):
    """The request was stopped by us; every token it had produced is kept."""

    trajectory: TrajectoryId
    attempt: int
    num_tokens: int
    spans: tuple[Span, ...]


class GenerationFailed(Event, frozen=True):
    """The request ended without an answer; tokens streamed before are kept."""

    trajectory: TrajectoryId
    attempt: int
    num_tokens: int
    server_gone: bool  #: the instance does not answer any more, or holds other weights
    reason: str
    final: bool = False  #: every server would refuse it again


class TrajectoryGraded(Event, frozen=True):
    """A reward, or None where grading failed (which is not reward 0)."""

    trajectory: TrajectoryId
    attempt: int
    reward: float | None
    reason: str = ""  #: why grading failed


# -- training -----------------------------------------------------------------------------------------------------


class TrainerReady(Event, frozen=True):
    """All ranks have loaded step `step` and wait for its first micro-batch."""

    step: StepId


class MicroBatchTrained(Event, frozen=True):
    """Every rank is done with micro-batch `index` of `step`."""

    step: StepId
    index: int


class StepTrained(Event, frozen=True):
    """The optimizer update of `step` is done."""

    step: StepId
    chain: str = ""  #: digest of all that was trained up to this step (controller/lineage.py)


class VersionPublished(Event, frozen=True):
    """The version is complete in the store and can be pushed."""

    version: VersionId
    num_bytes: int
    files: dict[str, str]  #: name -> checksum, of the bytes that are served
    chain: str = ""  #: that of the step that made it
    differs: str = ""  #: checksum of what a replay made of it where that is not what was published first


class CheckpointSaved(Event, frozen=True):
    """The trainer can be resumed at `step` from `folder`."""

    step: StepId
    folder: str
    chain: str = ""  #: that of the last step it has trained


# -- the run ------------------------------------------------------------------------------------------------------


class Ticked(Event, frozen=True):
    """About once a second: the only way in which the passing of time reaches the core."""


class ControllerRestarted(Event, frozen=True):
    """A new controller took over: every server is unknown, every command in flight is void.

    `num_tokens` counts the tokens on disk of each unfinished trajectory. The trainer says by itself where it stands.
    """

    epoch: int
    num_tokens: dict[TrajectoryId, int]
    steps: int = 0  #: the job has this many steps from now on; 0: as many as before
    missing: tuple[VersionId, ...] = ()  #: published versions that no folder holds: the trainer has to make them again


AnyEvent = (
    InstanceUp
    | InstanceLost
    | ProgressReported
    | PrefillReported
    | KvPressureReported
    | InstanceDrainRequested
    | InstanceRecalled
    | InstanceRemoved
    | WeightPushFinished
    | WeightPushFailed
    | PromptsArrived
    | GenerationFinished
    | GenerationStopped
    | GenerationFailed
    | TrajectoryGraded
    | TrainerReady
    | MicroBatchTrained
    | StepTrained
    | VersionPublished
    | CheckpointSaved
    | Ticked
    | ControllerRestarted
)
