"""Makes workloads for the simulator from workload files, configurations and finished runs."""

from __future__ import annotations

import os
from pathlib import Path

from dora.app.settings import CONFIG_REGIME, workload_of
from dora.config.load import load as load_config
from dora.config.load import read_toml
from dora.sim.limit import window
from dora.sim.recorded import RecordedRun, read_run
from dora.sim.workload import Workload, checked
from dora.sim.workload import load as load_workload


def from_run(folder: Path) -> tuple[Workload, str]:
    """Return a finished run as a workload, and a description."""
    workload, record = read_run(folder)
    return workload, (
        f"{folder}: {len(workload.lengths.answers)} groups recorded, {workload.num_instances} instances; "
        f"the run itself took {_own_step_s(record, workload):.2f} s per step\n{_measured(workload)}\n"
    )


def _measured(workload: Workload) -> str:
    fleet, server, decode = workload.fleet, workload.fleet.server, workload.fleet.server.decode
    push = "load" if workload.serves_adapters else "push"
    return (
        f"measured: decoding step {1e3 * decode.base_s:.3g} ms + {1e3 * decode.per_request_s:.3g} ms per request, "
        f"prefill {1e6 * server.prefill_s_per_token:.3g} us per token, overhead {1e3 * fleet.answer_s:.3g} ms per "
        f"request, {push} {workload.push_s:.3g} s, training {workload.train.tokens_s_per_device:.0f} tokens/s per "
        "rank; contention for shared cores is included, so the prediction assumes the same contention"
    )


def _own_step_s(record: RecordedRun, workload: Workload) -> float:
    """Return the run's own step time, over the window that a simulation measures."""
    first, last = window(len(record.trained), max_staleness=workload.rules.max_staleness)
    return (record.trained[last] - record.trained[first]) / (last - first)


def is_workload(path: Path) -> bool:
    """Return whether a file is a workload, not a configuration."""
    keys = set(read_toml(path))
    return not keys or not keys.isdisjoint(Workload.__struct_fields__)


def from_file(path: Path | None) -> tuple[Workload, str]:
    """Return a workload file, a configuration or the built-in example (None) as a workload, and a description."""
    if path is None:
        return Workload(), "the built-in example: regime A, 16 devices\n"
    if is_workload(path):
        workload = load_workload(path)
        return workload, f"{path}: regime {workload.lengths.regime}, {workload.fleet.devices} devices\n"
    note = (
        f"{path}: a configuration; lengths of regime {CONFIG_REGIME}, scaled to its token budget; times of an example "
        "server\n"
    )
    return checked(workload_of(load_config(path, environ=os.environ)), origin=str(path)), note
