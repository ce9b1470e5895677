"""Logging, in processes that configure it."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

SCRIPT = """
import logging, sys
from pathlib import Path
import structlog
log = structlog.get_logger("made.before")
from dora.log import configure_logging
path = Path(sys.argv[1]) if sys.argv[1] else None
configure_logging(path, level=sys.argv[2], run="job-1", role="trainer", rank=3)
log.debug("step_opened", step=1)
log.info("step_trained", step=1, where=Path("/x"))
log.warning("push_failed", instance=2)
logging.getLogger("some.library").warning("deprecated %s", "thing")
logging.getLogger("some.library").debug("noise")
try:
    secret = "sesame"
    1 / 0
except ZeroDivisionError:
    log.exception("job_failed")
"""


def logged(path: Path | str, level: str = "info") -> tuple[list[dict[str, Any]], str]:
    """The lines of the log, and the output on the console."""
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT, str(path), level], capture_output=True, text=True, timeout=60, check=True
    )
    assert done.stdout == ""
    text = Path(path).read_text() if path else done.stderr
    return [json.loads(line) for line in text.splitlines()], done.stderr


def test_lines_are_json_with_run_role_and_rank(tmp_path: Path):
    lines, _ = logged(tmp_path / "log.jsonl")
    assert [line["event"] for line in lines] == ["step_trained", "push_failed", "deprecated thing", "job_failed"]
    assert all((line["run"], line["role"], line["rank"]) == ("job-1", "trainer", 3) for line in lines)
    assert (lines[0]["level"], lines[0]["step"], lines[0]["where"]) == ("info", 1, "/x")
    assert lines[0]["timestamp"].endswith("Z")


def test_the_level_selects_lines_and_libraries_never_log_debug(tmp_path: Path):
    lines, _ = logged(tmp_path / "log.jsonl", "debug")
    assert [line["event"] for line in lines] == [
        "step_opened", "step_trained", "push_failed", "deprecated thing", "job_failed",
    ]  # fmt: skip
    lines, _ = logged(tmp_path / "errors.jsonl", "error")
    assert [line["event"] for line in lines] == ["job_failed"]


def test_the_console_shows_warnings_only_in_one_line_each(tmp_path: Path):
    _, console = logged(tmp_path / "log.jsonl")
    assert console.splitlines() == [
        "warning: push_failed instance=2",
        "warning: deprecated thing library=some.library",
        "error: job_failed",
    ]


def test_a_traceback_is_logged_without_the_values_of_variables(tmp_path: Path):
    lines, _ = logged(tmp_path / "log.jsonl")
    assert "ZeroDivisionError" in lines[-1]["exception"]
    assert "sesame" not in lines[-1]["exception"]


def test_a_second_process_appends(tmp_path: Path):
    logged(tmp_path / "log.jsonl")
    lines, _ = logged(tmp_path / "log.jsonl")
    assert len(lines) == 8


def test_without_a_file_the_lines_go_to_standard_error():
    lines, _ = logged("")
    assert [line["event"] for line in lines] == ["step_trained", "push_failed", "deprecated thing", "job_failed"]


def test_a_message_that_a_library_cannot_format_is_logged_as_it_is(tmp_path: Path):
    """`logging` never raises into the code that logs."""
    script = """
import logging, sys
from pathlib import Path
from dora.log import configure_logging
configure_logging(Path(sys.argv[1]), level="info", run="job-1", role="trainer")
logging.getLogger("some.library").warning("%d answers", "many")
"""
    path = tmp_path / "log.jsonl"
    subprocess.run([sys.executable, "-c", script, str(path)], capture_output=True, timeout=60, check=True)
    assert [json.loads(line)["event"] for line in path.read_text().splitlines()] == ["%d answers"]
