"""The file operations wait for the disk, in the right order, and raise when it refuses."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest

from dora import files
from dora.errors import DoraError
from dora.files import LineFile


def test_a_sync_that_the_system_refuses_is_an_error() -> None:
    """A pipe has no disk to sync to, so that a real system call fails."""
    reading, writing = os.pipe()
    try:
        for wait in (
            lambda: files.sync(Path("a pipe"), writing),
            lambda: files.sync(Path("/proc/version")),
            lambda: files.sync_folder(Path("/proc/self")),
        ):
            with pytest.raises(OSError, match="Invalid argument") as refused:
                wait()
            assert refused.value.errno == errno.EINVAL
    finally:
        os.close(reading)
        os.close(writing)


def test_a_replacement_is_synced_before_it_gets_the_name(tmp_path: Path) -> None:
    path = tmp_path / "epoch"
    path.write_bytes(b"0")
    done: list[files.Operation] = []
    with files.observed(done.append):
        files.replace(path, b"1")
    assert path.read_bytes() == b"1"
    assert [operation.kind for operation in done] == ["write", "sync", "rename", "sync_folder"]
    assert done[1].path == done[0].path != path
    assert (done[2].target, done[3].path) == (path, tmp_path)


@pytest.mark.parametrize("refused", ["sync", "rename"])
def test_a_replacement_that_the_system_refuses_leaves_nothing_behind(tmp_path: Path, refused: str) -> None:
    path = tmp_path / "epoch"
    path.write_bytes(b"0")

    def refuse(operation: files.Operation) -> None:
        if operation.kind == refused:
            raise OSError(errno.ENOSPC, "No space left on device")

    with files.observed(refuse), pytest.raises(OSError, match="No space left"):
        files.replace(path, b"1")
    assert [(left, left.read_bytes()) for left in tmp_path.iterdir()] == [(path, b"0")]


def is_good(line: bytes) -> bool:
    return line.startswith(b"good")


@pytest.mark.parametrize(
    ("before", "after", "number"),
    [
        (b"good 1\ngood 2\n", b"good 1\ngood 2\n", 0),
        (b"good 1\nbad\ngood 2\n", b"good 1\ngood 2\n", 1),
        (b"bad\n\0\0\ngood 2\n", b"good 2\n", 2),
        (b"good 1\nbad\n", b"good 1\n", 1),
        (b"good 1\ngood 2", b"good 1\n", 1),
        (b"bad\ngood 1\ngood 2", b"good 1\n", 2),
        (b"", b"", 0),
    ],
)
def test_lines_that_a_crash_has_damaged_are_removed_and_all_others_kept(
    before: bytes, after: bytes, number: int, tmp_path: Path
) -> None:
    path = tmp_path / "lines"
    path.write_bytes(before)
    lines = LineFile(path, is_known=is_good)
    lines.write(b"good 3\n")
    lines.close()
    assert (path.read_bytes(), lines.num_dropped) == (after + b"good 3\n", number)
    assert [*tmp_path.iterdir()] == [path]


def test_a_file_from_which_lines_are_removed_has_all_others_at_any_time(tmp_path: Path) -> None:
    path = tmp_path / "lines"
    path.write_bytes(b"bad\ngood\n")
    done: list[files.Operation] = []
    with files.observed(done.append):
        LineFile(path, is_known=is_good).close()
    assert [operation.kind for operation in done][:4] == ["wrote", "sync", "rename", "sync_folder"]
    assert "truncate" not in [operation.kind for operation in done]


def test_lines_are_synced_once_and_again_after_more_are_written(tmp_path: Path) -> None:
    lines = LineFile(tmp_path / "lines")
    done: list[files.Operation] = []
    with files.observed(done.append):
        lines.write(b"1\n")
        lines.sync()
        lines.sync()
        lines.write(b"2\n")
        lines.sync()
    lines.close()
    assert [operation.kind for operation in done] == ["append", "sync", "append", "sync"]


def test_lines_that_the_system_refuses_to_sync_are_an_error_and_those_of_a_full_disk_wait(tmp_path: Path) -> None:
    lines = LineFile(tmp_path / "lines")
    refusals = [errno.ENOSPC, errno.EIO]

    def refuse(operation: files.Operation) -> None:
        if operation.kind == "sync" and refusals:
            raise OSError(refusals.pop(0), "refused")

    lines.write(b"1\n")
    with files.observed(refuse):
        lines.sync()
        with pytest.raises(DoraError, match="lines: cannot be synced: refused"):
            lines.sync()
        done: list[files.Operation] = []
    with files.observed(done.append):
        lines.sync()
    lines.close()
    assert [operation.kind for operation in done] == ["sync"], "what was refused is not taken for synced"
