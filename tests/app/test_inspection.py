"""Opening a run folder for inspection."""

from __future__ import annotations

from pathlib import Path

import pytest

from dora import app
from dora.core import events as ev
from dora.errors import ConfigError
from dora.journal.replay import ReplayDifference
from tests.core.world import run
from tests.journal.recorded import first_event, full_run, new_folder, with_event, write


def test_opening_a_run_gives_its_state_and_its_events_with_their_commands(tmp_path: Path) -> None:
    world = full_run()
    folder = write(new_folder(tmp_path), world.settings, world.journal)
    state, entries = app.open_run(folder.root)
    assert [(event, list(commands)) for event, commands in entries] == world.journal
    assert (state.now, state.feed.trained) == (world.state.now, world.state.feed.trained)


def test_a_run_can_be_opened_before_its_end(tmp_path: Path) -> None:
    world = run(seed=3, steps=2)
    folder = write(new_folder(tmp_path), world.settings, world.journal[:50])
    state, entries = app.open_run(str(folder.root))
    assert len(entries) == 50
    assert not state.finished


def test_a_journal_of_other_decisions_than_the_cores_is_refused(tmp_path: Path) -> None:
    world = run(seed=3, steps=2)
    at, _ = first_event(world.journal, ev.InstanceUp, lambda e: True)
    folder = write(new_folder(tmp_path), world.settings, with_event(world.journal, at, slots=1))
    with pytest.raises(ReplayDifference):
        app.open_run(folder.root)


def test_a_folder_without_a_journal_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="is not a run folder"):
        app.open_run(tmp_path)
