"""Files that a command writes for a user, in a folder where others may have placed files of the same names."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from dora import files
from dora.app import saved_status
from dora.app.demo import unpack_demo
from dora.app.opening import keep_flight_record
from dora.cli.view import write_report, write_trace
from dora.journal.run_folder import RunFolder
from tests.journal.recorded import full_run, write


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A run folder that can be shown in every way."""
    root = unpack_demo(tmp_path)
    world = full_run()
    run = RunFolder(root)
    run.journal.unlink()
    write(run, world.state.settings, world.journal)
    run.spans.write_bytes(b"")
    return root


@pytest.mark.parametrize(("command", "name"), [(write_report, "run.html"), (write_trace, "run.json")])
def test_a_link_beside_the_output_is_not_written_through(folder: Path, tmp_path: Path, command, name: str) -> None:
    victim, output = tmp_path / "victim", tmp_path / "output"
    victim.write_text("mine")
    output.mkdir()
    (output / f".{name}").symlink_to(victim)
    (output / name).symlink_to(victim)
    command(folder, output / name)
    assert victim.read_text() == "mine"
    assert (output / name).stat().st_size > 100
    assert not (output / name).is_symlink()
    assert sorted(path.name for path in output.iterdir()) == [f".{name}", name]


def test_a_link_in_place_of_a_temporary_file_of_the_run_is_not_written_through(tmp_path: Path) -> None:
    victim = tmp_path / "victim"
    victim.write_text("mine")
    (tmp_path / ".status.json").symlink_to(victim)
    saved_status._write(tmp_path / "status.json", b"{}")
    (tmp_path / "new").symlink_to(victim)
    with pytest.raises(FileExistsError):
        files.write_new(tmp_path / "new", b"{}")
    assert victim.read_text() == "mine"
    assert (tmp_path / "status.json").read_text() == "{}"


def test_the_name_of_a_temporary_file_cannot_be_foreseen(tmp_path: Path) -> None:
    written = []
    with files.observed(lambda operation: written.append(operation.path)):
        for _ in range(2):
            files.replace(tmp_path / "epoch", b"1\n")
    temporary = {path.name for path in written if path.name.startswith(".")}
    assert len(temporary) == 2


def test_a_flight_record_takes_the_place_of_a_fifo_and_of_a_link(tmp_path: Path) -> None:
    """Whoever opened the fifo to write would wait for a reader, and with it the whole run."""
    victim, logs = tmp_path / "victim", tmp_path / "logs"
    victim.write_text("mine")
    logs.mkdir()
    os.mkfifo(logs / "flight-rank-0.json")
    (logs / "flight-rank-1.json").symlink_to(victim)
    for rank in range(2):
        keep_flight_record(logs, rank, "{}")
    assert victim.read_text() == "mine"
    assert [path.read_text() for path in sorted(logs.iterdir())] == ["{}", "{}"]
