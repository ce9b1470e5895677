"""The token store returns what was appended, by any controller and wherever the file ends."""

from __future__ import annotations

import struct
import tracemalloc
from array import array
from collections.abc import Container
from pathlib import Path

import numpy as np
import pytest

from dora.core.ids import GroupId, TrajectoryId
from dora.journal.frames import LARGE, FrameReader, FrameWriter, JournalError
from dora.journal.rows import Fork
from dora.journal.tokens import TokenWriter, read_tokens

T = TrajectoryId(5)


def test_chunks_of_several_attempts_make_one_answer(tmp_path: Path) -> None:
    path = tmp_path / "tokens"
    with TokenWriter(path) as tokens:
        tokens.prompt(2, [1, 2, 3], digest=bytes(16), group_size=2)
        tokens.append(5, 1, [10, 11], [-0.5, -0.25], start=0)
        tokens.append(-1, 1, [99], [-1.0], start=0)
        tokens.append(5, 2, [2**31 - 1], [-3.5], start=2)
    with TokenWriter(path) as tokens:
        tokens.append(5, 4, [13, 14], [0.0, -1e-30], start=3, loss_mask=[0, 1])
    store = read_tokens(path)
    assert store.prompts[GroupId(2)].tokens.tolist() == [1, 2, 3]
    answer = store.answers[T]
    assert answer.tokens.tolist() == [10, 11, 2**31 - 1, 13, 14]
    assert answer.logprobs.tolist() == np.array([-0.5, -0.25, -3.5, 0.0, -1e-30], np.float32).tolist()
    assert answer.loss_mask.tolist() == [1, 1, 1, 0, 1]
    assert store.counts == {5: 5, -1: 1}
    assert store.sampled == {5: 4, -1: 1}


def test_a_chunk_of_an_older_attempt_is_ignored_once_a_newer_one_began(tmp_path: Path) -> None:
    with TokenWriter(tmp_path / "tokens") as tokens:
        tokens.append(5, 1, [10], [-1.0], start=0)
        tokens.append(5, 3, [11], [-1.0], start=1)
        tokens.append(5, 1, [666], [-1.0], start=1)
        tokens.append(6, 1, [20], [-1.0], start=0)
        tokens.append(5, 3, [12], [-1.0], start=2)
    store = read_tokens(tmp_path / "tokens")
    assert store.answers[T].tokens.tolist() == [10, 11, 12]
    assert store.counts[T] == 3


def test_a_fork_is_kept_with_the_tokens_that_it_begins_with(tmp_path: Path) -> None:
    first, second = Fork(2, 0, 4), Fork(5, 1, 3)
    with TokenWriter(tmp_path / "tokens") as tokens:
        tokens.append(5, 1, [10, 11], [-1.0, -1.0], start=0)
        tokens.append(5, 2, [12, 13], [0.0, 0.0], start=2, loss_mask=[0, 0], fork=first)
        tokens.append(5, 3, [14], [-1.0], start=4)
        tokens.append(5, 4, [15], [0.0], start=5, loss_mask=[0], fork=second)
        tokens.append(5, 5, [16], [-1.0], start=6)
    store = read_tokens(tmp_path / "tokens")
    answer = store.answers[T]
    assert store.sampled == {T: 4}
    assert answer.forks == (first, second)
    assert answer.tokens.tolist() == [*range(10, 17)]
    assert answer.loss_mask.tolist() == [1, 1, 0, 0, 1, 0, 1]
    assert answer.observed == [(2, 4), (5, 6)]


@pytest.mark.parametrize("fork", [None, Fork(2, 0, 1)])
def test_a_call_that_is_repeated_by_a_later_controller_replaces_the_fork_of_its_result(tmp_path, fork) -> None:
    with TokenWriter(tmp_path / "tokens") as tokens:
        tokens.append(5, 1, [10, 11], [-1.0, -1.0], start=0)
        tokens.append(5, 2, [12, 13], [0.0, 0.0], start=2, loss_mask=[0, 0], fork=Fork(2, 0, 4))
    with TokenWriter(tmp_path / "tokens", epoch=1) as tokens:
        tokens.append(5, 3, [22], [0.0], start=2, loss_mask=[0], fork=fork)
        tokens.append(5, 4, [23], [-1.0], start=3)
    answer = read_tokens(tmp_path / "tokens").answers[T]
    assert answer.tokens.tolist() == [10, 11, 22, 23]
    assert answer.forks == (() if fork is None else (fork,))


def test_unwanted_trajectories_are_only_counted(tmp_path: Path) -> None:
    with TokenWriter(tmp_path / "tokens") as tokens:
        for trajectory in range(10):
            tokens.append(trajectory, 1, [1] * trajectory, [-1.0] * trajectory, start=0)
    store = read_tokens(tmp_path / "tokens", wanted={4, 5})
    assert sorted(store.answers) == [4, 5]
    assert store.counts == {t: t for t in range(10)}


def peak_bytes(path: Path, wanted: Container[int]) -> int:
    """The most memory that is in use while a store is read."""
    tracemalloc.start()
    try:
        read_tokens(path, wanted=wanted)
        return tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


def store_episode(path: Path, *, chunks: int) -> None:
    """One with an observation, which is followed by `chunks` of one token in a frame each."""
    with TokenWriter(path) as tokens:
        tokens.append(5, 1, [1], [0.0], start=0, loss_mask=[0])
        frames = [tokens.take()]
        for start in range(1, 1 + chunks):
            tokens.append(5, 1, [10], [-1.0], start=start)
            frames.append(tokens.take())
        tokens.store(b"".join(frames))


def test_a_counted_episode_takes_no_memory_for_its_chunks(tmp_path: Path) -> None:
    store_episode(tmp_path / "short", chunks=100)
    store_episode(tmp_path / "long", chunks=2_000)
    read_tokens(tmp_path / "short", wanted=())
    assert peak_bytes(tmp_path / "long", ()) < peak_bytes(tmp_path / "short", ()) + 2_000
    assert read_tokens(tmp_path / "long", wanted=()).sampled == {5: 2_000}


def test_an_answer_takes_the_memory_of_its_tokens_however_small_its_chunks_are(tmp_path: Path) -> None:
    store_episode(tmp_path / "short", chunks=100)
    store_episode(tmp_path / "long", chunks=2_000)
    read_tokens(tmp_path / "short")
    assert peak_bytes(tmp_path / "long", {5}) < peak_bytes(tmp_path / "short", {5}) + 2_000 * 20


def test_prompts_are_kept_of_groups_that_have_a_wanted_trajectory(tmp_path: Path) -> None:
    with TokenWriter(tmp_path / "tokens") as tokens:
        for group in range(4):
            tokens.prompt(group, [group], digest=bytes(16), group_size=2)
    assert [*read_tokens(tmp_path / "tokens").prompts] == [0, 1, 2, 3]
    assert [*read_tokens(tmp_path / "tokens", wanted={3, 6}).prompts] == [1, 3]


def heads_of(path: Path) -> list[tuple[int, ...]]:
    """Kind, id, attempt, start and number of tokens of each record."""
    heads = (struct.unpack_from("<BqIIII", record) for _, record in FrameReader(path))
    return [(kind, number, attempt, start, count) for kind, number, _, attempt, start, count in heads]


def test_what_an_attempt_has_sampled_between_two_commits_is_one_record(tmp_path: Path) -> None:
    with TokenWriter(tmp_path / "tokens") as tokens:
        for commit in range(2):
            for start in range(commit * 50, (commit + 1) * 50):
                for trajectory in (4, 5):
                    tokens.append(trajectory, 1, [start], [-1.0], start=start)
            tokens.store(tokens.take())
    assert heads_of(tmp_path / "tokens") == [(1, 4, 1, 0, 50), (1, 5, 1, 0, 50), (1, 4, 1, 50, 50), (1, 5, 1, 50, 50)]
    assert (tmp_path / "tokens").stat().st_size < 200 * 9
    assert read_tokens(tmp_path / "tokens").answers[T].tokens.tolist() == [*range(100)]


def test_a_record_ends_where_another_attempt_position_or_kind_begins(tmp_path: Path) -> None:
    with TokenWriter(tmp_path / "tokens") as tokens:
        tokens.prompt(5, [1, 2], digest=bytes(16), group_size=1)
        tokens.append(5, 1, [10], [-1.0], start=0)
        tokens.append(5, 2, [11], [-1.0], start=1)
        tokens.append(5, 2, [21], [-1.0], start=1)
        tokens.append(5, 2, [12, 13], [-1.0, -1.0], start=2)
        tokens.choose(5, 2, b"abc", b"\x01\x01\x01", start=0)
        tokens.append(5, 2, [14], [-1.0], start=4)
        tokens.append(5, 3, [15], [0.0], start=5, loss_mask=[0], fork=Fork(5, 0, 1))
        tokens.append(5, 4, [16], [-1.0], start=6)
        tokens.append(6, 1, [], [], start=0)
    assert heads_of(tmp_path / "tokens") == [
        (0, 5, 0, 1, 2), (1, 5, 1, 0, 1), (1, 5, 2, 1, 1), (1, 5, 2, 1, 3), (4, 5, 2, 0, 3), (1, 5, 2, 4, 1),
        (3, 5, 3, 5, 1), (1, 5, 4, 6, 1), (1, 6, 1, 0, 0),
    ]  # fmt: skip
    assert read_tokens(tmp_path / "tokens").answers[T].tokens.tolist() == [10, 21, *range(12, 17)]


def test_a_prompt_comes_after_what_was_sampled_for_its_group_before(tmp_path: Path) -> None:
    with TokenWriter(tmp_path / "tokens") as tokens:
        tokens.append(5, 1, [66], [-1.0], start=0)
        tokens.append(6, 1, [10], [-1.0], start=0)
        tokens.prompt(2, [1], digest=bytes(16), group_size=2)
        tokens.append(5, 2, [11], [-1.0], start=0)
    answers = read_tokens(tmp_path / "tokens").answers
    assert {t: answer.tokens.tolist() for t, answer in answers.items()} == {5: [11], 6: [10]}


def test_a_commit_is_requested_once_many_tokens_are_gathered_and_not_by_the_commit(tmp_path: Path) -> None:
    requests: list[int] = []
    with TokenWriter(tmp_path / "tokens") as tokens:
        tokens.on_large = lambda: requests.append(start)
        step = LARGE // 16
        for start in range(0, 2 * step, step):
            tokens.append(5, 1, array("i", [1]) * step, array("f", [-1.0]) * step, start=start)
        tokens.append(6, 1, [1], [-1.0], start=0)
        assert requests == [step]
        tokens.store(tokens.take())
        tokens.append(5, 1, [1], [-1.0], start=2 * step)
        assert len(requests) == 1


def test_a_torn_end_loses_no_whole_chunk(tmp_path: Path) -> None:
    path = tmp_path / "tokens"
    with TokenWriter(path) as tokens:
        tokens.append(5, 1, [10, 11], [-0.5, -0.25], start=0)
        tokens.store(tokens.take())
        tokens.append(5, 1, [12], [-0.5], start=2)
    path.write_bytes(path.read_bytes()[:-1])
    store = read_tokens(path)
    assert store.answers[T].tokens.tolist() == [10, 11]
    assert store.torn_bytes > 0


def test_a_chunk_replaces_an_earlier_controllers_tokens_from_its_position_on(tmp_path: Path) -> None:
    """Two controllers may use the same attempt number, if the last events of the first one were lost with it."""
    path = tmp_path / "tokens"
    with TokenWriter(path, epoch=0) as tokens:
        tokens.append(5, 1, [10, 11], [-1.0, -1.0], start=0)
        tokens.append(5, 3, [12, 666, 667], [-1.0] * 3, start=2)
    with TokenWriter(path, epoch=1) as tokens:
        tokens.append(5, 1, [13], [-2.0], start=3)
        tokens.append(5, 2, [14], [-2.0], start=4)
    store = read_tokens(path)
    assert store.answers[T].tokens.tolist() == [10, 11, 12, 13, 14]
    assert store.answers[T].logprobs.tolist() == [-1.0, -1.0, -1.0, -2.0, -2.0]
    assert store.counts == {5: 5}


def test_a_group_that_is_admitted_again_starts_empty(tmp_path: Path) -> None:
    """The journal has lost the first admission; the tokens of its siblings were of another version."""
    path = tmp_path / "tokens"
    with TokenWriter(path, epoch=0) as tokens:
        tokens.prompt(2, [1], digest=b"a" * 16, group_size=2)
        tokens.append(5, 1, [666], [-1.0], start=0)
        tokens.append(6, 1, [20], [-1.0], start=0)
    with TokenWriter(path, epoch=1) as tokens:
        tokens.prompt(2, [2], digest=b"b" * 16, group_size=2)
        tokens.append(4, 1, [10], [-1.0], start=0)
    store = read_tokens(path)
    assert {t: a.tokens.tolist() for t, a in store.answers.items()} == {4: [10], 6: [20]}
    assert store.counts == {4: 1, 6: 1}
    assert store.prompts[GroupId(2)].digest == b"b" * 16


def test_missing_records_are_an_error_that_names_the_trajectory(tmp_path: Path) -> None:
    with TokenWriter(tmp_path / "tokens") as tokens:
        tokens.append(5, 1, [10], [-1.0], start=0)
        tokens.append(5, 1, [12], [-1.0], start=2)
    with pytest.raises(JournalError, match="continues trajectory 5 at token 2, but only 1 are known"):
        read_tokens(tmp_path / "tokens")


def test_unequal_lengths_are_refused_before_anything_is_written(tmp_path: Path) -> None:
    with TokenWriter(tmp_path / "tokens") as tokens:
        with pytest.raises(ValueError, match="trajectory 5: 2 tokens"):
            tokens.append(5, 1, [1, 2], [-1.0], start=0)
        with pytest.raises(ValueError, match="trajectory 5: 1 tokens"):
            tokens.append(5, 1, [1], [-1.0], start=0, loss_mask=[])
    assert (tmp_path / "tokens").stat().st_size == 0


def test_a_whole_frame_that_is_not_a_chunk_is_an_error_with_its_offset(tmp_path: Path) -> None:
    path = tmp_path / "tokens"
    for payload in (b"", b"\x09" + bytes(16), b"\x01" + bytes(20) + b"\x02\x00\x00\x00" + bytes(15)):
        path.write_bytes(b"")
        with FrameWriter(path) as writer:
            writer.write(payload)
        with pytest.raises(JournalError, match="the record at byte 0 is neither a prompt nor a chunk"):
            read_tokens(path)
