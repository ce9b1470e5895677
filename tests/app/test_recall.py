"""What was forgotten of steps that are trained again is read from where it begins in the token store."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from dora.app.resume import recall
from dora.controller.trajectories import Trajectories
from dora.core.ids import GroupId, StepId, VersionId
from dora.core.tables import Group
from dora.core.training import StepFeed
from dora.journal.frames import JournalError
from dora.journal.run_folder import RunFolder
from dora.journal.tokens import TokenWriter
from tests.controller.fakes import prompt


def group(id: int) -> Group:
    """One of two siblings, each with two tokens."""
    made = Group(GroupId(id), version=VersionId(0), deadline=0, num_prompt_tokens=3, group_size=2, admitted_at=0.0)
    for trajectory in made.trajectories:
        trajectory.num_tokens = 2
    return made


async def test_the_store_is_read_from_the_frame_of_the_oldest_forgotten_group(tmp_path: Path) -> None:
    """The frames before it are damaged. In its frame, and after it, are answers that began before."""
    folder = RunFolder(tmp_path)
    with TokenWriter(folder.tokens) as tokens:
        made = Trajectories(tokens, group_size=2)
        for admitted in range(4):
            made.prompts[GroupId(admitted)] = prompt(admitted)
            made.admit(GroupId(admitted))
            for earlier in range(max(0, admitted - 1), admitted + 1):
                for sibling in made.siblings(GroupId(earlier)):
                    made.begin(sibling, attempt=admitted + 1)
                    made.append(sibling, admitted + 1, [10 * admitted + earlier], [-1.0])
            tokens.store(tokens.take())
        for sibling in made.siblings(GroupId(3)):
            made.append(sibling, 4, [99], [-1.0])
    since = tokens.offset_of(2)
    data = bytearray(folder.tokens.read_bytes())
    data[since // 2] ^= 1
    folder.tokens.write_bytes(data)

    made.forget(map(GroupId, range(4)))
    steps = {StepId(step): StepFeed(groups=[group(step)]) for step in range(4)}
    run: Any = SimpleNamespace(feed=SimpleNamespace(steps=steps))
    inputs: Any = SimpleNamespace(stream=SimpleNamespace(at=lambda position, known: prompt(position)))
    visits: Any = SimpleNamespace(row_of=lambda group: None)
    rest = {"offset_of": tokens.offset_of, "trajectories": made, "inputs": inputs, "visits": visits}
    await recall(folder, run, StepId(2), **rest)
    assert {id: record.tokens.tolist() for id, record in made.records.items()} == {
        4: [22, 32], 5: [22, 32], 6: [33, 99], 7: [33, 99],
    }  # fmt: skip
    with pytest.raises(JournalError, match="is damaged"):
        await recall(folder, run, StepId(1), **rest)


def test_where_a_group_of_an_earlier_controller_begins_is_not_known(tmp_path: Path) -> None:
    for epoch, admitted in enumerate((3, 5)):
        with TokenWriter(tmp_path / "tokens", epoch=epoch) as tokens:
            tokens.prompt(admitted, [1], digest=bytes(16), group_size=2)
    assert [tokens.offset_of(group) for group in (3, 4, 6)] == [0, 0, 0]
    assert tokens.offset_of(5) == (tmp_path / "tokens").stat().st_size // 2
