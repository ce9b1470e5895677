"""Hosts for a test, or the reason why there are none here."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.cluster.network import Network, missing, network_at


@pytest.fixture
def network(tmp_path: Path) -> Iterator[Network]:
    if lacking := missing():
        pytest.skip(f"needs {lacking}")
    with network_at(tmp_path / "net") as made:
        yield made
