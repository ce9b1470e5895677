"""Files that a command writes for a user, in a folder where others may have placed files of the same names."""

from __future__ import annotations

import os
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from typer.testing import CliRunner

from dora import files
from dora.app import saved_status
from dora.app.demo import unpack_demo
from dora.app.opening import keep_flight_record
from dora.cli.app import app
from dora.cli.view import write_report, write_trace
from dora.errors import ConfigError
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


@pytest.mark.parametrize("name", ["pipe", "link"])
def test_a_pipe_in_place_of_the_output_is_written_into(folder: Path, tmp_path: Path, name: str) -> None:
    """As with -o /dev/stdout, or -o /dev/null, which root would replace for everybody."""
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    (tmp_path / "link").symlink_to(pipe)
    writable = os.open(pipe, os.O_RDWR)  # until it is closed, the reader waits for more
    with ThreadPoolExecutor(1) as thread, pipe.open("rb") as reader:
        read = thread.submit(reader.read)
        write_report(folder, tmp_path / name)
        os.close(writable)
        assert b"</html>" in read.result()
    assert (pipe.is_fifo(), (tmp_path / "link").is_symlink()) == (True, True)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can make a file of another user")
def test_a_pipe_of_another_user_is_replaced(folder: Path, tmp_path: Path) -> None:
    output = tmp_path / "run.html"
    os.mkfifo(output)
    os.chown(output, 1, 1)
    write_report(folder, output)
    assert output.is_file()


@pytest.mark.parametrize("words", [("report", "run", "-o"), ("trace", "run", "-o"), ("plan", "--write"), ("init",)])
def test_a_folder_in_place_of_the_output_is_refused_in_a_line(
    folder: Path, monkeypatch: pytest.MonkeyPatch, words: tuple[str, ...]
) -> None:
    monkeypatch.chdir(folder)
    done = CliRunner().invoke(app, [*(word.replace("run", str(folder)) for word in words), "."])
    assert isinstance(done.exception, ConfigError)
    assert str(done.exception).endswith(".: is a folder; give a file")


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
