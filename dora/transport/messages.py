"""All types that travel between the controller and the trainer ranks, grouped by receiver.

The unions `ToTrainer` and `ToController` are the protocol; a change to any type here raises `PROTOCOL_VERSION`.
Every type is frozen, and fields or kinds that are unknown are refused by the codec. Arrays are read-only for the
receiver and must not be changed by the sender once handed over: the transport keeps them until acknowledged.

Legend: T tokens of a micro-batch, n trajectories in it, G siblings of a group.
Called by: controller (sends ToTrainer, receives ToController) and dora.trainer (the reverse).
"""

from __future__ import annotations

import math
from typing import Literal

import msgspec
import numpy as np
from numpy.typing import NDArray

PROTOCOL_VERSION = 2


class Message(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, tag=True):
    """Base of all wire types: the class name is the kind on the wire."""


# ---- received by the trainer ----------------------------------------------------------------------------------------


class TrainerSettings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The trainer's share of the resolved config; meanings as in config/schema.py."""

    device: Literal["cpu", "cuda"]
    dtype: Literal["float32", "bfloat16"]
    publish_dtype: Literal["float32", "bfloat16"]
    threads: int
    micro_batch_tokens: int
    steps: int  # T of the job: the last step writes a checkpoint
    learning_rate: float
    warmup_steps: int
    weight_decay: float
    beta1: float
    beta2: float
    max_grad_norm: float
    advantage: Literal["grpo", "dr_grpo", "rloo"]
    clip_low: float
    clip_high: float
    tis_cap: float
    temperature: float
    max_staleness: int  # K in force (the strategy's), or T - 1 where the strategy does not bound staleness
    checkpoint_every: int


class Configure(Message, frozen=True):
    """First message to every rank. Answered by Ready."""

    run_id: str
    model_path: str  # Hugging Face folder of version 0; config and tokenizer files of every version come from it
    settings: TrainerSettings
    memory_root: str  # VersionStore roots
    durable_root: str
    checkpoints: str  # folder of step-<s> checkpoint folders
    resume_from: str | None  # checkpoint folder to start from; None: a fresh run from model_path


class MicroBatch(Message, frozen=True):
    """Wave `index` of `step` for one rank. Every rank gets exactly one for each index, empty (n = 0) ones included.

    Trajectories lie one behind the other in the T axis; `lengths` cuts it. Position t of a trajectory is trained
    when loss_mask is 1 there (never at its first token, which nothing predicts).
    """

    step: int
    index: int  # 0, 1, ... within the step
    last: bool  # closes the step; the same on all ranks
    tokens: NDArray[np.int32]  # [T]
    loss_mask: NDArray[np.uint8]  # [T] 1: sampled by the model and trained
    behavior_logprobs: NDArray[np.float32]  # [T] from the engine under `versions`; read where loss_mask is 1 only
    lengths: NDArray[np.int32]  # [n] prompt + response
    trajectories: NDArray[np.int64]  # [n] ids
    groups: NDArray[np.int64]  # [n] ids
    versions: NDArray[np.int32]  # [n] policy version of the group
    rewards: NDArray[np.float32]  # [n] of the trajectory itself
    group_rewards: NDArray[np.float32]  # [n, G] of all siblings; NaN: that sibling is grading_failed
    truncated: NDArray[np.uint8]  # [n] 1: the answer reached its token budget


class SaveCheckpoint(Message, frozen=True):
    """Write a checkpoint at the next step boundary: now if between steps. Answered by CheckpointSaved (rank 0)."""


class Stop(Message, frozen=True):
    """Finish what is under way (publication included) and end with exit code 0. Nothing follows it."""

    reason: str


ToTrainer = Configure | MicroBatch | SaveCheckpoint | Stop


# ---- received by the controller -------------------------------------------------------------------------------------


class Ready(Message, frozen=True):
    """The rank has loaded model and optimizer. `next_step` is 0 or the step of the checkpoint it resumed from."""

    rank: int
    next_step: int


class MicroBatchTrained(Message, frozen=True):
    """Forward and backward of one micro-batch are done on one rank."""

    rank: int
    step: int
    index: int
    num_tokens: int  # prompt tokens included
    busy_s: float


class StepTrained(Message, frozen=True):
    """The step is closed and the weights of version step + 1 are gathered; the next step may begin. Rank 0 only.

    `metrics`: all-reduced over ranks; the key set is dora.trainer.metrics.METRICS.
    """

    rank: int
    step: int
    metrics: dict[str, float]


class VersionPublished(Message, frozen=True):
    """The version is complete in the store. Rank 0 only; after StepTrained of step version - 1."""

    version: int
    num_bytes: int
    files: dict[str, str]  # name -> checksum
    replayed: bool  # True: the version was in the store already and its bytes were kept
    matches: bool  # the bytes of this publication equal those in the store (always True when not replayed)


class CheckpointSaved(Message, frozen=True):
    """The checkpoint folder of all ranks is complete and durable. Rank 0 only."""

    step: int  # the next step to be trained from it
    folder: str


class TrainerFailed(Message, frozen=True):
    """The rank ends with exit code 1 after this."""

    rank: int
    reason: str  # one line


ToController = Ready | MicroBatchTrained | StepTrained | VersionPublished | CheckpointSaved | TrainerFailed


# ---- the link itself ------------------------------------------------------------------------------------------------


class Hello(Message, frozen=True):
    """First word of a rank, repeated after every reconnection. Its fields stay the same in all protocol versions."""

    protocol: int
    token: str
    rank: int
    world_size: int
    host: str
    pid: int
    last_id: int  # newest message of the controller that the rank has received; 0: none


class Welcome(Message, frozen=True):
    """The rank is admitted."""

    epoch: int  # of the controller; another number than before means that the controller was started anew
    last_id: int  # newest message of the rank that the controller has received; 0: none


class Refused(Message, frozen=True):
    """The rank is not admitted and must give up."""

    reason: str


class Ack(Message, frozen=True):
    """All messages up to `last_id` have been consumed."""

    epoch: int
    last_id: int


class TrainerData(Message, frozen=True):
    """A numbered message to the trainer; ids count 1, 2, ... per rank."""

    epoch: int
    id: int
    message: ToTrainer


class ControllerData(Message, frozen=True):
    """A numbered message to the controller; ids count 1, 2, ... per rank."""

    epoch: int
    id: int
    message: ToController


TrainerFrame = Welcome | Refused | Ack | TrainerData
ControllerFrame = Hello | Ack | ControllerData


def empty_micro_batch(*, step: int, index: int, last: bool, group_size: int) -> MicroBatch:
    """A wave without work for one rank."""
    return MicroBatch(
        step=step,
        index=index,
        last=last,
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
    )
