"""Records of what is in flight: tokens only grow, under one attempt at a time."""

from __future__ import annotations

from array import array
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from dora.controller.trajectories import Trajectories
from dora.core.ids import GroupId, TrajectoryId
from dora.engine.api import GenerateRequest
from dora.engine.sglang.client import EngineClient
from dora.journal.tokens import TokenWriter, read_tokens
from tests.controller.fakes import prompt

T = TrajectoryId(5)


@pytest.fixture
def log(tmp_path: Path) -> Iterator[TokenWriter]:
    with TokenWriter(tmp_path / "tokens.bin") as log:
        yield log


@pytest.fixture
def trajectories(log: TokenWriter) -> Trajectories:
    """Group 2 of three siblings is admitted: trajectories 6, 7, 8; an evaluation's sample is open."""
    made = Trajectories(log, group_size=3)
    made.prompts[GroupId(1)] = prompt(1)
    made.admit(GroupId(1))
    return made


def test_admission_makes_a_record_for_every_sibling_and_logs_the_prompt(
    trajectories: Trajectories, log: TokenWriter, tmp_path: Path
) -> None:
    assert sorted(trajectories.records) == [3, 4, 5]
    log.store(log.take())
    assert read_tokens(tmp_path / "tokens.bin").prompts[GroupId(1)].tokens.tolist() == [3, 4, 5]


def test_what_a_request_continues_takes_four_bytes_a_token_and_is_sent_as_numbers(trajectories: Trajectories) -> None:
    trajectories.begin(T, 1)
    trajectories.append(T, 1, [10, 11], [-1.0, -2.0])
    context = trajectories.records[T].context()
    assert context.tobytes() == array("i", [3, 4, 5, 10, 11]).tobytes()
    request = GenerateRequest("r", context, 8, 1.0, (0,), seed=1, label="run/1")
    assert EngineClient.encode(request) == EngineClient.encode(replace(request, tokens=context.tolist()))


def test_tokens_are_kept_and_logged_over_attempts(trajectories: Trajectories, log: TokenWriter, tmp_path: Path) -> None:
    trajectories.begin(T, 1)
    trajectories.append(T, 1, [10, 11], [-1.0, -2.0])
    trajectories.begin(T, 2)
    trajectories.append(T, 2, [12], [-3.0])
    assert trajectories.records[T].tokens.tolist() == [10, 11, 12]
    assert trajectories.records[T].logprobs.tolist() == [-1.0, -2.0, -3.0]
    assert trajectories.ledger.account.num_tokens == 3
    log.store(log.take())
    stored = read_tokens(tmp_path / "tokens.bin").answers[T]
    assert (stored.tokens.tolist(), stored.logprobs.tolist()) == ([10, 11, 12], [-1.0, -2.0, -3.0])


def test_tokens_of_an_older_attempt_are_refused(trajectories: Trajectories, log: TokenWriter, tmp_path: Path) -> None:
    trajectories.begin(T, 1)
    trajectories.append(T, 1, [10], [-1.0])
    trajectories.begin(T, 2)
    trajectories.append(T, 1, [66, 66], [-9.0, -9.0])
    assert trajectories.records[T].tokens.tolist() == [10]
    assert trajectories.refused_tokens == 2
    log.store(log.take())
    assert read_tokens(tmp_path / "tokens.bin").counts[T] == 1


def test_a_fence_refuses_tokens_until_the_next_attempt_and_returns_the_counts(trajectories: Trajectories) -> None:
    trajectories.begin(T, 1)
    trajectories.append(T, 1, [10], [-1.0])
    assert trajectories.fence([T, TrajectoryId(99)]) == {T: 1}
    trajectories.append(T, 1, [66], [-9.0])
    assert trajectories.records[T].tokens.tolist() == [10]
    trajectories.begin(T, 2)
    trajectories.append(T, 2, [11], [-1.0])
    assert trajectories.records[T].tokens.tolist() == [10, 11]


def test_tokens_of_a_forgotten_group_are_refused(trajectories: Trajectories) -> None:
    trajectories.begin(T, 1)
    trajectories.forget([GroupId(1)])
    trajectories.append(T, 1, [66], [-9.0])
    assert trajectories.records == {}
    assert trajectories.prompts == {}
    assert trajectories.refused_tokens == 1


def test_a_record_is_opened_once(trajectories: Trajectories) -> None:
    sample = TrajectoryId(-4)
    trajectories.open(sample, prompt(0))
    trajectories.records[sample].tokens.extend([1, 2])
    trajectories.open(sample, prompt(0))
    assert trajectories.records[sample].tokens.tolist() == [1, 2]
