"""With several workers, tests that share a run or a server are in the same one."""

from __future__ import annotations

import os

import pytest


@pytest.mark.skipif("PYTEST_XDIST_WORKER" not in os.environ, reason="there is one process")
def test_a_worker_knows_the_group_of_its_tests(request: pytest.FixtureRequest) -> None:
    assert request.node.nodeid.endswith("@static/test_workers.py")
