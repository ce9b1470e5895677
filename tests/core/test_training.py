"""What the trainer gets and when: waves of one micro-batch per rank, each trajectory once, the same on replay."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dora.core.commands import TrainMicroBatch
from dora.core.ids import GroupId
from dora.core.tables import Group
from dora.core.training import Feed, StepFeed
from tests.core.builders import wave

BUDGET = 100


def group(id: int, *sizes: int | None, prompt: int = 0) -> Group:
    """A graded group; one trajectory per size in tokens, None: its grading failed."""
    g = Group(GroupId(id), version=0, deadline=1, num_prompt_tokens=prompt, group_size=len(sizes), admitted_at=0.0)
    for trajectory, size in zip(g.trajectories, sizes, strict=True):
        trajectory.num_tokens = size or 1
        trajectory.reward = None if size is None else 1.0
    return g


def feed(*groups: Group, num_ranks: int = 2, closed: bool = False, groups_per_update: int = 99) -> Feed:
    """A feed whose trainer is ready at step 0, with these groups committed to it."""
    f = Feed(num_ranks=num_ranks, budget=BUDGET, groups_per_update=groups_per_update)
    f.restart(0)
    for g in groups:
        f.commit(g, step=0)
    f.steps.setdefault(0, StepFeed()).closed = closed
    return f


def waves(f: Feed) -> list[TrainMicroBatch]:
    """Everything the trainer is sent while it works off one wave after the other."""
    sent: list[TrainMicroBatch] = []
    while (following := f.next_wave()) is not None or f.waves_done < len(sent):
        if following is None:
            f.waves_done += 1
        else:
            sent.append(following)
    return sent


def test_what_the_rows_of_a_trajectory_repeat_counts_in_its_micro_batch() -> None:
    made = group(0, 40, 40, 40)
    assert feed(made, num_ranks=1, closed=True).next_wave() == wave(0, 0, [0, 1])
    made.trajectories[0].repeated = 30
    f = feed(made, num_ranks=1, closed=True)
    assert f.steps[0].pending[0].num_tokens == 150
    assert [order.ranks for order in waves(f)] == [((0,),), ((1, 2),)]


# -- when a wave is sent ----------------------------------------------------------------------------------------------


def test_an_idle_trainer_is_given_whatever_is_committed_even_to_one_rank() -> None:
    assert feed(group(0, 10, None)).next_wave() == wave(0, 0, [0], [])


def test_nothing_is_sent_before_the_trainer_is_ready_or_beyond_its_open_step() -> None:
    f = Feed(num_ranks=2, budget=BUDGET, groups_per_update=1)
    f.commit(group(0, 10, 10), step=1)
    assert f.next_wave() is None
    f.restart(0)
    assert f.next_wave() is None
    f.open_step = 1
    assert f.next_wave() is not None


def test_one_more_wave_is_sent_ahead_only_if_it_is_full() -> None:
    f = feed(group(0, 100, 100))
    assert f.next_wave() is not None
    f.commit(group(1, 90, 90), step=0)
    assert f.next_wave() is None  # 180 of 200 tokens: it would run ahead half empty
    f.commit(group(2, 20, 20), step=0)
    assert f.next_wave() is not None
    f.commit(group(3, 100, 100), step=0)
    assert f.next_wave() is None  # two ahead
    f.waves_done += 1
    assert f.next_wave() is not None


def test_the_rest_of_a_closed_step_is_sent_ahead_however_small() -> None:
    f = feed(group(0, 100, 100), group(1, 10, 10), closed=True)
    assert [(w.index, w.last) for w in (f.next_wave(), f.next_wave()) if w] == [(0, False), (1, True)]


def test_only_the_last_wave_of_a_closed_step_is_marked_last() -> None:
    sent = waves(feed(*(group(i, 70, 70) for i in range(4)), closed=True))
    assert [w.index for w in sent] == list(range(len(sent)))
    assert [w.last for w in sent] == [False] * (len(sent) - 1) + [True]


def test_a_step_that_closes_after_everything_was_sent_ends_with_an_empty_wave() -> None:
    f = feed(group(0, 10, 10))
    assert f.next_wave() is not None
    f.waves_done += 1
    f.steps[0].closed = True
    assert f.next_wave() == wave(0, 1, [], [], last=True)
    assert f.next_wave() is None


@given(
    groups=st.lists(st.lists(st.one_of(st.none(), st.integers(1, 150)), min_size=2, max_size=2), max_size=12),
    num_ranks=st.integers(1, 4),
)
def test_every_graded_trajectory_of_a_step_is_in_exactly_one_wave_of_as_many_micro_batches_as_ranks(
    groups: list[list[int | None]], num_ranks: int
) -> None:
    f = feed(*(group(i, *sizes) for i, sizes in enumerate(groups)), num_ranks=num_ranks, closed=True)
    sent = waves(f)
    graded = [2 * i + j for i, sizes in enumerate(groups) for j, size in enumerate(sizes) if size is not None]
    assert sorted(t for w in sent for rank in w.ranks for t in rank) == graded
    assert all(len(w.ranks) == num_ranks for w in sent)
    assert [w.last for w in sent] == [False] * (len(sent) - 1) + [True]


# -- several updates --------------------------------------------------------------------------------------------------


def test_an_update_ends_with_the_last_answers_of_its_groups_and_no_wave_mixes_two() -> None:
    f = feed(*(group(i, 40, 40) for i in range(4)), closed=True, groups_per_update=2)
    assert waves(f) == [
        wave(0, 0, [0, 2], [1, 3], update=0, closes=True),
        wave(0, 1, [4, 6], [5, 7], update=1, closes=True, last=True),
    ]


def test_a_complete_update_is_sent_ahead_however_small_and_an_incomplete_one_only_if_the_trainer_is_idle() -> None:
    f = feed(group(0, 10, 10), group(1, 10, 10), group(2, 10, 10), groups_per_update=2)
    assert f.next_wave() == wave(0, 0, [0, 2], [1, 3], update=0, closes=True)
    assert f.next_wave() is None  # group 2 would run ahead
    f.waves_done += 1
    assert f.next_wave() == wave(0, 1, [4], [5], update=1)


def test_an_update_whose_answers_are_all_trained_when_it_completes_ends_with_an_empty_wave() -> None:
    f = feed(group(0, 10, 10), groups_per_update=2)
    assert f.next_wave() == wave(0, 0, [0], [1])
    f.commit(group(1, None, None), step=0)
    assert f.next_wave() == wave(0, 1, [], [], closes=True)
    assert f.next_wave() is None


@pytest.mark.parametrize(("num_groups", "updates"), [(0, [0]), (1, [0]), (2, [0]), (3, [0, 1]), (4, [0, 1])])
def test_a_step_cut_short_ends_with_the_update_of_its_last_group(num_groups: int, updates: list[int]) -> None:
    sent = waves(feed(*(group(i, 10, 10) for i in range(num_groups)), closed=True, groups_per_update=2))
    assert [w.update for w in sent] == updates
    assert all(w.closes for w in sent)
    assert sent[-1].last


def test_a_step_that_is_cut_short_between_two_updates_ends_with_an_empty_one() -> None:
    f = feed(group(0, 10, 10), groups_per_update=1)
    assert f.next_wave() == wave(0, 0, [0], [1], closes=True)
    f.steps[0].closed = True
    assert f.next_wave() == wave(0, 1, [], [], update=1, closes=True, last=True)


@settings(max_examples=300)
@given(data=st.data(), num_updates=st.integers(1, 4), size=st.integers(1, 3), num_ranks=st.integers(1, 4))
def test_each_graded_trajectory_is_in_one_wave_of_its_update_and_each_update_ends_once(
    data: st.DataObject, num_updates: int, size: int, num_ranks: int
) -> None:
    """Groups are committed and waves trained in any order; the prompts may end early; the trainer may restart."""
    answers = st.lists(st.one_of(st.none(), st.integers(1, 150)), min_size=3, max_size=3)
    count = data.draw(st.integers(0, num_updates * size))
    groups = [group(i, *data.draw(answers), prompt=data.draw(st.integers(1, 120))) for i in range(count)]
    f = feed(num_ranks=num_ranks, groups_per_update=size)
    f.shared_prompts = data.draw(st.booleans())
    sent: list[TrainMicroBatch] = []
    waiting = list(groups)
    while not (sent and sent[-1].last):
        if (following := f.next_wave()) is not None:
            sent.append(following)
        elif f.waves_done < len(sent) and (not waiting or data.draw(st.booleans())):
            f.waves_done += 1
        elif waiting:
            f.commit(waiting.pop(0), step=0)
            f.steps[0].closed = not waiting and count == num_updates * size
        else:
            f.steps[0].closed = True
    fed = sorted((w.update, t) for w in sent for rank in w.ranks for t in rank)
    assert fed == [(i // size, t.id) for i, g in enumerate(groups) for t in g.trajectories if t.reward is not None]
    assert all(len(w.ranks) == num_ranks for w in sent)
    assert [w.update for w in sent if w.closes] == list(range(sent[-1].update + 1))
    assert [w.update for w in sent] == sorted(w.update for w in sent)
    assert sent[-1].update < num_updates
    assert [w.last for w in sent] == [False] * (len(sent) - 1) + [True]
    assert all(p.num_tokens == 0 for p in f.steps[0].pending.values())
    f.restart(0)
    assert waves(f) == sent


# -- replay -----------------------------------------------------------------------------------------------------------


def test_a_restarted_trainer_is_fed_the_very_same_waves() -> None:
    f = feed(group(0, 60, 60), group(1, 60, 60))
    first = [f.next_wave()]
    f.commit(group(2, 100, 100), step=0)
    first.append(f.next_wave())
    f.waves_done += 2
    f.steps[0].closed = True
    first += waves(f)
    f.restart(0)
    assert waves(f) == first


def test_waves_are_kept_back_to_the_older_one_of_two_checkpoints() -> None:
    f = feed(group(0, 10, 10), closed=True)
    f.commit(group(1, 10, 10), step=1)
    assert f.checkpointed(1, "one") == []
    assert list(f.steps) == [0, 1]
    assert f.checkpointed(2, "two") == [(0, "")]
    assert list(f.steps) == [1]
    assert f.checkpointed(3, "three") == [(1, "one")]
