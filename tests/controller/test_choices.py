"""Choices of experts: every row of a wave has those of its own tokens, through turns, forks, lost servers, resumes.

The engine of these tests chooses experts by a digest of all tokens up to the one that is read, and of the server, so
that a choice which belongs to another token, or to another history, is seen.
"""

from __future__ import annotations

import hashlib
import random
import struct
from array import array
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from dora.app.resume import _fill
from dora.controller.batches import build_wave, spread
from dora.controller.trajectories import Trajectories, TrajectoryRecord
from dora.core.commands import TrainMicroBatch
from dora.core.ids import GroupId, TrajectoryId
from dora.core.phases import TrajectoryPhase
from dora.core.tables import Group
from dora.errors import RunFailed
from dora.journal.audit_choices import ChoicesAccount, ChoicesCount
from dora.journal.choices import READ_AGAIN, SAMPLED, UNKNOWN, Choices, runs
from dora.journal.frames import JournalError
from dora.journal.rows import Fork
from dora.journal.tokens import TokenWriter, read_tokens
from dora.routing import Chosen, Experts, RoutingShape
from dora.tasks.prompts import Prompt
from dora.trainer.batch import check
from dora.transport.messages import MicroBatch

SMALL = RoutingShape(num_layers=5, layers=(1, 3, 4), num_experts=200, top_k=2)
WIDE = RoutingShape(num_layers=2, layers=(0, 1), num_experts=300, top_k=3)
T = TrajectoryId(0)


def chosen_by(server: int, context: Sequence[int], shape: RoutingShape) -> Experts:
    """The choices for each token of `context`."""
    rows = shape.empty(len(context))
    for at in range(len(context)):
        draw = random.Random(hashlib.blake2b(repr((server, list(context[: at + 1]))).encode()).digest())
        rows[at] = [draw.sample(range(shape.num_experts), shape.top_k) for _ in shape.layers]
    return rows


class Conversation:
    """One trajectory, driven at random, and for each place in prompt + answer the choice that must be kept."""

    def __init__(self, folder: Path, *, shape: RoutingShape, seed: int) -> None:
        self.draw = random.Random(seed)
        self.shape = shape
        self.log = TokenWriter(folder / "tokens")
        self.trajectories = Trajectories(self.log, group_size=1, routing=shape)
        prompt = Prompt(
            0, "made up", "", tuple(self.draw.randrange(99) for _ in range(self.draw.randint(1, 6))), "", {}
        )
        self.trajectories.prompts[GroupId(0)] = prompt
        self.trajectories.admit(GroupId(0))
        self.record = self.trajectories.records[T]
        self.server = 0
        self.attempt = 0
        self.kept: dict[int, tuple[bytes, int]] = {}  # by place: choices and mark

    def tokens(self, most: int) -> list[int]:
        return [self.draw.randrange(99) for _ in range(self.draw.randint(1, most))]

    def request(self, *, lost: bool = False) -> None:
        """A request that samples some tokens; a server that is lost sends them, and no choices."""
        self.attempt += 1
        self.trajectories.begin(T, self.attempt)
        asked = self.trajectories.asked_routing(self.record)
        assert asked is not None
        assert asked.shape == self.shape
        known = self.record.context()
        unknown = [at for at, place in enumerate(self.places()) if place not in self.kept]
        assert asked.start == unknown[0]
        new = self.tokens(5)
        self.trajectories.append(T, self.attempt, new, [-1.0] * len(new))
        if lost:
            self.server += 1
            return
        context = [*known, *new]
        assert context == self.record.context().tolist()
        experts = chosen_by(self.server, context[:-1], self.shape)[asked.start :]
        mask = self.record.loss_mask()
        for at, place in enumerate(self.places()[:-1]):
            following = self.places()[at + 1] - len(self.record.prompt.tokens)
            again = at + 1 < len(known) and following >= 0 and mask[following] == 1
            if at >= asked.start:
                mark = READ_AGAIN if again else SAMPLED
                self.kept.setdefault(place, (experts[at - asked.start].tobytes(), mark))
        self.trajectories.choose(T, self.attempt, Chosen(asked.start, experts), num_context=len(known))

    def places(self) -> list[int]:
        """The place of each token of the context: the tokens of the latest row, counted through prompt + answer."""
        first, forks = len(self.record.prompt.tokens), self.record.forks
        rows = [list(range(first + (forks[0].start if forks else len(self.record.tokens))))]
        for number, fork in enumerate(forks):
            end = forks[number + 1].start if number + 1 < len(forks) else len(self.record.tokens)
            rows.append(rows[fork.parent][: fork.keep] + list(range(first + fork.start, first + end)))
        return rows[-1]

    def observe(self) -> None:
        """An observation, after which the answer may fork."""
        fork = None
        if self.draw.random() < 0.3:
            parent = len(self.record.forks)
            fork = Fork(len(self.record.tokens), parent, self.draw.randint(0, len(self.record.context())))
        self.attempt += 1
        self.trajectories.observe(T, self.attempt, self.tokens(4), fork=fork)

    def resume(self) -> None:
        """Another controller reads the store."""
        self.log.close()
        stored = read_tokens(self.log.path)
        self.log = TokenWriter(self.log.path, epoch=self.attempt)
        self.trajectories = Trajectories(self.log, group_size=1, routing=self.shape)
        self.trajectories.open(T, self.record.prompt)
        record = self.trajectories.records[T]
        known: Any = SimpleNamespace(
            id=T, reward=None, turn_rewards=[], turn_tokens=0, truncated="", phase=TrajectoryPhase.GRADED, num_tokens=0
        )
        known.num_tokens, known.reward = len(self.record.tokens), 1.0
        _fill(record, known, stored)
        assert (record.tokens, record.forks) == (self.record.tokens, self.record.forks)
        self.record = record


Talk = Callable[..., Conversation]


@pytest.fixture
def talk(tmp_path: Path) -> Iterator[Talk]:
    begun: list[Conversation] = []

    def begin(**settings: Any) -> Conversation:
        begun.append(Conversation(tmp_path, **settings))
        return begun[-1]

    yield begin
    for one in begun:
        one.log.close()


def wave_of(record: TrajectoryRecord, shape: RoutingShape) -> MicroBatch:
    group = Group(GroupId(0), version=0, deadline=9, num_prompt_tokens=1, group_size=1, admitted_at=0.0)
    group.trajectories[0].reward = 1.0
    order = TrainMicroBatch(0, 0, True, ((T,),))
    (batch,) = build_wave(order, records={T: record}, groups={GroupId(0): group}, group_size=1, routing=shape)
    return batch


def counted(made: Conversation) -> ChoicesCount:
    """The audit's account."""
    made.log.close()
    account = ChoicesAccount()
    read_tokens(made.log.path, wanted=(), account=account)
    return account.count([T, TrajectoryId(7)])


@pytest.mark.parametrize("shape", [SMALL, WIDE])
@pytest.mark.parametrize("seed", range(25))
def test_each_row_has_what_was_chosen_for_its_tokens(shape: RoutingShape, seed: int, talk: Talk) -> None:
    made = talk(shape=shape, seed=seed)
    for _ in range(made.draw.randint(1, 7)):
        for _ in range(made.draw.randint(0, 2)):
            made.request(lost=True)
        made.request()
        if made.draw.random() < 0.3:
            made.resume()
        if made.draw.random() < 0.7:
            made.observe()
    made.request()
    batch = wave_of(made.record, shape)
    ids = np.array([*made.record.prompt.tokens, *made.record.tokens])
    rows, marks = [], []
    for places in made.record.row_places():
        assert ids[places].tolist() == batch.tokens[len(marks) : len(marks) + len(places)].tolist()
        rows += [made.kept.get(int(place), (bytes(shape.row_bytes), UNKNOWN))[0] for place in places]
        marks += [made.kept.get(int(place), (b"", UNKNOWN))[1] for place in places]
    assert batch.experts.shape == (len(batch.tokens), len(shape.layers), shape.top_k * shape.dtype.itemsize)
    assert [row.tobytes() for row in batch.experts] == rows
    assert batch.routed.tolist() == marks
    ends = np.cumsum(batch.lengths) - 1
    assert all(batch.routed[at] for at in range(len(batch.tokens)) if at not in ends), "only last tokens are unknown"
    before_sampled = batch.routed[np.flatnonzero(batch.loss_mask) - 1]
    assert counted(made) == ChoicesCount(len(before_sampled), int((before_sampled == READ_AGAIN).sum()), 0)


def test_what_is_sampled_after_a_loss_is_told_from_what_is_read_again(talk: Talk) -> None:
    made = talk(shape=SMALL, seed=3)
    made.request(lost=True)
    before = len(made.record.context())
    made.request()
    marks = wave_of(made.record, SMALL).routed.tolist()
    prompt = len(made.record.prompt.tokens)
    assert marks[: prompt - 1] == [SAMPLED] * (prompt - 1)
    assert marks[prompt - 1 : before - 1] == [READ_AGAIN] * (before - prompt)
    assert set(marks[before - 1 : -1]) == {SAMPLED}
    assert marks[-1] == UNKNOWN


def test_what_a_lost_server_sampled_is_counted_as_unknown(talk: Talk) -> None:
    made = talk(shape=SMALL, seed=3)
    made.request()
    before = len(made.record.tokens)
    made.request(lost=True)
    known = counted(made)
    assert (known.known, known.missing) == (before, len(made.record.tokens) - before)
    assert wave_of(made.record, SMALL).routed.tolist()[:-1].count(UNKNOWN) == known.missing


def test_choices_of_an_older_attempt_are_refused(talk: Talk) -> None:
    made = talk(shape=SMALL, seed=1)
    made.request()
    known = wave_of(made.record, SMALL)
    made.trajectories.begin(T, made.attempt + 1)
    wrong = chosen_by(77, made.record.context()[:-1], SMALL)
    made.trajectories.choose(T, made.attempt, Chosen(0, wrong), num_context=1)
    assert wave_of(made.record, SMALL).experts.tobytes() == known.experts.tobytes()


def test_more_choices_than_tokens_are_an_error(talk: Talk) -> None:
    made = talk(shape=SMALL, seed=1)
    made.request()
    with pytest.raises(ValueError, match="choices for 99 tokens"):
        made.trajectories.choose(T, made.attempt, Chosen(0, SMALL.empty(99)), num_context=1)


def test_tokens_that_replace_others_have_none_of_their_choices(talk: Talk) -> None:
    made = talk(shape=SMALL, seed=2)
    made.request()
    made.request()
    start = len(made.record.tokens) - 2
    made.log.append(T, made.attempt + 1, [5, 6], [-1.0, -1.0], start=start)
    made.log.close()
    choices = read_tokens(made.log.path).answers[T].choices
    assert choices is not None
    assert len(choices) == len(made.record.prompt.tokens) + start


def test_large_choices_are_several_records(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("dora.journal.tokens.MAX_CHOICES_BYTES", 10)
    draw = random.Random(1)
    experts, marks = draw.randbytes(7 * 4), bytes([1, 2, 1, 1, 2, 2, 1])
    with TokenWriter(tmp_path / "tokens") as tokens:
        tokens.prompt(5, [1] * 10, digest=bytes(16), group_size=1)
        tokens.append(5, 1, [10], [-1.0], start=0)
        tokens.choose(5, 1, experts, marks, start=3)
    choices = read_tokens(tmp_path / "tokens").answers[TrajectoryId(5)].choices
    assert choices is not None
    places = np.arange(11)
    assert choices.marks(places).tolist() == [0, 0, 0, *marks, 0]
    assert choices.experts(places).tobytes() == bytes(12) + experts + bytes(4)


@pytest.mark.parametrize(
    ("group", "start", "experts", "reason"),
    [
        (1, 2**31, b"aabb", "do not fit the 6 tokens of trajectory 1"),
        (1, 4, b"aabb", "do not fit the 6 tokens of trajectory 1"),
        (7, 0, b"aabb", "do not fit the 0 tokens of trajectory 7"),
        (1, 0, b"aaabbb", "or those of other tokens"),
        (1, 0, b"", "neither a prompt nor a chunk"),
    ],
)
def test_choices_that_nobody_can_have_made_are_damage(
    group: int, start: int, experts: bytes, reason: str, tmp_path: Path
) -> None:
    """A start far beyond the answer would take gigabytes."""
    with TokenWriter(tmp_path / "tokens") as tokens:
        tokens.prompt(1, [1, 2, 3, 4], digest=bytes(16), group_size=1)
        tokens.append(1, 1, [10, 11], [-1.0, -1.0], start=0)
        tokens.choose(1, 1, b"ccdd", b"\x01\x01", start=2)
        head = struct.pack("<BqIIIII", 4, group, 0, 1, start, 2, len(experts) // 2)
        tokens.write(head + b"\x01\x01" + experts)
    for wanted in (None, ()):
        with pytest.raises(JournalError, match=reason):
            read_tokens(tmp_path / "tokens", wanted=wanted, account=ChoicesAccount())


def test_a_resume_with_a_model_that_chooses_otherwise_is_refused(talk: Talk) -> None:
    made = talk(shape=SMALL, seed=1)
    made.request()
    made.shape = WIDE
    with pytest.raises(RunFailed, match="the token store has 6 bytes of chosen experts for each token, but the model"):
        made.resume()


def test_what_is_known_is_kept() -> None:
    choices = Choices(2)
    choices.put(2, b"aabb", b"\x01\x01")
    choices.put(1, b"ccddeeff", b"\x02\x02\x02\x02")
    assert choices.experts(np.arange(6)).tobytes() == b"\0\0ccaabbff\0\0"
    assert choices.marks(np.arange(6)).tolist() == [0, 2, 1, 1, 2, 0]
    assert choices.first_unknown(np.array([1, 2, 5, 0])) == 2
    assert choices.first_unknown(np.array([1, 2])) == 2
    choices.cut(3)
    assert len(choices) == 3
    with pytest.raises(ValueError, match="3 bytes for 2 tokens of 2 bytes"):
        choices.put(0, b"abc", b"\x01\x01")


@pytest.mark.parametrize(
    ("places", "expected"), [([], []), ([4], [(0, 1)]), ([4, 5, 7, 8, 8], [(0, 2), (2, 4), (4, 5)])]
)
def test_runs(places: list[int], expected: list[tuple[int, int]]) -> None:
    assert runs(np.array(places, np.int64)) == expected


def test_ranks_get_the_choices_of_their_answers_however_many_there_are(talk: Talk) -> None:
    made = talk(shape=WIDE, seed=9)
    made.request()
    group = Group(GroupId(0), version=0, deadline=9, num_prompt_tokens=1, group_size=1, admitted_at=0.0)
    order = TrainMicroBatch(0, 0, True, ((), (T,), ()))
    wave = build_wave(order, records={T: made.record}, groups={GroupId(0): group}, group_size=1, routing=WIDE)
    alone = wave_of(made.record, WIDE)
    for num_ranks in (1, 2, 5):
        parts = spread(wave, num_ranks=num_ranks)
        assert sum(part.experts.nbytes for part in parts) == alone.experts.nbytes
        assert {part.experts.shape[1:] for part in parts} == {alone.experts.shape[1:]}
        assert b"".join(part.routed.tobytes() for part in parts) == alone.routed.tobytes()
        for part in parts:  # a rank without answers accepts its part, too
            check(part, max_staleness=0, vocab_size=100, routing=WIDE)


def test_evaluations_ask_for_nothing(tmp_path: Path) -> None:
    with TokenWriter(tmp_path / "tokens") as log:
        trajectories = Trajectories(log, group_size=1, routing=SMALL)
        trajectories.open(TrajectoryId(-1), Prompt(0, "made up", "", (1,), "", {}))
        assert trajectories.asked_routing(trajectories.records[TrajectoryId(-1)]) is None


def test_a_wrong_choice_is_named() -> None:
    good = chosen_by(0, [1, 2, 3], SMALL)
    assert SMALL.fault(good) == ""
    assert SMALL.fault(SMALL.empty()) == ""
    twice, beyond = good.copy(), good.copy()
    twice[1, 2] = twice[1, 2, 0]
    beyond[2, 0, 1] = 200
    assert SMALL.fault(twice) == "token 1 has an expert twice in layer 4"
    assert SMALL.fault(beyond) == "expert 200 of 200"
    assert SMALL.fault(good[:, :2]) == "shape (3, 2, 2), expected (tokens, 3, 2)"
    assert SMALL.fault(SMALL.empty(1)) == "token 0 has an expert twice in layer 1"


def test_tokens_of_an_answer_are_arrays() -> None:
    """The places of rows must not be confused with their tokens."""
    record = TrajectoryRecord(Prompt(0, "made up", "", (7, 7), "", {}), routing=SMALL)
    record.tokens, record.logprobs = array("i", [7, 7]), array("f", [-1, -1])
    assert record.context_places().tolist() == [0, 1, 2, 3]
    assert [places.tolist() for places in record.row_places()] == [[0, 1, 2, 3]]
