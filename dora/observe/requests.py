"""What users asked of a run: who, when, and whether it was refused.

Invariant: pure; a function of the events, so that a resume gets the same from the journal.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from dora.core import commands as cmd
from dora.core import events as ev
from dora.core.ids import VersionId

#: Number of requests to show.
MAX_SHOWN: Final = 50


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestRow:
    """One request."""

    at: float
    by: str  #: "" if it is not known
    verb: str  #: add, recall, drain, remove, evaluate, stop
    target: str  #: the number of an instance, an address, or a version; "" for the run
    refused: str  #: why; "" if it was granted


class RequestLog:
    """The latest requests to one run."""

    def __init__(self) -> None:
        self.rows: deque[RequestRow] = deque(maxlen=MAX_SHOWN)  #: oldest first

    def note(self, event: ev.Event, commands: Sequence[cmd.Command], *, newest: VersionId | None) -> None:
        """Note a request and its answer. `newest`: the version that would be evaluated."""
        if isinstance(event, ev.UserRequest):
            refused = next((c.reason for c in commands if isinstance(c, cmd.RefuseRequest)), "")
            verb, target = _words(event, newest)
            self.rows.append(RequestRow(at=event.at, by=event.request.by, verb=verb, target=target, refused=refused))


def _words(event: ev.UserRequest, newest: VersionId | None) -> tuple[str, str]:
    match event:
        case ev.InstanceDrainRequested():
            return "remove" if event.leave else "drain", str(event.instance)
        case ev.InstanceRecalled():
            return "recall", str(event.instance)
        case ev.ServerOffered():
            return "add", event.url
        case ev.EvaluationRequested():
            return "evaluate", "" if newest is None else f"v{newest}"
        case _:
            return "stop", ""
