"""The token store: the prompt of each group, and the tokens of each trajectory as they arrived.

It is a file of records in frames (frames.py). Most records are a prompt or a chunk of an answer: a little-endian head,
then raw arrays. Every record has the epoch of the controller that wrote it; a chunk also has its start position.

A record may also have what an engine chose for consecutive tokens, counted through prompt and answer (choices.py).

A chunk may begin a new row (rows.py). It then also has the row that it forks from, and the number of that row's tokens
that the new row repeats.

Invariant: an answer is the sequence of its chunks, where a later chunk replaces everything from its position on. A
chunk of an older attempt after one of a newer attempt is ignored, because a server treated as lost may still send
tokens. A chunk that starts after the end of its answer is a JournalError, because tokens are missing. A
prompt resets its group, so that records of a group whose admission the journal lost do not mix with later ones.
"""

from __future__ import annotations

import struct
import sys
from array import array
from collections.abc import Container, Sequence
from dataclasses import dataclass, field
from itertools import repeat
from pathlib import Path
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from dora.core.ids import GroupId, TrajectoryId
from dora.core.strategies import MAX_GROUP_SIZE
from dora.journal.audit_choices import ChoicesAccount
from dora.journal.choices import Choices
from dora.journal.frames import LARGE, FrameReader, FrameWriter, JournalError
from dora.journal.rows import Fork

#: kind, trajectory or group, epoch, attempt, position of the first token (in a prompt: group size), number of tokens
_HEAD: Final = struct.Struct("<BqIIII")
_PROMPT: Final = 0
_CHUNK: Final = 1  #: every token was sampled by the policy
_MASKED_CHUNK: Final = 2  #: with a loss mask
_FORKED_CHUNK: Final = 3  #: with a loss mask, and the parent row and the number of its tokens that the new row repeats
_CHOICES: Final = 4  #: bytes of choices for each token, then a mark for each, then the choices
DIGEST_BYTES: Final = 16  #: after the tokens of a prompt

_TOKENS: Final = np.dtype("<i4")
_LOGPROBS: Final = np.dtype("<f4")
_MASK: Final = np.dtype("u1")
_FORK: Final = struct.Struct("<II")
_WIDTH: Final = struct.Struct("<I")
_MASKED_BYTES: Final = _TOKENS.itemsize + _LOGPROBS.itemsize + _MASK.itemsize

MAX_CHOICES_BYTES: Final = 2**24  #: of a record of choices; a frame has a limit

#: Kind -> bytes per token, and bytes after the tokens.
_SIZES: Final = {
    _PROMPT: (_TOKENS.itemsize, DIGEST_BYTES),
    _CHUNK: (_TOKENS.itemsize + _LOGPROBS.itemsize, 0),
    _MASKED_CHUNK: (_MASKED_BYTES, 0),
    _FORKED_CHUNK: (_MASKED_BYTES, _FORK.size),
    _CHOICES: (0, _WIDTH.size),  # the record itself says how many bytes each token has
}


class TokenWriter(FrameWriter):
    """Writer of prompts and chunks. What an attempt has sampled since the last `take` makes one chunk."""

    def __init__(self, path: Path, *, epoch: int = 0) -> None:
        """`epoch`: of this controller."""
        super().__init__(path)
        self._epoch = epoch
        self._gathered: dict[int, _Gathered] = {}  # by trajectory: what has no record yet
        self._gathered_bytes = 0
        self._offsets = array("q")  # by group: of the frame with its prompt; 0: unknown

    def prompt(self, group: int, tokens: Sequence[int], *, digest: bytes, group_size: int) -> None:
        """Append the prompt of an admitted group; `digest` covers its whole row (tasks/prompts.py)."""
        for sibling in range(group * group_size, (group + 1) * group_size):
            self._put_gathered(sibling)
        self._offsets.extend(repeat(0, group + 1 - len(self._offsets)))
        self._offsets[group] = self._position
        head = _HEAD.pack(_PROMPT, group, self._epoch, 0, group_size, len(tokens))
        self.write(head + np.asarray(tokens, _TOKENS).tobytes() + digest)

    def offset_of(self, group: int) -> int:
        """Return where the records of a group begin, or a place before; `read_tokens` can begin there."""
        return self._offsets[group] if group < len(self._offsets) else 0

    def choose(self, trajectory: int, attempt: int, experts: bytes, marks: bytes, *, start: int) -> None:
        """Append what an engine chose for consecutive tokens from `start` on, counted through prompt and answer."""
        self._put_gathered(trajectory)
        width, most = len(experts) // len(marks), max(1, MAX_CHOICES_BYTES * len(marks) // len(experts))
        for first in range(0, len(marks), most):
            part = marks[first : first + most]
            head = _HEAD.pack(_CHOICES, trajectory, self._epoch, attempt, start + first, len(part))
            self.write(head + _WIDTH.pack(width) + part + experts[first * width : (first + len(part)) * width])

    def append(
        self,
        trajectory: int,
        attempt: int,
        tokens: Sequence[int],
        logprobs: Sequence[float],
        *,
        start: int,
        loss_mask: Sequence[int] | None = None,
        fork: Fork | None = None,
    ) -> None:
        """Append tokens that an attempt has produced, from position `start` of the answer, with behavior log-probs.

        `loss_mask` is 1 for tokens that the policy sampled and 0 for those of a tool; None: all were sampled. `fork`:
        the origin of the new row that begins with these tokens, if one does; then there is at least one token.
        """
        if len(logprobs) != len(tokens) or (loss_mask is not None and len(loss_mask) != len(tokens)):
            raise ValueError(f"trajectory {trajectory}: {len(tokens)} tokens need as many log-probs and mask entries")
        data = _bytes(tokens, _TOKENS), _bytes(logprobs, _LOGPROBS)
        if loss_mask is None and fork is None:
            self._gather(trajectory, attempt, *data, start=start)
            return
        self._put_gathered(trajectory)
        kind, rest = _MASKED_CHUNK, np.asarray(loss_mask, _MASK).tobytes()
        if fork is not None:
            kind, rest = _FORKED_CHUNK, rest + _FORK.pack(fork.parent, fork.keep)
        head = _HEAD.pack(kind, trajectory, self._epoch, attempt, start, len(tokens))
        self.write(b"".join((head, *data, rest)))

    def _gather(self, trajectory: int, attempt: int, tokens: bytes, logprobs: bytes, *, start: int) -> None:
        gathered = self._gathered.get(trajectory)
        if gathered is None or (gathered.attempt, gathered.end) != (attempt, start):
            self._put_gathered(trajectory)
            gathered = self._gathered[trajectory] = _Gathered(attempt, start)
        gathered.tokens += tokens
        gathered.logprobs += logprobs
        self._gathered_bytes += len(tokens) + len(logprobs)
        if len(self._pending) + self._gathered_bytes > LARGE:
            self.on_large()

    def _put_gathered(self, trajectory: int) -> None:
        """Make a record of what was gathered of a trajectory, if anything was."""
        if (gathered := self._gathered.pop(trajectory, None)) is not None:
            tokens, logprobs, count = gathered.tokens, gathered.logprobs, gathered.end - gathered.start
            self._gathered_bytes -= len(tokens) + len(logprobs)
            head = _HEAD.pack(_CHUNK, trajectory, self._epoch, gathered.attempt, gathered.start, count)
            self._put(b"".join((head, tokens, logprobs)))

    def take(self) -> bytes:
        """Return all that was written since the last call, as a frame for `store`; empty if nothing was."""
        for trajectory in [*self._gathered]:
            self._put_gathered(trajectory)
        return super().take()

    def abandon(self) -> None:
        """Close without storing what is pending, because earlier records are not on the disk."""
        self._gathered.clear()
        super().abandon()


@dataclass(slots=True)
class _Gathered:
    """Consecutive tokens that one attempt has sampled."""

    attempt: int
    start: int
    tokens: bytearray = field(default_factory=bytearray)
    logprobs: bytearray = field(default_factory=bytearray)

    @property
    def end(self) -> int:
        return self.start + len(self.tokens) // _TOKENS.itemsize


def _bytes(values: Sequence[float], dtype: np.dtype[Any]) -> bytes:
    """Encode `values` in little-endian order, without conversion if they are an array of that type."""
    if type(values) is array and sys.byteorder == "little" and values.typecode == dtype.char:
        return values.tobytes()
    return np.asarray(values, dtype).tobytes()


@dataclass(frozen=True, slots=True)
class StoredAnswer:
    """The tokens of one trajectory so far."""

    tokens: npt.NDArray[np.int32]
    logprobs: npt.NDArray[np.float32]
    loss_mask: npt.NDArray[np.uint8]
    forks: tuple[Fork, ...] = ()  #: where each row but the first begins
    choices: Choices | None = None  #: None: none were recorded

    @property
    def observed(self) -> list[tuple[int, int]]:
        """Start and end of each run of tokens that the policy did not sample."""
        edges = np.flatnonzero(np.diff(self.loss_mask, prepend=1, append=1))
        return [(int(start), int(end)) for start, end in edges.reshape(-1, 2)]


@dataclass(frozen=True, slots=True)
class StoredPrompt:
    """A group's prompt as it was admitted."""

    tokens: npt.NDArray[np.int32]
    digest: bytes


@dataclass
class TokenStore:
    """The contents of a token file."""

    prompts: dict[GroupId, StoredPrompt] = field(default_factory=dict)
    answers: dict[TrajectoryId, StoredAnswer] = field(default_factory=dict)
    counts: dict[TrajectoryId, int] = field(default_factory=dict)  #: tokens of every trajectory, wanted or not
    sampled: dict[TrajectoryId, int] = field(default_factory=dict)  #: the same, without tokens of observations
    torn_bytes: int = 0  #: of a torn end


def read_tokens(
    path: Path,
    *,
    wanted: Container[int] | None = None,
    account: ChoicesAccount | None = None,
    since: int | None = None,
) -> TokenStore:
    """Read the store in `path`. Trajectories that are not `wanted` (None: all) are only counted, and prompts of groups
    without one that is are left out. `account` takes in of which tokens choices are known.

    `since`: the offset of the first frame that is read (None: the whole file); others are then not even counted.
    """
    frames = FrameReader(path, since=since or 0)
    reader = _StoreReader(path, wanted=wanted, account=account, is_whole=since is None)
    for offset, record in frames:
        reader.take(record, offset=offset)
    return reader.found(torn_bytes=frames.torn_bytes)


class _StoreReader:
    """The contents of a store, taken in record by record."""

    def __init__(
        self, path: Path, *, wanted: Container[int] | None, account: ChoicesAccount | None, is_whole: bool
    ) -> None:
        """`is_whole`: the file is read from its beginning, so that every trajectory can be counted."""
        self._path = path
        self._wanted = wanted
        self._account = account
        self._is_whole = is_whole
        self._store = TokenStore()
        self._latest: dict[TrajectoryId, int] = {}  # epoch and attempt of the latest chunk, in one number
        self._answers: dict[TrajectoryId, _GrowingAnswer] = {}
        self._observed: dict[TrajectoryId, list[tuple[int, int]]] = {}  # (start, tokens) of chunks with observations
        self._choices: dict[TrajectoryId, Choices] = {}
        self._prompt_tokens: dict[int, int] = {}  # by group
        self._group_size = 1
        self._widths: set[int] = set()  # bytes of choices for each token: the same in a whole run

    def take(self, record: bytes, *, offset: int) -> None:
        """Take in a record; `offset` is that of its frame. JournalError if it does not fit those before it."""
        kind, number, epoch, attempt, start, count = _parse_head(record, path=self._path, offset=offset)
        if kind == _PROMPT:
            self._take_prompt(record, number, count=count, group_size=start)
            return
        trajectory = TrajectoryId(number)
        if not self._is_whole and not self._wants(trajectory):
            return
        if (writer := epoch << 32 | attempt) < self._latest.get(trajectory, 0):
            return
        self._latest[trajectory] = writer
        if kind == _CHOICES:
            self._take_choices(record, trajectory, start=start, count=count, offset=offset)
        else:
            self._take_chunk(record, kind, trajectory, start=start, count=count, offset=offset)

    def found(self, *, torn_bytes: int) -> TokenStore:
        """Return the store after the last record."""
        store, observed = self._store, self._observed
        store.torn_bytes = torn_bytes
        store.sampled = {t: n - sum(masked for _, masked in observed.get(t, ())) for t, n in store.counts.items()}
        store.answers = {t: answer.stored(self._choices.get(t)) for t, answer in self._answers.items()}
        return store

    def _wants(self, trajectory: TrajectoryId) -> bool:
        return self._wanted is None or trajectory in self._wanted

    def _num_prompt(self, trajectory: TrajectoryId) -> int:
        return self._prompt_tokens.get(trajectory // self._group_size, 0)

    def _take_prompt(self, record: bytes, group: int, *, count: int, group_size: int) -> None:
        self._prompt_tokens[group], self._group_size = count, group_size
        siblings = [TrajectoryId(id) for id in range(group * group_size, (group + 1) * group_size)]
        for sibling in siblings:
            for known in (self._store.counts, self._answers, self._observed, self._choices):
                known.pop(sibling, None)
            if self._account is not None:
                self._account.begin(sibling, num_prompt=count)
        if any(map(self._wants, siblings)):
            tokens = np.frombuffer(record, _TOKENS, count, _HEAD.size)
            self._store.prompts[GroupId(group)] = StoredPrompt(tokens, record[-DIGEST_BYTES:])

    def _take_choices(self, record: bytes, trajectory: TrajectoryId, *, start: int, count: int, offset: int) -> None:
        (width,) = _WIDTH.unpack_from(record, _HEAD.size)
        num_tokens = self._num_prompt(trajectory) + self._store.counts.get(trajectory, 0)
        if start + count >= num_tokens or self._widths - {width}:  # no engine has read the last token
            raise JournalError(
                f"{self._path}: the record at byte {offset} has choices that do not fit the {num_tokens} tokens of "
                f"trajectory {trajectory}, or those of other tokens"
            )
        self._widths.add(width)
        end = _HEAD.size + _WIDTH.size + count
        marks = record[end - count : end]
        if self._account is not None:
            self._account.choose(trajectory, marks, start=start)
        if self._wants(trajectory):
            self._choices.setdefault(trajectory, Choices(width)).put(start, record[end:], marks)

    def _take_chunk(
        self, record: bytes, kind: int, trajectory: TrajectoryId, *, start: int, count: int, offset: int
    ) -> None:
        known, observed = self._store.counts.get(trajectory, 0), self._observed
        if start > known:
            raise JournalError(
                f"{self._path}: the record at byte {offset} continues trajectory {trajectory} at token {start}, "
                f"but only {known} are known: records are missing"
            )
        if start < known and trajectory in self._choices:
            self._choices[trajectory].cut(self._num_prompt(trajectory) + start)
        self._store.counts[trajectory] = start + count
        if self._account is not None:
            self._account.append(trajectory, _mask_of(record, kind, count), start=start)
        if start < known and trajectory in observed:
            observed[trajectory] = [(at, masked) for at, masked in observed[trajectory] if at < start]
        if kind != _CHUNK and (num_masked := count - sum(_mask_of(record, kind, count))):
            observed.setdefault(trajectory, []).append((start, num_masked))
        if self._wants(trajectory):
            answer = self._answers.setdefault(trajectory, _GrowingAnswer())
            answer.put(record, kind, start=start, count=count)


def _parse_head(record: bytes, *, path: Path, offset: int) -> tuple[int, int, int, int, int, int]:
    """Return the head of a record; JournalError unless it agrees with the record's length."""
    if len(record) >= _HEAD.size:
        kind, number, epoch, attempt, start, count = _HEAD.unpack_from(record)
        width, rest = _SIZES.get(kind, (0, -1))
        if kind == _CHOICES and len(record) > _HEAD.size + _WIDTH.size:
            width = 1 + (_WIDTH.unpack_from(record, _HEAD.size)[0] or -1)
        if len(record) == _HEAD.size + width * count + rest and (kind != _PROMPT or 0 < start <= MAX_GROUP_SIZE):
            return kind, number, epoch, attempt, start, count
    raise JournalError(
        f"{path}: the record at byte {offset} is neither a prompt nor a chunk of tokens, nor has it choices"
    )


def _mask_of(record: bytes, kind: int, count: int) -> bytes:
    """Return the loss mask of a chunk."""
    at = _HEAD.size + count * (_TOKENS.itemsize + _LOGPROBS.itemsize)
    return b"\x01" * count if kind == _CHUNK else record[at : at + count]


@dataclass(slots=True)
class _GrowingAnswer:
    """An answer that is being read, its arrays as bytes: an object for each chunk would take 500 bytes."""

    tokens: bytearray = field(default_factory=bytearray)
    logprobs: bytearray = field(default_factory=bytearray)
    loss_mask: bytearray = field(default_factory=bytearray)
    forks: list[Fork] = field(default_factory=list)

    def put(self, record: bytes, kind: int, *, start: int, count: int) -> None:
        """Add a chunk, which replaces everything from its position on."""
        logprobs_at = _HEAD.size + count * _TOKENS.itemsize
        mask_at = logprobs_at + count * _LOGPROBS.itemsize
        self.tokens[start * _TOKENS.itemsize :] = record[_HEAD.size : logprobs_at]
        self.logprobs[start * _LOGPROBS.itemsize :] = record[logprobs_at:mask_at]
        self.loss_mask[start:] = _mask_of(record, kind, count)
        while self.forks and self.forks[-1].start >= start:
            self.forks.pop()
        if kind == _FORKED_CHUNK:
            self.forks.append(Fork(start, *_FORK.unpack_from(record, mask_at + count)))

    def stored(self, choices: Choices | None) -> StoredAnswer:
        """Return the answer as it is now."""
        return StoredAnswer(
            tokens=np.frombuffer(self.tokens, _TOKENS),
            logprobs=np.frombuffer(self.logprobs, _LOGPROBS),
            loss_mask=np.frombuffer(self.loss_mask, _MASK),
            forks=tuple(self.forks),
            choices=choices,
        )
