"""The results of a sweep, as a table and as data."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from itertools import zip_longest
from statistics import fmean, median
from typing import Final

import msgspec

from dora.sim.measure import Result, Tail
from dora.sim.workload import AdapterUse

_Setting = tuple[int, int, str, str, int, int, AdapterUse]
#: Fields of a row that are means over the seeds.
_MEANS: Final = (
    *("tokens_s", "trainer_idle", "trainer_unbalanced", "slot_load", "tool_load", "staleness_mean", "migrations"),
    *("evictions", "mixed_share", "discarded_share", "beyond_share", "length_bias"),
)
#: What is added to the name of a strategy.
ADAPTERS: Final[dict[AdapterUse, str]] = {"none": "", "merged": ", merged", "served": ", adapters"}
#: Columns of the table that fits a terminal.
_NARROW: Final = ("strategy", "K", "split", "step s", "x limit", "sync/x", "trainer idle", "stale")
#: Columns of the wide table -> fields of `Tail`.
_TAIL: Final = {
    **{"alone s": "alone_s", "in batch": "batch_s", "queued": "queue_s", "pushed": "push_s", "graded": "grade_s"},
    "trained": "train_s",
}
#: Shares of the instances' time that the wide table shows.
_SHOWN_SHARES: Final = ("full", "thin_new", "thin_old", "prefill", "push", "empty")


class ReportRow(msgspec.Struct, frozen=True):
    """One setting over its seeds: the median of the step times, and the means of all else."""

    devices: int
    instances: int
    strategy: str
    rules: str
    max_staleness: int
    rollout_devices: int
    adapters: AdapterUse
    seeds: int
    step_s: float
    step_s_range: tuple[float, float]
    tokens_s: float
    limit_s: float
    floor_s: float
    rule: str
    ratio: float
    floor_ratio: float  #: step time over the floor of versions in order
    sync_ratio: float | None  #: step time of `sync` on as many devices, divided by this one; None: no `sync`
    trainer_idle: float
    trainer_unbalanced: float
    instance_shares: dict[str, float]
    slot_load: float
    tool_load: float
    staleness: tuple[int, ...]  #: groups trained at staleness i
    staleness_mean: float
    staleness_max: int
    migrations: float
    evictions: float
    mixed_share: float
    discarded_share: float
    beyond_share: float
    length_bias: float
    violations: int
    tail: Tail | None


def rows(results: Iterable[Result]) -> list[ReportRow]:
    """Return one row per setting, in order of appearance."""
    by_setting: dict[_Setting, list[Result]] = {}
    for r in results:
        setting = (r.devices, r.instances, r.strategy, r.rules, r.max_staleness, r.rollout_devices, r.adapters)
        by_setting.setdefault(setting, []).append(r)
    sync: dict[int, float] = {}  # by devices, at the fastest of its splits
    for (devices, _, strategy, *_), group in by_setting.items():
        if strategy == "sync":
            sync[devices] = min(median(r.step_s for r in group), sync.get(devices, math.inf))
    return [_row(setting, group, sync_s=sync.get(setting[0])) for setting, group in by_setting.items()]


def _row(setting: _Setting, results: Sequence[Result], *, sync_s: float | None) -> ReportRow:
    devices, instances, strategy, rules, max_staleness, rollout_devices, adapters = setting
    step_s = median(r.step_s for r in results)
    return ReportRow(
        devices=devices,
        instances=instances,
        strategy=strategy,
        rules=rules,
        max_staleness=max_staleness,
        rollout_devices=rollout_devices,
        adapters=adapters,
        seeds=len(results),
        step_s=step_s,
        step_s_range=(min(r.step_s for r in results), max(r.step_s for r in results)),
        limit_s=fmean(r.limit.step_s for r in results),
        floor_s=fmean(r.limit.floor_s for r in results),
        rule=results[0].limit.rule,
        ratio=median(r.ratio for r in results),
        floor_ratio=median(r.step_s / r.limit.floor_s for r in results),
        sync_ratio=sync_s / step_s if sync_s is not None else None,
        instance_shares=_shares(results),
        staleness=tuple(map(sum, zip_longest(*(r.staleness for r in results), fillvalue=0))),
        staleness_max=max(r.staleness_max for r in results),
        violations=sum(r.violations for r in results),
        tail=mean_tail([r.tail for r in results if r.tail is not None]),
        **{name: fmean(getattr(r, name) for r in results) for name in _MEANS},
    )


def mean_tail(tails: Sequence[Tail]) -> Tail | None:
    """Return the means over the seeds, or None if there are none."""
    return Tail(*(fmean(getattr(t, name) for t in tails) for name in Tail.__struct_fields__)) if tails else None


def _shares(results: Sequence[Result]) -> dict[str, float]:
    """Return the means over the seeds, with all prefill in one share."""
    shares = {name: fmean(r.instance_shares[name] for r in results) for name in results[0].instance_shares}
    shares["prefill"] += shares.pop("again")
    return shares


def table(found: Sequence[ReportRow], *, wide: bool) -> str:
    """Return an aligned Markdown table; `*` marks the fastest split of a strategy. Unless `wide`, it has 8 columns."""
    best: dict[tuple[int, str, str, int], float] = {}
    for row in found:
        key = (row.devices, row.strategy, row.rules, row.max_staleness)
        best[key] = min(best.get(key, row.step_s), row.step_s)
    columns = [_cells(r, is_best=r.step_s == best[r.devices, r.strategy, r.rules, r.max_staleness]) for r in found]
    if not wide:
        columns = [
            {name: c[name] for name in _NARROW} | {"strategy": title_of(r)} for r, c in zip(found, columns, strict=True)
        ]
    cells = [tuple(columns[0]), *(tuple(row.values()) for row in columns)]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    lines = ["| " + " | ".join(c.ljust(w) for c, w in zip(row, widths, strict=True)) + " |" for row in cells]
    return "\n".join([lines[0], "|" + "|".join("-" * (w + 2) for w in widths) + "|", *lines[1:]])


def _cells(row: ReportRow, *, is_best: bool) -> dict[str, str]:
    """Return a row's text by column."""
    shares = row.instance_shares
    low, high = row.step_s_range
    return {
        "strategy": row.strategy + ADAPTERS[row.adapters],
        "rules": row.rules,
        "K": str(row.max_staleness),
        "split": f"{row.rollout_devices}/{row.devices}{'*' if is_best else ''}",
        "seeds": str(row.seeds),
        "step s": f"{row.step_s:.4g}",
        "range": f"{low:.4g}-{high:.4g}",
        "tokens/s": f"{row.tokens_s:,.0f}",
        "limit s": f"{row.limit_s:.4g}",
        "floor s": f"{row.floor_s:.4g}",
        "rule": row.rule,
        "x limit": f"{row.ratio:.3f}",
        "x floor": f"{row.floor_ratio:.3f}",
        "sync/x": f"{row.sync_ratio:.2f}" if row.sync_ratio is not None else "-",
        "trainer idle": f"{row.trainer_idle:.1%}",
        "uneven": f"{row.trainer_unbalanced:.1%}",
        **{name.replace("_", " "): f"{shares[name]:.1%}" for name in _SHOWN_SHARES},
        **{name: f"{getattr(row.tail, field):.4g}" if row.tail else "-" for name, field in _TAIL.items()},
        "slots": f"{row.slot_load:.1%}",
        "tools": f"{row.tool_load:.1%}",
        "stale": f"{row.staleness_mean:.2f}",
        "max": str(row.staleness_max),
        "moves": f"{row.migrations:.1f}",
        "evict": f"{row.evictions:.1f}",
        "bias": f"{row.length_bias:.2f}",
        "viol": str(row.violations),
        "by design": _by_design(row),
    }


def notes(found: Sequence[ReportRow]) -> list[str]:
    """Return the notes for the narrow table: the terms in it, and which constraints were violated."""
    lines = ["* fastest split; x limit: step time over its lower bound; stale: mean staleness; --wide: all columns"]
    for row in found:
        name = f"{title_of(row)}, K = {row.max_staleness}"
        lines += [f"{name}: broken by design: {_by_design(row)}"] * (_by_design(row) != "-")
        lines += [f"{name}: {row.violations} VIOLATIONS"] * (row.violations > 0)
    return lines


def title_of(row: ReportRow) -> str:
    """Return the strategy, its rules unless they are its own, and what becomes of an adapter."""
    rules = row.rules.removeprefix("dora") if row.rules.startswith("dora") else f", {row.rules} rules"
    return row.strategy + rules + ADAPTERS[row.adapters]


def _by_design(row: ReportRow) -> str:
    """Return the shares of answers (C1) and of groups (C2, C3) that break a constraint by design."""
    shares = {"C1": row.mixed_share, "C2": row.discarded_share, "C3": row.beyond_share}
    return ", ".join(f"{name} {share:.1%}" for name, share in shares.items() if share) or "-"
