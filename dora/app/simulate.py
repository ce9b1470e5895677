"""What is simulated: a workload file, a run's config or a finished run, each as a workload."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from pathlib import Path

from dora.app.settings import CONFIG_REGIME, workload_of
from dora.config.load import load as load_config
from dora.config.load import read_toml
from dora.sim.measure import window
from dora.sim.recorded import RecordedRun, read_run
from dora.sim.split import Search, search
from dora.sim.sweep import Case
from dora.sim.workload import Workload, checked
from dora.sim.workload import load as load_workload


def at_best_splits(found: Sequence[Case], *, processes: int, told: Callable[[Search], object]) -> list[Case]:
    """The same cases, each setting at the split that its first seed finds; `told` is given each search's result."""
    best: dict[Workload, Workload] = {}
    for workload, seed in found:
        if workload not in best and workload.is_shared:
            best[workload] = workload
        elif workload not in best:
            result = search(workload, seed=seed, processes=processes)
            told(result)
            best[workload] = result.workload
    return [(best[workload], seed) for workload, seed in found]


def from_run(folder: Path) -> tuple[Workload, str]:
    """A finished run as a workload, and what was read of it."""
    workload, record = read_run(folder)
    return workload, (
        f"{folder}: {len(workload.lengths.answers)} groups recorded, {workload.num_instances} instances; "
        f"the run itself took {_own_step_s(record, workload):.2f} s per step\n{_measured(workload)}\n"
    )


def _measured(workload: Workload) -> str:
    """What was read of it, and what it holds besides."""
    fleet, server, decode = workload.fleet, workload.fleet.server, workload.fleet.server.decode
    return (
        f"measured: a decoding step {1e3 * decode.base_s:.3g} ms and {1e3 * decode.per_request_s:.3g} ms a request, "
        f"prefill {1e6 * server.prefill_s_per_token:.3g} us a token, a request {1e3 * fleet.answer_s:.3g} ms besides, "
        f"a push {workload.push_s:.3g} s, training {workload.train.tokens_s_per_device:.0f} tokens/s a rank; processes "
        "that shared cores contended for them, and the prediction holds where they would as much"
    )


def _own_step_s(record: RecordedRun, workload: Workload) -> float:
    """Over the same window as a simulation's, so that the two can be compared."""
    first, last = window(len(record.trained), max_staleness=workload.rules.max_staleness)
    return (record.trained[last] - record.trained[first]) / (last - first)


def from_file(path: Path | None) -> tuple[Workload, str]:
    """A workload file, a run's config or the built-in example as a workload, and where it comes from."""
    if path is None:
        return Workload(), "the built-in example: regime A, 16 devices\n"
    keys = set(read_toml(path))
    if not keys or keys & {"job", "lengths", "tools", "fleet", "train", "grade", "faults"}:
        workload = load_workload(path)
        return workload, f"{path}: regime {workload.lengths.regime}, {workload.fleet.devices} devices\n"
    note = (
        f"{path}: a config; lengths of regime {CONFIG_REGIME} scaled to its token budget, times of an example server\n"
    )
    return checked(workload_of(load_config(path, environ=os.environ)), origin=str(path)), note
