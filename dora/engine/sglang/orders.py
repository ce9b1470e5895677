"""What the controller and a sender process say to each other: one JSON line per message, over the sender's pipes.

Orders go to standard input, replies come from standard output, `SenderReady` first. `Send` is answered by `Listening`
and, when the last byte is out, by `Sent`; `ScoreOrder` by `Scored`; either by `Failed` at any point, after which the
sender is of no further use. One order at a time. Used by `senders` (controller) and `sender` (process).
"""

from __future__ import annotations

import msgspec


class TensorBucket(msgspec.Struct, frozen=True):
    """Tensors that travel together, in this order."""

    names: list[str]
    dtypes: list[str]  # torch's names: "bfloat16"
    shapes: list[list[int]]


class Send(msgspec.Struct, frozen=True, tag=True):
    """Broadcast a version to the other ranks of a group of its own."""

    folder: str
    group: str  # a name never used before
    address: str  # of this host, as the server sees it; the rendezvous listens on no other
    world_size: int  # the sender and the server's ranks
    backend: str  # gloo or nccl
    bucket_bytes: int  # a bucket is no larger, unless one tensor is
    timeout_s: float  # of the rendezvous and of each broadcast


class ScoreOrder(msgspec.Struct, frozen=True, tag=True):
    """Compute the log-probs of a short prompt under a version."""

    folder: str


class SenderReady(msgspec.Struct, frozen=True, tag=True):
    """The process has started."""


class Listening(msgspec.Struct, frozen=True, tag=True):
    """The rendezvous is open: the server may join and then ask for the buckets, one after the other."""

    port: int
    buckets: list[TensorBucket]


class Sent(msgspec.Struct, frozen=True, tag=True):
    """Every bucket has been taken."""


class Scored(msgspec.Struct, frozen=True, tag=True):
    token_ids: list[int]
    logprobs: list[float]  # of each token after the first


class Failed(msgspec.Struct, frozen=True, tag=True):
    reason: str


Order = Send | ScoreOrder
Reply = SenderReady | Listening | Sent | Scored | Failed
