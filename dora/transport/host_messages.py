"""The messages between the two ends that carry the pipes of a host of environments to another machine."""

from __future__ import annotations

from typing import Final, Literal

from dora.transport.messages import Message

#: Raised with each change of the messages below `OpenHost`.
HOST_PROTOCOL: Final = 1


class HostBytes(Message, frozen=True):
    """A piece of a pipe. Pieces are numbered from 1 on, in each direction by itself."""

    id: int
    #: "pipe": of stdin or stdout. "log": of stderr. "end": there is no more, and `data` says why, in UTF-8.
    kind: Literal["pipe", "log", "end"]
    data: bytes


class HostAck(Message, frozen=True):
    """All pieces up to `last_id` were passed on. It is also sent every BEAT_S, and shows that this side is there."""

    last_id: int


# ---- received where the host is -------------------------------------------------------------------------------------


class OpenHost(Message, frozen=True):
    """The first message, and after every reconnection. Its fields are the same in all protocol versions."""

    protocol: int
    is_new: bool  # a host is to be started; otherwise the sender has one
    last_id: int  # newest piece that the sender has received


class HostLeft(Message, frozen=True):
    """The sender has read why its host has ended."""


# ---- received where the controller is -------------------------------------------------------------------------------


class HostOpened(Message, frozen=True):
    """The host is there, and the other side has received all pieces up to `last_id`."""

    last_id: int


class HostRefused(Message, frozen=True):
    """There is no such host, or none for this side."""

    reason: str
    is_busy: bool = False  # ... now; ask again


ToHost = OpenHost | HostLeft | HostBytes | HostAck
FromHost = HostOpened | HostRefused | HostBytes | HostAck
