"""Streamed = whole, on 1, 2 and 4 ranks: pairwise combinations of order, split, packing and number of updates.

`python -m tests.trainer.whole` plays the full product.
"""

from __future__ import annotations

import json

import pytest

from tests.trainer import whole

pytestmark = [pytest.mark.deep, pytest.mark.timeout(600)]

CASES = whole.pairwise()


@pytest.fixture(scope="module", params=whole.WORLD_SIZES)
def played(request, model_path, tmp_path_factory) -> whole.Results:
    """The results of all cases on so many ranks."""
    return whole.run(CASES, model_path, tmp_path_factory.mktemp("whole"), world_size=request.param)


@pytest.fixture(scope="module")
def plain(model_path):
    """What the plain trainer finds, by number of updates."""
    return {updates: whole.expected(model_path, updates=updates) for updates in whole.FACTORS["updates"]}


def test_every_order_split_packing_and_number_of_updates_gives_the_weights_of_a_plain_trainer(played, plain):
    for case, (weights, metrics) in zip(CASES, played.cases, strict=True):
        for mine, found, (theirs, norm) in zip(weights, metrics, plain[case.updates], strict=True):
            assert whole.difference(mine, theirs) < whole.TOLERANCE, case
            assert found["grad_norm"] == pytest.approx(norm, rel=1e-4), case
            assert found["updates_skipped"] == 0
        clipped = found["all/clip_low_frac"] + found["all/clip_high_frac"]
        assert (clipped > 0) == (case.updates > 1), "later updates move away from the policy before the step"


def test_a_trainer_resumed_from_the_middle_of_a_step_repeats_it_bit_for_bit(played):
    uninterrupted, resumed = played.manifests
    assert json.loads(resumed)["step"] == 2
    assert resumed == uninterrupted


def test_an_update_without_a_finite_gradient_is_skipped_and_the_others_are_made(played):
    metrics, [weights], [others] = played.skipped
    assert metrics["updates_skipped"] == 1
    assert whole.difference(weights, others) == 0
