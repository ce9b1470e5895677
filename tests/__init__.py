"""Tests, and the processes that they start, keep what DORA keeps for a user in a temporary folder."""

import atexit
import os
import shutil
import tempfile

_MARK = "dora-tests-state-"


def _remove(folder: str, *, of: int) -> None:
    if os.getpid() == of:  # not in a process that was forked
        shutil.rmtree(folder, ignore_errors=True)


if _MARK not in os.environ.get("XDG_STATE_HOME", ""):
    os.environ["XDG_STATE_HOME"] = tempfile.mkdtemp(prefix=_MARK)
    atexit.register(_remove, os.environ["XDG_STATE_HOME"], of=os.getpid())
