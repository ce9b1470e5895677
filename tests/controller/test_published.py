"""Versions by content: one that was lost is waited for, and one that came back with other bytes is not used."""

from __future__ import annotations

import asyncio

import pytest

from dora.controller.published import Published
from dora.core.ids import FOREIGN_VERSION
from dora.errors import RunFailed

FILES = {"model.safetensors": "one"}


def test_a_label_names_the_bytes_of_its_version() -> None:
    one, other = (Published("run", files={3: {"model.safetensors": checksum}}) for checksum in ("one", "other"))
    assert one.label(3) != other.label(3)
    assert (one.version_of(one.label(3)), other.version_of(one.label(3))) == (3, FOREIGN_VERSION)


def test_a_version_rewritten_with_other_bytes_ends_the_run_if_answers_need_it() -> None:
    published = Published("run", files={3: FILES}, missing=[3])
    label = published.label(3)
    published.add(3, {"model.safetensors": "other"}, is_needed=False)
    assert published.label(3) == label
    with pytest.raises(RunFailed, match=r"version 3 was lost .* the trainer has now written other bytes"):
        published.add(3, {"model.safetensors": "other"}, is_needed=True)


async def test_a_lost_version_is_awaited_until_it_is_written_again() -> None:
    published = Published("run", files={3: FILES, 4: FILES}, missing=[3])
    await published.available(4)
    waiting = asyncio.create_task(published.available(3))
    await asyncio.sleep(0)
    assert not waiting.done()
    published.add(3, FILES, is_needed=True)
    async with asyncio.timeout(10):
        await waiting
