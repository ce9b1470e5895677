"""The calls of environments that are under way, and those that end with a controller.

Invariant: folded from events and commands alone. A new controller repeats the calls that can be replayed; no event says
that the others are lost, and their answers have no reward.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from dora.core import commands as cmd
from dora.core import events as ev
from dora.core.ids import TrajectoryId


@dataclass(slots=True)
class CallsUnderWay:
    """The answers of groups that are calling their environment."""

    _attempts: dict[TrajectoryId, int] = field(default_factory=dict)

    def note(self, event: ev.Event, commands: Iterable[cmd.Command]) -> Sequence[TrajectoryId]:
        """Take in an event and the commands it led to; return the answers whose calls it has lost."""
        lost: list[TrajectoryId] = []
        if isinstance(event, ev.CallFinished):
            if self._attempts.get(event.trajectory) == event.attempt:
                del self._attempts[event.trajectory]
        elif isinstance(event, ev.ControllerRestarted):
            lost = [trajectory for trajectory in self._attempts if trajectory not in event.replayable]
            self._attempts.clear()
        for command in commands:
            if isinstance(command, cmd.CallEnvironment) and command.trajectory >= 0:
                self._attempts[command.trajectory] = command.attempt
        return lost
