"""The exceptions of DORA; every error that a user may see is one of these.

    DoraError
    ├── ConfigError          invalid input; names the field, file or server and what to do (exit code 2)
    │   └── RunEnded         ... the run to continue has reached its end
    ├── RunFailed            the run cannot continue; one line that says why (exit code 1)
    ├── RemoteError          another process answered with an error, or did not answer
    │   └── ProtocolError    ... or violated the protocol
    └── InvariantViolation   C1, C2, C3, conservation or a table of phases is broken; has an excerpt about the id

Any other exception that escapes is a bug, and its traceback may be shown.
"""

from __future__ import annotations

import re
from typing import Final

#: Maximum number of characters of a text from a file or another process.
_LONGEST: Final = 1_000
#: Quotations; hexadecimal identifiers and addresses; numbers, but not ports.
_VARIABLE: Final = re.compile(
    r"""'[^']*'|"[^"]*"|\b(?:0x)?(?=[a-f]*\d)[\da-f]{6,}(?:-[\da-f]+)*\b|(?<![\w:])\d+(?:\.\d+)?""", re.IGNORECASE
)


def kind_of(failure: str) -> str:
    """Return what failures with one cause have in common: the text without quotations, identifiers and numbers."""
    return _VARIABLE.sub("…", failure)


def first_of(group: ExceptionGroup) -> Exception:
    """Return the first error of nested groups, or the group itself if any of them is a bug."""
    # Not by `except*`, in which Python 3.11.3 and older wrap whatever is raised in a group again.
    if group.split(DoraError)[1] is not None:
        return group
    error = group.exceptions[0]
    return first_of(error) if isinstance(error, ExceptionGroup) else error


def one_line(text: object) -> str:
    """Turn text from a file or another process into one line of printable characters, of limited length.

    All such text passes through here on its way to a terminal; otherwise it could move the cursor and forge lines.
    Indentation is kept.
    """
    first, *others = str(text)[: 2 * _LONGEST].splitlines() or [""]
    line = " ".join(filter(None, (first.rstrip(), *map(str.strip, others))))
    line = "".join(c if c.isprintable() else " " if c.isspace() else "\N{REPLACEMENT CHARACTER}" for c in line)
    return line if len(line) <= _LONGEST else f"{line[: _LONGEST - 3]}..."


class DoraError(Exception):
    """Base class of all errors raised on purpose; `str(error)` has one printable line for each of its problems."""

    def __init__(self, *problems: str) -> None:
        super().__init__("\n".join(map(one_line, problems)))


class ConfigError(DoraError):
    """Invalid input. The message names the field, file or server, and what to change."""


class RunEnded(ConfigError):
    """The run that should be continued has reached its end."""


class RunFailed(DoraError):
    """The job ended without reaching its goal. The message says why and what to look at."""


class RemoteError(DoraError):
    """Another process (engine, trainer, grader) answered with an error, late, or not at all."""


class ProtocolError(RemoteError):
    """Another process sent bytes that violate the protocol."""


class InvariantViolation(DoraError):
    """C1, C2, C3, conservation or a table of phases is broken; `excerpt` has the journal's lines about the id."""

    def __init__(self, message: str, excerpt: tuple[str, ...] = ()) -> None:
        super().__init__(message)
        self.excerpt = excerpt
