"""Reading of journals, record by record: a journal may have any length, and its run may still be active.

A torn last record is tolerated and counted; any other damage is a JournalError or ProtocolError that names file and
offset.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

from dora.core.commands import Command
from dora.core.events import Event
from dora.errors import ConfigError, ProtocolError
from dora.journal.codec import FORMAT, MAX_RECORD_BYTES, AnyRecord, Handled, Header, decode, format_of
from dora.journal.frames import FrameReader


class Journal:
    """A journal on disk: `header`, `records()`, and, when iterated, its (event, commands)."""

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            self._frames = FrameReader(path, max_record_bytes=MAX_RECORD_BYTES)
            self.header = self._read_header()
        except OSError as err:
            raise ConfigError(f"{path}: cannot be read: {err.strerror}") from err

    @property
    def torn_bytes(self) -> int:
        """Bytes of an incomplete last record, as found by the last full iteration."""
        return self._frames.torn_bytes

    def records(self) -> Iterator[AnyRecord]:
        """Yield every record, the header included."""
        for offset, payload in self._frames:
            try:
                yield decode(payload)
            except ProtocolError as err:
                raise ProtocolError(f"{self.path}: the record at byte {offset}: {err}") from err

    def __iter__(self) -> Iterator[tuple[Event, Sequence[Command]]]:
        """Yield every event with the commands that answered it."""
        for record in self.records():
            if isinstance(record, Handled):
                yield record.event, record.commands

    def _read_header(self) -> Header:
        first = next(iter(self._frames), None)
        if first is None:
            raise ConfigError(f"{self.path}: is empty: the run ended before its first record")
        number = format_of(first[1])
        if number is None:
            raise ConfigError(f"{self.path}: is not a journal: its first record is not a header")
        if number != FORMAT:
            raise ConfigError(
                f"{self.path}: has format {number}, but this DORA reads format {FORMAT}; use the other version"
            )
        header = decode(first[1])
        assert isinstance(header, Header), "format_of has checked its type"
        if not header.settings.is_possible:
            raise ConfigError(f"{self.path}: has settings that no run can have: the file is damaged or was altered")
        return header
