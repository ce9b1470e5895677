"""What the trainer gets and when: waves of one micro-batch per rank, each trajectory once, the same on replay."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from dora.core.commands import TrainMicroBatch
from dora.core.ids import GroupId, TrajectoryId
from dora.core.tables import Group
from dora.core.training import Feed, StepFeed, split_wave
from tests.core.builders import wave

BUDGET = 100


def group(id: int, *sizes: int | None) -> Group:
    """A graded group; one trajectory per size in tokens, None: its grading failed."""
    g = Group(GroupId(id), version=0, deadline=1, num_prompt_tokens=0, group_size=len(sizes), admitted_at=0.0)
    for trajectory, size in zip(g.trajectories, sizes, strict=True):
        trajectory.num_tokens = size or 1
        trajectory.reward = None if size is None else 1.0
    return g


def feed(*groups: Group, num_ranks: int = 2, closed: bool = False) -> Feed:
    """A feed whose trainer is ready at step 0, with these groups committed to it."""
    f = Feed(num_ranks=num_ranks, budget=BUDGET)
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


# -- one wave ---------------------------------------------------------------------------------------------------------


@settings(derandomize=True, deadline=None)
@given(sizes=st.lists(st.integers(1, 150), max_size=40), num_ranks=st.integers(1, 6))
def test_every_rank_gets_one_micro_batch_within_the_budget_and_no_trajectory_is_lost(
    sizes: list[int], num_ranks: int
) -> None:
    size_of = {TrajectoryId(t): size for t, size in enumerate(sizes)}
    ranks, left = split_wave(size_of.items(), num_ranks=num_ranks, budget=BUDGET)
    assert len(ranks) == num_ranks
    assert sorted([t for rank in ranks for t in rank] + [t for t, _ in left]) == sorted(size_of)
    assert all(size_of[t] == size for t, size in left)
    for rank in ranks:
        assert len(rank) == 1 or sum(size_of[t] for t in rank) <= BUDGET
    for _, size in left:  # only what fits nowhere is left
        assert all(rank and sum(size_of[t] for t in rank) + size > BUDGET for rank in ranks)


def test_the_longest_goes_first_to_the_least_loaded_rank() -> None:
    sizes = [(TrajectoryId(t), size) for t, size in enumerate([10, 60, 30, 50])]
    assert split_wave(sizes, num_ranks=2, budget=BUDGET) == ([[1, 0], [3, 2]], [])


def test_a_trajectory_beyond_the_budget_has_a_rank_of_its_own() -> None:
    sizes = [(TrajectoryId(0), 150), (TrajectoryId(1), 90), (TrajectoryId(2), 20)]
    assert split_wave(sizes, num_ranks=2, budget=BUDGET) == ([[0], [1]], [(2, 20)])


# -- when a wave is sent ----------------------------------------------------------------------------------------------


def test_an_idle_trainer_is_given_whatever_is_committed_even_to_one_rank() -> None:
    assert feed(group(0, 10, None)).next_wave() == wave(0, 0, [0], [])


def test_nothing_is_sent_before_the_trainer_is_ready_or_beyond_its_open_step() -> None:
    f = Feed(num_ranks=2, budget=BUDGET)
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


@settings(derandomize=True, deadline=None)
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
