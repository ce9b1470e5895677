"""Ranks that stand still in a collective which one of them never reaches, in a real job of two ranks."""

from __future__ import annotations

import asyncio
import json
import time
from pathlib import Path

import pytest
from conftest import START_S, make_groups, start_job

from dora.controller import vitals as vitals_module
from dora.controller.vitals import LOOK_S, Vitals
from dora.transport.messages import FlightRecord, RankPulse, RankReady


@pytest.mark.deep
async def test_ranks_that_wait_for_each_other_for_ever_are_found_with_their_last_collectives(
    tmp_path: Path, model_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(vitals_module, "FIRST_S", 8.0)
    monkeypatch.setattr(vitals_module, "STILL_S", 8.0)
    monkeypatch.setenv("TORCH_FR_BUFFER_SIZE", "100")
    entry = str(Path(__file__).parent / "wedged_rank.py")
    async with start_job(tmp_path, model_path, entry=entry) as job:
        await job.until(RankReady, count=2)
        vitals = Vitals(2, at=time.monotonic())
        answers = make_groups(4, version=0, seed=0)
        sending = asyncio.create_task(job.step(0, [[answers[:8], answers[8:]]]))
        await asyncio.sleep(0)
        sending.cancel()  # the waves are sent; nobody will answer
        await asyncio.gather(sending, return_exceptions=True)
        records: dict[int, str] = {}
        problem = ""
        async with asyncio.timeout(START_S):
            while not problem:
                try:
                    async with asyncio.timeout(LOOK_S):
                        rank, message = await job.end.receive()
                except TimeoutError:
                    message = None
                if isinstance(message, RankPulse):
                    vitals.note(rank, message, at=time.monotonic())
                elif isinstance(message, FlightRecord):
                    records[rank] = message.record
                problem = vitals.problem(at=time.monotonic())
    assert problem.startswith("no trainer rank has made progress for "), problem
    assert "rank 1: forward_backward" in problem
    assert {rank: bool(json.loads(record)) for rank, record in records.items()} == {0: True, 1: True}
