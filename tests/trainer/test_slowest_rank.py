"""The wait for a slow rank is distinguished from computing, in a real job of two ranks."""

from __future__ import annotations

from collections import defaultdict
from pathlib import Path

import pytest
from conftest import make_groups, start_job
from slow_rank import SLOW_S

from dora.transport.messages import RankReady, RankSpans, VersionWritten

STEPS, WAVES = 2, 2


@pytest.mark.deep
async def test_the_other_rank_waits_for_the_slow_one_and_does_not_compute_meanwhile(
    tmp_path: Path, model_path: Path
) -> None:
    async with start_job(tmp_path, model_path, entry=str(Path(__file__).parent / "slow_rank.py")) as job:
        seen: set[type] = set()
        while seen != {RankReady, VersionWritten}:
            seen.add(type(await job.until(RankReady | VersionWritten)))
        for step in range(STEPS):
            answers = make_groups(4, version=step, seed=step)
            waves = [[answers[i : i + 4], answers[i + 8 : i + 12]] for i in (0, 4)]
            assert len(waves) == WAVES
            await job.step(step, waves)
        assert await job.stop() == 0
        spent: dict[int, dict[str, float]] = defaultdict(lambda: defaultdict(float))
        for report in job.reports:
            if isinstance(report, RankSpans):
                for activity, seconds in report.spans:
                    spent[report.rank][activity] += seconds
    planted = SLOW_S * STEPS * WAVES
    assert spent[1]["forward_backward"] > planted
    assert spent[0]["slowest_rank"] > 0.8 * planted
    assert spent[0]["forward_backward"] < SLOW_S, "in all passes together"
