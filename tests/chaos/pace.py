"""A reward that takes its time and can be seen at work: it adds 0 to the reward of the job under test.

`CHAOS_FOLDER` names a folder in which every grader that is busy keeps a file. The pauses give a job of a few steps the
length that it takes to hit it, without work for the processor.
"""

from __future__ import annotations

import os
import time
from pathlib import Path


def score(*, prompt: str, response: str, answer: str, metadata: dict[str, object]) -> float:
    """0, a moment later."""
    busy = Path(os.environ["CHAOS_FOLDER"]) / f"grading-{os.getpid()}"
    busy.touch()
    time.sleep(float(os.environ["CHAOS_GRADE_S"]))
    busy.unlink()
    return 0.0
