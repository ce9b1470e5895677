"""A run as its folder tells it, for people who want to know what it did."""

from __future__ import annotations

from pathlib import Path

from dora.core.state import State
from dora.core.story import Entry
from dora.journal.reader import Journal
from dora.journal.replay import replay
from dora.journal.run_folder import RunFolder


def open_run(folder: Path | str) -> tuple[State, list[Entry]]:
    """The state of the core after the last event in the journal, and every event with the commands it led to.

    Reads only: the run may have ended or still be going on. ReplayDifference if this core decides otherwise.
    """
    journal = Journal(RunFolder.open(Path(folder)).journal)
    entries = list(journal)
    found = replay(journal.header.settings, entries)
    if found.difference is not None:
        raise found.difference
    return found.state, entries
