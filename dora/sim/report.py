"""The results of a sweep, as a table and as data."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from itertools import zip_longest
from statistics import fmean, median

import msgspec

from dora.sim.measure import Result

_Setting = tuple[int, int, str, str, int, int]

COLUMNS = (
    *(
        "strategy",
        "rules",
        "K",
        "split",
        "seeds",
        "step s",
        "range",
        "tokens/s",
        "limit s",
        "rule",
        "x limit",
        "sync/x",
    ),
    *("trainer idle", "uneven", "full", "thin new", "thin old", "prefill", "push", "empty", "slots", "tools"),
    *("stale", "max", "moves", "evict", "bias", "viol", "by design"),
)


class ReportRow(msgspec.Struct, frozen=True):
    """One setting over its seeds: the median of the step times, and the means of all else."""

    devices: int
    instances: int
    strategy: str
    rules: str
    max_staleness: int
    rollout_devices: int
    seeds: int
    step_s: float
    step_s_range: tuple[float, float]
    tokens_s: float
    limit_s: float
    rule: str
    ratio: float
    sync_ratio: float | None  #: step time of `sync` on as many devices over this one; None if it was not simulated
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


def rows(results: Iterable[Result]) -> list[ReportRow]:
    """Return one row per setting, in order of appearance."""
    by_setting: dict[_Setting, list[Result]] = {}
    for r in results:
        setting = (r.devices, r.instances, r.strategy, r.rules, r.max_staleness, r.rollout_devices)
        by_setting.setdefault(setting, []).append(r)
    sync: dict[int, float] = {}  # by devices, at the fastest of its splits
    for (devices, _, strategy, *_), found in by_setting.items():
        if strategy == "sync":
            sync[devices] = min(median(r.step_s for r in found), sync.get(devices, math.inf))
    return [_row(setting, found, sync_s=sync.get(setting[0])) for setting, found in by_setting.items()]


def _row(setting: _Setting, found: Sequence[Result], *, sync_s: float | None) -> ReportRow:
    devices, instances, strategy, rules, max_staleness, rollout_devices = setting
    step_s = median(r.step_s for r in found)
    return ReportRow(
        devices=devices,
        instances=instances,
        strategy=strategy,
        rules=rules,
        max_staleness=max_staleness,
        rollout_devices=rollout_devices,
        seeds=len(found),
        step_s=step_s,
        step_s_range=(min(r.step_s for r in found), max(r.step_s for r in found)),
        tokens_s=fmean(r.tokens_s for r in found),
        limit_s=fmean(r.limit.step_s for r in found),
        rule=found[0].limit.rule,
        ratio=median(r.ratio for r in found),
        sync_ratio=sync_s / step_s if sync_s is not None else None,
        trainer_idle=fmean(r.trainer_idle for r in found),
        trainer_unbalanced=fmean(r.trainer_unbalanced for r in found),
        instance_shares=_shares(found),
        slot_load=fmean(r.slot_load for r in found),
        tool_load=fmean(r.tool_load for r in found),
        staleness=tuple(map(sum, zip_longest(*(r.staleness for r in found), fillvalue=0))),
        staleness_mean=fmean(r.staleness_mean for r in found),
        staleness_max=max(r.staleness_max for r in found),
        migrations=fmean(r.migrations for r in found),
        evictions=fmean(r.evictions for r in found),
        mixed_share=fmean(r.mixed_share for r in found),
        discarded_share=fmean(r.discarded_share for r in found),
        beyond_share=fmean(r.beyond_share for r in found),
        length_bias=fmean(r.length_bias for r in found),
        violations=sum(r.violations for r in found),
    )


def _shares(found: Sequence[Result]) -> dict[str, float]:
    """Return the means over the seeds, with all prefill in one share."""
    shares = {name: fmean(r.instance_shares[name] for r in found) for name in found[0].instance_shares}
    shares["prefill"] += shares.pop("again")
    return shares


def table(found: Sequence[ReportRow]) -> str:
    """Return an aligned Markdown table; `*` marks the fastest split of a strategy."""
    best: dict[tuple[int, str, str, int], float] = {}
    for row in found:
        key = (row.devices, row.strategy, row.rules, row.max_staleness)
        best[key] = min(best.get(key, row.step_s), row.step_s)
    cells = [COLUMNS, *(_cells(r, r.step_s == best[r.devices, r.strategy, r.rules, r.max_staleness]) for r in found)]
    widths = [max(len(row[i]) for row in cells) for i in range(len(COLUMNS))]
    lines = ["| " + " | ".join(c.ljust(w) for c, w in zip(row, widths, strict=True)) + " |" for row in cells]
    return "\n".join([lines[0], "|" + "|".join("-" * (w + 2) for w in widths) + "|", *lines[1:]])


def _cells(row: ReportRow, is_best: bool) -> tuple[str, ...]:
    shares = row.instance_shares
    low, high = row.step_s_range
    return (
        row.strategy,
        row.rules,
        str(row.max_staleness),
        f"{row.rollout_devices}/{row.devices}{'*' if is_best else ''}",
        str(row.seeds),
        f"{row.step_s:.4g}",
        f"{low:.4g}-{high:.4g}",
        f"{row.tokens_s:,.0f}",
        f"{row.limit_s:.4g}",
        row.rule,
        f"{row.ratio:.3f}",
        f"{row.sync_ratio:.2f}" if row.sync_ratio is not None else "-",
        *(f"{share:.1%}" for share in (row.trainer_idle, row.trainer_unbalanced, shares["full"], shares["thin_new"])),
        *(f"{shares[name]:.1%}" for name in ("thin_old", "prefill", "push", "empty")),
        *(f"{load:.1%}" for load in (row.slot_load, row.tool_load)),
        f"{row.staleness_mean:.2f}",
        str(row.staleness_max),
        f"{row.migrations:.1f}",
        f"{row.evictions:.1f}",
        f"{row.length_bias:.2f}",
        str(row.violations),
        _by_design(row),
    )


def _by_design(row: ReportRow) -> str:
    """How often the strategy breaks constraints by design: shares of answers (C1) and of groups (C2, C3)."""
    shares = {"C1": row.mixed_share, "C2": row.discarded_share, "C3": row.beyond_share}
    return ", ".join(f"{name} {share:.1%}" for name, share in shares.items() if share) or "-"
