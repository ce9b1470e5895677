"""The token store: what was appended comes back, whoever appended it and wherever the file ends."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from dora.core.ids import GroupId, TrajectoryId
from dora.journal.frames import FrameWriter, JournalError
from dora.journal.tokens import TokenWriter, read_tokens

T = TrajectoryId(5)


def test_chunks_of_several_attempts_make_one_answer(tmp_path: Path) -> None:
    path = tmp_path / "tokens"
    with TokenWriter(path) as tokens:
        tokens.prompt(2, [1, 2, 3])
        tokens.append(5, 1, [10, 11], [-0.5, -0.25])
        tokens.append(-1, 1, [99], [-1.0])
        tokens.append(5, 2, [2**31 - 1], [-3.5])
    with TokenWriter(path) as tokens:
        tokens.append(5, 4, [13, 14], [0.0, -1e-30], loss_mask=[0, 1])
    store = read_tokens(path)
    assert store.prompts[GroupId(2)].tolist() == [1, 2, 3]
    answer = store.answers[T]
    assert answer.tokens.tolist() == [10, 11, 2**31 - 1, 13, 14]
    assert answer.logprobs.tolist() == np.array([-0.5, -0.25, -3.5, 0.0, -1e-30], np.float32).tolist()
    assert answer.loss_mask.tolist() == [1, 1, 1, 0, 1]
    assert store.counts == {5: 5, -1: 1}
    assert store.late_chunks == 0


def test_a_chunk_of_an_older_attempt_is_ignored_once_a_newer_one_began(tmp_path: Path) -> None:
    with TokenWriter(tmp_path / "tokens") as tokens:
        tokens.append(5, 1, [10], [-1.0])
        tokens.append(5, 3, [11], [-1.0])
        tokens.append(5, 1, [666], [-1.0])
        tokens.append(6, 1, [20], [-1.0])
        tokens.append(5, 3, [12], [-1.0])
    store = read_tokens(tmp_path / "tokens")
    assert store.answers[T].tokens.tolist() == [10, 11, 12]
    assert store.counts[T] == 3
    assert store.late_chunks == 1


def test_of_unwanted_trajectories_only_the_counts_are_kept(tmp_path: Path) -> None:
    with TokenWriter(tmp_path / "tokens") as tokens:
        for trajectory in range(10):
            tokens.append(trajectory, 1, [1] * trajectory, [-1.0] * trajectory)
    store = read_tokens(tmp_path / "tokens", wanted={4, 5})
    assert sorted(store.answers) == [4, 5]
    assert store.counts == {t: t for t in range(10)}


def test_a_torn_end_loses_no_whole_chunk(tmp_path: Path) -> None:
    path = tmp_path / "tokens"
    with TokenWriter(path) as tokens:
        tokens.append(5, 1, [10, 11], [-0.5, -0.25])
        tokens.append(5, 1, [12], [-0.5])
    path.write_bytes(path.read_bytes()[:-1])
    store = read_tokens(path)
    assert store.answers[T].tokens.tolist() == [10, 11]
    assert store.torn_bytes > 0


def test_unequal_lengths_are_refused_before_anything_is_written(tmp_path: Path) -> None:
    with TokenWriter(tmp_path / "tokens") as tokens:
        with pytest.raises(ValueError, match="trajectory 5: 2 tokens"):
            tokens.append(5, 1, [1, 2], [-1.0])
        with pytest.raises(ValueError, match="trajectory 5: 1 tokens"):
            tokens.append(5, 1, [1], [-1.0], loss_mask=[])
    assert (tmp_path / "tokens").stat().st_size == 0


def test_a_whole_frame_that_is_no_chunk_is_named_with_its_place(tmp_path: Path) -> None:
    path = tmp_path / "tokens"
    for payload in (b"", b"\x09" + bytes(16), b"\x01" + bytes(12) + b"\x02\x00\x00\x00" + bytes(15)):
        path.write_bytes(b"")
        with FrameWriter(path) as writer:
            writer.write(payload)
        with pytest.raises(JournalError, match="the record at byte 0 is neither a prompt nor a chunk"):
            read_tokens(path)
