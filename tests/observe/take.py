"""Takes the recordings that are kept: `python -m tests.observe.take [NAME ...]`, one job after the other.

A job has a recording for each of its controllers. Each takes a minute or less on two cores.
"""

from __future__ import annotations

import lzma
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from tests.e2e.runs import environment, paced_workload, settings
from tests.observe.recording import FOLDER

_TOOLS: Final = "launch/configs/tools-cpu.toml"
_HELD_OUT: Final = '[{name="heldout", prompts=24, source={kind="arithmetic", options={min_terms=6, max_terms=24}}}]'
_TWO_SETS: Final = (
    '[{name="short", prompts=8, samples=3, temperature=1.0, source={kind="arithmetic", options={max_terms=6}}},'
    ' {name="long", prompts=6, samples=2, temperature=0.7, source={kind="arithmetic", options={min_terms=20}}}]'
)
_SEEDS: Final = '[{name="heldout", prompts=24, source={kind="seeds"}}]'
_PACED: Final = paced_workload(
    steps=105, devices=6, rollout_devices=4, slots=4, kv_tokens=4000, tokens_s_per_device=30_000.0
).replace("groups_per_step = 8\ngroup_size = 4", "groups_per_step = 4\ngroup_size = 2")


@dataclass(frozen=True)
class Job:
    """A job whose controllers are recorded; each but the first resumes the run."""

    arguments: list[str]
    actions: tuple[str, ...] = ("",)  #: for each controller: `N ACTION` of record.py, or nothing


_COMMON: Final[dict[str, Any]] = {
    "run__steps": 6,
    "rollout__groups_per_step": 6,
    "engine__start_timeout_s": 600,
    "trainer__start_timeout_s": 600,
    "eval__sets": "[]",
    "status__port": 0,
}


def _job(*arguments: str, actions: tuple[str, ...] = ("",), **changes: object) -> Job:
    return Job(["run", *arguments, *settings(**{**_COMMON, **changes})], actions)


#: A small job with everything that the default job has.
_FULL: Final[dict[str, Any]] = {
    "trainer__ranks": 2,
    "trainer__checkpoint_every": 3,
    "eval__sets": _HELD_OUT,
    "eval__every": 3,
}

JOBS: Final = {
    "dora": _job(run__steps=10, rollout__groups_per_step=12, **_FULL),
    "periodic": _job(rollout__strategy="periodic", rollout__max_staleness=0, engine__instances=2, trainer__ranks=1),
    "sync": _job(rollout__strategy="sync", rollout__max_staleness=0, engine__instances=2, trainer__ranks=1),
    "partial": _job(
        rollout__strategy="partial",
        rollout__pause="retract",
        rollout__max_staleness=1,
        engine__instances=2,
        engine__slots=8,
        trainer__ranks=1,
    ),
    "oversample": _job(
        rollout__strategy="oversample",
        rollout__oversample=2,
        rollout__max_staleness=0,
        engine__instances=2,
        trainer__ranks=1,
    ),
    "killed": _job(run__steps=10, engine__instances=3, actions=("5 kill", ""), **_FULL),
    "interrupted": _job(
        actions=("5 interrupt", ""),
        **_FULL
        | {
            "run__steps": 12,
            "rollout__groups_per_step": 3,
            "engine__instances": 3,
            "engine__slots": 16,
            "eval__sets": _HELD_OUT.replace("24, source", "128, source"),
            "eval__every": 1,
        },
    ),
    "tools": _job(_TOOLS, run__steps=5, eval__sets=_SEEDS, eval__every=2),
    "tools-killed": _job(_TOOLS, run__steps=6, eval__sets=_SEEDS, eval__every=2, actions=("3 kill", "")),
    "lost": _job(run__steps=55, engine__instances=3, trainer__ranks=1, actions=("2 lose-engine",)),
    "updates": _job(run__steps=10, trainer__updates=2, eval__sets=_TWO_SETS, eval__every=1, rollout__max_staleness=1),
    "troubled": _job(
        run__steps=8,
        rollout__max_staleness=1,
        rollout__filter_zero_variance=False,
        trainer__ranks=1,
        trainer__learning_rate=0.01,
        task__max_prompt_tokens=20,
        eval__sets=_HELD_OUT,
        eval__every=1,
        log__trajectories_mb=0,
    ),
    "rollout-only": _job("--rollout-only", run__steps=3, engine__instances=2, rollout__max_staleness=1),
    "failed": _job(
        engine__instances=2,
        rollout__max_staleness=1,
        trainer__ranks=1,
        trainer__activation_checkpointing="none",
        actions=("2 lose-trainer",),
    ),
    "gave-up": _job(
        run__steps=20,
        engine__instances=2,
        rollout__max_staleness=1,
        rollout__max_top_up=0.2,
        trainer__ranks=1,
    ),
    "not-started": _job(engine__start_timeout_s=1, trainer__start_timeout_s=5),
    "paced": Job(["pace", "workload.toml", "--time-scale", "20", "--processes", "1"]),
}


def take(name: str, folder: Path) -> None:
    """Run a job in `folder`, and keep its recordings."""
    job, runs = JOBS[name], folder / "runs"
    if job.arguments[0] == "pace":
        (folder / "workload.toml").write_text(_PACED)
        arguments = [job.arguments[0], str(folder / job.arguments[1]), *job.arguments[2:], "--folder", str(runs)]
    else:
        arguments = [*job.arguments, *settings(run__folder=runs)]
    for number, action in enumerate(job.actions):
        if number:
            (run,) = runs.iterdir()
            arguments = ["run", "--resume", str(run), *settings(status__port=0)]
        recorded = folder / f"{name}.{number}"
        options = ["--after-step", *action.split()] if action else []
        subprocess.run(
            [sys.executable, "-m", "tests.observe.record", str(recorded), *options, "--", *arguments],
            check=False,  # some are made to fail
            env=environment(),
        )
        kept = FOLDER / f"{recorded.name}.xz"
        kept.write_bytes(lzma.compress(recorded.read_bytes(), preset=9 | lzma.PRESET_EXTREME))
        sys.stdout.write(f"{kept.name}: {kept.stat().st_size:,} bytes\n")


def main() -> None:
    """Take the recordings of the named jobs, or of all."""
    for name in sys.argv[1:] or JOBS:
        with tempfile.TemporaryDirectory(prefix="run-", ignore_cleanup_errors=True) as folder:
            take(name, Path(folder))


if __name__ == "__main__":
    main()
