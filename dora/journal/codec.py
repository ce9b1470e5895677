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

#: Maximum size of a record; the decoded object takes up to thirty times as much. The largest record has a number for
#: each held-out sample: a million samples take 3 MB.
MAX_RECORD_BYTES: Final = 4 << 20
#: Incremented with every change that older readers would misread.
FORMAT: Final = 3


class JournalRecord(msgspec.Struct, frozen=True, gc=False, tag=True, forbid_unknown_fields=True):
    """Base class of all journal records."""


class Header(JournalRecord, frozen=True):
    """The first record: the run, and all inputs of decisions besides events."""

    format: int
    run_id: str
    created: str  #: ISO 8601, UTC
    dora_version: str
    settings: Settings
    rollout_only: bool = False  #: without a trainer; true as well if nothing is trained (`settings.steps` is 0)


class Epoch(JournalRecord, frozen=True):
    """The first record of a controller process."""

    epoch: int  #: 0 for the first one; each restart adds one
    at: float  #: seconds since the run began
    config: str  #: the resolved configuration, as TOML without secrets
    changes: tuple[str, ...] = ()  #: differences from the previous epoch, one line each


class Handled(JournalRecord, frozen=True):
    """An event, and the commands that the core returned for it; replay recomputes and compares them."""

    event: AnyEvent
    commands: tuple[AnyCommand, ...]


class Note(JournalRecord, frozen=True):
    """Information for users and for recovery, on which no decision depends."""

    at: float
    name: str
    values: dict[str, str | int | float]


AnyRecord = Header | Epoch | Handled | Note

_ENCODER: Final = msgspec.msgpack.Encoder()
_DECODER: Final[msgspec.msgpack.Decoder[AnyRecord]] = msgspec.msgpack.Decoder(AnyRecord)

encode = _ENCODER.encode


def decode(data: bytes) -> AnyRecord:
    """Return the record in `data`."""
    try:
        return _DECODER.decode(data)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as err:
        raise ProtocolError(f"not a journal record of format {FORMAT}: {err}") from err


def format_of(data: bytes) -> int | None:
    """Return the format number of a header of any format; None if `data` is not a header."""
    try:
        fields = msgspec.msgpack.decode(data)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        return None
    return fields.get("format") if isinstance(fields, dict) and fields.get("type") == Header.__name__ else None
