"""Open files: as many as the host allows; a run that needs more is refused before it starts."""

from __future__ import annotations

import subprocess
import sys

import pytest

SOFT, HARD = 400, 600
ASK = """
import resource, sys
resource.setrlimit(resource.RLIMIT_NOFILE, ({soft}, {hard}))
from dora.errors import ConfigError
from dora.node.limits import allow_open_files
try:
    allow_open_files(int(sys.argv[1]))
    print(*resource.getrlimit(resource.RLIMIT_NOFILE))
except ConfigError as err:
    print(err)
"""


@pytest.mark.parametrize(
    ("streams", "says"),
    [
        pytest.param(300, f"{HARD} {HARD}", id="the soft limit is raised"),
        pytest.param(
            500,
            "engine.slots: 500 concurrent requests need about 756 open files, but this host allows 600; raise "
            "the hard limit (ulimit -Hn), or lower engine.slots",
            id="the hard limit is too low",
        ),
    ],
)
def test_a_run_may_open_as_many_files_as_the_host_allows(streams: int, says: str) -> None:
    asked = [sys.executable, "-c", ASK.format(soft=SOFT, hard=HARD), str(streams)]
    assert subprocess.run(asked, capture_output=True, text=True, check=True).stdout.strip() == says
