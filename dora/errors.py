"""The exception tree of DORA; every error a user can meet is one of these.

    DoraError
    ├── ConfigError          bad input: names the field, the file or the server and what to do (exit code 2)
    ├── RunFailed            the run cannot go on: one line that says why (exit code 1)
    ├── RemoteError          another process answered wrongly or not at all
    │   └── ProtocolError    ... with something that is not the protocol
    └── InvariantViolation   C1, C2, C3 or conservation broke: carries the story of the id, never repaired by guess

Anything else that escapes is a bug and may show its traceback.
"""

from __future__ import annotations


class DoraError(Exception):
    """Base of all errors raised on purpose; `str(error)` is one line fit for a terminal."""


class ConfigError(DoraError):
    """Input that cannot work. The message names the field, file or server, and what to change."""


class RunFailed(DoraError):
    """The job ended without reaching its goal. The message says why and what to look at."""


class RemoteError(DoraError):
    """Another process (engine, trainer, grader) answered with an error, late, or not at all."""


class ProtocolError(RemoteError):
    """Another process answered with bytes that do not follow the protocol."""


class InvariantViolation(DoraError):
    """One of C1, C2, C3 or conservation is broken; `story` holds the journal lines of the id."""

    def __init__(self, message: str, story: tuple[str, ...] = ()) -> None:
        super().__init__(message)
        self.story = story
