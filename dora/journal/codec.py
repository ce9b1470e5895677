"""Journal records <-> msgpack: one generic codec for all struct types.

It is strict: an unknown record, event, command or field is a ProtocolError.
"""

from __future__ import annotations

from typing import Final

import msgspec

from dora.core.commands import AnyCommand
from dora.core.events import AnyEvent
from dora.core.strategies import Settings
from dora.errors import ProtocolError

#: Raised with every change that older readers would misread.
FORMAT: Final = 2


class JournalRecord(msgspec.Struct, frozen=True, gc=False, tag=True, forbid_unknown_fields=True):
    """Base class of all journal records."""


class Header(JournalRecord, frozen=True):
    """The first record: the run, and everything besides events that decisions depend on."""

    format: int
    run_id: str
    created: str  #: ISO 8601, UTC
    dora_version: str
    settings: Settings
    rollout_only: bool = False


class Epoch(JournalRecord, frozen=True):
    """A controller process begins to write."""

    epoch: int  #: 0 for the first one; each restart adds one
    at: float  #: seconds since the run began
    config: str  #: the resolved configuration, as TOML without secrets
    changes: tuple[str, ...] = ()  #: differences from the previous epoch, one line each


class Handled(JournalRecord, frozen=True):
    """A fact and the orders that the core gave in answer; replay recomputes and compares them."""

    event: AnyEvent
    commands: tuple[AnyCommand, ...]


class Note(JournalRecord, frozen=True):
    """Information for people and for recovery; no decision depends on it."""

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
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as err:
        raise ProtocolError(f"not a journal record of format {FORMAT}: {err}") from err


def format_of(data: bytes) -> int | None:
    """The format number of a header of any format; None if `data` is not a header."""
    try:
        fields = msgspec.msgpack.decode(data)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        return None
    return fields.get("format") if isinstance(fields, dict) and fields.get("type") == Header.__name__ else None
