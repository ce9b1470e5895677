"""Framed files: a torn end is tolerated, any other damage is named, order on disk is kept."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from dora import files
from dora.journal.frames import FrameReader, FrameWriter, JournalError

PAYLOADS = [b"first", b"", b"a longer third one", b"last"]


def write(path: Path, payloads: list[bytes]) -> bytes:
    """Write each record in its own frame."""
    with FrameWriter(path) as writer:
        for payload in payloads:
            writer.write(payload)
            writer.store(writer.take())
    return path.read_bytes()


def payloads(path: Path) -> list[bytes]:
    return [payload for _, payload in FrameReader(path)]


def test_records_are_read_back_and_a_file_can_be_appended_to(tmp_path: Path) -> None:
    path = tmp_path / "f"
    write(path, PAYLOADS)
    write(path, [b"more"])
    assert payloads(path) == [*PAYLOADS, b"more"]


def test_a_file_truncated_anywhere_keeps_every_whole_frame_and_can_be_continued(tmp_path: Path) -> None:
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


def test_a_flipped_bit_in_front_of_a_whole_frame_is_an_error_that_names_file_and_offset(tmp_path: Path) -> None:
    data = write(tmp_path / "whole", PAYLOADS)
    *offsets, last = [offset for offset, _ in FrameReader(tmp_path / "whole")]
    for place in range(last):
        path = tmp_path / "flipped"
        path.write_bytes(data[:place] + bytes([data[place] ^ 0x10]) + data[place + 1 :])
        offset = max(o for o in offsets if o <= place)
        with pytest.raises(JournalError, match=rf"flipped: the record at byte {offset} "):
            payloads(path)


def test_a_damaged_last_frame_is_a_torn_end_whatever_its_bytes(tmp_path: Path) -> None:
    """A power failure may leave pages of zeros, or some of a frame's pages without those before them."""
    data = write(tmp_path / "whole", PAYLOADS)
    *_, last = [offset for offset, _ in FrameReader(tmp_path / "whole")]
    for end in (bytes(len(data) - last), bytes(5) + data[last + 5 :], data[last:-2] + bytes(2), data[last:-1] + b"?x"):
        path = tmp_path / "torn"
        path.write_bytes(data[:last] + end)
        reader = FrameReader(path)
        assert [payload for _, payload in reader] == PAYLOADS[:-1]
        assert reader.torn_bytes == len(end)


def test_records_that_were_stored_together_are_lost_together(tmp_path: Path) -> None:
    with FrameWriter(tmp_path / "f") as writer:
        writer.write(b"one")
        writer.store(writer.take())
        writer.write(b"two")
        writer.write(b"three")
    assert payloads(tmp_path / "f") == [b"one", b"two", b"three"]
    os.truncate(tmp_path / "f", (tmp_path / "f").stat().st_size - 1)
    assert payloads(tmp_path / "f") == [b"one"]


def test_a_damaged_file_is_not_continued(tmp_path: Path) -> None:
    path = tmp_path / "f"
    data = write(path, PAYLOADS)
    path.write_bytes(b"x" + data[1:])
    with pytest.raises(JournalError, match="is damaged"):
        FrameWriter(path)


def test_a_reader_sees_the_records_that_existed_when_it_was_opened(tmp_path: Path) -> None:
    path = tmp_path / "f"
    write(path, PAYLOADS)
    reader = FrameReader(path)
    write(path, [b"later"])
    assert [payload for _, payload in reader] == PAYLOADS


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
        writer.store(writer.take())
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


def test_the_name_of_a_new_file_is_synced_before_anything_is_stored_in_it(tmp_path: Path) -> None:
    done: list[files.Operation] = []
    with files.observed(done.append), FrameWriter(tmp_path / "f") as writer:
        writer.write(b"one")
    assert [(operation.kind, operation.path.name) for operation in done[1:]] == [
        ("sync_folder", tmp_path.name),
        ("append", "f"),
        ("sync", "f"),
    ]


def test_writing_to_a_deleted_file_is_an_error(tmp_path: Path) -> None:
    path = tmp_path / "f"
    writer = FrameWriter(path)
    writer.write(b"one")
    writer.store(writer.take())
    path.unlink()
    writer.write(b"two")
    with pytest.raises(JournalError, match="cannot be written: it was deleted"):
        writer.store(writer.take())
