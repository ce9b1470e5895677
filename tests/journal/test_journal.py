"""Writing, reading and replaying a journal."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest

from dora.core import commands as cmd
from dora.core import events as ev
from dora.core import tables
from dora.core.ids import Subject
from dora.core.phases import GROUP, GroupPhase
from dora.errors import ConfigError, ProtocolError
from dora.journal.codec import FORMAT, Epoch, Handled, Header, Note
from dora.journal.reader import Journal
from dora.journal.replay import replay
from dora.journal.writer import JournalWriter
from tests.core.world import World
from tests.journal.recorded import first_command, first_event, full_run, with_command, with_event


@pytest.fixture(scope="module")
def world() -> World:
    return full_run()


def header(world: World) -> Header:
    return Header(FORMAT, "run-1", "2026-01-01T00:00:00Z", "0.1.0", world.settings)


def test_a_journal_gives_back_settings_events_and_commands_over_several_controllers(
    world: World, tmp_path: Path
) -> None:
    path = tmp_path / "journal"
    half = len(world.journal) // 2
    for epoch, part in enumerate((world.journal[:half], world.journal[half:])):
        with JournalWriter(path) as writer:
            if epoch == 0:
                writer.append(header(world))
            writer.append(Epoch(epoch, part[0][0].at, ""))
            for event, commands in part:
                writer.handled(event, commands)
            writer.append(Note(1.0, "end", {"epoch": epoch}))
    journal = Journal(path)
    assert journal.header == header(world)
    assert [(event, list(commands)) for event, commands in journal] == world.journal
    others = [record for record in journal.records() if not isinstance(record, Handled)]
    assert [type(record) for record in others] == [Header, Epoch, Note, Epoch, Note]
    assert journal.torn_bytes == 0


def test_a_replay_of_the_file_gives_the_state_of_the_run(world: World, tmp_path: Path) -> None:
    with JournalWriter(tmp_path / "journal") as writer:
        writer.append(header(world))
        for event, commands in world.journal:
            writer.handled(event, commands)
    journal = Journal(tmp_path / "journal")
    replayed = replay(journal.header.settings, journal)
    assert replayed.difference is None
    assert replayed.num_events == len(world.journal)
    assert replayed.state.ledger.counts == world.state.ledger.counts
    assert replayed.state.finished


def test_a_replay_stops_at_the_first_command_that_differs_and_gives_its_excerpt(world: World) -> None:
    at, order = first_command(world.journal, cmd.Generate, lambda c: c.num_tokens > 0)
    changed = with_command(world.journal, at, num_tokens=order.num_tokens - 1)
    replayed = replay(world.settings, changed)
    difference = replayed.difference
    assert difference is not None
    assert difference.index == replayed.num_events == at[0]
    assert difference.subject == Subject("trajectory", order.trajectory)
    assert f"num_tokens={order.num_tokens - 1}, recomputed Generate" in str(difference)
    assert "Generate" in difference.excerpt[-1]
    assert len(difference.excerpt) > 2


def test_a_replay_of_an_impossible_sequence_is_a_difference_and_not_a_crash(world: World) -> None:
    at, published = first_event(world.journal, ev.VersionPublished)
    replayed = replay(world.settings, with_event(world.journal, at, version=published.version + 7))
    assert replayed.difference is not None
    assert replayed.difference.index >= at


def test_an_impossible_change_is_told_with_what_happened_to_its_subject(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tables, "GROUP", {**GROUP, GroupPhase.COMPLETE: {}})
    at, order = first_command(world.journal, cmd.CommitGroup, lambda _: True)
    difference = replay(world.settings, world.journal).difference
    assert difference is not None
    assert difference.index == at[0]
    assert difference.subject == Subject("group", order.group)
    assert f"group {order.group}: complete --> committed by commit is impossible" in str(difference)
    assert f"→ AdmitGroup group={order.group} " in "".join(difference.excerpt)


def test_a_missing_command_is_a_difference(world: World) -> None:
    index, (event, commands) = next((i, e) for i, e in enumerate(world.journal) if len(e[1]) > 1)
    for recorded in (commands[:-1], [*commands, cmd.ReleaseVersion(0)]):
        difference = replay(world.settings, [*world.journal[:index], (event, recorded)]).difference
        assert difference is not None
        assert "nothing more" in str(difference)


def test_a_file_that_is_not_a_journal_is_refused_in_one_line(world: World, tmp_path: Path) -> None:
    path = tmp_path / "journal"
    with pytest.raises(ConfigError, match="cannot be read"):
        Journal(path)
    path.write_bytes(b"")
    with pytest.raises(ConfigError, match="is empty"):
        Journal(path)
    with JournalWriter(path) as writer:
        writer.append(Epoch(0, 0.0, ""))
    with pytest.raises(ConfigError, match="its first record is not a header"):
        Journal(path)


def test_another_format_is_refused_by_its_number(world: World, tmp_path: Path) -> None:
    with JournalWriter(tmp_path / "journal") as writer:
        writer.write(msgspec.msgpack.encode({"type": "Header", "format": 99, "new": True}))
    with pytest.raises(ConfigError, match="has format 99, but this DORA reads format 3"):
        Journal(tmp_path / "journal")


def test_a_whole_record_with_unknown_contents_is_an_error_with_its_offset(world: World, tmp_path: Path) -> None:
    path = tmp_path / "journal"
    with JournalWriter(path) as writer:
        writer.append(header(world))
    place = path.stat().st_size
    with JournalWriter(path) as writer:
        writer.write(b"\xc1")
    with pytest.raises(ProtocolError, match=rf"journal: the record at byte {place}: "):
        list(Journal(path))
