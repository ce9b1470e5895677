"""Events: the facts that the decision core receives, one type each.

Invariant: an event says what happened, never what to do. Time is `at`, in seconds since the run began, by the shell's
clock; counts are tokens. A completion has the `attempt` of its command; if the attempt is old, the completion is
counted and ignored.
Events are msgspec structs, which are faster than frozen dataclasses (bench/core.py).
"""

from __future__ import annotations

from enum import StrEnum
from typing import Final

import msgspec

from dora.core.ids import ForkCause, GroupId, InstanceId, StepId, TrajectoryId, Truncation, VersionId

#: (version, start, end): a half-open range of positions in the whole answer. The spans of an attempt start at the
#: position where the attempt began. The version of a foreign label is FOREIGN_VERSION.
Span = tuple[int, int, int]


class Event(msgspec.Struct, frozen=True, gc=False, tag=True, forbid_unknown_fields=True):
    """Base class of all events."""

    at: float


# -- instances ----------------------------------------------------------------------------------------------------


class InstanceUp(Event, frozen=True):
    """A server answers and can load weights. The weights it holds count as unknown, unless it was taken over with a
    version of this run: its node kept it running, and nothing runs on it now.

    With adapters it has room for `Settings.num_holdings` of them, and has none: those that an earlier controller loaded
    are unloaded before.
    """

    instance: InstanceId
    incarnation: int  #: counts the times it came up; events of an older one are ignored
    slots: int  #: requests decoded at the same time
    kv_tokens: int  #: capacity of the KV cache
    version: VersionId | None = None  #: what it serves already, by its label; None: unknown
    digest: str = ""  #: of the version's bytes, in the same label; see versions.py


class InstanceLost(Event, frozen=True):
    """A server is lost, or treated as lost. `num_tokens` counts the streamed tokens of each resident trajectory."""

    instance: InstanceId
    incarnation: int
    num_tokens: dict[TrajectoryId, int]
    reason: str


class ProgressReported(Event, frozen=True):
    """Tokens produced so far by the residents of an instance, every few seconds for each instance."""

    instance: InstanceId
    num_tokens: dict[TrajectoryId, int]


class PrefillReported(Event, frozen=True):
    """The KV use of an instance reached a new maximum although no resident got a token: it prefills a long prompt."""

    instance: InstanceId


class KvPressureReported(Event, frozen=True):
    """The instance's KV became nearly full or it retracted requests (`pressed`), or neither is the case any more."""

    instance: InstanceId
    pressed: bool


class WeightPushFinished(Event, frozen=True):
    """The push has ended, and the instance reports that it holds `version`."""

    instance: InstanceId
    attempt: int
    version: VersionId


class WeightPushFailed(Event, frozen=True):
    """The push failed, or its result is unknown."""

    instance: InstanceId
    attempt: int
    reason: str


class VersionUnloaded(Event, frozen=True):
    """The instance does not have the adapter of the UnloadVersion any more, or never had it."""

    instance: InstanceId
    attempt: int


class VersionUnloadFailed(Event, frozen=True):
    """The unload failed, or its result is unknown.

    `disproved`: the server does not compute what the adapter computes, so its answers may have come from another one.
    """

    instance: InstanceId
    attempt: int
    reason: str
    disproved: bool = False


class InstanceRemoved(Event, frozen=True):
    """The instance has left the run; its id is not reused before a ControllerRestarted."""

    instance: InstanceId


# -- trajectories -------------------------------------------------------------------------------------------------


class Visit(msgspec.Struct, frozen=True, gc=False, forbid_unknown_fields=True):
    """The row of a prompt, and the rows that its source passed over to come to it."""

    source: int
    row: int
    passed: tuple[int, ...] = ()


class PromptsArrived(Event, frozen=True):
    """The next prompts of the stream; `num_prompt_tokens[i]` belongs to group `first + i`.

    Nothing is decided by `visits`. A group that was read again after a restart has its row, without those passed over.
    """

    first: GroupId
    num_prompt_tokens: tuple[int, ...]
    dry: bool  #: these are the last prompts
    visits: tuple[Visit, ...] = ()  #: of each prompt, if rows may be passed over (`task.revisit_share`)


class GenerationFinished(Event, frozen=True):
    """The answer is complete, by a stop token or by its token limit (`length_capped`)."""

    trajectory: TrajectoryId
    attempt: int
    num_tokens: int  #: of the whole answer, earlier attempts included
    length_capped: bool
    spans: tuple[Span, ...]


class GenerationStopped(Event, frozen=True):
    """The request was stopped on command; all its tokens are kept."""

    trajectory: TrajectoryId
    attempt: int
    num_tokens: int
    spans: tuple[Span, ...]


class NoPrompt(StrEnum):
    """Why a trajectory has nothing to continue: the reason of its GenerationFailed."""

    TOO_LONG = "the prompt is longer than task.max_prompt_tokens"
    NOT_BEGUN = "the environment gave no prompt"


class GenerationFailed(Event, frozen=True):
    """The request failed; the tokens streamed before are kept."""

    trajectory: TrajectoryId
    attempt: int
    num_tokens: int
    server_gone: bool  #: the instance no longer answers, or holds other weights
    reason: str
    final: bool = False  #: every server would refuse the request


class CallStarted(Event, frozen=True):
    """The turn ended with a call of the environment: the intent to call it, which precedes the call itself."""

    trajectory: TrajectoryId
    attempt: int  #: of the Generate whose request ended with the call
    num_tokens: int  #: of the whole answer so far
    spans: tuple[Span, ...]


class CallFinished(Event, frozen=True):
    """The call has ended; its observation was appended to the answer."""

    trajectory: TrajectoryId
    attempt: int
    num_tokens: int  #: of the whole answer, observation included
    ended: bool = False  #: the environment ended the episode: the answer is complete
    failed: str = ""  #: "cause: reason" if the environment cannot go on; the answer gets no reward
    reward: float = 0.0  #: of the turn; an answer's reward is the sum over its turns plus the task's rewards
    graded: bool = False  #: the episode has ended, and the task's rewards are not asked
    truncated: Truncation = ""  #: the budget that ended it
    repeated: int = 0  #: tokens that rows of a forked episode repeat from earlier rows; not in `num_tokens`
    replays: int = 0  #: how often a lost environment was replayed for this call
    turn_tokens: int = 0  #: limit of the next turn; 0: that of the answer
    fork: ForkCause = ""  #: why its observation began a new row


class JudgeUse(msgspec.Struct, frozen=True, gc=False, forbid_unknown_fields=True):
    """What the models that judged an answer were asked, and how much they read and wrote, as they reported."""

    requests: int  #: repeated ones included
    prompt_tokens: int
    sampled_tokens: int


class TrajectoryGraded(Event, frozen=True):
    """The answer's reward, or None if grading failed (which is not reward 0)."""

    trajectory: TrajectoryId
    attempt: int
    reward: float | None
    reason: str = ""  #: why grading failed
    judged: JudgeUse | None = None  #: None: no model judged it


# -- training -----------------------------------------------------------------------------------------------------


class TrainerReady(Event, frozen=True):
    """All ranks have loaded step `step` and wait for its first micro-batch."""

    step: StepId


class TrainerLost(Event, frozen=True):
    """The ranks have ended, or were ended, and nothing of this start of them will be heard any more."""

    incarnation: int  #: number of this start, since the controller began
    reason: str


class MicroBatchTrained(Event, frozen=True):
    """All ranks have trained micro-batch `index` of `step`."""

    step: StepId
    index: int


class StepTrained(Event, frozen=True):
    """All optimizer updates of `step` are done."""

    step: StepId
    chain: str = ""  #: digest of everything trained up to this step (controller/lineage.py)


class VersionPublished(Event, frozen=True):
    """The version is complete in the store and can be pushed."""

    version: VersionId
    num_bytes: int
    files: dict[str, str]  #: name -> checksum of the bytes served
    chain: str = ""  #: of the step that wrote the version
    differs: str = ""  #: checksum of a replayed version that differs from the one published first


class CheckpointSaved(Event, frozen=True):
    """The trainer can be resumed at `step` from `folder`."""

    step: StepId
    folder: str
    chain: str = ""  #: of the last step trained


# -- requests of users --------------------------------------------------------------------------------------------


#: Why a request to a run that has ended is refused.
ENDED: Final = "the run has ended: nothing was changed"


class RequestTag(msgspec.Struct, frozen=True, gc=False, forbid_unknown_fields=True):
    """Who asks, and the id under which this is done at most once."""

    id: str = ""  #: "": as often as it is asked
    by: str = ""  #: one short line of printable characters; "" if it is not known


class UserRequest(Event, frozen=True, kw_only=True):
    """Base class of what users ask for. It is granted, or answered with RefuseRequest."""

    request: RequestTag = RequestTag()


class InstanceDrainRequested(UserRequest, frozen=True):
    """A user wants the instance drained, to be recalled later or, with `leave`, to leave the run."""

    instance: InstanceId
    leave: bool


class InstanceRecalled(UserRequest, frozen=True):
    """A user wants a drained instance back."""

    instance: InstanceId


class ServerOffered(UserRequest, frozen=True):
    """A user adds a server, which has been examined; if this is granted, it joins and comes up."""

    url: str


class EvaluationRequested(UserRequest, frozen=True):
    """A user wants the newest version evaluated next."""


class StopRequested(UserRequest, frozen=True):
    """A user wants the run to stop; everything in flight is kept for a resume."""


# -- the run ------------------------------------------------------------------------------------------------------


class Ticked(Event, frozen=True):
    """A clock tick, about once a second; only events tell the core that time has passed."""


class TimeLimits(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The time limits of the core's settings."""

    watchdog_s: float
    no_progress_s: float
    call_limit_s: float


class ControllerRestarted(Event, frozen=True):
    """A new controller took over: the state of every server is unknown and every command in flight is void.

    `num_tokens` has the number of tokens on disk for each unfinished trajectory that is not calling its environment;
    the core knows the number for one that is. The trainer reports its own position.
    """

    epoch: int
    num_tokens: dict[TrajectoryId, int]
    steps: int = 0  #: new number of steps of the job; 0: the number stays
    missing: tuple[VersionId, ...] = ()  #: published versions without a folder, which the trainer has to write again
    max_episodes: int = 0  #: episodes for which the hosts have room now; 0: any number
    replayable: tuple[TrajectoryId, ...] = ()  #: calling trajectories whose environments can be replayed
    limits: TimeLimits | None = None  #: from now on; None: those of the settings stay


AnyEvent = (
    InstanceUp
    | InstanceLost
    | ProgressReported
    | PrefillReported
    | KvPressureReported
    | InstanceRemoved
    | InstanceDrainRequested
    | InstanceRecalled
    | ServerOffered
    | EvaluationRequested
    | StopRequested
    | WeightPushFinished
    | WeightPushFailed
    | VersionUnloaded
    | VersionUnloadFailed
    | PromptsArrived
    | GenerationFinished
    | GenerationStopped
    | GenerationFailed
    | CallStarted
    | CallFinished
    | TrajectoryGraded
    | TrainerReady
    | TrainerLost
    | MicroBatchTrained
    | StepTrained
    | VersionPublished
    | CheckpointSaved
    | Ticked
    | ControllerRestarted
)
