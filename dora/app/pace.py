"""A workload file as a live run. The controller, HTTP and ZeroMQ are real; servers and trainer are paced.

What the simulator computes in virtual time happens here in time that runs `time_scale` times faster than the wall's,
under the same answers and the same models of decoding and training: the two differ by what the controller costs. The
controller's clock and ticks run as fast, so that its timers, journal and metrics are in seconds of the workload.
Graders are the run's own and take the time they take; faults are not paced.
"""

from __future__ import annotations

import itertools
import json
import os
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from msgspec import to_builtins

from dora.app.job import Frontend, run_job
from dora.app.managed import draw_key
from dora.app.settings import rollout_section
from dora.config.schema import Config
from dora.controller.loop import Outcome
from dora.errors import ConfigError
from dora.node.plan import SERVE_KEY, ProcessPlan, child_env
from dora.node.supervise import Node
from dora.paced.model import write_model
from dora.seed.policy import path as seed_path
from dora.sim.workload import Faults, Workload, load

START_TIMEOUT_S: Final = 120.0
#: Between two checkpoints, as in the simulator.
CHECKPOINT_STEPS: Final = 5
#: What one grader process keeps up with: a scaled run has as many answers a second as a far larger fleet.
INSTANCES_PER_GRADER: Final = 16
#: Wall-clock seconds for which a server, or the whole run, may be silent.
WATCHDOG_S: Final = 120.0
NO_PROGRESS_S: Final = 1_800.0


@dataclass(frozen=True, kw_only=True)
class Pace:
    """What was asked for."""

    path: Path  # of the workload
    workload: Workload
    seed: int
    time_scale: float
    processes: int  # that the servers share
    home: Path  # of what the run needs besides its folder; beside it
    longest_prompt: int  # tokens


def prepare(path: Path, *, seed: int, time_scale: float, processes: int, folder: Path) -> Pace:
    """Check what is asked for, and write what the run will read; its run folder is to be made in `folder`."""
    workload = load(path)
    if workload.faults != Faults():
        raise ConfigError(f"{path}: faults: are simulated, not paced; leave the section out")
    if workload.tools.max_turns > 1:
        raise ConfigError(f"{path}: tools: are simulated, not paced: a live answer is one turn; leave the section out")
    if workload.is_shared and workload.rules.in_flight:
        raise ConfigError(
            f"{path}: fleet.time_shared: paced servers do not take turns with the trainer; set it to false"
        )
    try:
        folder.mkdir(parents=True, exist_ok=True)
        home = Path(tempfile.mkdtemp(prefix="servers-", dir=folder)).resolve()
    except OSError as err:
        raise ConfigError(f"--folder {folder}: cannot be written: {err.strerror}") from err
    (home / "model").mkdir()
    write_model(home / "model", like=seed_path(), version=0, positions=workload.fleet.server.kv_tokens + 1)
    return Pace(
        path=path.resolve(),
        workload=workload,
        seed=seed,
        time_scale=time_scale,
        processes=processes,
        home=home,
        longest_prompt=_write_prompts(home / "prompts.jsonl", workload),
    )


async def drive(asked: Pace, frontend: Frontend) -> Outcome:
    """Servers first, since the run asks them what they are; it starts the ranks itself."""
    async with Node(logs=asked.home, lease=asked.home / "lease") as node:
        key = draw_key()
        env = child_env(os.environ, lease=asked.home / "lease", threads=1) | {SERVE_KEY: key}
        urls: list[str] = []
        for plan in _server_plans(asked, env=env):
            urls += (await node.add(plan).start()).split(",")
        config = _config(asked, urls=urls, api_key=key)
        return await run_job(config, frontend, time_scale=asked.time_scale)


def _write_prompts(path: Path, workload: Workload) -> int:
    """One line per prompt, in the order of the groups; returns the tokens of the longest. A digit is a token of the
    seed's tokenizer, and the reference answer is what a paced answer begins with if it is to be rewarded."""
    sizes = workload.lengths.prompts or (workload.lengths.prompt_tokens,)
    rows = [json.dumps({"prompt": "7" * size, "answer": "1"}) for size in sizes]
    path.write_text("\n".join(rows) + "\n", encoding="utf-8")
    return max(sizes)


def _server_plans(asked: Pace, *, env: Mapping[str, str]) -> list[ProcessPlan]:
    """The instances, spread over the processes as evenly as can be."""
    total = asked.workload.num_instances
    processes = min(asked.processes, total)
    bounds = [total * i // processes for i in range(processes + 1)]
    return [
        ProcessPlan(
            name=f"servers-{first}",
            argv=_command(
                asked, "pace-servers", "--model", asked.home / "model", "--first", first, "--count", end - first
            ),
            env=env,
            ready_timeout_s=START_TIMEOUT_S,
        )
        for first, end in itertools.pairwise(bounds)
    ]


def _command(asked: Pace, name: str, *words: object) -> tuple[str, ...]:
    seed = ("--seed", asked.seed) if name == "pace-servers" else ()
    given: Sequence[object] = (asked.path, "--time-scale", asked.time_scale, *seed, *words)
    return (sys.executable, "-m", "dora", name, *map(str, given))


def _config(asked: Pace, *, urls: list[str], api_key: str) -> Config:
    """The workload as the settings of a run."""
    job, server, settings = asked.workload.job, asked.workload.fleet.server, asked.workload.settings()
    config: Config = Config.model_validate(
        {
            "run": {
                **{"name": "paced", "folder": asked.home.parent, "seed": asked.seed},
                **{"steps": job.steps, "no_progress_s": NO_PROGRESS_S * asked.time_scale},
            },
            "model": {"path": str(asked.home / "model")},
            "rollout": {
                **rollout_section(job),
                **{"max_new_tokens": asked.workload.cap, "watchdog_s": WATCHDOG_S * asked.time_scale},
            },
            "engine": {
                **{"urls": tuple(urls), "slots": server.slots, "kv_tokens": server.kv_tokens},
                "max_parallel_pushes": settings.max_parallel_pushes,
                **{"decode": to_builtins(server.decode), "api_key": api_key},
            },
            "trainer": {
                **{"ranks": settings.num_ranks, "command": _command(asked, "pace-ranks")},
                **{"micro_batch_tokens": settings.micro_batch_tokens, "checkpoint_every": CHECKPOINT_STEPS},
            },
            "task": {
                "sources": ({"kind": "jsonl", "path": asked.home / "prompts.jsonl"},),
                "rewards": ({"kind": "regex", "pattern": "^(.)"},),
                **{"shuffle": False, "max_prompt_tokens": asked.longest_prompt},
                "graders": 1 + asked.workload.num_instances // INSTANCES_PER_GRADER,
            },
            "eval": {"sets": ()},
            "status": {"port": 0},
            "log": {"trajectories_per_step": 0},
        }
    )
    return config
