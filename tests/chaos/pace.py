"""A slow, observable reward of 0 for jobs under test.

Every busy grader has a file in the folder `CHAOS_FOLDER`. The pauses make a job of a few steps long enough for faults,
without load on the CPU.
"""

from __future__ import annotations

import os
import time
import zlib
from pathlib import Path


def score(*, prompt: str, response: str, answer: str, metadata: dict[str, object]) -> float:
    """Return 0 after `CHAOS_GRADE_S`."""
    busy = Path(os.environ["CHAOS_FOLDER"]) / f"grading-{os.getpid()}"
    busy.touch()
    time.sleep(float(os.environ["CHAOS_GRADE_S"]))
    busy.unlink()
    return 0.0


def varied(*, prompt: str, response: str, answer: str, metadata: dict[str, object]) -> float:
    """Return a reward that differs between answers, and is the same for equal ones."""
    return float(zlib.crc32(response.encode()) % 8) / 8.0
