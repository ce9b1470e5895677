"""Journal records <-> msgpack. One generic codec over the struct types; no type has code of its own.

Strict in both directions: an unknown record, event, command or field is a ProtocolError. Called by writer and reader.
"""

from __future__ import annotations

from typing import Final

import msgspec

from dora.core.commands import AnyCommand
from dora.core.events import AnyEvent
from dora.core.strategies import Settings
from dora.errors import ProtocolError

#: Grows with every change that older readers would misread.
FORMAT: Final = 1


class Record(msgspec.Struct, frozen=True, gc=False, tag=True, forbid_unknown_fields=True):
    """Base of all journal records."""


class Header(Record, frozen=True):
    """The first record, once: whose journal this is, and everything that decisions depend on besides events."""

    format: int
    run_id: str
    created: str  #: ISO 8601, UTC
    dora_version: str
    settings: Settings


class Epoch(Record, frozen=True):
    """A controller process begins to write."""

    epoch: int  #: 0: the first one; each restart adds one
    at: float  #: seconds since the run began
    config_sha256: str  #: of the resolved configuration in the run folder


class Handled(Record, frozen=True):
    """A fact, and the orders the core gave on it; replay recomputes them and compares."""

    event: AnyEvent
    commands: tuple[AnyCommand, ...]


class Note(Record, frozen=True):
    """Something for people and for recovery that no decision depends on."""

    at: float
    name: str
    values: dict[str, str | int | float]


AnyRecord = Header | Epoch | Handled | Note

_ENCODER: Final = msgspec.msgpack.Encoder()
_DECODER: Final[msgspec.msgpack.Decoder[AnyRecord]] = msgspec.msgpack.Decoder(AnyRecord)

encode = _ENCODER.encode


def decode(data: bytes) -> AnyRecord:
    """The record in `data`."""
    try:
        return _DECODER.decode(data)
    except (msgspec.MsgspecError, UnicodeDecodeError) as err:
        raise ProtocolError(f"not a journal record of format {FORMAT}: {err}") from err


def format_of(data: bytes) -> int | None:
    """Format number of a header of any format; None if it is no header."""
    try:
        fields = msgspec.msgpack.decode(data)
    except (msgspec.MsgspecError, UnicodeDecodeError):
        return None
    return fields.get("format") if isinstance(fields, dict) and fields.get("type") == Header.__name__ else None
