"""Messages between the controller and a sender process: one JSON line each.

Orders go to the sender's standard input; replies come from its standard output, `SenderReady` first. `Send` is answered
by `Listening` and, after the last byte, by `Sent`; `ScoreOrder` by `Scored`; either by `Failed` at any point, after
which the sender cannot be reused. There is one order at a time.
"""

from __future__ import annotations

import msgspec


class TensorBucket(msgspec.Struct, frozen=True):
    """Tensors that are sent together, in this order."""

    names: list[str]
    dtypes: list[str]  # as in torch: "bfloat16"
    shapes: list[list[int]]


class Send(msgspec.Struct, frozen=True, tag=True):
    """Broadcast a version to the other ranks of a new process group."""

    folder: str
    group: str  # a unique name
    address: str  # address of this host, as the server sees it; the rendezvous listens on this address only
    world_size: int  # the sender and the server's ranks
    backend: str  # gloo or nccl
    bucket_bytes: int  # maximum size of a bucket of more than one tensor
    timeout_s: float  # time limit of the rendezvous and of each broadcast


class ScoreOrder(msgspec.Struct, frozen=True, tag=True):
    """Compute the log-probs of a short prompt under a version."""

    folder: str


class SenderReady(msgspec.Struct, frozen=True, tag=True):
    """The process has started."""


class Listening(msgspec.Struct, frozen=True, tag=True):
    """The rendezvous is open: the server may join and then receive the buckets, one after the other."""

    port: int
    buckets: list[TensorBucket]


class Sent(msgspec.Struct, frozen=True, tag=True):
    """The server has received every bucket."""


class Scored(msgspec.Struct, frozen=True, tag=True):
    token_ids: list[int]
    logprobs: list[float]  # log-probs of all tokens but the first


class Failed(msgspec.Struct, frozen=True, tag=True):
    reason: str


Order = Send | ScoreOrder
Reply = SenderReady | Listening | Sent | Scored | Failed
