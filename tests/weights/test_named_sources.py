"""A receiver leaves a source that is named no more, without waiting for what it was to give."""

from __future__ import annotations

import asyncio
from pathlib import Path

from dora.weights.arrival import RelayLimits
from tests.weights.nodes import FILES, NUM_PIECES, PIECE, WAIT_S, fetcher, held, node, publish, store_at


async def test_a_silent_source_is_left_once_others_are_named_instead(tmp_path: Path) -> None:
    maker, a = store_at(tmp_path / "maker"), store_at(tmp_path / "a")
    manifest = publish(maker)
    limits = RelayLimits(piece_bytes=PIECE, piece_s=10 * WAIT_S)
    async with (
        asyncio.timeout(WAIT_S),
        node(maker, after=5 * PIECE) as (_, silent),
        node(maker) as (_, other),
        asyncio.TaskGroup() as tasks,
    ):
        named = [silent.source()]
        tasks.create_task(fetcher(a, limits=limits).fetch(manifest, lambda: named))
        await silent.until(5 * PIECE)
        named[:] = [other.source()]
    assert held(a) == FILES
    assert other.pieces_asked_of("model.safetensors")[-1] == NUM_PIECES - 1
