"""The data of the page as JSON, by name. A run in progress and a run folder have the same data.

`status` is the snapshot, `groups` the step being formed (`GroupRow`), `info` what the run is and its evidence for C1,
C2 and C3. `steps`, `timeline` and `samples` are rows of the run's files, from a given line on (`Records`).
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

import msgspec

from dora.observe.groups import GroupRow
from dora.observe.sentence import ENDED
from dora.observe.snapshot import Snapshot, encode
from dora.status.records import Records

#: Names of the data about the present.
CURRENT: Final = ("status", "info", "groups")
#: Names of the data that is read from files.
RECORDED: Final = ("steps", "timeline", "samples")
NAMES: Final = (*CURRENT, *RECORDED)
_EMPTY: Final = b'{"rows":[],"next":0}'


class Constraint(msgspec.Struct, frozen=True):
    """The evidence for one constraint."""

    name: str
    meaning: str
    counter: str  #: the field of `Snapshot.counts` with its violations
    count: int  #: violations
    by_design: str  #: how often the strategy broke it; "" if it keeps it


class Info(msgspec.Struct, frozen=True):
    """What a run is."""

    run_id: str
    live: bool  #: whether the run is in progress
    takes_requests: bool  #: whether this server takes requests to the run, with its token
    constraints: tuple[Constraint, ...]
    audit: str  #: the command that proves the constraints from the journal


@dataclass(frozen=True, slots=True, kw_only=True)
class RunData:
    """The sources of one run. `records`: None if it has no folder.

    Invariant: files are read in one thread at a time, however many requests there are: the journal of a run is
    committed in threads of the same pool.
    """

    snapshot: Callable[[], Awaitable[Snapshot]]
    groups: Callable[[], Awaitable[Sequence[GroupRow]]]
    records: Records | None
    folder: Path | None  #: as the user would write it
    takes_requests: bool = False
    _reading: asyncio.Lock = field(default_factory=asyncio.Lock, init=False, repr=False)

    async def present(self) -> dict[str, bytes]:
        """Return the JSON of each of CURRENT."""
        now = await self.snapshot()
        info, groups = self._info(now), await self.groups()
        return {"status": encode(now), "info": msgspec.json.encode(info), "groups": msgspec.json.encode(groups)}

    async def rows(self, name: str, *, since: int = 0) -> bytes:
        """Return the JSON of one of RECORDED. `since`: the first line of the file."""
        if self.records is None:
            return _EMPTY
        read = {"steps": self.records.steps, "timeline": self.records.timeline, "samples": self.records.samples}[name]
        async with self._reading:
            return await asyncio.to_thread(read, since)

    def _info(self, now: Snapshot) -> Info:
        counts = now.counts
        rows = (
            ("C1", "no answer has tokens of two policy versions", "version_conflicts", counts.version_conflicts),
            ("C2", "no answer is dropped or cut by the scheduler", "scheduling_aborts", counts.scheduling_aborts),
            (
                "C3",
                f"no group is trained more than {now.max_staleness} steps after its version",
                "staleness_violations",
                counts.staleness_violations,
            ),
        )
        return Info(
            run_id=now.run_id,
            live=now.phase not in ENDED,
            takes_requests=self.takes_requests,
            constraints=tuple(Constraint(*row, now.by_design.get(row[0], "")) for row in rows),
            audit=f"dora audit {self.folder if self.folder is not None else now.run_id}",
        )
