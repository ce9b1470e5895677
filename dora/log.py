"""Logging: JSON lines in a file, and warnings on the console.

Invariant: every line has run, role and, for a trainer, rank, including lines that libraries log through `logging`.
Without a file (in child processes, whose output is captured) the lines go to standard error. Lines are dropped while
the disk is full. A process that has no log, or none yet, shows its warnings (`show_warnings`).
"""

from __future__ import annotations

import errno
import io
import logging
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import structlog
from structlog.typing import EventDict, WrappedLogger

from dora.errors import one_line
from dora.files import is_full

if TYPE_CHECKING:
    from _typeshed import ReadableBuffer

#: From this level on, a line is also shown on the console.
CONSOLE_LEVEL = logging.WARNING


def configure_logging(path: Path | None, *, level: str, run: str, role: str, rank: int | None = None) -> None:
    """Log to `path`, appending, at `level` and above; call once per process."""
    threshold = logging.getLevelNamesMapping()[level.upper()]
    stream = sys.stderr if path is None else _open(path)
    bound: dict[str, object] = {"run": run, "role": role}
    if rank is not None:
        bound["rank"] = rank
    structlog.configure(
        processors=[
            structlog.stdlib.add_log_level,
            structlog.processors.TimeStamper(fmt="iso", utc=True),
            structlog.processors.format_exc_info,
            _Bind(bound),
            *([] if path is None else [_show_warnings]),
            structlog.processors.JSONRenderer(default=str),
        ],
        wrapper_class=structlog.make_filtering_bound_logger(threshold),
        logger_factory=structlog.WriteLoggerFactory(file=stream),
        cache_logger_on_first_use=False,  # modules make their loggers before this is called
    )
    logging.basicConfig(level=max(threshold, logging.INFO), handlers=[_ToStructlog()], force=True)
    logging.captureWarnings(True)


def show_warnings() -> None:
    """Show warnings, with tracebacks, on the console alone. (The defaults of structlog and `logging` do not escape
    control characters.)"""
    structlog.configure(
        processors=[structlog.stdlib.add_log_level, structlog.processors.format_exc_info, _show_warnings, _end],
        cache_logger_on_first_use=False,
    )
    logging.basicConfig(level=CONSOLE_LEVEL, handlers=[_ToStructlog()], force=True)
    logging.captureWarnings(True)


def _open(path: Path) -> io.TextIOWrapper:
    return io.TextIOWrapper(io.BufferedWriter(LossyFile(path, "a")), encoding="utf-8", line_buffering=True)


class LossyFile(io.FileIO):
    """A file that drops what is written while the disk is full, or a pipe without a reader: a log must not end the run
    that it describes."""

    def write(self, data: ReadableBuffer, /) -> int:
        try:
            return super().write(data)
        except OSError as err:
            if not is_full(err) and err.errno != errno.EPIPE:
                raise
            return memoryview(data).nbytes


class _Bind:
    """Adds fixed fields to every line."""

    def __init__(self, fields: dict[str, object]) -> None:
        self._fields = fields

    def __call__(self, logger: WrappedLogger, method: str, event: EventDict) -> EventDict:
        return {**event, **self._fields}


def _show_warnings(logger: WrappedLogger, method: str, event: EventDict) -> EventDict:
    """Print one plain line per warning. sys.stderr is looked up each time because a live view may have replaced it."""
    if logging.getLevelNamesMapping()[event["level"].upper()] >= CONSOLE_LEVEL:
        known = {"event", "level", "timestamp", "exception", "run", "role", "rank"}
        details = " ".join(f"{key}={value}" for key, value in event.items() if key not in known)
        sys.stderr.write(one_line(f"{event['level']}: {event['event']} {details}") + "\n")
    return event


def _end(logger: WrappedLogger, method: str, event: EventDict) -> EventDict:
    """Print the traceback of a line and drop the line, because there is no log."""
    for line in str(event.get("exception", "")).splitlines():
        sys.stderr.write(one_line(f"  | {line}") + "\n")
    raise structlog.DropEvent


class _ToStructlog(logging.Handler):
    """Passes the log records of libraries on, at the nearest level of structlog."""

    def emit(self, record: logging.LogRecord) -> None:
        logger: structlog.typing.FilteringBoundLogger = structlog.get_logger(record.name)
        level = min(record.levelno // 10 * 10, logging.CRITICAL)
        try:
            event = record.getMessage()
        except Exception:  # noqa: BLE001 - a mistake of the library, which `logging` does not raise either
            event = str(record.msg)
        logger.log(level, event, library=record.name, exc_info=record.exc_info)
