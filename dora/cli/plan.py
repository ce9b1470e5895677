"""`dora plan`: searches the width of the servers, the split, K, slots and micro-batches, and prints the best plans; for
a job that trains an adapter, also whether servers should hold the adapters or merged weights."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

from dora.app.plan import Question, ask
from dora.cli.output import require_no_folder, say, show_progress, table, write_file
from dora.config.load import as_toml
from dora.errors import ConfigError
from dora.sim.plan import WORTH, SimulatedPlan, search

#: Terms of the limit, by how they are called.
_TERMS = {"train": "training", "decode": "decoding", "slowest": "longest answer"}


def plan(
    path: Path | None,
    *,
    recorded: Path | None,
    gpus: str | None,
    overrides: Sequence[str],
    strategy: str | None,
    staleness: Sequence[int],
    widths: Sequence[int],
    seed: int,
    write: Path | None,
    force: bool,
    processes: int | None,
) -> None:
    if min(staleness, default=0) < 0 or min(widths, default=1) < 1:
        raise ConfigError("--k: must be at least 0; --widths: must be at least 1")
    if write is not None:
        require_no_folder(write, option="--write ")
    if write is not None and os.path.lexists(write) and not force:
        raise ConfigError(f"--write {write}: exists; --force replaces it")
    if write is not None and not os.access(write.parent, os.W_OK):
        raise ConfigError(f"--write {write}: cannot be written: {write.parent} is not a folder that you may write to")
    question = ask(path, recorded, gpus=gpus, overrides=overrides)
    workload = question.workload
    if strategy is not None:
        workload = workload.with_changes(job={"strategy": strategy})
    say(*question.note.splitlines())
    best = search(
        workload,
        staleness=staleness or range(workload.rules.max_staleness + 1),
        widths=widths,
        uses=[workload.adapters.use] if recorded is not None else question.uses,  # a run has measured one use
        why_not=question.why_not,
        seed=seed,
        processes=processes or min(2, os.cpu_count() or 1),
        progress=lambda number: show_progress(f"{number} simulations"),
    )
    show_progress("")
    rows = [_HEAD, *(_row(place, plan) for place, plan in enumerate(best, start=1))]
    say(*table([row if _has_adapter(best[0]) else row[:-1] for row in rows]))
    say("step s: simulated, give or take the standard error; limit: least seconds of any scheduler, and what sets it")
    if _has_adapter(best[0]):
        say(_comparison(best))
    for place, one in enumerate(best, start=1):
        say(*_lines(question, one, place=place))
    if write is not None:
        text = question.text(best[0].workload).encode()
        write_file(write, lambda file: file.write(text))
        say(f"wrote plan 1 to {write}")


_HEAD = (
    *("plan", "K", "GPUs a server", "servers", "trainer GPUs", "step s", "limit s", "bound by", "staleness"),
    *("trainer idle", "pushes at once", "KV tokens a server", "adapters"),
)


def _row(place: int, plan: SimulatedPlan) -> tuple[str, ...]:
    workload, result = plan.workload, plan.result
    return (
        str(place),
        str(result.max_staleness),
        str(workload.fleet.devices_per_instance),
        str(result.instances),
        str(workload.train_devices),
        f"{result.step_s:.4g} ± {result.step_error_s:.2g}",
        f"{result.limit.step_s:.4g}",
        _bound(plan),
        f"{result.staleness_mean:.2f}",
        f"{result.trainer_idle:.0%}",
        str(min(result.push_limit, result.instances)),
        f"{workload.fleet.server.kv_tokens:,}",
        workload.adapters.use,
    )


def _has_adapter(plan: SimulatedPlan) -> bool:
    return plan.workload.adapters.use != "none"


def _comparison(best: Sequence[SimulatedPlan]) -> str:
    """Return whether to serve adapters or to merge them, by the best plan of each."""
    first, use = best[0], best[0].workload.adapters.use
    others = [(number, plan) for number, plan in enumerate(best, start=1) if plan.workload.adapters.use != use]
    if not others:
        return f"adapters: {use}; nothing else was compared"
    number, other = others[0]
    ratio = other.result.step_s / first.result.step_s
    advice = ("merge them", "serve them side by side")[use == "served"] if ratio >= WORTH else "no difference"
    return f"adapters: {advice}; {other.workload.adapters.use} (plan {number}) takes {ratio:.3f} times as long"


def _bound(plan: SimulatedPlan) -> str:
    """Return what binds a plan: the largest term of its limit, or the store if its pushes take longer."""
    fleet, result = plan.workload.fleet, plan.result
    num_bytes = 0.0 if plan.workload.serves_adapters else result.pushes * fleet.weight_bytes
    if num_bytes / fleet.store_bytes_s > result.limit.step_s:
        return "pushes"
    return _TERMS[result.limit.rule]


def _lines(question: Question, plan: SimulatedPlan, *, place: int) -> list[str]:
    changes = question.changes(plan.workload)
    lines = [f"    {key} = {_toml(value)}" for key, value in changes.items()]
    return [f"plan {place}: set" if lines else f"plan {place}: as it is", *lines]


def _toml(value: object) -> str:
    return f"{value:.6g}" if isinstance(value, float) else as_toml(value)
