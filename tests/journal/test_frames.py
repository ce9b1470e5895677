"""Framed files: a torn end is tolerated, any other damage is named, order on disk is kept."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from dora.journal.frames import FrameReader, FrameWriter, JournalError

PAYLOADS = [b"first", b"", b"a longer third one", b"last"]


def write(path: Path, payloads: list[bytes]) -> bytes:
    with FrameWriter(path) as writer:
        for payload in payloads:
            writer.write(payload)
    return path.read_bytes()


def payloads(path: Path) -> list[bytes]:
    return [payload for _, payload in FrameReader(path)]


def test_what_is_written_is_read_and_appended_to(tmp_path: Path) -> None:
    path = tmp_path / "f"
    write(path, PAYLOADS)
    write(path, [b"more"])
    assert payloads(path) == [*PAYLOADS, b"more"]


def test_a_file_cut_anywhere_keeps_every_whole_frame_and_can_be_continued(tmp_path: Path) -> None:
    data = write(tmp_path / "whole", PAYLOADS)
    starts = [offset for offset, _ in FrameReader(tmp_path / "whole")]
    ends = [*starts[1:], len(data)]
    for cut in range(len(data)):
        path = tmp_path / "cut"
        path.write_bytes(data[:cut])
        reader = FrameReader(path)
        kept = [payload for _, payload in reader]
        assert kept == PAYLOADS[: sum(end <= cut for end in ends)]
        assert reader.num_bytes + reader.torn_bytes == cut
        with FrameWriter(path) as writer:
            assert writer.torn_bytes == reader.torn_bytes
            writer.write(b"after the crash")
        assert payloads(path) == [*kept, b"after the crash"]


def test_a_flipped_bit_anywhere_is_an_error_that_names_file_and_offset(tmp_path: Path) -> None:
    data = write(tmp_path / "whole", PAYLOADS)
    offsets = [offset for offset, _ in FrameReader(tmp_path / "whole")]
    for place in range(len(data)):
        path = tmp_path / "flipped"
        path.write_bytes(data[:place] + bytes([data[place] ^ 0x10]) + data[place + 1 :])
        offset = max(o for o in offsets if o <= place)
        with pytest.raises(JournalError, match=rf"flipped: the record at byte {offset} "):
            payloads(path)


def test_a_damaged_file_is_not_continued(tmp_path: Path) -> None:
    path = tmp_path / "f"
    data = write(path, PAYLOADS)
    path.write_bytes(b"x" + data[1:])
    with pytest.raises(JournalError, match="damaged length"):
        FrameWriter(path)


def test_a_reader_sees_what_was_there_when_it_was_opened(tmp_path: Path) -> None:
    path = tmp_path / "f"
    write(path, PAYLOADS)
    reader = FrameReader(path)
    write(path, [b"later"])
    assert [payload for _, payload in reader] == PAYLOADS


def test_flushing_a_file_first_flushes_the_one_it_follows(tmp_path: Path) -> None:
    first, second = tmp_path / "first", tmp_path / "second"
    leader = FrameWriter(first)
    follower = FrameWriter(second, follows=leader)
    for ask in (follower.flush, follower.sync):
        leader.write(b"data")
        follower.write(b"refers to data")
        ask()
        assert len(payloads(first)) == len(payloads(second))
    leader.write(b"data")
    while second.stat().st_size < 1 << 20:  # until it is flushed for its size
        follower.write(bytes(1 << 16))
    assert payloads(first) == [b"data"] * 3
    follower.close()
    leader.close()


def test_flushed_records_survive_kill_9(tmp_path: Path) -> None:
    program = """
import os, signal, sys
from pathlib import Path
from dora.journal.frames import FrameWriter
leader = FrameWriter(Path(sys.argv[1]) / "first")
follower = FrameWriter(Path(sys.argv[1]) / "second", follows=leader)
for i in range(100):
    leader.write(b"data")
    follower.write(b"refers to data")
    if i == 79:
        follower.flush()
os.kill(os.getpid(), signal.SIGKILL)
"""
    ended = subprocess.run([sys.executable, "-c", program, str(tmp_path)], check=False, timeout=60)
    assert ended.returncode == -9
    assert len(payloads(tmp_path / "first")) == len(payloads(tmp_path / "second")) == 80


def test_a_full_disk_is_an_error_that_names_the_file_and_leaves_whole_frames(tmp_path: Path) -> None:
    program = """
import resource, sys
from pathlib import Path
from dora.journal.frames import FrameWriter, JournalError
resource.setrlimit(resource.RLIMIT_FSIZE, (1000, 1000))
writer = FrameWriter(Path(sys.argv[1]))
try:
    for _ in range(100):
        writer.write(bytes(100))
        writer.flush()
except JournalError as err:
    print(err)
writer.close()
"""
    path = tmp_path / "f"
    ended = subprocess.run(
        [sys.executable, "-c", program, str(path)], check=True, timeout=60, capture_output=True, text=True
    )
    assert ended.stdout == f"{path}: cannot be written: File too large\n"
    assert payloads(path) == [bytes(100)] * 8
