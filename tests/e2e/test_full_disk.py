"""A version store whose disk is full: a small file system of the run's own, mounted where nobody else sees it."""

from __future__ import annotations

import errno
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.e2e.runs import Run, assert_audit_clean, settings, small, until

#: A version is 2.3 MB, a checkpoint 5.4; `dora` asks for room for K + 4 versions, twice over, before it uses a memory
#: folder. All versions of STEPS and three checkpoints take 47.
MEGABYTES = 64
#: What is left for the journal on a full disk: no room for a version.
LEFT_BYTES = 600_000
STEPS = 12


def _can_mount() -> bool:
    unshare = shutil.which("unshare")
    mount = [unshare or "", "--mount", "--map-root-user", "mount", "-t", "tmpfs", "tmpfs", "/mnt"]
    return unshare is not None and subprocess.run(mount, capture_output=True, check=False).returncode == 0


pytestmark = [
    pytest.mark.deep,
    pytest.mark.skipif(not _can_mount(), reason="this machine lets nobody mount a file system of their own"),
]


def mounting(folder: Path) -> list[str]:
    """What is put before a command so that it sees a small file system at `folder`."""
    script = f'mount -t tmpfs -o size={MEGABYTES}m tmpfs "{folder}" && exec "$@"'
    return ["unshare", "--mount", "--map-root-user", "sh", "-c", script, "sh"]


def as_seen_by(run: Run, folder: Path) -> Path:
    return Path(f"/proc/{run.process.pid}/root") / folder.relative_to("/")


def fill(folder: Path, *, left_bytes: int = LEFT_BYTES) -> Path:
    """Writes until no more room is left."""
    filler = folder / "filler"
    with filler.open("ab", buffering=0) as file:
        try:
            while True:
                file.write(bytes(65_536))
        except OSError as err:
            if err.errno != errno.ENOSPC:
                raise
        file.truncate(file.tell() - left_bytes)
    return filler


def has_no_room(log: Path) -> bool:
    """Whether there is no room for a version or for a checkpoint: while one waits, the other may not have begun."""
    told = [line for line in log.read_text().splitlines() if line.endswith(": the file system is full")]
    return any("cannot write " in line for line in told)


def test_versions_go_to_disk_while_the_memory_folder_is_full(tmp_path: Path) -> None:
    memory = tmp_path / "memory"
    memory.mkdir()
    arguments = [*small(tmp_path / "runs", run__steps=STEPS), *settings(weights__memory_folder=memory)]
    with Run(*arguments, prefix=mounting(memory)) as run:
        folder = run.folder
        run.until_trained(1)
        log, there = folder.logs / "trainer.log", as_seen_by(run, memory)
        until(lambda: fill(there) and has_no_room(log), what="a version that finds no room")  # old ones make room
        code = run.end()
    assert code == 0, run.told()
    assert "memory/dora-" in log.read_text()
    assert_audit_clean(folder)


def test_a_run_waits_for_room_on_its_only_disk_and_loses_nothing(tmp_path: Path) -> None:
    """First the trainer finds none, then the journal: it is filled again, to the last byte."""
    disk = tmp_path / "disk"
    disk.mkdir()
    arguments = small(disk, run__steps=STEPS, trainer__checkpoint_every=1, weights__memory_folder=tmp_path / "none")
    with Run(*arguments, prefix=mounting(disk)) as run:
        run.until_trained(1)
        seen = as_seen_by(run, disk)
        filler = fill(seen)
        log = as_seen_by(run, run.folder.logs / "trainer.log")
        until(lambda: has_no_room(log), what="the trainer finds no room")
        filler.unlink()
        run.until_trained(4)
        filler = fill(seen, left_bytes=0)
        until(lambda: "disk_full" in "".join(run.err), what="the journal finds no room")
        filler.unlink()
        code = run.end()
    assert code == 0, run.told()
    assert "audit of C1, C2, C3: clean" in "".join(run.out)  # its folder is gone with its file system


def test_a_run_that_finds_no_room_at_its_start_says_so_in_a_line(tmp_path: Path) -> None:
    """There is room for some of its first files: each may be the one that finds none."""
    script = 'mount -t tmpfs -o size=64k tmpfs "$1"; head -c "$2" /dev/zero > "$1/filler"; shift 2; exec "$@"'
    for left_pages in range(4):
        disk = tmp_path / f"disk-{left_pages}"
        disk.mkdir()
        prefix = [
            "unshare",
            "--mount",
            "--map-root-user",
            "sh",
            "-c",
            script,
            "sh",
            disk,
            str((16 - left_pages) * 4096),
        ]
        command = [*prefix, sys.executable, "-m", "dora", "run", *small(disk / "runs")]
        done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
        assert done.returncode == 1, done.stderr
        [line] = [line for line in done.stderr.splitlines() if "No space left on device" in line]
        assert line.startswith("dora: ")
        assert "Traceback" not in done.stderr


LINES = """
import os, sys
from pathlib import Path
from dora.files import LineFile
lines, filler = LineFile(Path(sys.argv[1])), Path(sys.argv[2])
lines.write(b"first" * 20_000 + b"\\n")
with filler.open("wb", buffering=0) as file:
    try:
        while True:
            file.write(bytes(4096))
    except OSError:
        os.truncate(filler, filler.stat().st_size - 8192)  # so that half of the next line fits
lines.write(b"second" * 20_000 + b"\\n")
print(lines.path.read_bytes() == b"first" * 20_000 + b"\\n")
filler.unlink()
lines.write(b"third\\n")
print(lines.path.read_bytes() == b"first" * 20_000 + b"\\n" + b"second" * 20_000 + b"\\nthird\\n")
"""


def test_lines_that_find_no_room_are_written_later_and_never_in_part(tmp_path: Path) -> None:
    command = [*mounting(tmp_path), sys.executable, "-c", LINES, str(tmp_path / "lines"), str(tmp_path / "filler")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout == "True\nTrue\n"


SAVE = """
import sys
from pathlib import Path
import torch
from dora.trainer.checkpoint import _write
from dora.weights.store import StoreFull
path = Path(sys.argv[1])
for size in (2**25, 2**20):  # the second one fits, so the first has left room, or a file that is replaced
    try:
        _write(path, {"w": torch.zeros(size)}, "cannot write")
        print(path.stat().st_size > 4 * size)
    except StoreFull as err:
        print(err)
"""


def test_the_file_of_a_checkpoint_that_finds_no_room_waits_and_is_written_later(tmp_path: Path) -> None:
    command = [*mounting(tmp_path), sys.executable, "-c", SAVE, str(tmp_path / "rank-0.safetensors")]
    saved = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True)
    assert saved.stdout == "cannot write: the file system is full\nTrue\n"
