"""The core decides as it did when the digests were recorded (a sample; `python -m tests.identity` compares all)."""

from __future__ import annotations

import pytest

from tests.identity.__main__ import HASH_SEEDS, digests, recorded
from tests.identity.runs import names

pytestmark = pytest.mark.timeout(900)

LARGE = ("workload:paper", "workload:search-agent")
RANDOM = ("world", "outside")


@pytest.mark.parametrize("hash_seed", HASH_SEEDS)
def test_a_few_random_runs_are_identical(hash_seed: str) -> None:
    chosen = [name for name in names() if name.startswith(RANDOM)][int(hash_seed) % 100 :: 100]
    expected = recorded()
    assert digests(chosen, hash_seed=hash_seed) == {name: expected[name] for name in chosen}


@pytest.mark.deep
@pytest.mark.parametrize("hash_seed", HASH_SEEDS)
def test_a_sample_of_the_runs_is_identical(hash_seed: str) -> None:
    small = [name for name in names() if not name.startswith(LARGE)]
    random = [name for name in small if name.startswith(RANDOM)]
    chosen = [name for name in small if name not in random] + random[int(hash_seed) % 10 :: 10]
    expected = recorded()
    assert digests(chosen, hash_seed=hash_seed) == {name: expected[name] for name in chosen}


def test_every_run_has_its_digest() -> None:
    assert list(recorded()) == names()
