"""Rollouts on disk, to debug each half of the system alone: `--rollout-only` writes them, `--train-only` reads them.

A rollout file has the micro-batches of one step, in journal frames. Invariant: reading gives the trajectories that were
written, with the same data; only their distribution over ranks is new.
"""

from __future__ import annotations

import asyncio
import struct
from collections.abc import Awaitable, Callable, Coroutine, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dora import files
from dora.controller.trainer_link import StepReport, TrainerLink
from dora.core import events as ev
from dora.core.commands import TrainMicroBatch
from dora.core.ids import GroupId, StepId, TrajectoryId, VersionId
from dora.core.waves import Pending, answers_of
from dora.errors import ConfigError
from dora.journal.frames import FrameReader, FrameWriter
from dora.transport.codec import decode, encode
from dora.transport.messages import MicroBatch, empty_micro_batch

_PATTERN = "step-*.rollout"

#: One sequence of a micro-batch: (batch, index in the batch, start of its tokens).
Piece = tuple[MicroBatch, int, int]


class RolloutWriter:
    """A replacement for the trainer that writes each wave to files and reports it as trained.

    The whole job is one step of version 0; each file has `groups_per_step` groups, in order of arrival.
    """

    def __init__(
        self,
        folder: Path,
        *,
        groups_per_step: int,
        group_size: int,
        now: Callable[[], float],
        emit: Callable[[ev.Event], Awaitable[None]],
        on_step: Callable[[StepReport], None],
        durable: Callable[[int], Awaitable[None]],
    ) -> None:
        """Delete the files of an earlier controller: a resumed run gets the same waves again."""
        for path in folder.glob(_PATTERN):
            files.remove(path)
        self._durable = durable
        self._outbox: asyncio.Queue[tuple[int, list[MicroBatch]]] = asyncio.Queue()  # MAX_WAVES_AHEAD at most
        self._folder = folder
        self._groups_per_step = groups_per_step
        self._group_size = group_size
        self._now = now
        self._emit = emit
        self._on_step = on_step
        self._file_of: dict[int, StepId] = {}  # by group, in order of arrival

    def loops(self) -> list[tuple[str, Coroutine[Any, Any, None]]]:
        """Return the named coroutines to run together with the controller."""
        return [("rollout-writer", self._write_waves())]

    async def checkpoint(self, *, timeout_s: float) -> bool:
        """Return True: there is nothing to save."""
        return True

    def train(self, wave: list[MicroBatch], *, position: int) -> None:
        """Queue a wave, to be written once the journal is on the disk up to `position`."""
        self._outbox.put_nowait((position, wave))

    async def _write_waves(self) -> None:
        while True:
            position, wave = await self._outbox.get()
            await self._durable(position)
            await asyncio.to_thread(self._write, wave)
            await self._report(wave[0])

    def _write(self, wave: list[MicroBatch]) -> None:
        index, last = wave[0].index, wave[0].last
        by_file: dict[StepId, list[Piece]] = {}
        for piece in _pieces(wave):
            group = int(piece[0].groups[piece[1]])
            number = self._file_of.setdefault(group, StepId(len(self._file_of) // self._groups_per_step))
            by_file.setdefault(number, []).append(piece)
        for number, pieces in by_file.items():
            with FrameWriter(self._folder / f"step-{number:06d}.rollout") as file:
                order = TrainMicroBatch(number, index, last, ranks=())
                file.write(_pack(_join(pieces, order, group_size=self._group_size)))

    async def _report(self, first: MicroBatch) -> None:
        step = first.step
        await self._emit(ev.MicroBatchTrained(self._now(), step, first.index))
        if first.last:
            self._on_step(StepReport(step, {}))
            await self._emit(ev.StepTrained(self._now(), step, first.chain))
            # An empty version, as nothing was trained.
            await self._emit(ev.VersionPublished(self._now(), VersionId(step + 1), 0, {}, first.chain))


def rollout_files(folder: Path) -> list[Path]:
    """Return the files of a rollout folder in order of steps."""
    found = sorted(folder.glob(_PATTERN))
    if not found:
        raise ConfigError(f"{folder}: no {_PATTERN} files; give the `rollouts` folder of a --rollout-only run")
    return found


async def train_rollouts(
    steps: list[Path],
    *,
    link: TrainerLink,
    num_parts: int,
    budget: int,
    group_size: int,
    updates: int,
    shared_prompts: bool,
) -> None:
    """Send every step to the ranks, in waves of `num_parts` parts of at most `budget` tokens."""
    for step, path in enumerate(steps):
        pieces: dict[TrajectoryId, list[Piece]] = {}
        for batch, i, start in _pieces(
            [_unpack(payload) for _, payload in FrameReader(path, max_record_bytes=1 << 32)]
        ):
            pieces.setdefault(TrajectoryId(int(batch.trajectories[i])), []).append((batch, i, start))
        pending = _pending(pieces, updates=updates, shared_prompts=shared_prompts)
        for order in _orders(pending, step=StepId(step), num_ranks=num_parts, budget=budget):
            ranks = [[piece for t in rank for piece in pieces[t]] for rank in order.ranks]
            wave = [_join(rank, order, group_size=group_size) for rank in ranks]
            await link.send(link.lineage.add(wave))


def _pending(pieces: Mapping[TrajectoryId, Sequence[Piece]], *, updates: int, shared_prompts: bool) -> list[Pending]:
    """Return the answers of each update: groups in the order of their ids."""
    groups: dict[GroupId, list[tuple[TrajectoryId, int, int]]] = {}
    for t, rows in sorted(pieces.items()):
        batch, i, start = rows[0]
        first = int(batch.lengths[i])
        prompt = first - np.trim_zeros(batch.loss_mask[start : start + first], "f").size
        length = sum(int(batch.lengths[i]) for batch, i, _ in rows)
        groups.setdefault(GroupId(int(batch.groups[i])), []).append((t, length - prompt, prompt))
    size = -(-len(groups) // updates)
    pending = [Pending() for _ in range(-(-len(groups) // size))]
    for number, (group, members) in enumerate(groups.items()):
        lengths, prompt = [(t, length) for t, length, _ in members], members[0][2]
        for answer in answers_of(group, lengths, prompt=prompt, shared_prompts=shared_prompts):
            pending[number // size].add(answer)
    return pending


def _orders(pending: list[Pending], *, step: StepId, num_ranks: int, budget: int) -> Iterator[TrainMicroBatch]:
    """Yield the waves of a step."""
    index = 0
    for update, answers in enumerate(pending):
        while answers.answers:
            ranks = answers.cut(num_ranks=num_ranks, budget=budget)
            closes = not answers.answers
            yield TrainMicroBatch(
                step=step,
                index=index,
                last=closes and update == len(pending) - 1,
                ranks=tuple(tuple(sorted(a.trajectory for a in rank)) for rank in ranks),
                update=update,
                closes=closes,
            )
            index += 1


def _pieces(batches: list[MicroBatch]) -> list[Piece]:
    """Return all sequences of the micro-batches."""
    found: list[Piece] = []
    for batch in batches:
        starts = np.cumsum(batch.lengths) - batch.lengths
        found += [(batch, i, int(start)) for i, start in enumerate(starts)]
    return found


def _join(chosen: list[Piece], order: TrainMicroBatch, *, group_size: int) -> MicroBatch:
    if not chosen:
        return empty_micro_batch(
            step=order.step,
            index=order.index,
            last=order.last,
            update=order.update,
            closes=order.closes,
            group_size=group_size,
        )
    spans = [(batch, slice(start, start + int(batch.lengths[i]))) for batch, i, start in chosen]
    return MicroBatch(
        step=order.step,
        index=order.index,
        last=order.last,
        update=order.update,
        closes=order.closes,
        tokens=np.concatenate([b.tokens[s] for b, s in spans]),
        loss_mask=np.concatenate([b.loss_mask[s] for b, s in spans]),
        behavior_logprobs=np.concatenate([b.behavior_logprobs[s] for b, s in spans]),
        lengths=np.array([b.lengths[i] for b, i, _ in chosen], np.int32),
        trajectories=np.array([b.trajectories[i] for b, i, _ in chosen], np.int64),
        groups=np.array([b.groups[i] for b, i, _ in chosen], np.int64),
        versions=np.array([b.versions[i] for b, i, _ in chosen], np.int32),
        rewards=np.array([b.rewards[i] for b, i, _ in chosen], np.float32),
        group_rewards=np.stack([b.group_rewards[i] for b, i, _ in chosen]),
        truncated=np.array([b.truncated[i] for b, i, _ in chosen], np.uint8),
        sources=np.array([b.sources[i] for b, i, _ in chosen], np.uint8),
        rewards_to_go=_rewards_to_go(chosen),
        experts=np.concatenate([b.experts[s] for b, s in spans]),
        routed=np.concatenate([b.routed[s] for b, s in spans]),
    )


def _rewards_to_go(chosen: list[Piece]) -> NDArray[np.float32]:
    """Return MicroBatch.rewards_to_go of sequences whose episodes may have had fewer turns than others."""
    most = max(b.rewards_to_go.shape[2] for b, _, _ in chosen)
    if not most:
        return chosen[0][0].rewards_to_go
    columns = [b.rewards_to_go[i] if b.rewards_to_go.size else b.group_rewards[i][:, None] for b, i, _ in chosen]
    return np.stack([np.pad(one, ((0, 0), (0, most - one.shape[1])), mode="edge") for one in columns])


def _pack(batch: MicroBatch) -> bytes:
    frames = [bytes(frame) for frame in encode(batch)]
    head = struct.pack(f"<I{len(frames)}I", len(frames), *(len(f) for f in frames))
    return head + b"".join(frames)


def _unpack(payload: bytes) -> MicroBatch:
    (count,) = struct.unpack_from("<I", payload)
    sizes = struct.unpack_from(f"<{count}I", payload, 4)
    frames, start = [], 4 * (count + 1)
    for size in sizes:
        frames.append(payload[start : start + size])
        start += size
    batch: MicroBatch = decode(frames, MicroBatch)
    return batch
