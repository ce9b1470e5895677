"""A few steps at learning rate 0: all versions have the same weights, so engine and trainer must agree in all of them.

Servers, pushes and trainer are those of the run; only its size, its rewards and its learning rate are replaced.
"""

from __future__ import annotations

import re
import shutil
from collections.abc import AsyncIterator, Iterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any, Final

from dora.app.job import Running, run_job
from dora.app.settings import precision_of
from dora.config.schema import Config, EvalConfig, RewardConfig
from dora.controller.recorder import read_rows
from dora.errors import RunFailed
from dora.journal.run_folder import RunFolder
from dora.observe.drift import ENGINE_LIMIT
from dora.observe.snapshot import Snapshot

STEPS: Final = 5
#: Groups in a step, unless the run has fewer.
GROUPS: Final = 8

_MISMATCH: Final = re.compile(r"lag=(\d+)/mismatch_k3")


@dataclass(frozen=True)
class Mismatches:
    """Mean k3 between engine and trainer, by step and staleness, in nats."""

    limit: float  #: largest mismatch between two correct implementations, for this data type
    steps: list[Mapping[int, float]] = field(default_factory=list)

    def lines(self) -> Iterator[str]:
        """Yield a line for each step."""
        for step, mismatches in enumerate(self.steps):
            parts = [f"{value:.1e} at staleness {staleness}" for staleness, value in sorted(mismatches.items())]
            yield f"step {step + 1}/{len(self.steps)}  mismatch (k3, nats) {', '.join(parts) or 'not measured'}"


async def train_without_learning(config: Config) -> Mismatches:
    """Run the steps in a run folder of their own, which is deleted unless they fail."""
    frontend = _Silent()
    outcome = await run_job(without_learning(config), frontend)
    if not outcome.finished or frontend.folder is None:
        raise RunFailed(f"the steps at learning rate 0 did not end: {outcome.reason}")
    rows = list(read_rows(frontend.folder.metrics, kind="step"))
    shutil.rmtree(frontend.folder.root)
    return Mismatches(ENGINE_LIMIT[precision_of(config)], [_by_staleness(row["trainer"]) for row in rows])


def without_learning(config: Config) -> Config:
    """Return the job with few steps and groups, learning rate 0, no evaluation, and a reward without user code."""
    updates, rollout = config.trainer.updates, config.rollout
    groups = min(rollout.groups_per_step, updates * -(-GROUPS // updates))
    length = RewardConfig(kind="length", weight=-1.0)  # rewards are positive, as the advantage maxrl needs
    changes: dict[str, dict[str, Any]] = {
        "run": {"name": "drift-check", "steps": STEPS},
        "rollout": {"groups_per_step": groups, "filter_zero_variance": False},
        "trainer": {"learning_rate": 0.0},  # the schema refuses it to users
        "task": {"rewards": (length,)},
        "weights": {"keep": 1},
        "status": {"port": 0},
    }
    sections = {name: getattr(config, name).model_copy(update=change) for name, change in changes.items()}
    return config.model_copy(update={**sections, "eval": EvalConfig(sets=())})


def verdict(found: Mismatches) -> tuple[bool, str]:
    """Return whether the mismatch is flat, and a line that says so or names the likely cause."""
    values = [value for mismatches in found.steps for value in mismatches.values()]
    if not values or not found.steps[0]:
        return False, "no step was measured"
    lowest, highest, at_start = min(values), max(values), max(found.steps[0].values())
    limit = f"limit {found.limit:.0e}"
    if highest <= found.limit:
        return True, f"engine and trainer agree at every step and staleness (at most {highest:.1e}, {limit})"
    if at_start <= found.limit:
        return False, (
            f"the first version agrees, a later one differs by {highest:.1e} ({limit}), though no weight has changed: "
            "publishing or pushing changes it; look at trainer.publish_dtype and at the servers"
        )
    if lowest > found.limit:
        return False, (
            f"the mismatch is {lowest:.1e} to {highest:.1e} at every step ({limit}), so engine and trainer compute "
            "different log-probs from the same weights: compare their temperature, dtype and model"
        )
    return False, (
        f"the mismatch varies from {lowest:.1e} to {highest:.1e} ({limit}), though no weight has changed: some "
        "servers hold other weights, or compute other log-probs, than the rest; dora check compares each of them"
    )


def _by_staleness(metrics: Mapping[str, float | None]) -> dict[int, float]:
    found = {_MISMATCH.fullmatch(key): value for key, value in metrics.items() if value is not None}
    return {int(match[1]): value for match, value in found.items() if match is not None}


class _Silent:
    """A frontend that shows nothing and keeps the run folder."""

    def __init__(self) -> None:
        self.folder: RunFolder | None = None

    def tell(self, line: str) -> None:
        """Ignore the message."""

    def show(self, text: str) -> None:
        """Ignore the text."""

    @asynccontextmanager
    async def watch(self, run: Running) -> AsyncIterator[None]:
        yield

    def ended(self, snapshot: Snapshot, *, folder: RunFolder, violations: int | None) -> None:
        self.folder = folder
