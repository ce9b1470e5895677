"""What observes a run, without the run."""

from __future__ import annotations

from pathlib import Path

from dora.controller.recorder import read_rows
from dora.core.state import State
from dora.observe.drift import DriftWatch
from dora.observe.facts import ShellFacts
from dora.observe.lanes import Lanes
from dora.observe.observed import Folded, Observed
from tests.core.world import settings


def observed(
    state: State | None = None,
    *,
    drift: DriftWatch | None = None,
    facts: ShellFacts | None = None,
    folded: Folded | None = None,
) -> Observed:
    state = state or State(settings())
    return Observed(
        state,
        facts=facts or ShellFacts(run_id="job-1", strategy="dora"),
        folded=folded or Folded.new(state.settings.group_size),
        lanes=Lanes(state, num_ranks=2, time_scale=1.0),
        drift=drift or DriftWatch(precision="float32", updates=1),
    )


def resumed(metrics: Path, *, drift: DriftWatch | None = None, facts: ShellFacts | None = None) -> Observed:
    """What a resume knows from the rows of an earlier controller."""
    found = observed(drift=drift, facts=facts)
    for row in read_rows(metrics):
        found.recall(row)
    return found
