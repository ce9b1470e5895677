"""A cross-check: the seconds of a step of DryRun-RL and of `dora simulate` with the rules of PSRL, on the same answers.

    PYTHONPATH=. python bench/sweeps/dryrun.py DRYRUN PSRL [--steps 100] [--seeds 3]

DRYRUN is a checkout of psrl-project/DryRun-RL, PSRL one of Somoku/psrl. Both run as they are, with scipy installed
beside DORA; nothing of them is stored here. The job is launch/workloads/tail-bound.toml with steps of 128 single
answers, since DryRun-RL has no groups: each is a group with a second answer of one token, as groups of one are refused.
docs/SIMULATION.md has the result.
"""

from __future__ import annotations

import argparse
import importlib
import logging
import random
import sys
from pathlib import Path
from statistics import median
from types import ModuleType
from typing import Any, Final

from dora.sim.limit import window
from dora.sim.workload import Workload, checked, load
from dora.sim.world import World

ROOT: Final = Path(__file__).parents[2]
KS: Final = (0, 1, 2)
#: No time for training, publication and pushes.
INSTANT: Final[dict[str, dict[str, Any]]] = {
    "fleet": {"push_fixed_s": 0.0, "push_bytes_s": 1e30, "store_bytes_s": 1e30},
    "train": {"tokens_s_per_device": 1e12, "update_s": 0.0, "publish_bytes_s": 1e30},
}
#: What is compared: a name, our rules, changes of the job on both sides, and whether siblings are apart.
ROWS: Final[tuple[tuple[str, str, dict[str, dict[str, Any]], bool], ...]] = (
    ("`dora`", "dora", {}, False),
    ("`--rules psrl`", "psrl", {}, False),
    ("the same; training, publication and pushes take no time", "psrl", INSTANT, False),
    ("the same, and siblings apart", "psrl", INSTANT, True),
)


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("dryrun", type=Path)
    parser.add_argument("psrl", type=Path)
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--seeds", type=int, default=3)
    options = parser.parse_args()
    find(options.dryrun, options.psrl)
    base = load(ROOT / "launch" / "workloads" / "tail-bound.toml").with_changes(job={"steps": options.steps})
    print("| what | K | DryRun-RL, s | `dora`, s | ratio (range) |", "| --- | --- | --- | --- | --- |", sep="\n")
    seconds: dict[tuple[object, ...], float] = {}
    for what, rules, changes, mixed in ROWS:
        for k in KS:
            pairs = []
            for seed in range(options.seeds):
                lengths = answers(base, seed=seed, mixed=mixed)
                one = singles(base.with_changes(job={"max_staleness": k, "rules": rules}), lengths)
                if (key := (bool(changes), mixed, k, seed)) not in seconds:
                    seconds[key] = theirs(base.with_changes(**changes), lengths, k=k)
                pairs.append((seconds[key], ours(one.with_changes(**changes), seed)))
            ratios = sorted(a / b for a, b in pairs)
            both = " | ".join(f"{median(side):.1f}" for side in zip(*pairs, strict=True))
            print(f"| {what} | {k} | {both} | {median(ratios):.3f} ({ratios[0]:.3f}-{ratios[-1]:.3f}) |", flush=True)


def answers(base: Workload, *, seed: int, mixed: bool) -> list[int]:
    """Return the lengths in the order of the prompts; `mixed`: in any order within a step."""
    drawn, job, order = base.answers(seed=seed), base.job, random.Random(seed)
    lengths: list[int] = []
    for step in range(job.steps + 4):
        groups = range(step * job.groups_per_step, (step + 1) * job.groups_per_step)
        batch = [length for number in groups for length in drawn.group(number).lengths]
        lengths += order.sample(batch, len(batch)) if mixed else batch
    return lengths


def singles(base: Workload, lengths: list[int]) -> Workload:
    """Return the job with a group for each answer. Training takes as long as without the second answers."""
    prompt, job, train, count = base.lengths.prompt_tokens, base.job, base.train, len(lengths)
    mean = prompt + sum(lengths) / count
    recorded = {"prompts": (prompt,) * count, "answers": tuple((n, 1) for n in lengths), "cap": base.cap}
    return checked(
        base.with_changes(
            job={"group_size": 2, "groups_per_step": job.groups_per_step * job.group_size},
            lengths={"regime": "recorded", "rewards": ((1.0, 1.0),) * count, **recorded},
            train={"tokens_s_per_device": train.tokens_s_per_device * (mean + prompt + 1) / mean},
        ),
        origin="the job of single answers",
    )


def ours(one: Workload, seed: int) -> float:
    """Return the seconds of a step in DORA's simulator."""
    world = World(one, seed=seed)
    world.run()
    return mean_step([mark.at for mark in world.measure.marks], k=one.job.max_staleness)


def theirs(base: Workload, lengths: list[int], *, k: int) -> float:
    """Return the seconds of a step of DryRun-RL."""
    rollout, training, sync, simulator, psrl = (
        importlib.import_module(f"dryrun.{name}")
        for name in ("cost.rollout", "cost.training", "component.sync.cost", "simulator", "policy.psrl")
    )
    fleet, server, train = base.fleet, base.fleet.server, base.train
    decode = server.decode
    rate = train.tokens_s_per_device * base.train_devices
    simulated = simulator.Simulator(
        rollout_cost=rollout.UnifiedRoofline(F=1e-9, W=decode.base_s, G=decode.per_request_s, A_d=decode.per_token_s),
        training_cost=training.LinearTrainingCost(1 / rate),
        sync_cost=sync.FixedSyncCost(train.update_s + base.publish_s + base.push_s),
        policy=psrl.PSRLPolicy(),
        lengths=lengths,
        cfg=simulator.SimConfig(
            batch_size=base.job.groups_per_step * base.job.group_size,
            max_staleness=k,
            n_versions=base.job.steps,
            partial_rollout=False,
            kv_blocks=server.kv_tokens // 16,
            max_concurrency=server.slots,
            prompt_lengths=[base.lengths.prompt_tokens],
            n_instances=fleet.rollout_devices // fleet.devices_per_instance,
            log_telemetry=False,
        ),
    ).run()
    assert not simulated.livelocked
    assert not simulated.dropped
    assert simulated.max_staleness_true <= k
    return mean_step([end for _, end in simulated.train_timestamps], k=k)


def mean_step(ends: list[float], *, k: int) -> float:
    """Return the mean seconds of the measured steps. `ends`: when each step was trained."""
    first, last = window(len(ends), max_staleness=k)
    return (ends[last] - ends[first]) / (last - first)


def find(dryrun: Path, psrl: Path) -> None:
    """Make both checkouts importable, with stand-ins for what the one module of PSRL takes from elsewhere."""
    sys.path[:0] = [str(dryrun), str(psrl)]
    log = logging.getLogger("psrl")
    log.setLevel(logging.CRITICAL)
    values: dict[str, dict[str, object]] = {
        "psrl.utils.logger": {"get_ps_logger": lambda: log},
        "psrl.workers.gen.utils": {"RolloutInstanceId": tuple},
    }
    for name, needed in values.items():
        module = sys.modules[name] = ModuleType(name)
        vars(module).update(needed)
    for name in ("psrl", "psrl.utils", "psrl.workers", "psrl.workers.gen", "psrl.workers.ps"):
        package = sys.modules[name] = ModuleType(name)
        package.__path__ = [str(psrl.joinpath(*name.split(".")))]


if __name__ == "__main__":
    main()
