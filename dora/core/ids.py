"""Identifiers and numbering. All numbers are 0-based.

Policy version v is the weights after step v - 1; version 0 is the start. Step s trains under version s and publishes
version s + 1. A group's id is the position of its prompt in the prompt stream. An example with T = 3 steps and K = 1:

    version  published by   may be trained at steps   deadline = min(version + K, T - 1)
    0        the start      0, 1                      1
    1        step 0         1, 2                      2
    2        step 1         2                         2
    3        step 2         none (final version)      -
"""

from __future__ import annotations

from typing import Final, Literal, NamedTuple, NewType

InstanceId = NewType("InstanceId", int)
GroupId = NewType("GroupId", int)
VersionId = NewType("VersionId", int)
StepId = NewType("StepId", int)
#: `group * group_size + sibling` for training; negative for evaluation (see `evaluation_id`).
TrajectoryId = NewType("TrajectoryId", int)

#: The weights at the start.
FIRST_VERSION: Final = VersionId(0)
#: A weight label that is not a version of this run.
FOREIGN_VERSION: Final = VersionId(-1)

#: The budget that ended an answer: of turns, of tokens, or of time. Empty: it ended by itself.
Truncation = Literal["", "turns", "tokens", "time"]
#: Why an episode began a new row (docs/AGENTS.md).
ForkCause = Literal["", "branched", "resampled", "rewritten", "unbridged"]


class Subject(NamedTuple):
    """What a line of a log, an excerpt or an error is about."""

    kind: str  #: "trajectory" | "group" | "instance" | "version" | "step" | "run"
    id: int

    def __str__(self) -> str:
        """In words, steps count from 1."""
        return f"{self.kind} {self.id + (self.kind == 'step')}"


def trajectory_id(group: GroupId, sibling: int, *, group_size: int) -> TrajectoryId:
    """Return the id of one sibling of a training group."""
    return TrajectoryId(group * group_size + sibling)


def group_of(trajectory: TrajectoryId, *, group_size: int) -> GroupId:
    """Return the group of a training trajectory."""
    return GroupId(trajectory // group_size)


def evaluation_id(version: VersionId, index: int, *, num_samples: int) -> TrajectoryId:
    """Return the id of sample `index` of the evaluation of `version`; it is negative, and so never a training id."""
    return TrajectoryId(-(1 + version * num_samples + index))


def evaluation_index(trajectory: TrajectoryId, *, num_samples: int) -> tuple[VersionId, int]:
    """Return (version, index) of an evaluation trajectory."""
    version, index = divmod(-trajectory - 1, num_samples)
    return VersionId(version), index


def deadline(version: VersionId, *, max_staleness: int, steps: int) -> int:
    """Return the last step that may train a group of `version`: min(v + K, T - 1)."""
    return min(version + max_staleness, steps - 1)
