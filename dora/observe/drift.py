"""Drift alarms: what the metrics of a step say about the distance between trainer and engine.

Invariant: pure; alarms are a function of the metrics of the steps so far. An alarm is raised when a quantity passes its
limit, and cleared after 3 steps on the calm side of a second limit; in between the alarm is neither repeated nor
withdrawn. If a step does not have a quantity, as nothing was trained at that staleness, its alarm does not change.

Limits, and the worst values of healthy runs: the default job at a learning rate of 5e-4 with two seeds, at K = 8
with 9 instances, at K = 16 with 17, and under `sync`, of 14 to 24 steps (two CPU cores, float32):

| alarm | quantity | healthy | limit |
|---|---|---|---|
| engine_mismatch | mismatch_k3 at staleness 0 | 4e-13 | 1e-6 (float32), 1e-2 (bfloat16, not measured) |
| large_updates | mismatch_k3 at staleness 1 | 0.049 | 0.3 |
| stale_tokens | mismatch_k3 at staleness 2 and more | 0.10 | 0.3 |
| low_ess | ess | 0.89 | 0.5 |
| gradient_explosion | grad_norm / its median | 1.8 | 10 |
| entropy_collapse | entropy / that of the first steps | 0.06 | 0.01 |
| much_clipping | share of tokens with a mark of the objective | 0.03 | 0.5 |
| update_skipped | updates that were not made | 0 | 0 |
"""

from __future__ import annotations

import math
import re
from collections import deque
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from statistics import fmean, median
from typing import Final, Literal

from dora.objectives.marks import MARKS

#: What may be alarmed, with the likely cause.
CAUSES: Final = {
    "engine_mismatch": "engine and trainer disagree about the same weights: compare their temperature, dtype and model "
    "(dora check --drift)",
    "large_updates": "one step changes the policy too much: lower trainer.learning_rate",
    "stale_tokens": "the policy has moved too far since these tokens were sampled: lower rollout.max_staleness or "
    "trainer.learning_rate",
    "low_ess": "few tokens carry most of the importance weight: lower rollout.max_staleness or trainer.learning_rate",
    "gradient_explosion": "the gradient is far above that of the last steps: lower trainer.learning_rate, and look at "
    "the rewards",
    "entropy_collapse": "the policy has become deterministic: lower trainer.learning_rate, or use harder prompts",
    "much_clipping": "the objective clips, caps or masks most tokens: lower trainer.learning_rate or "
    "rollout.max_staleness",
    "update_skipped": "the gradient was not finite, or nothing was trained: look at nonfinite_count and at the rewards",
}
#: Largest mean k3 between engine and trainer under the same weights, by the coarser of the data types.
ENGINE_LIMIT: Final = {"float32": 1e-6, "bfloat16": 1e-2}
#: Calm steps that clear an alarm.
CALM_STEPS: Final = 3
#: Maximum and minimum number of earlier steps whose gradient norms a gradient norm is compared with.
BASELINE_STEPS: Final = 20
MIN_BASELINE_STEPS: Final = 5
#: Number of first steps, whose mean entropy is taken as the entropy at the beginning.
FIRST_STEPS: Final = 3
#: A staleness with a smaller share of the step's tokens is not judged.
MIN_SHARE: Final = 0.05

_MISMATCH: Final = re.compile(r"lag=(\d+)/mismatch_k3")

Precision = Literal["float32", "bfloat16"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Alarm:
    """A quantity that passed its limit."""

    name: str  #: one of CAUSES
    quantity: str  #: metric of the step
    value: float
    threshold: float
    step: int  #: at which it was raised
    staleness: int | None  #: of the tokens; None: of all
    cause: str  #: the likely one, and what to do
    cleared: int | None = None  #: step at which it was cleared

    @property
    def text(self) -> str:
        """One line: name, step, quantity, value, threshold and likely cause."""
        until = f", cleared at step {self.cleared + 1}" if self.cleared is not None else ""
        return (
            f"{self.name} at step {self.step + 1}{until}: {self.quantity} is {self.value:.3g}, "
            f"limit {self.threshold:.3g}; {self.cause}"
        )


@dataclass(frozen=True, slots=True)
class Reading:
    """A quantity of one step, with the limit that raises its alarm and the one that clears it."""

    name: str
    quantity: str
    value: float
    threshold: float
    calm: float
    staleness: int | None = None

    @property
    def is_passed(self) -> bool:
        """Whether the value is beyond the limit: above it or, if the calm side is above the limit, below it."""
        return self.value < self.threshold if self.calm > self.threshold else self.value > self.threshold

    @property
    def is_calm(self) -> bool:
        """Whether the value is on the calm side of both limits."""
        return self.value >= self.calm if self.calm > self.threshold else self.value <= self.calm


class DriftWatch:
    """The alarms of a run, from its metrics step by step."""

    def __init__(self, *, precision: Precision, updates: int, clips_many: bool = False) -> None:
        """`precision`: the coarser data type of trainer and published weights. `updates`: M; with more than one, tokens
        of staleness 0 may be trained under other weights than those that sampled them, and say nothing about the
        engine. `clips_many`: the loss clips most tokens of healthy runs, too (GSPO: 0.64 with two updates a step), so
        that clipped tokens say nothing."""
        self.alarms: dict[str, Alarm] = {}  #: the latest of each name, in the order of the first
        self._engine_limit = ENGINE_LIMIT[precision]
        self._updates = updates
        self._judged = [
            f"all/{name}_frac"
            for name, (unit, _) in MARKS.items()
            if unit == "fraction" and not (clips_many and name in ("clip_low", "clip_high"))
        ]
        self._calm: dict[str, int] = {}  # steps since an active alarm was last not calm
        self._grad_norms: deque[float] = deque(maxlen=BASELINE_STEPS)
        self._first_entropies: list[float] = []

    @property
    def active(self) -> list[str]:
        """Names of the alarms that are not cleared."""
        return [name for name, alarm in self.alarms.items() if alarm.cleared is None]

    def note(self, step: int, metrics: Mapping[str, float]) -> list[Alarm]:
        """Take in the trainer's metrics of a step; return the alarms that it raises or clears.

        Values that are not finite are left out: such a step's update is skipped, which has an alarm of its own.
        """
        metrics = {name: value for name, value in metrics.items() if math.isfinite(value)}
        worst: dict[str, Reading] = {}
        for reading in self._readings(metrics):
            if reading.name not in worst or reading.value > worst[reading.name].value:
                worst[reading.name] = reading
        self._remember(metrics)
        changes = [self._judge(step, reading) for reading in worst.values()]
        return [alarm for alarm in changes if alarm is not None]

    def _judge(self, step: int, reading: Reading) -> Alarm | None:
        """Return the alarm if this reading raises or clears it."""
        name, alarm = reading.name, self.alarms.get(reading.name)
        if alarm is None or alarm.cleared is not None:
            if not reading.is_passed:
                return None
            self._calm[name] = 0
            self.alarms[name] = Alarm(
                name=name,
                quantity=reading.quantity,
                value=reading.value,
                threshold=reading.threshold,
                step=step,
                staleness=reading.staleness,
                cause=CAUSES[name],
            )
            return self.alarms[name]
        self._calm[name] = self._calm[name] + 1 if reading.is_calm else 0
        if self._calm[name] < CALM_STEPS:
            return None
        self.alarms[name] = replace(alarm, cleared=step)
        return self.alarms[name]

    def _remember(self, metrics: Mapping[str, float]) -> None:
        if metrics.get("grad_norm"):  # 0 if all rewards of each group are equal
            self._grad_norms.append(metrics["grad_norm"])
        if len(self._first_entropies) < FIRST_STEPS and "all/entropy" in metrics:
            self._first_entropies.append(metrics["all/entropy"])

    def _readings(self, metrics: Mapping[str, float]) -> Iterator[Reading]:
        yield from self._mismatches(metrics)
        if (skipped := metrics.get("updates_skipped")) is not None:
            yield Reading("update_skipped", "updates_skipped", skipped, 0.0, 0.0)
        if not metrics.get("all/tokens"):
            return
        if (ess := metrics.get("all/ess")) is not None:
            yield Reading("low_ess", "all/ess", ess, 0.5, 0.75)
        if (norm := metrics.get("grad_norm")) is not None and len(self._grad_norms) >= MIN_BASELINE_STEPS:
            usual = median(self._grad_norms)
            yield Reading("gradient_explosion", "grad_norm", norm, 10 * usual, 5 * usual)
        if (entropy := metrics.get("all/entropy")) is not None and len(self._first_entropies) == FIRST_STEPS:
            first = fmean(self._first_entropies)
            yield Reading("entropy_collapse", "all/entropy", entropy, 0.01 * first, 0.02 * first)
        for key in self._judged:
            if key in metrics:
                yield Reading("much_clipping", key, metrics[key], 0.5, 0.25)

    def _mismatches(self, metrics: Mapping[str, float]) -> Iterator[Reading]:
        limit, all_tokens = self._engine_limit, metrics.get("all/tokens", 0.0)
        if "engine_mismatch_k3" in metrics:
            yield Reading("engine_mismatch", "engine_mismatch_k3", metrics["engine_mismatch_k3"], limit, limit / 2)
        for key, value in metrics.items():
            if (found := _MISMATCH.fullmatch(key)) is None:
                continue
            staleness = int(found[1])
            if staleness == 0 and self._updates == 1:
                yield Reading("engine_mismatch", key, value, limit, limit / 2, staleness)
            if staleness > 0 and metrics.get(f"lag={staleness}/tokens", 0.0) >= MIN_SHARE * all_tokens:
                yield Reading("large_updates" if staleness == 1 else "stale_tokens", key, value, 0.3, 0.15, staleness)
