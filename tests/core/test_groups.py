"""The ledger: phases, conservation, and which graded groups carry no advantage."""

from __future__ import annotations

import pytest

from dora.core.ids import GroupId
from dora.core.on_requests import advantage_free
from dora.core.phases import GROUP, UNCONSUMED, GroupPhase
from dora.core.tables import Group, Ledger


def group(id: int = 0, *, size: int = 2) -> Group:
    return Group(GroupId(id), version=3, deadline=5, num_prompt_tokens=7, group_size=size, admitted_at=1.0)


def move(ledger: Ledger, group: Group, phase: GroupPhase) -> None:
    ledger.move(group, phase, next(iter(GROUP[group.phase][phase])))


def path_to(phase: GroupPhase) -> list[GroupPhase]:
    """Legal moves that lead from GENERATING to a phase."""
    paths: list[list[GroupPhase]] = [[GroupPhase.GENERATING]]
    while paths[0][-1] is not phase:
        paths += [[*paths[0], after] for after in GROUP[paths[0][-1]]]
        paths.pop(0)
    return paths[0][1:]


@pytest.mark.parametrize("phase", GroupPhase)
def test_the_counts_follow_the_phases(phase: GroupPhase) -> None:
    ledger, g = Ledger(), group()
    ledger.admit(g)
    for after in path_to(phase):
        move(ledger, g, after)
    assert {p for p, n in ledger.counts.items() if n} == {phase}
    assert sum(ledger.counts.values()) == ledger.admitted == 1


@pytest.mark.parametrize("end", [GroupPhase.TRAINED, GroupPhase.FILTERED, GroupPhase.FAILED])
def test_a_group_is_untrained_until_it_is_trained_filtered_or_failed(end: GroupPhase) -> None:
    ledger, g = Ledger(), group()
    ledger.admit(g)
    *before, last = path_to(end)
    for phase in before:
        move(ledger, g, phase)
        assert ledger.num_untrained == 1
    move(ledger, g, last)
    assert ledger.num_untrained == 0
    assert ledger.groups == {}


def test_a_committed_group_is_consumed() -> None:
    assert {GroupPhase.GENERATING, GroupPhase.GRADING, GroupPhase.COMPLETE} == UNCONSUMED


def test_siblings_carry_the_tag_of_their_group() -> None:
    g = group(4, size=3)
    assert [(t.id, t.version, t.num_prompt_tokens) for t in g.trajectories] == [(12, 3, 7), (13, 3, 7), (14, 3, 7)]
    assert (g.unfinished, g.ungraded, g.phase) == (3, 3, GroupPhase.GENERATING)


@pytest.mark.parametrize(
    ("rewards", "verdict"),
    [
        ((0.0, 1.0), None),
        ((1.0, 1.0), (GroupPhase.FILTERED, "zero variance")),
        ((0.0, 0.0, 0.0), (GroupPhase.FILTERED, "zero variance")),
        ((None, 0.5, 0.5), (GroupPhase.FILTERED, "zero variance")),
        ((None, 0.0, 1.0), None),
        ((None, 1.0), (GroupPhase.FAILED, "grading")),
        ((None, None), (GroupPhase.FAILED, "grading")),
    ],
)
def test_zero_variance_is_judged_over_graded_siblings_and_fewer_than_two_is_a_failure_of_grading(
    rewards: tuple[float | None, ...], verdict: tuple[str, str] | None
) -> None:
    assert advantage_free(rewards, filter_zero_variance=True) == verdict


def test_with_the_filter_off_only_failed_grading_keeps_a_group_from_training() -> None:
    assert advantage_free((1.0, 1.0), filter_zero_variance=False) is None
    assert advantage_free((None, 1.0), filter_zero_variance=False) == (GroupPhase.FAILED, "grading")
