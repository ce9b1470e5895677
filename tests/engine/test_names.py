"""What requests and versions are called: no id is the beginning of another, and only its own run can read a label."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dora.engine.names import UNCONFIRMED, digest_in, is_same_run, request_id, version_in, version_label

KEYS = st.tuples(
    st.sampled_from(["a", "ab", "run-7"]),
    st.integers(0, 9_999),
    st.integers(-(10**12) + 1, 10**12 - 1),
    st.integers(0, 999_999),
)


@given(st.lists(KEYS, min_size=2, unique=True))
def test_no_id_is_a_prefix_of_another(keys: list[tuple[str, int, int, int]]) -> None:
    ids = [request_id(run, epoch=e, trajectory=t, attempt=a) for run, e, t, a in keys]
    assert not any(one.startswith(other) for one, other in itertools.permutations(ids, 2))


@pytest.mark.parametrize(
    ("epoch", "trajectory", "attempt"),
    [(0, 10**12, 0), (0, -(10**12), 0), (0, 0, 10**6), (0, 0, -1), (10**4, 0, 0), (-1, 0, 0)],
)
def test_what_does_not_fit_the_width_is_an_error(epoch: int, trajectory: int, attempt: int) -> None:
    with pytest.raises(ValueError, match="too large for a request id"):
        request_id("run", epoch=epoch, trajectory=trajectory, attempt=attempt)


def test_the_version_in_a_label_is_known_to_its_own_run_only() -> None:
    label = version_label("a/run", 12, digest="01234567")
    assert (label, digest_in(label)) == ("a/run/12-01234567", "01234567")
    assert version_in(label, run_id="a/run") == 12
    assert version_in(label, run_id="run") is None
    assert is_same_run(label, "a/run/3-89abcdef")
    assert not any(is_same_run(label, other) for other in ("default", "run/12-01234567", UNCONFIRMED))


@pytest.mark.parametrize("label", [UNCONFIRMED, "default", "run/", "run/x-1", "run/²-1", "run/-1"])
def test_a_label_that_is_not_ours_names_no_version(label: str) -> None:
    assert version_in(label, run_id="run") is None
