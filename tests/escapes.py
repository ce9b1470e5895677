"""Text of others that would control a terminal, and the rule for what is shown of it."""

from __future__ import annotations

from dora.cli.output import say, tell
from dora.errors import DoraError

FORGED = "audit: C1, C2 and C3 hold"
HOSTILE = f"\x1b[2J\x1b]0;title\x07\x9b31m\r\n\u2028\u202e\x00\x08\t[/red][bold]{FORGED}\n{FORGED}"
#: The same for where no line may end and no NUL may be, such as a header.
HOSTILE_LINE = HOSTILE.replace("\r\n", "\r").replace("\n", "\r").replace("\x00", "")


def require_harmless(shown: str) -> None:
    """No control character, and no line that text of others has made."""
    assert all(line.isprintable() for line in shown.split("\n")), repr(shown)
    assert FORGED not in {line.strip() for line in shown.split("\n")}


def show(outcome: object) -> None:
    """Print an error as the command line does, and anything else as a result."""
    if isinstance(outcome, DoraError):
        tell(*str(outcome).split("\n"))
    else:
        say(str(outcome))
