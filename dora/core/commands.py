"""Commands: the orders of the decision core to the shell, one type each.

*Work* starts something and is answered by exactly one event with its `attempt`. *Notices* are carried out at once,
without an answer. *Decisions* are journaled only, for the audit. Invariant: a command holds ids, counts and versions,
and never says why.
"""

from __future__ import annotations

from enum import StrEnum

import msgspec

from dora.core.ids import GroupId, InstanceId, StepId, TrajectoryId, VersionId
from dora.core.phases import GroupPhase
from dora.errors import kind_of


class Command(msgspec.Struct, frozen=True, gc=False, tag=True, forbid_unknown_fields=True):
    """Base class of all commands."""


# -- work ---------------------------------------------------------------------------------------------------------


class FetchPrompts(Command, frozen=True):
    """Read prompts from the stream → PromptsArrived."""

    first: GroupId
    count: int


class Generate(Command, frozen=True):
    """Sample from the tokens produced so far → GenerationFinished, -Stopped or -Failed, or CallStarted."""

    trajectory: TrajectoryId
    attempt: int
    instance: InstanceId
    version: VersionId
    num_tokens: int  #: produced by earlier attempts: the request must resume from exactly these


class CallEnvironment(Command, frozen=True):
    """Make the call with which the turn ended, once its intent is on disk, or ask for the prompt → CallFinished."""

    trajectory: TrajectoryId
    attempt: int


class GradeTrajectory(Command, frozen=True):
    """Score a finished answer → TrajectoryGraded."""

    trajectory: TrajectoryId
    attempt: int


class PushWeights(Command, frozen=True):
    """Load a version into an instance and read it back → WeightPushFinished | WeightPushFailed.

    An adapter is loaded beside others, while requests run, under a name of its own: the attempt is part of it, and the
    start of the controller, as an instance that has left may come back under its number. No name or path is used again,
    so that a load that was given up cannot pass for another.
    """

    instance: InstanceId
    attempt: int  #: a number that no other push or unload of the instance has
    version: VersionId


class UnloadVersion(Command, frozen=True):
    """Unload an adapter, which no request uses → VersionUnloaded | VersionUnloadFailed.

    The load may have failed: then it is not known whether the server has the adapter.
    """

    instance: InstanceId
    attempt: int
    version: VersionId
    load: int  #: attempt of the PushWeights that loaded it


class TrainMicroBatch(Command, frozen=True):
    """Train one micro-batch per rank, empty ones included → MicroBatchTrained, and StepTrained after the `last`.

    A wave that `closes` an update is followed by the optimizer update; the last wave of a step always closes one.
    """

    step: StepId
    index: int
    last: bool
    ranks: tuple[tuple[TrajectoryId, ...], ...]
    update: int = 0  #: the update that it belongs to: 0 ... M - 1
    closes: bool = False


class RestartTrainer(Command, frozen=True):
    """Start the ranks again after a pause → TrainerReady or TrainerLost."""

    incarnation: int
    after_s: float


class CondemnInstance(Command, frozen=True):
    """Declare a server lost and restart it → InstanceLost, later InstanceUp."""

    instance: InstanceId
    incarnation: int
    reason: str


class DismissInstance(Command, frozen=True):
    """Release an empty instance: end it if it is managed, leave it running if it is external → InstanceRemoved."""

    instance: InstanceId


# -- notices ------------------------------------------------------------------------------------------------------


class StopRequest(Command, frozen=True):
    """Stop a request and keep its tokens. The event that follows answers the request's Generate."""

    trajectory: TrajectoryId
    attempt: int
    instance: InstanceId


class RefuseRequest(Command, frozen=True):
    """Refuse what a user asks for (events.UserRequest)."""

    instance: InstanceId | None  #: None if the request is not about one
    reason: str


class ForgetGroups(Command, frozen=True):
    """Drop the tokens of trained or discarded groups from memory."""

    groups: tuple[GroupId, ...]


class ReleaseVersion(Command, frozen=True):
    """Delete a version that nothing needs any more from the live store."""

    version: VersionId


class DropCheckpoint(Command, frozen=True):
    """Delete a checkpoint that no resume will need, as enough newer ones exist."""

    step: StepId
    folder: str


class ReportEvaluation(Command, frozen=True):
    """Report the evaluation of a version, whose samples are all graded."""

    version: VersionId


class StopRun(Command, frozen=True):
    """End the run now, with everything in flight kept for a resume."""


class FinishRun(Command, frozen=True):
    """End the run: the job is done."""

    reason: str


class FailRun(Command, frozen=True):
    """End the run: the job cannot continue."""

    reason: str


# -- decisions ----------------------------------------------------------------------------------------------------


class AdmitGroup(Command, frozen=True):
    """A prompt became a group, tagged with the version that generates it."""

    group: GroupId
    version: VersionId
    deadline: int


class CommitGroup(Command, frozen=True):
    """The group will be trained in `step`, with staleness `step - version`."""

    group: GroupId
    version: VersionId
    step: StepId


class DropReason(StrEnum):
    """Why a group leaves without being trained."""

    ZERO_VARIANCE = "zero variance"
    GRADING = "grading"  #: fewer than two answers could be graded
    GENERATION = "generation"  #: an answer could not be generated: ": " and the reason follow
    OVER_SAMPLED = "over-sampled"


class DropGroup(Command, frozen=True):
    """The group leaves without being trained: `filtered` (no advantage), `failed`, or `discarded` (over-sampled)."""

    group: GroupId
    outcome: GroupPhase
    reason: str  #: begins with a DropReason
    rewards: tuple[float | None, ...]

    @property
    def why(self) -> str:
        """The key "outcome: kind of reason", by which groups and their tokens are counted.

        What servers say has numbers, so that in a long run there is no bound on the number of different reasons.
        """
        return f"{self.outcome.value}: {kind_of(self.reason)}"


class CloseStep(Command, frozen=True):
    """No more groups will be committed to `step`."""

    step: StepId
    num_groups: int


AnyCommand = (
    FetchPrompts
    | Generate
    | CallEnvironment
    | GradeTrajectory
    | PushWeights
    | UnloadVersion
    | TrainMicroBatch
    | RestartTrainer
    | CondemnInstance
    | DismissInstance
    | StopRequest
    | RefuseRequest
    | ForgetGroups
    | ReleaseVersion
    | DropCheckpoint
    | ReportEvaluation
    | StopRun
    | FinishRun
    | FailRun
    | AdmitGroup
    | CommitGroup
    | DropGroup
    | CloseStep
)
