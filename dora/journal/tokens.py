"""The token store: prompts by group, and what each trajectory's attempts produced, as it arrived.

One file of frames (frames.py); a frame is a prompt or a chunk: a little-endian head, then raw arrays. Invariant: a
trajectory's chunks, in file order, are its answer; a chunk of an older attempt behind one of a newer attempt is ignored
and counted, because a server that was given up may go on talking. Written by the controller as tokens arrive, read
back at a resume and by the audit.
"""

from __future__ import annotations

import struct
import sys
from array import array
from collections.abc import Container, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from dora.core.ids import GroupId, TrajectoryId
from dora.journal.frames import FrameReader, FrameWriter, JournalError

_HEAD: Final = struct.Struct("<BqII")  #: kind, trajectory or group, attempt, number of tokens
_PROMPT: Final = 0
_CHUNK: Final = 1  #: every token was sampled by the policy
_MASKED_CHUNK: Final = 2  #: with a loss mask

_TOKENS: Final = np.dtype("<i4")
_LOGPROBS: Final = np.dtype("<f4")
_MASK: Final = np.dtype("u1")


class TokenWriter(FrameWriter):
    """Appends prompts and chunks."""

    def prompt(self, group: int, tokens: Sequence[int]) -> None:
        """The prompt of a group, once."""
        self.write(_HEAD.pack(_PROMPT, group, 0, len(tokens)) + np.asarray(tokens, _TOKENS).tobytes())

    def append(
        self,
        trajectory: int,
        attempt: int,
        tokens: Sequence[int],
        logprobs: Sequence[float],
        loss_mask: Sequence[int] | None = None,
    ) -> None:
        """Tokens that an attempt has just produced, each with its behavior log-prob.

        `loss_mask` is 1 where the policy sampled the token, 0 for text of a tool; None: all were sampled.
        """
        if len(logprobs) != len(tokens) or (loss_mask is not None and len(loss_mask) != len(tokens)):
            raise ValueError(f"trajectory {trajectory}: {len(tokens)} tokens need as many log-probs and mask entries")
        kind = _CHUNK if loss_mask is None else _MASKED_CHUNK
        mask = b"" if loss_mask is None else np.asarray(loss_mask, _MASK).tobytes()
        head = _HEAD.pack(kind, trajectory, attempt, len(tokens))
        self.write(head + _bytes(tokens, _TOKENS) + _bytes(logprobs, _LOGPROBS) + mask)


def _bytes(values: Sequence[float], dtype: np.dtype[Any]) -> bytes:
    """Little-endian; an array of that type already, as it comes from a stream, is not converted again."""
    if type(values) is array and sys.byteorder == "little" and values.typecode == dtype.char:
        return values.tobytes()
    return np.asarray(values, dtype).tobytes()


@dataclass(frozen=True, slots=True)
class Answer:
    """What one trajectory has produced so far."""

    tokens: npt.NDArray[np.int32]
    logprobs: npt.NDArray[np.float32]
    loss_mask: npt.NDArray[np.uint8]


@dataclass
class TokenStore:
    """A token file, read back."""

    prompts: dict[GroupId, npt.NDArray[np.int32]] = field(default_factory=dict)
    answers: dict[TrajectoryId, Answer] = field(default_factory=dict)
    counts: dict[TrajectoryId, int] = field(default_factory=dict)  #: tokens of every trajectory, wanted or not
    late_chunks: int = 0  #: of older attempts, ignored
    torn_bytes: int = 0  #: of an incomplete last frame


def read_tokens(path: Path, *, wanted: Container[int] | None = None) -> TokenStore:
    """The store in `path`. Of trajectories that are not `wanted` (None: all are) only the counts are kept."""
    store = TokenStore()
    attempts: dict[TrajectoryId, int] = {}
    chunks: dict[TrajectoryId, list[Answer]] = {}
    frames = FrameReader(path)
    for offset, payload in frames:
        kind, number, attempt, count = _parse_head(payload, path=path, offset=offset)
        if kind == _PROMPT:
            store.prompts[GroupId(number)] = np.frombuffer(payload, _TOKENS, count, _HEAD.size)
            continue
        trajectory = TrajectoryId(number)
        if attempt < attempts.get(trajectory, 0):
            store.late_chunks += 1
            continue
        attempts[trajectory] = attempt
        store.counts[trajectory] = store.counts.get(trajectory, 0) + count
        if wanted is None or trajectory in wanted:
            chunks.setdefault(trajectory, []).append(_parse_chunk(payload, masked=kind == _MASKED_CHUNK, count=count))
    store.torn_bytes = frames.torn_bytes
    store.answers = {trajectory: _join(parts) for trajectory, parts in chunks.items()}
    return store


def _parse_head(payload: bytes, *, path: Path, offset: int) -> tuple[int, int, int, int]:
    """The head of a frame whose length agrees with it."""
    if len(payload) >= _HEAD.size:
        kind, number, attempt, count = _HEAD.unpack_from(payload)
        width = {
            _PROMPT: _TOKENS.itemsize,
            _CHUNK: _TOKENS.itemsize + _LOGPROBS.itemsize,
            _MASKED_CHUNK: _TOKENS.itemsize + _LOGPROBS.itemsize + _MASK.itemsize,
        }.get(kind)
        if width is not None and len(payload) == _HEAD.size + width * count:
            return kind, number, attempt, count
    raise JournalError(f"{path}: the record at byte {offset} is neither a prompt nor a chunk of tokens")


def _parse_chunk(payload: bytes, *, masked: bool, count: int) -> Answer:
    logprobs_at = _HEAD.size + count * _TOKENS.itemsize
    mask_at = logprobs_at + count * _LOGPROBS.itemsize
    return Answer(
        tokens=np.frombuffer(payload, _TOKENS, count, _HEAD.size),
        logprobs=np.frombuffer(payload, _LOGPROBS, count, logprobs_at),
        loss_mask=np.frombuffer(payload, _MASK, count, mask_at) if masked else np.ones(count, _MASK),
    )


def _join(parts: list[Answer]) -> Answer:
    return Answer(
        tokens=np.concatenate([p.tokens for p in parts]),
        logprobs=np.concatenate([p.logprobs for p in parts]),
        loss_mask=np.concatenate([p.loss_mask for p in parts]),
    )
