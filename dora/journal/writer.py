"""The journal, written: an append-only file of records (codec.py) in frames (frames.py).

Invariant: what an event refers to is on disk before the event is, because flushing or syncing the journal first
does the same to the token store. Called by the controller's loop, once per event; a flush per batch of events and a
sync per closed step are the loop's choice.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import cast

from dora.core.commands import AnyCommand, Command
from dora.core.events import AnyEvent, Event
from dora.journal.codec import AnyRecord, Handled, encode
from dora.journal.frames import FrameWriter
from dora.journal.tokens import TokenWriter


class JournalWriter(FrameWriter):
    """Appends records; a new journal begins with a `Header`, every controller process with an `Epoch`."""

    def __init__(self, path: Path, *, tokens: TokenWriter | None = None) -> None:
        super().__init__(path, follows=tokens)

    def append(self, record: AnyRecord) -> None:
        """One record of any kind."""
        self.write(encode(record))

    def handled(self, event: Event, commands: Sequence[Command]) -> None:
        """An event, and what the core answered."""
        record = Handled(cast(AnyEvent, event), cast("tuple[AnyCommand, ...]", commands))
        self.write(encode(record))
