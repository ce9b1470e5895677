"""The format of tokens.bin as docs/ARCHITECTURE.md has it: every kind of record, for readers that others write."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from dora.journal import tokens
from dora.journal.frames import FrameWriter
from dora.journal.rows import Fork
from dora.journal.tokens import TokenWriter, read_tokens
from tests.chaos import recorded
from tests.crash import checker

ARCHITECTURE = Path(__file__).parents[2] / "docs" / "ARCHITECTURE.md"
KINDS = sorted(tokens._SIZES)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """One record of each kind; the fork begins with the second token of the first row."""
    file = tmp_path / "tokens.bin"
    with TokenWriter(file, epoch=3) as writer:
        writer.prompt(1, [7, 8], digest=b"d" * 16, group_size=2)
        writer.append(2, 4, [10, 11], [-1.0, -2.0], start=0)
        writer.append(2, 4, [12], [0.0], start=2, loss_mask=[0])
        writer.append(2, 4, [13, 14], [0.0, 0.0], start=3, loss_mask=[0, 0], fork=Fork(3, 0, 1))
        writer.choose(2, 4, b"aabbcc", b"\x01\x02\x01", start=1)
    return file


def test_the_description_has_every_kind() -> None:
    assert sorted(map(int, re.findall(r"(?m)^\| (\d+): ", ARCHITECTURE.read_text()))) == KINDS


def test_a_reader_that_follows_the_description_knows_every_kind(path: Path) -> None:
    chunks = recorded.read_chunks(path)
    assert [chunk.kind for chunk in chunks] == KINDS
    assert [(chunk.number, chunk.epoch, chunk.attempt, chunk.start, chunk.count) for chunk in chunks] == [
        (1, 3, 0, 2, 2), (2, 3, 4, 0, 2), (2, 3, 4, 2, 1), (2, 3, 4, 3, 2), (2, 3, 4, 1, 3),
    ]  # fmt: skip
    assert [chunk.fork for chunk in chunks] == [None, None, None, (0, 1), None]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("change", [lambda record: record[:-1], lambda record: record + b"\0"], ids=["less", "more"])
def test_a_record_of_another_length_is_damaged(path: Path, tmp_path: Path, kind: int, change) -> None:
    damaged = tmp_path / "damaged"
    with FrameWriter(damaged) as writer:
        writer.write(change(recorded.read_frames(path).records[kind]))
    with pytest.raises(recorded.Damaged, match=f"a record of kind {kind}"):
        recorded.read_chunks(damaged)


def test_another_such_reader_finds_the_same_answer(path: Path) -> None:
    ours, theirs = read_tokens(path).answers[2], checker.read_tokens(path.read_bytes()).answers[2]
    assert theirs.tokens == ours.tokens.tolist() == [10, 11, 12, 13, 14]
    assert theirs.logprobs == ours.logprobs.tolist()
    assert theirs.mask == ours.loss_mask.tolist() == [1, 1, 0, 0, 0]
    assert theirs.forks == [*ours.forks]
