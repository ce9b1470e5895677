"""The budget of failed episodes, and rows that are set aside."""

import pytest

from dora.environments.failures import Failures
from dora.errors import RunFailed


def failures_of(*, budget: float = 0.5, window: int = 10, row_failures: int = 3) -> Failures:
    return Failures(budget=budget, window=window, row_failures=row_failures, field="environment")


def fail(failures: Failures, reason: str = "raised", *, source: str = "s", row: str = "r", is_own: bool = True) -> None:
    failures.failed(reason, source=source, row=row, is_own=is_own)


def test_the_share_is_of_the_whole_window_so_that_a_bad_beginning_is_no_verdict():
    failures = failures_of()
    for _ in range(5):
        fail(failures)
    with pytest.raises(RunFailed, match=r"^environment.failure_budget: 6 of the last 6 episodes of source 's'"):
        fail(failures)


def test_what_is_older_than_the_window_is_forgotten():
    failures = failures_of()
    for _ in range(20):
        for _ in range(5):
            fail(failures)
        for _ in range(5):
            failures.ended("s")
    fail(failures)  # the oldest of 5 leaves


def test_each_source_has_a_budget_of_its_own():
    failures = failures_of()
    for source in "abc":
        for _ in range(5):
            fail(failures, source=source)
    with pytest.raises(RunFailed, match="source 'b'"):
        fail(failures, source="b")


def test_the_commonest_reason_is_named():
    failures = failures_of()
    for reason in ("rare", "often", "often", "often", "rare"):
        fail(failures, reason)
    with pytest.raises(RunFailed, match=r"failed in the environment; 4 of them: often$"):
        fail(failures, "often")


def test_a_whole_budget_never_ends_the_run_and_none_ends_it_at_once():
    failures = failures_of(budget=1)
    for _ in range(50):
        fail(failures)
    with pytest.raises(RunFailed):
        fail(failures_of(budget=0))


def test_a_lost_host_counts_once_however_many_episodes_it_had():
    failures = failures_of(budget=0.1)
    fail(failures)
    for _ in range(50):
        failures.failed("host died", source="s", row="r", is_own=False, is_known=True)
    with pytest.raises(RunFailed, match=r"2 of the last 2 episodes"):
        fail(failures)


def test_a_row_is_set_aside_by_failures_of_its_own():
    failures = failures_of(budget=1)
    for _ in range(10):
        fail(failures, row="innocent", is_own=False)
    fail(failures, "first", row="poisoned")
    fail(failures, "second", row="poisoned")
    assert failures.set_aside == {}
    fail(failures, "third", row="poisoned")
    assert failures.set_aside == {"poisoned": "third"}
