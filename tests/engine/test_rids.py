"""Request ids: SGLang may abort by prefix, so no id may be the beginning of another."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dora.engine.rids import request_id, trajectory_of

KEYS = st.tuples(st.sampled_from(["a", "ab", "run-7"]), st.integers(-(10**12) + 1, 10**12 - 1), st.integers(0, 999_999))


@given(st.lists(KEYS, min_size=2, unique=True))
def test_no_id_is_a_prefix_of_another(keys: list[tuple[str, int, int]]) -> None:
    rids = [request_id(run, trajectory=trajectory, attempt=attempt) for run, trajectory, attempt in keys]
    assert not any(one.startswith(other) for one, other in itertools.permutations(rids, 2))


@pytest.mark.parametrize(("trajectory", "attempt"), [(10**12, 0), (-(10**12), 0), (0, 10**6), (0, -1)])
def test_what_does_not_fit_the_width_is_an_error(trajectory: int, attempt: int) -> None:
    with pytest.raises(ValueError, match="too large for a request id"):
        request_id("run", trajectory=trajectory, attempt=attempt)


@given(KEYS)
def test_an_id_tells_its_trajectory(key: tuple[str, int, int]) -> None:
    run, trajectory, attempt = key
    assert trajectory_of(request_id(run, trajectory=trajectory, attempt=attempt)) == trajectory


def test_an_id_of_other_making_names_no_trajectory() -> None:
    assert trajectory_of("HEALTH_CHECK_0") is None
