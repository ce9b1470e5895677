"""Runs a workload file live: the controller, HTTP and ZeroMQ are real; servers and trainer are simulated.

The run uses the simulator's answers and its models of decoding and training, in time that passes `time_scale` times
faster than the wall clock, so that the difference from a simulation is the cost of the controller. The controller's
clock is scaled too: its timers, journal and metrics are in seconds of the workload. Tools are an environment with its
own host (`dora.paced.environment`). Graders are real and not scaled; faults are not supported.
"""

from __future__ import annotations

import itertools
import json
import os
import sys
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from dora.app.job import Frontend, run_job
from dora.app.managed import draw_key
from dora.app.prepare import Pacing
from dora.app.settings import rollout_section
from dora.config.schema import Config
from dora.controller.loop import Outcome
from dora.errors import ConfigError
from dora.node.plan import SERVE_KEY, ProcessPlan, child_env
from dora.node.supervise import Node
from dora.paced.environment import TOKEN
from dora.paced.model import write_model
from dora.seed.policy import path as seed_path
from dora.sim.workload import Faults, Workload, load

START_TIMEOUT_S: Final = 120.0
#: Steps between two checkpoints, as in the simulator.
CHECKPOINT_STEPS: Final = 5
#: Number of instances per grader process. A scaled run has as many answers per second as a far larger fleet.
INSTANCES_PER_GRADER: Final = 16
#: Wall-clock seconds without progress after which a server is lost, or the run fails.
WATCHDOG_S: Final = 120.0
NO_PROGRESS_S: Final = 1_800.0
#: Number of episodes in the host: so many that no episode waits for a place.
EPISODES: Final = 1_000_000
#: Wall-clock seconds that a call may be late.
CALL_MARGIN_S: Final = 60.0


@dataclass(frozen=True, kw_only=True)
class Pace:
    """A paced run, checked and ready to start."""

    path: Path  # workload file
    workload: Workload
    seed: int
    time_scale: float
    processes: int  # number of processes over which the servers are spread
    home: Path  # folder of the model, prompts and server logs; beside the run folder
    longest_prompt: int  # tokens
    trackers: tuple[str, ...]


def prepare(
    path: Path, *, seed: int, time_scale: float, processes: int, folder: Path, trackers: tuple[str, ...] = ()
) -> Pace:
    """Check the workload and write the model and prompts; the run folder will be created in `folder`."""
    workload = load(path)
    if workload.faults != Faults():
        raise ConfigError(f"{path}: faults: are simulated, not paced; remove the section")
    tools = workload.tools
    if workload.lengths.calls:
        raise ConfigError(f"{path}: lengths.calls: are simulated, not paced; use a workload with [tools]")
    if tools.max_turns > 1 and (tools.stuck_share or not tools.result_tokens):
        raise ConfigError(
            f"{path}: tools: calls without a result are simulated, not paced; set tools.stuck_share to 0 and "
            "tools.result_tokens above 0"
        )
    if workload.is_shared and workload.rules.in_flight:
        raise ConfigError(
            f"{path}: fleet.time_shared: paced servers cannot share devices with the trainer; set it to false"
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
        trackers=trackers,
    )


async def drive(pace: Pace, frontend: Frontend) -> Outcome:
    """Start the servers, which the run treats as external, then the run, which starts the ranks."""
    async with Node(logs=pace.home, lease=pace.home / "lease") as node:
        key = draw_key()
        env = child_env(os.environ, lease=pace.home / "lease", threads=1) | {SERVE_KEY: key}
        urls: list[str] = []
        for plan in _server_plans(pace, env=env):
            urls += (await node.add(plan).start()).split(",")
        config = _config(pace, urls=urls, api_key=key)
        return await run_job(config, frontend, pacing=Pacing(pace.time_scale, pace.workload.settings()))


def _write_prompts(path: Path, workload: Workload) -> int:
    """Write one prompt per line, in the order of the groups; return the number of tokens of the longest.

    Paced answers begin with the reference answer if they are rewarded.
    """
    sizes = workload.lengths.prompts or (workload.lengths.prompt_tokens,)
    rows = [json.dumps({"prompt": TOKEN * size, "answer": "1"}) for size in sizes]
    path.write_text("\n".join(rows) + "\n", encoding="utf-8")
    return max(sizes)


def _server_plans(pace: Pace, *, env: Mapping[str, str]) -> list[ProcessPlan]:
    """Spread the instances evenly over the processes."""
    total = pace.workload.num_instances
    processes = min(pace.processes, total)
    bounds = [total * i // processes for i in range(processes + 1)]
    return [
        ProcessPlan(
            name=f"servers-{first}",
            argv=_command(
                pace,
                "pace-servers",
                *("--seed", pace.seed, "--model", pace.home / "model", "--first", first, "--count", end - first),
            ),
            env=env,
            ready_timeout_s=START_TIMEOUT_S,
        )
        for first, end in itertools.pairwise(bounds)
    ]


def _command(pace: Pace, name: str, *options: object) -> tuple[str, ...]:
    arguments = (pace.path, "--time-scale", pace.time_scale, *options)
    return (sys.executable, "-m", "dora", name, *map(str, arguments))


def _config(pace: Pace, *, urls: list[str], api_key: str) -> Config:
    """Return the configuration of a run of the workload."""
    job, server, settings = pace.workload.job, pace.workload.fleet.server, pace.workload.settings()
    config: Config = Config.model_validate(
        {
            "run": {
                **{"name": "paced", "folder": pace.home.parent, "seed": pace.seed},
                **{"steps": job.steps, "no_progress_s": NO_PROGRESS_S * pace.time_scale},
            },
            "model": {"path": str(pace.home / "model")},
            "rollout": {
                **rollout_section(job),
                **{"max_new_tokens": pace.workload.cap, "watchdog_s": WATCHDOG_S * pace.time_scale},
            },
            "engine": {
                **{"urls": tuple(urls), "slots": server.slots, "kv_tokens": server.kv_tokens},
                "api_key": api_key,
            },
            "environment": _environment(pace) if pace.workload.tools.max_turns > 1 else {},
            "trainer": {
                **{"ranks": settings.num_ranks, "command": _command(pace, "pace-ranks")},
                **{"micro_batch_tokens": settings.micro_batch_tokens, "checkpoint_every": CHECKPOINT_STEPS},
            },
            "task": {
                "sources": ({"kind": "jsonl", "path": pace.home / "prompts.jsonl"},),
                "rewards": ({"kind": "regex", "pattern": "^(.)"},),
                **{"shuffle": False, "max_prompt_tokens": pace.longest_prompt},
                "graders": 1 + pace.workload.num_instances // INSTANCES_PER_GRADER,
            },
            "eval": {"sets": ()},
            "status": {"port": 0},
            "log": {"trajectories_per_step": 0},
            "tracking": {"trackers": pace.trackers},
        }
    )
    return config


def _environment(pace: Pace) -> dict[str, Any]:
    tools = pace.workload.tools
    return {
        "name": "paced",
        "command": _command(pace, "pace-environment", "--seed", pace.seed),
        "renderer": {"name": "custom", "import_path": "dora.paced.renderer:PacedRenderer"},
        "max_turns": tools.max_turns,
        "episodes_per_host": EPISODES,
        "call_timeout_s": CALL_MARGIN_S + tools.longest_s / min(1.0, pace.time_scale),
    }
