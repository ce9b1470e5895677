"""Replay of the engine's routing (objective.router_replay): what it costs a job with experts, and what it gains.

Run: python bench/router_replay.py [--full]. The arithmetic task with a small mixture of experts (2 layers, 2 of 4
experts) that engines compute in float32 and the trainer in bfloat16; five seeds, one in the short profile. Ceiling: the
same job without replay, taking turns; figures are means over seeds, ratios are medians over seeds of replay over none.
  mean, largest   |log-prob of the engine - log-prob of the trainer| of tokens without staleness: mean over steps, and
                  the largest of all steps.
  cpu             seconds of all processes of the run, from start to end.
  step            seconds of the trainer's ranks in the passes of a step.
  store           bytes of the token store for each sampled token.
  gain            in held-out reward.
  changed, l      share of the replayed experts that the trainer's router would not have chosen, at staleness l: mean
                  over steps. At staleness 0 that is rounding, at 1 also what a version changes.
"""

from __future__ import annotations

import json
import resource
import statistics
import tempfile
from dataclasses import dataclass
from pathlib import Path

from default_job import run_dora
from result import Report, parser

from dora.journal.run_folder import RunFolder
from dora.journal.tokens import read_tokens

SEEDS = {False: (0,), True: (0, 1, 2, 3, 4)}
POLICY = Path(__file__).parents[1] / "tests" / "e2e" / "policies" / "qwen3_moe"
STEPS = 16
LAGS = (0, 1)
SETTINGS = (
    f"run.steps={STEPS}",
    f"model.path={POLICY}",
    "rollout.groups_per_step=16",
    "rollout.max_new_tokens=128",
    "trainer.dtype=bfloat16",
    "trainer.learning_rate=5e-4",
    'task.sources=[{kind="arithmetic"}]',
    "eval.every=0",
    'eval.sets=[{name="heldout", prompts=128}]',
    "status.port=0",
)


@dataclass(frozen=True)
class Figures:
    reward: float  # held out, of the last version
    gain: float  # over that of version 0
    mean: float
    largest: float
    cpu_s: float
    step_s: float
    store: float
    changed: tuple[float, ...]  # by staleness; 0 without replay


def run(replay: str, *, seed: int) -> Figures:
    """Run and audit the job."""
    before = cpu_seconds()
    with tempfile.TemporaryDirectory() as home:
        chosen = (*SETTINGS, f"run.folder={home}", f"run.seed={seed}", f"objective.router_replay={replay}")
        run_dora("run", *(word for setting in chosen for word in ("--set", setting)))
        cpu_s = cpu_seconds() - before
        [root] = Path(home).iterdir()
        run_dora("audit", str(root))
        folder = RunFolder.open(root)
        rows = [json.loads(line) for line in folder.metrics.read_text().splitlines()]
        steps = [row for row in rows if row["kind"] == "step"]
        scores = {row["version"]: row["mean"] for row in rows if row["kind"] == "evaluation"}
        sampled = sum(read_tokens(folder.tokens, wanted=()).sampled.values())
        means = [step["trainer"]["lag=0/log_ratio_abs_mean"] for step in steps if has_fresh(step)]
        most = [step["trainer"]["lag=0/log_ratio_abs_max"] for step in steps if has_fresh(step)]
        return Figures(
            reward=scores[max(scores)],
            gain=scores[max(scores)] - scores[0],
            mean=statistics.mean(means),
            largest=max(most),
            cpu_s=cpu_s,
            step_s=statistics.mean(step["rank_s"]["forward_backward"] for step in steps),
            store=folder.tokens.stat().st_size / sampled,
            changed=tuple(mean_of(steps, f"lag={lag}/routing_changed_frac") for lag in LAGS),
        )


def has_fresh(step: dict[str, dict[str, float]]) -> bool:
    return "lag=0/log_ratio_abs_max" in step["trainer"]


def mean_of(steps: list[dict[str, dict[str, float]]], name: str) -> float:
    values = [step["trainer"][name] for step in steps if name in step["trainer"]]
    return statistics.mean(values) if values else 0.0


def cpu_seconds() -> float:
    """Return the CPU seconds of all processes that have ended."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def main() -> None:
    options = parser(__doc__).parse_args()
    seeds = SEEDS[options.full]
    report = Report(__doc__, full=options.full, sizes=f"{STEPS} steps of 16 groups, {len(seeds)} seeds")
    found: dict[str, list[Figures]] = {"off": [], "r3": []}
    for seed in seeds:
        for replay in sorted(found, reverse=bool(seed % 2)):
            found[replay].append(run(replay, seed=seed))
    for name, unit in (
        ("mean", ""),
        ("largest", ""),
        ("cpu_s", "s"),
        ("step_s", "s"),
        ("store", "bytes"),
        ("gain", ""),
    ):
        plain, replayed = ([getattr(one, name) for one in found[replay]] for replay in ("off", "r3"))
        report.row(
            name.removesuffix("_s"),
            statistics.mean(replayed),
            unit,
            against=f"without replay {statistics.mean(plain):.3g}",
            ratio=statistics.median(a / b for a, b in zip(replayed, plain, strict=True)),
        )
    for lag in LAGS:
        report.row(f"changed, {lag}", statistics.mean(one.changed[lag] for one in found["r3"]), "")
    for replay in found:
        rewards = [one.reward for one in found[replay]]
        report.row(
            f"held-out reward, {replay}", statistics.mean(rewards), "", against=" ".join(f"{r:.3f}" for r in rewards)
        )
    report.print()


if __name__ == "__main__":
    main()
