"""Shared by whole runs: a policy whose answers take long enough to be interrupted."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.e2e.runs import make_slow_policy


@pytest.fixture(scope="session")
def slow_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_slow_policy(tmp_path_factory.mktemp("models") / "slow")
