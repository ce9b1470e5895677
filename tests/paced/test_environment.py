"""The host of a paced environment, a process of its own: the calls of the table, in its time and never earlier."""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path

from dora.config.schema import EnvironmentConfig
from dora.environments.api import End, Observation, Reset, Turn
from dora.environments.pool import EnvironmentPool
from dora.sim.workload import load

SEED, SCALE = 3, 10.0
ROW = {"prompt": "777"}
WORKLOAD = """
[lengths]
regime = "S"
[tools]
calls = [1.0, 1.0, 1.0]
latency_max_s = 2.0
result_tokens = 20
"""


async def test_an_episode_makes_the_calls_of_its_answer(tmp_path: Path) -> None:
    path = tmp_path / "workload.toml"
    path.write_text(WORKLOAD)
    workload = load(path)
    command = (sys.executable, "-m", "dora", "pace-environment", str(path), "--seed", str(SEED))
    settings = EnvironmentConfig(name="paced", command=(*command, "--time-scale", str(SCALE)))
    answers, size = workload.answers(seed=SEED), workload.job.group_size
    async with EnvironmentPool(settings) as pool:

        async def play(episode: int) -> int:
            begun = await pool.start(episode, ROW, source="s", name="row")
            assert begun == Reset([{"role": "user", "content": "777"}])
            group, sibling = divmod(episode, size)
            calls = answers.group(group).calls_of(sibling)
            for call in calls:
                sent_at = asyncio.get_running_loop().time()
                answer = await pool.step(episode, Turn(""))
                assert asyncio.get_running_loop().time() - sent_at >= call.latency_s / SCALE
                assert isinstance(answer, Observation)
                assert answer.messages == [{"role": "user", "content": "7" * call.num_tokens}]
            assert await pool.step(episode, Turn("")) == End()
            return len(calls)

        assert {*await asyncio.gather(*(play(episode) for episode in range(3 * size)))} == {0, 1, 2}
        await pool.start(1, ROW, source="s", name="row")
        await pool.close(1)
