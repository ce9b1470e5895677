"""The budget of failed episodes, and rows that are set aside."""

import pytest

from dora.environments.failures import Death, FailureLimits, Failures
from dora.errors import RunFailed


def failures_of(*, budget: float = 0.5, window: int = 10, row_failures: int = 3) -> Failures:
    return Failures(FailureLimits(budget, window, row_failures), field="environment")


def fail(failures: Failures, reason: str = "raised", *, source: str = "s", row: str = "r", **how) -> None:
    failures.failed(reason, source=source, row=row, **how)


def test_the_share_is_of_the_whole_window_so_that_a_bad_beginning_is_no_verdict():
    failures = failures_of()
    for _ in range(5):
        fail(failures)
    with pytest.raises(RunFailed, match=r"^environment: 6 of the last 6 episodes of source 's'"):
        fail(failures)


def test_what_is_older_than_the_window_is_forgotten():
    failures = failures_of()
    for _ in range(20):
        for _ in range(5):
            fail(failures)
        for _ in range(5):
            failures.ended(source="s", row="r")
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
    death = Death()
    for _ in range(50):
        fail(failures, "host died", is_own=False, death=death)
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


def test_a_row_is_suspected_once_of_the_loss_of_a_host_however_many_of_its_episodes_called():
    failures = failures_of(budget=1)
    for _ in range(2):
        death = Death()
        for _ in range(8):
            fail(failures, "host died", row="shared", death=death)
    assert failures.set_aside == {}
    fail(failures, "host died", row="shared", death=Death())
    assert failures.set_aside == {"shared": "host died"}


def test_an_episode_that_goes_well_clears_its_row_of_the_loss_of_hosts_but_not_of_failures_of_its_own():
    failures = failures_of(budget=1)
    for _ in range(5):
        fail(failures, "host died", row="innocent", death=Death())
        fail(failures, "host died", row="innocent", death=Death())
        failures.ended(source="s", row="innocent")
    assert failures.set_aside == {}
    for _ in range(3):
        fail(failures, row="poisoned")
        failures.ended(source="s", row="poisoned")
    assert set(failures.set_aside) == {"poisoned"}
