"""`dora run --train-only`: trains on rollouts from disk."""

from __future__ import annotations

from pathlib import Path

import uvloop

from dora.app.train_only import train
from dora.cli.output import say, tell
from dora.config.schema import Config
from dora.controller.trainer_link import StepReport


def train_only(config: Config, rollouts: Path) -> None:
    steps, folder = uvloop.run(train(config, rollouts, report=_print, tell=tell))
    say(f"trained steps: {steps}; versions and metrics are in {folder.root}")


def _print(step: StepReport, steps: int) -> None:
    reward, norm = step.metrics.get("all/reward_mean", 0.0), step.metrics["grad_norm"]
    say(f"step {step.step + 1}/{steps}  reward {reward:.3f}  gradient norm {norm:.3f}")
