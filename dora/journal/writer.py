"""Writing of a journal: an append-only file of records (codec.py) in frames (frames.py), stored by `Commits`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import cast

from dora.core.commands import AnyCommand, Command
from dora.core.events import AnyEvent, Event
from dora.journal.codec import AnyRecord, Handled, encode
from dora.journal.frames import FrameWriter


class JournalWriter(FrameWriter):
    """Writer of records; the first one is a `Header`, and the first one of each controller an `Epoch`."""

    def append(self, record: AnyRecord) -> None:
        """Append a record of any kind."""
        self.write(encode(record))

    def handled(self, event: Event, commands: Sequence[Command]) -> int:
        """Append an event and the core's commands; return the position after it."""
        self.append(Handled(cast(AnyEvent, event), cast("tuple[AnyCommand, ...]", commands)))
        return self.num_records
