"""The messages between the controller and the trainer ranks, grouped by receiver.

The unions `ToTrainer` and `ToController` are the protocol; a change to any type here raises `PROTOCOL_VERSION`.
Every type is frozen, and the codec refuses unknown fields and types. The receiver's arrays are read-only, and the
sender must not change an array after sending it: the transport keeps it until it is acknowledged.

Legend: T tokens of a micro-batch, n sequences in it, G siblings of a group.
"""

from __future__ import annotations

import math
from typing import Final, Literal

import msgspec
import numpy as np
from numpy.typing import NDArray

from dora.core.ids import StepId, TrajectoryId, Truncation, VersionId

PROTOCOL_VERSION = 12

#: `MicroBatch.rewards_to_go` if all episodes have one turn.
NO_TURNS: Final = np.zeros((0, 0, 0), np.float32)

#: `MicroBatch.experts` if no choices of experts are replayed.
NO_EXPERTS: Final = np.zeros((0, 0, 0), np.uint8)
NOT_ROUTED: Final = np.zeros(0, np.uint8)

#: What `MicroBatch.truncated` counts: the budget that ended the answer.
TRUNCATIONS: Final[tuple[Truncation, ...]] = ("", "tokens", "turns", "time")


class Message(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, tag=True):
    """Base class of all messages; the class name is their tag."""


# ---- received by the trainer ----------------------------------------------------------------------------------------


class LoraSettings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The adapter that is trained in place of the weights."""

    rank: int
    alpha: float
    rslora: bool
    targets: tuple[str, ...]
    seed: int  # of the run: its first values are drawn from it
    begins_with: str = ""  # folder of an adapter that has the first values; "": they are drawn


class TrainerSettings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The trainer's part of the configuration; see config/schema.py."""

    device: Literal["cpu", "cuda"]
    dtype: Literal["float32", "bfloat16"]
    publish_dtype: Literal["float32", "bfloat16"]
    fp32_head: bool
    activation_checkpointing: Literal["none", "selective", "full", "auto"]
    compile: bool
    optimizer: Literal["adamw", "muon"]
    optimizer_state: Literal["device", "host", "8bit"]
    threads: int
    micro_batch_tokens: int
    longest_request: int  # tokens of the longest prompt and answer
    max_new_tokens: int  # token budget of an answer
    steps: int  # T of the job: the last step writes a checkpoint
    learning_rate: float
    schedule: Literal["constant", "linear", "cosine"]
    min_learning_rate: float  # as a share of learning_rate
    warmup_steps: int
    lora: LoraSettings | None = None  # None: all weights are trained
    serves_adapters: bool = False  # servers hold versions as adapters, beside the model
    weight_decay: float
    beta1: float
    beta2: float
    max_grad_norm: float
    updates: int  # M
    shard_ranks: int  # over which the weights are sharded, while the others have copies of them; 0: all
    expert_ranks: int = 1  # consecutive ranks that divide the experts
    context_ranks: int = 1  # consecutive ranks that divide each sequence
    tensor_ranks: int = 1  # consecutive ranks that divide the matrices of each layer
    copies: Literal["device", "host"]  # where the shards of proximal and reference policy are
    probe_tokens: int  # per rank and step: maximum number of stale tokens rescored under their version; 0: off
    probe_every: int  # steps between two such probes
    shared_prompts: Literal["auto", "on", "off"] = "auto"
    sends_logprobs: bool = False  # whether to send the log-probs of one answer of each micro-batch
    advantages: tuple[str, ...] = ()  # kind of advantage by source of prompts; empty: the objective's for all
    objective: str  # the section `[objective]` as JSON
    temperature: float
    max_staleness: int  # K of the strategy, or T - 1 if the strategy does not bound staleness
    checkpoint_every: int


class Configure(Message, frozen=True):
    """The first message to every rank, answered by `RankReady`. Paths are those of the rank's host."""

    run_id: str
    model_path: str  # Hugging Face folder of version 0; config and tokenizer files of every version come from it
    settings: TrainerSettings
    memory_root: str  # VersionStore roots
    durable_root: str
    checkpoints: str  # folder of checkpoint folders
    resume_from: tuple[str, ...]  # checkpoint folders, best first; the first one that loads on every rank is used
    may_start_over: bool  # whether to start from model_path if none of them loads
    chain: str  # lineage before step 0, for a start from model_path
    epoch: int  # of the controller, as in `fence`
    fence: str  # file that names the only ranks that may make versions and checkpoints visible
    incarnation: int = 0  # number of this start of the ranks, as in `fence`
    ranks_here: tuple[int, ...] = ()  # whose files are in `checkpoints`, ascending; (): all
    owns_checkpoints: bool = False  # the controller cannot delete in `checkpoints`, so the first of those ranks does


class MicroBatch(Message, frozen=True):
    """Wave `index` of `step` for one rank. Every rank gets exactly one for each index, empty (n = 0) ones included.

    Sequences follow each other along the T axis; `lengths` separates them. Position t of a sequence is trained if its
    loss_mask is 1 (never the first token, which nothing predicts). A trajectory is one sequence or, if its conversation
    forked, several, side by side (journal/rows.py).
    """

    step: StepId
    index: int  # 0, 1, ... within the step
    last: bool  # closes the step; the same on all ranks
    tokens: NDArray[np.int32]  # [T]
    loss_mask: NDArray[np.uint8]  # [T] 1: sampled by the model and trained
    behavior_logprobs: NDArray[np.float32]  # [T] from the engine under `versions`; used only where loss_mask is 1
    lengths: NDArray[np.int32]  # [n] tokens of prompt + response, or of one row of a forked trajectory
    trajectories: NDArray[np.int64]  # [n] ids; equal for the sequences of one trajectory
    groups: NDArray[np.int64]  # [n] ids
    versions: NDArray[np.int32]  # [n] policy version of the group
    rewards: NDArray[np.float32]  # [n] of the trajectory itself
    group_rewards: NDArray[np.float32]  # [n, G] of all siblings; NaN: that sibling is grading_failed
    truncated: NDArray[np.uint8]  # [n] index into TRUNCATIONS
    sources: NDArray[np.uint8]  # [n] index into `task.sources`
    #: [n, G, U] sum of each sibling's rewards from each turn on; for the first turn, group_rewards. After the last turn
    #: of a sibling, the value of its last turn. Empty if no sibling had several turns.
    rewards_to_go: NDArray[np.float32] = NO_TURNS
    #: [T, layers, bytes] the experts that the engine chose: top_k ids of one byte each, or little-endian of two bytes
    #: with more than 256 experts (dora/routing.py). Empty if they are not replayed.
    experts: NDArray[np.uint8] = NO_EXPERTS
    #: [T] 1: `experts` has the engine's choice; 2: that of a server which read the token again after the one that
    #: sampled its successor was lost; 0: nothing is known. Empty if choices are not replayed.
    routed: NDArray[np.uint8] = NOT_ROUTED
    update: int = 0  # 0 ... M - 1: the optimizer update that it belongs to
    closes: bool = False  # ends its update, as `last` always does; the same on all ranks
    parent: str = ""  # lineage before this step, that is, of the trainer's weights
    chain: str = ""  # lineage including this step; in the last micro-batch only


class SaveCheckpoint(Message, frozen=True):
    """Write a checkpoint of the state before the current step. Answered by `CheckpointWritten`."""


class DeleteCheckpoint(Message, frozen=True):
    """Delete a checkpoint that is no longer needed. Sent to the first rank of each folder that the ranks own."""

    name: str  # of its folder


class Stop(Message, frozen=True):
    """Finish the work in progress, including publication, and exit with code 0. No message follows."""

    reason: str


ToTrainer = Configure | MicroBatch | SaveCheckpoint | DeleteCheckpoint | Stop


# ---- received by the controller -------------------------------------------------------------------------------------


class RankReady(Message, frozen=True):
    """The rank has loaded model and optimizer. `next_step` is 0 or the step of the checkpoint it resumed from."""

    rank: int
    next_step: StepId
    skipped: tuple[str, ...] = ()  # checkpoints that could not be loaded, each with the reason
    note: str = ""  # for the user: how this model is trained, if not as usual


class MicroBatchDone(Message, frozen=True):
    """One rank has completed forward and backward of a micro-batch."""

    rank: int
    step: StepId
    index: int
    num_tokens: int  # prompt tokens included
    busy_s: float


class StepDone(Message, frozen=True):
    """The step is closed and the weights of version step + 1 are gathered; the next step may begin. Rank 0 only.

    `metrics`: all-reduced over ranks; the key set is dora.trainer.metrics.METRICS.
    """

    rank: int
    step: StepId
    metrics: dict[str, float]
    chain: str = ""  # lineage including this step


class VersionWritten(Message, frozen=True):
    """The version is complete in the store. Rank 0 only; after `StepDone` of step version - 1."""

    version: VersionId
    num_bytes: int
    files: dict[str, str]  # name -> checksum of the bytes in the store
    chain: str = ""  # lineage of the weights
    differs: str = ""  # the store already had the version and kept it; checksum of the new bytes if they differ


class CheckpointWritten(Message, frozen=True):
    """The checkpoint is complete and durable on the hosts of all ranks. Sent by the first rank of each folder."""

    step: StepId  # the next step to be trained from it
    folder: str
    num_bytes: int  # of `files`
    files: dict[str, str]  # name -> checksum of the files of the ranks in this folder, and of the manifest
    chain: str = ""  # lineage before that step


class TrainerFailed(Message, frozen=True):
    """The rank exits with code 1 after this message."""

    rank: int
    reason: str  # one line
    is_final: bool = False  # ranks that are started again would fail again


#: Seconds from one RankPulse to the next.
PULSE_S: Final = 2.0

#: What a rank does (dora/trainer/spans.py). waiting: for a message; slowest_rank: in a collective, for the other ranks;
#: publishing: for the previous version to be written; copying: gathers weights and makes copies of them.
RankActivity = Literal[
    "start",
    "waiting",
    "slowest_rank",
    "publishing",
    "packing",
    "forward_backward",
    "optimizer",
    "copying",
    "saving",
]


#: Activities in which a rank waits for something other than the other ranks, with a limit of its own.
OWN_LIMIT: Final[frozenset[RankActivity]] = frozenset({"start", "waiting", "publishing", "saving"})


class RankSpans(Message, frozen=True):
    """What a rank has done since its last RankSpans, in order and without holes."""

    rank: int
    until: float  # end of the last span, by the rank's monotonic clock, in seconds
    spans: tuple[tuple[RankActivity, float], ...]  # activity, seconds


class RankPulse(Message, frozen=True):
    """How far a rank is; sent every PULSE_S by a thread of its own, whatever the main thread does."""

    rank: int
    count: int  # of the main thread: it grows with each activity, pass and layer
    activity: RankActivity  # that the main thread is in


class FlightRecord(Message, frozen=True):
    """The last collectives of a rank without progress, as torch's flight recorder has them."""

    rank: int
    record: str  # JSON


class TrainerLogprobs(Message, frozen=True):
    """Log-probs of one answer of a micro-batch in the pass that trained it; before its `MicroBatchDone`."""

    rank: int
    trajectory: TrajectoryId
    logprobs: NDArray[np.float32]  # of its trained tokens


ToController = (
    RankReady
    | MicroBatchDone
    | RankSpans
    | RankPulse
    | FlightRecord
    | TrainerLogprobs
    | StepDone
    | VersionWritten
    | CheckpointWritten
    | TrainerFailed
)


# ---- the link itself ------------------------------------------------------------------------------------------------


class Hello(Message, frozen=True):
    """First message of a rank and after every reconnection. Its fields are the same in all versions from 9 on."""

    protocol: int
    rank: int
    world_size: int
    host: str
    pid: int
    last_id: int  # newest message of the controller that the rank has received; 0: none
    incarnation: int = 0  # number of the start of the ranks that it belongs to, since the controller began


class Welcome(Message, frozen=True):
    """The rank is admitted."""

    epoch: int  # of the controller; it changes when the controller is restarted
    incarnation: int
    last_id: int  # newest message of the rank that the controller has received; 0: none


class Refused(Message, frozen=True):
    """The rank is not admitted and must end."""

    reason: str


class Ack(Message, frozen=True):
    """All messages up to `last_id` have been consumed."""

    epoch: int
    incarnation: int
    last_id: int


class TrainerData(Message, frozen=True):
    """A numbered message to the trainer; ids count 1, 2, ... per rank."""

    epoch: int
    incarnation: int
    id: int
    message: ToTrainer


class ControllerData(Message, frozen=True):
    """A numbered message to the controller; ids count 1, 2, ... per rank."""

    epoch: int
    incarnation: int
    id: int
    message: ToController


TrainerFrame = Welcome | Refused | Ack | TrainerData
ControllerFrame = Hello | Ack | ControllerData


def empty_micro_batch(
    *, step: StepId, index: int, last: bool, group_size: int, update: int = 0, closes: bool = False
) -> MicroBatch:
    """Return a micro-batch without trajectories."""
    return MicroBatch(
        step=step,
        index=index,
        last=last,
        update=update,
        closes=closes or last,
        tokens=np.zeros(0, np.int32),
        loss_mask=np.zeros(0, np.uint8),
        behavior_logprobs=np.zeros(0, np.float32),
        lengths=np.zeros(0, np.int32),
        trajectories=np.zeros(0, np.int64),
        groups=np.zeros(0, np.int64),
        versions=np.zeros(0, np.int32),
        rewards=np.zeros(0, np.float32),
        group_rewards=np.full((0, group_size), math.nan, np.float32),
        truncated=np.zeros(0, np.uint8),
        sources=np.zeros(0, np.uint8),
    )
