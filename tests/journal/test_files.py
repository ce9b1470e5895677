"""The file operations wait for the disk, in the right order, and raise when it refuses."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest

from dora import files


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
