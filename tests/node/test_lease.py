"""The lease between a supervisor and its children, with real processes."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from dora.errors import ConfigError
from dora.node.lease import hold, watch_lease

CHILD = """
import sys, threading
from pathlib import Path
from dora.node.lease import watch_lease
watch_lease(Path(sys.argv[1]))
print("watching", flush=True)
threading.Event().wait(60)
"""

HOLDER = f"""
import subprocess, sys, threading
from pathlib import Path
from dora.node.lease import hold
lease = hold(Path(sys.argv[1]))
child = subprocess.Popen([sys.executable, "-c", {CHILD!r}, sys.argv[1]], stdout=subprocess.PIPE, text=True)
child.stdout.readline()
print("holding", flush=True)
child.stdout.readline()
"""


def test_a_child_ends_when_its_holder_is_killed(tmp_path: Path) -> None:
    holder = subprocess.Popen(
        [sys.executable, "-c", HOLDER, str(tmp_path / "lease")],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert holder.stdout is not None
    assert holder.stdout.readline() == "holding\n"
    holder.send_signal(signal.SIGKILL)
    holder.wait(timeout=10)
    # Standard error is inherited by the child, so its end is read when, and only when, both are gone.
    _, errors = holder.communicate(timeout=10)
    assert errors == ""


def test_a_child_lives_while_the_lease_is_held_and_ends_when_it_is_released(tmp_path: Path) -> None:
    lease = hold(tmp_path / "lease")
    child = subprocess.Popen([sys.executable, "-c", CHILD, str(tmp_path / "lease")], stdout=subprocess.PIPE, text=True)
    assert child.stdout is not None
    assert child.stdout.readline() == "watching\n"
    with pytest.raises(subprocess.TimeoutExpired):
        child.wait(timeout=0.3)
    lease.close()
    assert child.wait(timeout=10) == 1
    child.stdout.close()


@pytest.mark.parametrize("make", [os.mkfifo, os.mkdir], ids=["pipe", "folder"])
def test_what_is_no_file_is_not_held(tmp_path: Path, make: Callable[[Path], None]) -> None:
    make(tmp_path / "lock")
    with pytest.raises(ConfigError, match=r"lock: cannot be written \((it is not a regular file|Is a directory)\)$"):
        hold(tmp_path / "lock")


CONTROLLER = """
import sys, threading
from pathlib import Path
from dora.journal.run_folder import RunFolder
from dora.node.lease import hold
folder = RunFolder(Path(sys.argv[1]))
lease = folder.lease(int(sys.argv[2]))
held = hold(folder.lock), hold(lease)
print(lease, flush=True)
threading.Event().wait(60)
"""


def controller(folder: Path, *, epoch: int) -> tuple[subprocess.Popen[str], str]:
    """A process that holds run and lease; returns the lease too."""
    process = subprocess.Popen(
        [sys.executable, "-c", CONTROLLER, str(folder), str(epoch)], stdout=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    return process, process.stdout.readline().strip()


def end(process: subprocess.Popen[str]) -> None:
    process.kill()
    process.wait(timeout=10)
    assert process.stdout is not None
    process.stdout.close()


@pytest.mark.parametrize("epoch", [0, 1])  # a controller that wrote nothing leaves its epoch to the next one
def test_a_child_stopped_across_a_resume_does_not_take_the_next_controller_for_its_own(
    tmp_path: Path, epoch: int
) -> None:
    first, lease = controller(tmp_path, epoch=0)
    child = subprocess.Popen([sys.executable, "-c", CHILD, lease], stdout=subprocess.PIPE, text=True)
    assert child.stdout is not None
    assert child.stdout.readline() == "watching\n"
    child.send_signal(signal.SIGSTOP)
    os.waitpid(child.pid, os.WUNTRACED)  # it is stopped, and out of the line for the lock
    end(first)
    second, _ = controller(tmp_path, epoch=epoch)
    child.send_signal(signal.SIGCONT)
    assert child.wait(timeout=10) == 1
    child.stdout.close()
    end(second)


def test_a_held_lease_cannot_be_taken_again(tmp_path: Path) -> None:
    with hold(tmp_path / "lease"), pytest.raises(ConfigError, match="held by another process"):
        hold(tmp_path / "lease")


def test_a_lease_that_does_not_exist_cannot_be_watched(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot be opened"):
        watch_lease(tmp_path / "lease")
