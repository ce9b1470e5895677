"""`dora run --train-only`: train on rollouts from disk."""

from __future__ import annotations

import sys
from pathlib import Path

import uvloop

from dora.app.train_only import train
from dora.config.schema import Config
from dora.controller.trainer_link import StepReport


def train_only(config: Config, rollouts: Path) -> None:
    """The command."""
    steps, folder = uvloop.run(train(config, rollouts, told=_tell))
    sys.stdout.write(f"{steps} steps are trained; versions and metrics are in {folder.root}\n")


def _tell(report: StepReport, steps: int) -> None:
    reward, norm = report.metrics.get("all/reward_mean", 0.0), report.metrics["grad_norm"]
    sys.stdout.write(f"step {report.step + 1}/{steps}  reward {reward:.3f}  gradient norm {norm:.3f}\n")
