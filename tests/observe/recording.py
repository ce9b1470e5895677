"""What the observers of a run were given, and what they wrote: one recording for each controller process.

A recording is a sequence of msgpack records, each preceded by its length (`<I`). The first is `Opened`, the last is
`Left`, and between them are the inputs, in the order in which the observers got them. Numbers are as they were: floats
are not rounded, and a metric may be NaN. A file with the suffix `.xz` is compressed.

Invariant: with the settings, the earlier events and the inputs, everything that the observers have written can be
computed again, byte for byte. They were recorded from the observers that `dora/observe` replaced, by the scripts of
commit 3268809; test_recording.py names every value that has changed since. Once the core decides otherwise than it did
then, they have served.
"""

from __future__ import annotations

import lzma
import struct
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from itertools import zip_longest
from pathlib import Path
from typing import Final, Literal, NamedTuple

import msgspec

from dora.core.commands import Command
from dora.core.core import handle
from dora.core.events import Event
from dora.core.ids import GroupId, InstanceId, StepId, TrajectoryId, VersionId
from dora.core.state import State
from dora.core.strategies import Settings
from dora.journal.codec import Handled

#: The files of lines that are compared; the fourth is status.json.
LINES: Final = ("metrics.jsonl", "spans.jsonl", "timeline.jsonl")
FOLDER: Final = Path(__file__).parent / "recordings"
_LENGTH: Final = struct.Struct("<I")


class Input(msgspec.Struct, frozen=True, tag=True, forbid_unknown_fields=True, kw_only=True):
    """Base class of everything in a recording but `Handled`: an event, noted when the core handled it."""


# -- the beginning and the end --------------------------------------------------------------------------------------


class Opened(Input, frozen=True):
    """The run when this controller began. The state of the core follows from `settings` and `earlier`."""

    settings: Settings  #: of the journal's header
    earlier: tuple[Handled, ...]  #: events of earlier controllers
    files: dict[str, bytes]  #: what an earlier controller left, before damaged lines were removed
    num_ranks: int
    time_scale: float


class HeldOut(msgspec.Struct, frozen=True, kw_only=True):
    """A held-out set."""

    name: str
    prompts: int
    samples: int
    skipped: int  #: rows over the prompt limit


class Began(Input, frozen=True):
    """The observer was made; what it was told about the job."""

    run_id: str
    strategy: str
    task: str
    has_environment: bool
    num_servers: int
    num_ranks: int
    held_out: tuple[HeldOut, ...]
    precision: Literal["float32", "bfloat16"]  #: the coarser data type of trainer and published weights
    updates: int
    clips_many: bool  #: the loss clips most tokens of healthy runs
    keep_per_step: int
    max_kept_bytes: int
    cpu_s: float  #: of the controller's process


class Closed(Input, frozen=True):
    """The spans were ended and their files closed."""


class Left(Input, frozen=True):
    """What the controller left in the run folder: the expected output."""

    files: dict[str, bytes]


# -- events and the disk ----------------------------------------------------------------------------------------------


class Noted(Input, frozen=True):
    """The last event handled was given to the observer, with its commands."""

    position: int  #: of the journal, after the event
    skipped: dict[GroupId, str]  #: for prompts that arrived: why a group's is skipped


class Durable(Input, frozen=True):
    """The journal was on the disk up to a position."""

    position: int


# -- tokens -----------------------------------------------------------------------------------------------------------


class Restored(Input, frozen=True):
    """A resume counted the tokens of the run so far."""

    num_tokens: int  #: observations and evaluation included
    sampled: dict[TrajectoryId, int]  #: by trajectory, without observations


class Sampled(Input, frozen=True):
    """Tokens arrived."""

    trajectory: TrajectoryId
    num_tokens: int


class FirstToken(Input, frozen=True):
    """A request got its first token."""

    trajectory: TrajectoryId
    at: float


# -- instances, ranks, the loop ---------------------------------------------------------------------------------------


class DownServer(msgspec.Struct, frozen=True, kw_only=True):
    """A server that is not up."""

    since: float
    reason: str
    then: str


class Servers(Input, frozen=True):
    """The servers, whenever they have changed before a snapshot."""

    urls: dict[InstanceId, str]  #: of those that are up
    down: dict[InstanceId, DownServer]


class PushStage(Input, frozen=True):
    """A push reached a stage."""

    instance: InstanceId
    stage: str
    at: float


class WaveDone(Input, frozen=True):
    """A rank ended a micro-batch."""

    rank: int
    at: float


class Spans(Input, frozen=True):
    """A rank reported what it has done."""

    rank: int
    until: float  #: by the rank's clock
    spans: tuple[tuple[str, float], ...]  #: activity, seconds
    at: float  #: when it arrived


class Ready(Input, frozen=True):
    """Another rank was ready."""

    num_ranks: int


class Lag(Input, frozen=True):
    """The event loop's lag was measured."""

    seconds: float


class Full(Input, frozen=True):
    """The journal began to wait for space on the disk."""

    reason: str


# -- results ----------------------------------------------------------------------------------------------------------


class Episode(msgspec.Struct, frozen=True, kw_only=True):
    """What is read from the record of an episode."""

    num_tokens: int  #: of the answer, observations included
    observed: tuple[tuple[int, int], ...]  #: start and end of each observation
    turn_rewards: tuple[float, ...]
    truncated: str


class Stepped(Input, frozen=True):
    """The trainer reported a step, before its StepTrained."""

    step: StepId
    metrics: dict[str, float]
    episodes: dict[TrajectoryId, Episode]  #: of the step, if there is an environment
    samples_full: bool  #: trajectories.jsonl has reached its limit
    cpu_s: float | None  #: None: the step has a row already


class Evaluated(Input, frozen=True):
    """All samples of a version were graded."""

    version: VersionId
    position: int
    outcomes: tuple[tuple[float | None, int], ...]  #: reward and number of tokens, by sample
    episodes: dict[TrajectoryId, Episode]
    samples_full: bool
    scores: tuple[dict[str, object], ...]  #: expected: as `Evaluations.scores` returned them, by set


class Shown(Input, frozen=True):
    """A snapshot was taken, which also counts what every lane has done until now."""

    snapshot: bytes  #: expected: the snapshot as JSON


class Ended(Input, frozen=True):
    """The controller returned."""

    finished: bool
    reason: str


class Failed(Input, frozen=True):
    """The controller raised."""

    reason: str


AnyInput = (
    Opened | Began | Closed | Left | Noted | Durable | Restored | Sampled | FirstToken | Servers | PushStage | WaveDone
    | Spans | Ready | Lag | Full | Stepped | Evaluated | Shown | Ended | Failed
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Before:
    """An event that the core handles next."""

    event: Event


@dataclass(frozen=True, slots=True)
class Fact:
    """`Noted`, with the event and its commands."""

    event: Event
    commands: list[Command]
    position: int
    skipped: dict[GroupId, str]


_DECODER: Final[msgspec.msgpack.Decoder[Handled | AnyInput]] = msgspec.msgpack.Decoder(Handled | AnyInput)
_encode: Final = msgspec.msgpack.Encoder().encode


def encode(record: Handled | Input) -> bytes:
    """Return a record with its length."""
    data = _encode(record)
    return _LENGTH.pack(len(data)) + data


class Recording:
    """The inputs of one controller."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._records = list(_read(path))
        opened, left = self._records[0], self._records[-1]
        assert isinstance(opened, Opened), f"{path}: begins with {type(opened).__name__}"
        assert isinstance(left, Left), f"{path}: ends with {type(left).__name__}"
        self.opened = opened
        self.left = left

    def __iter__(self) -> Iterator[tuple[State, AnyInput | Before | Fact]]:
        """Yield every input, from `Opened` to `Left`, with the state of the core at that time.

        It is one object, which changes from input to input. An event changes it after its `Before`, which may be some
        inputs before it is noted.
        """
        state = State(self.opened.settings)
        for earlier in self.opened.earlier:
            _apply(state, earlier)
        handled: Handled | None = None
        for record in self._records:
            if isinstance(record, Handled):
                yield state, Before(record.event)
                _apply(state, handled := record)
            elif isinstance(record, Noted):
                assert handled is not None, "an event is handled before it is noted"
                yield state, Fact(handled.event, [*handled.commands], record.position, record.skipped)
            else:
                yield state, record


@dataclass(slots=True)
class Disk:
    """How much of the journal is on the disk, and what waits for more of it: what the journal's commits do."""

    position: int = 0
    _waiting: list[tuple[int, Callable[[], None]]] = field(default_factory=list)

    def then(self, position: int, callback: Callable[[], None], *, is_urgent: bool = True) -> None:
        """Call `callback` when the journal is on the disk up to `position`, at once if it already is."""
        if position <= self.position:
            callback()
        else:
            self._waiting.append((position, callback))

    def reach(self, position: int) -> None:
        """Note that the journal is on the disk up to `position`."""
        self.position = max(self.position, position)
        waiting, self._waiting = self._waiting, []
        for wanted, callback in waiting:
            self.then(wanted, callback)


class Difference(NamedTuple):
    """A value that is not as recorded; a field that one of both lacks is MISSING."""

    place: str  #: the file and the number of its line, or the time of the snapshot
    field: str  #: its path
    recorded: object
    written: object


MISSING: Final = "(none)"


def differences(written: bytes, recorded: bytes, *, of: str) -> list[Difference]:
    """Return all differences of lines of JSON, which need not be equal in number; none if the bytes are equal."""
    if written == recorded:
        return []
    found = []
    pairs = zip_longest(written.splitlines(), recorded.splitlines())
    for number, (mine, theirs) in enumerate(pairs, 1):
        if mine != theirs:
            ours, others = dict(_values(mine)), dict(_values(theirs))
            fields = [f for f in {**others, **ours} if others.get(f, MISSING) != ours.get(f, MISSING)]
            place = f"{of}:{number}"
            found += [Difference(place, f, others.get(f, MISSING), ours.get(f, MISSING)) for f in fields]
            if not fields:
                found.append(Difference(place, "order", theirs, mine))
    return found or [Difference(of, "bytes", recorded, written)]


def _values(line: bytes | None) -> Iterator[tuple[str, object]]:
    """Yield the values in a line of JSON by their paths."""

    def walk(value: object, path: str) -> Iterator[tuple[str, object]]:
        if isinstance(value, dict | list):
            items = value.items() if isinstance(value, dict) else enumerate(value)
            for key, inner in items:
                yield from walk(inner, f"{path}.{key}" if path else str(key))
            yield f"{path}.len", len(value)
        else:
            yield path, value

    if line is not None:
        yield from walk(msgspec.json.decode(line), "")


def recordings() -> list[Path]:
    """Return the recordings that are kept, resumes after the controllers that they continue."""
    return sorted(FOLDER.glob("*.xz"))


def _apply(state: State, recorded: Handled) -> None:
    commands = handle(state, recorded.event)
    assert commands == [*recorded.commands], "the core decides differently now: the recording must be taken again"


def _read(path: Path) -> Iterator[Handled | AnyInput]:
    data = memoryview(lzma.decompress(path.read_bytes()) if path.suffix == ".xz" else path.read_bytes())
    while data:
        (length,) = _LENGTH.unpack_from(data)
        yield _DECODER.decode(data[_LENGTH.size : _LENGTH.size + length])
        data = data[_LENGTH.size + length :]
