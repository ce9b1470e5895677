"""Rule F, compared with its definition in docs/STALENESS.md: counted over a plain list of deadlines."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dora.core.feasibility import Formation, fits
from dora.errors import InvariantViolation


def rule_f(deadlines: list[int], *, step: int, committed: int, step_size: int) -> bool:
    """The text of F: nothing overdue, and for every m at most (N - c) + m·N groups due at or before s + m."""
    horizon = max(deadlines, default=step) - step
    return min(deadlines, default=step) >= step and all(
        sum(d <= step + m for d in deadlines) <= step_size - committed + m * step_size for m in range(horizon + 1)
    )


def in_time(deadlines: list[int], *, step: int, committed: int, step_size: int) -> bool:
    """Earliest deadline first, as many as fit into each step: is every group committed by its deadline?"""
    return all(step + (committed + i) // step_size <= d for i, d in enumerate(sorted(deadlines)))


def formation(*, n: int = 2, k: int = 2, steps: int = 100) -> Formation:
    return Formation(step_size=n, max_staleness=k, steps=steps)


def admit_all(f: Formation, *versions: int) -> None:
    for version in versions:
        assert f.may_admit(version)
        f.admit(f.deadline(version))


@given(due=st.lists(st.integers(0, 6), max_size=5), committed=st.integers(0, 3), step_size=st.integers(3, 5))
def test_f_holds_exactly_when_the_groups_can_be_committed_by_their_deadlines(
    due: list[int], committed: int, step_size: int
) -> None:
    deadlines = [9 + m for m, count in enumerate(due) for _ in range(count)]
    expected = in_time(deadlines, step=9, committed=committed, step_size=step_size)
    assert rule_f(deadlines, step=9, committed=committed, step_size=step_size) == expected
    assert fits(due, committed=committed, step_size=step_size) == expected


@settings(max_examples=300)
@given(data=st.data(), n=st.integers(1, 4), k=st.integers(0, 4), steps=st.integers(1, 8))
def test_allowed_operations_keep_f_and_refused_ones_would_break_it(
    data: st.DataObject, n: int, k: int, steps: int
) -> None:
    """Admit, commit, filter, publish and close in any order; then the rest can still be committed."""
    f = formation(n=n, k=k, steps=steps)
    groups: list[int] = []  # deadlines of U
    newest = 0
    for _ in range(data.draw(st.integers(0, 60))):
        operation = data.draw(st.sampled_from(("admit", "admit", "commit", "drop", "publish", "close")))
        if operation == "publish":
            newest = min(newest + 1, f.step)  # a version is published by a step that was closed before
        elif operation == "admit":
            due = f.deadline(newest)
            allowed = rule_f([*groups, due], step=f.step, committed=f.committed, step_size=n)
            assert f.may_admit(newest) == allowed
            if allowed:
                f.admit(due)
                groups.append(due)
        elif operation == "close":
            if f.committed == n:
                f.close()
        elif groups:
            due = data.draw(st.sampled_from(sorted(groups)))
            rest = list(groups)
            rest.remove(due)
            if operation == "drop":
                f.drop(due)
                groups = rest
            else:
                allowed = f.committed < n and rule_f(rest, step=f.step, committed=f.committed + 1, step_size=n)
                assert f.may_commit(due) == allowed
                if allowed:
                    assert f.step <= due
                    f.commit(due)
                    groups = rest
        assert fits(f.due, committed=f.committed, step_size=n)
        assert rule_f(groups, step=f.step, committed=f.committed, step_size=n)
        assert f.num_unconsumed == len(groups)
    for due in sorted(groups):
        if f.committed == n:
            f.close()
        assert f.may_commit(due)
        assert f.step <= due
        f.commit(due)
    assert f.num_unconsumed == 0


# -- admit ------------------------------------------------------------------------------------------------------------


def test_the_newest_version_is_admitted_up_to_the_places_by_its_deadline() -> None:
    f = formation(n=2, k=2)
    assert f.slack(0) == 6
    admit_all(f, *[0] * 6)
    assert not f.may_admit(0)


def test_older_groups_take_their_places_from_newer_ones() -> None:
    f = formation(n=2, k=2)
    admit_all(f, 0, 0, 0, 0, 0)
    f.commit(2)
    f.commit(2)
    f.close()
    assert f.due == [0, 3, 0]
    assert f.slack(1) == 3  # six places in steps 1 to 3, three of them taken by version 0


def test_a_version_whose_deadline_has_passed_is_not_admitted_however_much_room_there_is() -> None:
    f = formation(n=2, k=0)
    admit_all(f, 0, 0)
    f.commit(0)
    f.commit(0)
    f.close()
    assert f.step == 1
    assert f.slack(0) == 0
    assert f.slack(1) == 2


@pytest.mark.parametrize("k", range(4))
def test_nothing_is_admissible_when_forming_runs_k_plus_1_ahead_of_the_newest_version(k: int) -> None:
    f = formation(n=1, k=k)
    for s in range(k + 1):
        assert f.step == s
        admit_all(f, 0)
        f.commit(k)
        f.close()
    assert not f.may_admit(0)
    assert f.may_admit(1)


def test_the_last_steps_admit_what_they_can_train_and_no_more() -> None:
    f = formation(n=2, k=4, steps=3)
    assert f.slack(0) == 6
    admit_all(f, *[0] * 6)
    for _ in range(3):
        assert not f.may_admit(f.step)
        f.commit(2)
        f.commit(2)
        f.close()
    assert f.step == 3
    assert not f.may_admit(3)


# -- commit, close, filter --------------------------------------------------------------------------------------------


def test_a_later_deadline_is_committed_only_while_every_earlier_one_keeps_its_place() -> None:
    f = formation(n=2, k=1)
    admit_all(f, 0, 0, 0, 0)
    f.commit(1)
    f.commit(1)
    f.close()
    admit_all(f, 1, 1)
    assert f.due == [2, 2]
    assert not f.may_commit(2)  # both places of step 1 are owed to version 0
    f.drop(1)
    assert f.may_commit(2)
    f.commit(2)
    assert not f.may_commit(2)
    assert f.may_commit(1)


def test_a_full_step_takes_no_more_groups() -> None:
    f = formation(n=2, k=2)
    admit_all(f, 0, 0, 0)
    f.commit(2)
    f.commit(2)
    assert not any(f.may_commit(deadline) for deadline in (0, 1, 2))


def test_closing_carries_the_counters_over() -> None:
    f = formation(n=1, k=2)
    admit_all(f, 0, 0, 0)
    assert f.due == [0, 0, 3]
    f.commit(2)
    f.close()
    assert (f.step, f.committed, f.due) == (1, 0, [0, 2, 0])


def test_a_step_never_closes_over_a_group_that_is_due_now() -> None:
    f = formation(n=2, k=0)
    admit_all(f, 0, 0)
    f.commit(0)
    with pytest.raises(InvariantViolation, match="step 1 closes without 1 groups that are due now"):
        f.close()


def test_a_filtered_group_gives_its_place_back() -> None:
    f = formation(n=2, k=0)
    admit_all(f, 0, 0)
    assert not f.may_admit(0)
    f.drop(0)
    assert f.may_admit(0)


@pytest.mark.parametrize("deadline", [-1, 3, 9])
def test_a_group_that_is_due_outside_the_next_k_steps_is_never_admitted(deadline: int) -> None:
    f = formation(k=2)
    with pytest.raises(InvariantViolation, match=f"C3: a group is due at step {deadline + 1} while step 1 is formed"):
        f.admit(deadline)
    assert f.num_unconsumed == 0
