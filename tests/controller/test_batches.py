"""Micro-batches: what the trainer gets of a committed group, and rollouts on disk."""

from __future__ import annotations

import asyncio
import math
from dataclasses import replace
from pathlib import Path

import msgspec
import numpy as np
import pytest

from dora.controller.batches import build_wave, spread
from dora.controller.lineage import Lineage
from dora.controller.rollouts import RolloutWriter, rollout_files, train_rollouts
from dora.controller.trainer_link import StepReport
from dora.controller.trajectories import TrajectoryRecord
from dora.core import events as ev
from dora.core.commands import TrainMicroBatch
from dora.core.ids import GroupId, TrajectoryId
from dora.core.tables import Group
from dora.errors import ConfigError
from dora.journal.rows import Fork
from dora.tasks.prompts import Prompt
from dora.transport.messages import MicroBatch

G = 3


def group(number: int, *, version: int, rewards: tuple[float | None, ...]) -> Group:
    made = Group(
        GroupId(number), version=version, deadline=9, num_prompt_tokens=number + 1, group_size=G, admitted_at=0.0
    )
    for trajectory, reward in zip(made.trajectories, rewards, strict=True):
        trajectory.reward = reward
    return made


def record(trajectory: int, num_tokens: int) -> TrajectoryRecord:
    """Prompt tokens are 100 + group, answer tokens the trajectory's number, log-probs fall by a tenth each."""
    number = trajectory // G
    made = TrajectoryRecord(Prompt(number, "made up", "", (100 + number,) * (number + 1), "", {}))
    made.tokens.extend([trajectory] * num_tokens)
    made.logprobs.extend(-(i + 1) / 10 for i in range(num_tokens))
    return made


def forked(trajectory: int) -> TrajectoryRecord:
    """A prompt of two tokens, two turns after each other, and a third after the first turn alone, then one anew."""
    made = record(trajectory, 0)
    made.prompt = replace(made.prompt, tokens=(100, 101))
    made.tokens.extend([11, 12, 5, 21, 6, 31, 32, 7, 8, 41])
    made.logprobs.extend([-1, -2, 0, -3, 0, -4, -5, 0, 0, -6])
    made.observed = [(2, 3), (4, 5), (7, 9)]
    made.forks = [Fork(start=4, parent=0, keep=4), Fork(start=7, parent=1, keep=1)]
    return made


def test_a_trajectory_that_forked_has_each_sampled_token_in_one_of_its_rows() -> None:
    made = forked(1)
    assert made.context().tolist() == [100, 7, 8, 41]
    order = TrainMicroBatch(4, 0, True, ((0, 1, 2),))
    records = {0: record(0, 2), 1: made, 2: record(2, 2)}
    (batch,) = build_wave(
        order, records=records, groups={0: group(0, version=0, rewards=(1.0, 0.0, 1.0))}, group_size=G
    )
    assert batch.trajectories.tolist() == [0, 1, 1, 1, 2]
    assert batch.lengths.tolist() == [3, 6, 7, 4, 3]
    assert batch.lengths[1:4].sum() == len(made.prompt.tokens) + len(made.tokens) + made.repeated
    rows = np.split(np.arange(len(batch.tokens)), np.cumsum(batch.lengths)[:-1])[1:4]
    assert [batch.tokens[row].tolist() for row in rows] == [
        [100, 101, 11, 12, 5, 21],
        [100, 101, 11, 12, 6, 31, 32],
        [100, 7, 8, 41],
    ]
    assert [batch.loss_mask[row].tolist() for row in rows] == [
        [0, 0, 1, 1, 0, 1],
        [0, 0, 0, 0, 0, 1, 1],
        [0, 0, 0, 1],
    ]
    sampled = np.concatenate(rows)[np.concatenate([batch.loss_mask[row] for row in rows]) == 1]
    assert batch.behavior_logprobs[sampled].tolist() == [-1, -2, -3, -4, -5, -6]
    assert not batch.behavior_logprobs[batch.loss_mask == 0].any()
    assert batch.rewards.tolist() == [1, 0, 0, 0, 1]


def test_forks_that_repeat_what_is_not_there_are_refused() -> None:
    for fork in (Fork(start=4, parent=0, keep=7), Fork(start=4, parent=1, keep=1), Fork(start=99, parent=0, keep=1)):
        made = forked(1)
        made.forks = [fork]
        with pytest.raises(ValueError, match="Fork"):
            made.context()


def wave(*ranks: tuple[int, ...], index: int = 0, last: bool = True, groups: int = 2) -> list[MicroBatch]:
    made = {GroupId(g): group(g, version=g, rewards=(1.0, 0.0, None)) for g in range(groups)}
    records = {TrajectoryId(t): record(t, 2 + t % 3) for t in range(groups * G)}
    records[TrajectoryId(1)].truncated = "tokens"
    if groups == 4:
        records[TrajectoryId(7)] = forked(7)
    records[TrajectoryId(3)].prompt = replace(records[TrajectoryId(3)].prompt, source_index=2)
    order = TrainMicroBatch(4, index, last, tuple(tuple(TrajectoryId(t) for t in rank) for rank in ranks))
    return build_wave(order, records=records, groups=made, group_size=G)


def test_trajectories_are_concatenated_with_their_masks_and_logprobs() -> None:
    (batch,) = wave((1, 3))
    assert (batch.step, batch.index, batch.last) == (4, 0, True)
    assert batch.lengths.tolist() == [4, 4]
    assert batch.tokens.tolist() == [100, 1, 1, 1, 101, 101, 3, 3]
    assert batch.loss_mask.tolist() == [0, 1, 1, 1, 0, 0, 1, 1]
    np.testing.assert_allclose(batch.behavior_logprobs, [0, -0.1, -0.2, -0.3, 0, 0, -0.1, -0.2])
    assert batch.trajectories.tolist() == [1, 3]
    assert batch.groups.tolist() == [0, 1]
    assert batch.versions.tolist() == [0, 1]
    assert batch.truncated.tolist() == [1, 0]
    assert batch.sources.tolist() == [0, 2]


def test_a_trajectory_has_its_reward_and_those_of_all_siblings() -> None:
    (batch,) = wave((0, 1, 4))
    assert batch.rewards.tolist() == [1.0, 0.0, 0.0]
    assert batch.group_rewards.shape == (3, G)
    assert batch.group_rewards[0].tolist()[:2] == [1.0, 0.0]
    assert math.isnan(batch.group_rewards[0][2])


def test_a_rank_without_work_gets_an_empty_micro_batch_of_the_same_wave() -> None:
    full, empty = wave((0,), (), index=3, last=False)
    assert (empty.step, empty.index, empty.last) == (full.step, full.index, full.last) == (4, 3, False)
    assert empty.tokens.size == empty.trajectories.size == 0
    assert empty.group_rewards.shape == (0, G)


# -- other numbers of ranks ------------------------------------------------------------------------------------------


def rows_of(batch: MicroBatch) -> list[tuple[object, ...]]:
    """Each sequence with all that belongs to it."""
    ends = np.cumsum(batch.lengths)
    rows = []
    for n, end in enumerate(ends):
        inside = slice(end - batch.lengths[n], end)
        of_tokens = (getattr(batch, name)[inside].tolist() for name in ("tokens", "loss_mask", "behavior_logprobs"))
        names = ("trajectories", "groups", "versions", "rewards", "group_rewards", "truncated", "sources")
        rows.append((*map(tuple, of_tokens), *(str(getattr(batch, name)[n]) for name in names)))
    return rows


@pytest.mark.parametrize("num_ranks", [1, 2, 3, 4, 6])
def test_parts_are_spread_over_other_ranks_and_each_sequence_keeps_what_belongs_to_it(num_ranks: int) -> None:
    parts = wave((0, 1), (3,), (), (4, 5), index=2, last=True)
    ranks = spread(parts, num_ranks=num_ranks)
    assert len(ranks) == num_ranks
    found = sorted(row for batch in ranks for row in rows_of(batch))
    assert found == sorted(row for batch in parts for row in rows_of(batch))
    marks = {(batch.step, batch.index, batch.last, batch.update, batch.closes) for batch in (*parts, *ranks)}
    assert len(marks) == 1
    for batch in ranks[4:]:
        assert batch.tokens.size == batch.trajectories.size == batch.rewards_to_go.size == 0
        assert batch.group_rewards.shape == (0, G)


def test_parts_of_as_many_ranks_are_sent_as_they_are() -> None:
    parts = wave((0,), (1,))
    assert all(given is sent for given, sent in zip(parts, spread(parts, num_ranks=2), strict=True))


def test_ranks_that_divide_sequences_get_the_same_part() -> None:
    parts = wave((0,), (1,))
    for num_ranks, expected in ((4, [0, 0, 1, 1]), (2, None)):
        ranks = spread(parts, num_ranks=num_ranks, ranks_per_part=2)
        assert [ranks[rank] is ranks[rank + 1] for rank in range(0, num_ranks, 2)] == [True] * (num_ranks // 2)
        assert len(ranks) == num_ranks
        if expected is not None:
            assert all(ranks[rank] is parts[part] for rank, part in enumerate(expected))
    assert sorted(ranks[0].trajectories.tolist()) == [0, 1]


def test_rewards_of_turns_are_padded_when_parts_with_fewer_turns_are_merged() -> None:
    one, several = wave((0,)), wave((7,), groups=4)
    part = msgspec.structs.replace(several[0], step=one[0].step)
    part = msgspec.structs.replace(part, rewards_to_go=np.array([[[3, 2, 1], [5, 4, 4], [6, 6, 6]]] * 3, np.float32))
    for parts in ([one[0], part], [part, one[0]]):
        (merged,) = spread(parts, num_ranks=1)
        assert merged.rewards_to_go.shape == (4, G, 3)
        (single,) = np.flatnonzero(merged.trajectories == 0)
        np.testing.assert_array_equal(
            merged.rewards_to_go[single], np.stack([merged.group_rewards[single]] * 3, axis=-1)
        )
        others = np.flatnonzero(merged.trajectories == 7)
        np.testing.assert_array_equal(merged.rewards_to_go[others], part.rewards_to_go)
    (merged,) = spread([one[0], one[0]], num_ranks=1)
    assert merged.rewards_to_go.size == 0


# -- rollouts on disk -----------------------------------------------------------------------------------------------


class Ranks:
    """A stand-in for the trainer link that keeps what would be sent to every rank."""

    def __init__(self, num_ranks: int) -> None:
        self.num_ranks = num_ranks
        self.lineage = Lineage(base="base", settings=b"", trained={})
        self.waves: list[list[MicroBatch]] = []

    async def send(self, wave: list[MicroBatch]) -> None:
        self.waves.append(wave)


async def write(folder: Path) -> list[ev.Event]:
    """Four groups in two waves; two groups make a file, and one of them comes in both waves."""
    events: list[ev.Event] = []
    reports: list[StepReport] = []
    published, on_disk, waited = asyncio.Event(), asyncio.Event(), asyncio.Event()

    async def emit(event: ev.Event) -> None:
        events.append(event)
        if isinstance(event, ev.VersionPublished):
            published.set()

    async def durable(position: int) -> None:
        assert position == 7
        waited.set()
        await on_disk.wait()

    writer = RolloutWriter(
        folder,
        groups_per_step=2,
        group_size=G,
        now=lambda: 1.0,
        emit=emit,
        on_step=reports.append,
        durable=durable,
    )
    ((_, loop),) = writer.loops()
    running = asyncio.create_task(loop)
    writer.train(wave((0, 1, 2, 3, 4), index=0, last=False, groups=4), position=7)
    last = [msgspec.structs.replace(b, chain="c") for b in wave((5, 6, 7, 8, 9, 10, 11), index=1, groups=4)]
    writer.train(last, position=7)
    await waited.wait()
    assert events == []  # the journal is not on the disk yet
    on_disk.set()
    await asyncio.wait_for(published.wait(), 10)
    running.cancel()
    assert [report.step for report in reports] == [4]
    return events


async def test_a_writer_reports_written_waves_as_trained(tmp_path: Path) -> None:
    events = await write(tmp_path)
    assert events == [
        ev.MicroBatchTrained(1.0, 4, 0),
        ev.MicroBatchTrained(1.0, 4, 1),
        ev.StepTrained(1.0, 4, "c"),
        ev.VersionPublished(1.0, 5, 0, {}, "c"),
    ]
    assert [path.name for path in rollout_files(tmp_path)] == ["step-000000.rollout", "step-000001.rollout"]


@pytest.mark.parametrize(("num_ranks", "updates"), [(1, 1), (3, 1), (3, 2), (1, 9)])
async def test_the_trajectories_read_are_those_written(tmp_path: Path, num_ranks: int, updates: int) -> None:
    await write(tmp_path)
    assert [path.name for path in rollout_files(tmp_path)] == ["step-000000.rollout", "step-000001.rollout"]
    ranks = Ranks(num_ranks)
    await train_rollouts(
        rollout_files(tmp_path),
        link=ranks,  # type: ignore[arg-type]
        num_parts=num_ranks,
        budget=12,
        group_size=G,
        updates=updates,
        shared_prompts=False,
    )
    assert all(len(wave) == num_ranks for wave in ranks.waves)
    lasts = [(wave[0].step, wave[0].index, wave[0].last) for wave in ranks.waves]
    assert [last for _, _, last in lasts].count(True) == 2
    assert lasts == sorted(lasts)
    closing = [(wave[0].step, wave[0].update) for wave in ranks.waves if wave[0].closes]
    assert closing == [(step, update) for step in (0, 1) for update in range(min(updates, 2))]
    of_update = {int(g): b.update for wave in ranks.waves for b in wave for g in b.groups}
    assert of_update == {g: 0 if updates == 1 else g % 2 for g in range(4)}  # two groups in each step
    found = pieces([batch for wave in ranks.waves for batch in wave])
    wanted = pieces(wave(tuple(range(12)), groups=4))
    assert found.keys() == wanted.keys() == set(range(12))
    assert len(found[7]) == 3 * len(found[8])
    for trajectory, arrays in wanted.items():
        for mine, theirs in zip(found[trajectory], arrays, strict=True):
            np.testing.assert_array_equal(mine, theirs)


def pieces(batches: list[MicroBatch]) -> dict[int, tuple[np.ndarray, ...]]:
    """All that belongs to a trajectory, row by row."""
    found: dict[int, tuple[np.ndarray, ...]] = {}
    for batch in batches:
        starts = np.cumsum(batch.lengths) - batch.lengths
        for i, trajectory in enumerate(batch.trajectories):
            span = slice(starts[i], starts[i] + batch.lengths[i])
            row = (batch.versions[i], batch.rewards[i], batch.group_rewards[i], batch.groups[i], batch.truncated[i])
            tokens = (batch.tokens[span], batch.loss_mask[span], batch.behavior_logprobs[span])
            earlier = found.get(int(trajectory), ())
            found[int(trajectory)] = (*earlier, *tokens, *(np.asarray(value) for value in row))
    return found


def test_a_folder_without_rollouts_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"no step-\*.rollout files; give the `rollouts` folder"):
        rollout_files(tmp_path)
