"""Opens a run folder for inspection."""

from __future__ import annotations

from pathlib import Path

from dora.core.excerpt import Entry
from dora.core.state import State
from dora.journal.reader import Journal
from dora.journal.replay import replay
from dora.journal.run_folder import RunFolder


def open_run(folder: Path | str) -> tuple[State, list[Entry]]:
    """Return the core's state after the last event in the journal, and every event with the resulting commands.

    Read-only; the run may still be active. ReplayDifference if this core makes different decisions.
    """
    journal = Journal(RunFolder.open(Path(folder)).journal)
    entries = list(journal)
    found = replay(journal.header.settings, entries)
    if found.difference is not None:
        raise found.difference
    return found.state, entries
