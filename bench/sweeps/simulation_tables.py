"""The tables of docs/SIMULATION.md and docs/SCALE.md, as functions of the stored results alone.

A block of a document, between `<!-- NAME -->` and `<!-- end -->`, is written by the function of that name. A row whose
seeds are not all simulated is left out, and its command is listed as missing.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from statistics import median
from typing import Final

import adapter_plans
import calls
import calls_split
import exhaustive
import paced_calls
import plan_tables
import plans
from scale_table import serve
from simulation_cases import CASES, ROOT, without
from simulation_found import (
    Found,
    Results,
    SimulationRow,
    commands,
    key,
    missing,
    rows_of,
    setting,
    staleness,
    sync_of,
    table,
)

from dora.sim.measure import Result

DOCUMENTS: Final = ("README.md", "docs/SIMULATION.md", "docs/SCALE.md")
_BLOCK: Final = re.compile(r"<!-- (\w+) -->\n((?:(?!<!-- ).)*)<!-- end -->\n", re.DOTALL)


def documents(rows: Sequence[SimulationRow]) -> dict[str, str]:
    """Return the text of each document, by its path."""
    by_command: dict[str, dict[int, Result]] = {}
    for row in rows:
        by_command.setdefault(row.command, {})[row.seed] = row.result
    found = {
        case: Found(case, [by_command[case.command][seed] for seed in range(case.seeds)])
        for case in CASES
        if len(by_command.get(case.command, ())) == case.seeds
    }

    def write(block: re.Match[str]) -> str:
        return f"<!-- {block[1]} -->\n{_BLOCKS[block[1]](found)}\n<!-- end -->\n"

    return {path: _BLOCK.sub(write, (ROOT / path).read_text()) for path in DOCUMENTS}


# -- the tables -------------------------------------------------------------------------------------------------------


def _regimes(found: Results) -> str:
    head = "answers | K | split | step s (range) | × limit (range) | bound by | trainer idle | staleness mean, max"
    lines = [
        (
            one.case.label,
            *setting(one)[2:],
            one.text(".4g", lambda r: r.step_s),
            one.text(".3f", lambda r: r.ratio),
            plan_tables.TERMS[one.results[0].limit.rule],
            one.mean(".1%", lambda r: r.trainer_idle),
            staleness(one),
        )
        for one in rows_of("regimes", found)
    ]
    return table(head, lines) + commands("regimes", found)


def _rules(found: Results) -> str:
    columns = {"tail-bound": "tail-bound, K = 2", "paper-128": "128 GPUs, K = 3"}
    chosen = [one for one in rows_of("rules", found) if one.case.file in columns]
    by_setting = {(one.case.file, one.case.sets): one for one in chosen}
    lines = []
    for sets in dict.fromkeys(case.sets for case in CASES if "rules" in case.tables):
        label = next((f"`{name}`" for name in _rule_names() if without(name) == sets), "nothing: all rules on")
        lines.append((label, *(_against(by_setting, file, sets) for file in columns)))
    return table(" | ".join(["without", *columns.values()]), lines) + missing("rules", found)


def _rule_names() -> list[str]:
    return [case.label for case in CASES if "rules" in case.tables and case.sets]


def _against(by_setting: Mapping[tuple[str, tuple[str, ...]], Found], file: str, sets: tuple[str, ...]) -> str:
    """Return the step time over that with all rules and the same seed; bold if every seed is slower."""
    one, base = by_setting.get((file, sets)), by_setting.get((file, ()))
    if one is None or base is None:
        return "–"
    staleness = one.mean(".2f", lambda r: r.staleness_mean)
    if one is base:
        return f"{one.text('.4g', lambda r: r.step_s)} s; {staleness}"
    slower = sorted(ours.step_s / theirs.step_s for ours, theirs in zip(one.results, base.results, strict=True))
    text = f"{median(slower):.3f} ({slower[0]:.3f}-{slower[-1]:.3f})"
    return f"{f'**{text}**' if slower[0] > 1 else text}; {staleness}"


def _speculation(found: Results) -> str:
    head = "fleet | strategy | K | split | step s without (range) | with | times as fast (range) | × limit with"
    by_setting = {(one.case.file, one.case.strategy, one.case.sets): one for one in rows_of("speculation", found)}
    lines = []
    for (file, strategy, sets), one in by_setting.items():
        base = by_setting.get((file, strategy, ()))
        if sets and base is not None:
            gains = sorted(b.step_s / r.step_s for b, r in zip(base.results, one.results, strict=True))
            lines.append(
                (
                    *setting(one),
                    base.text(".4g", lambda r: r.step_s),
                    one.text(".4g", lambda r: r.step_s),
                    f"{median(gains):.2f} ({gains[0]:.2f}-{gains[-1]:.2f})",
                    one.text(".3f", lambda r: r.ratio),
                )
            )
    return table(head, lines) + commands("speculation", found)


def _interrupt(found: Results) -> str:
    head = (
        "case | strategy | K | split | step s (range) | × limit | staleness mean, max | C1: mixed answers | "
        "C3: groups beyond K | C2: discarded | bias"
    )
    lines = [
        (
            *setting(one),
            one.text(".4g", lambda r: r.step_s),
            f"{median(r.ratio for r in one.results):.3f}",
            staleness(one),
            one.mean(".1%", lambda r: r.mixed_share),
            one.mean(".1%", lambda r: r.beyond_share),
            one.mean(".1%", lambda r: r.discarded_share),
            one.mean(".2f", lambda r: r.length_bias),
        )
        for one in rows_of("interrupt", found)
    ]
    return table(head, lines) + commands("interrupt", found)


def _peers(found: Results) -> str:
    head = (
        "case | strategy | rules | K | split | step s (range) | × limit | staleness mean, max | C1: mixed answers | "
        "C3: groups beyond K | trainer idle"
    )
    lines = []
    rows = rows_of("peers", found)
    for one in sorted(rows, key=lambda one: (one.case.file != "tail-bound", one.case.split or 0, one.case.k or 0)):
        case, strategy, k, split = setting(one)
        lines.append(
            (
                *(case, strategy, f"`{one.case.rules or 'dora'}`", k, split),
                one.text(".4g", lambda r: r.step_s),
                f"{median(r.ratio for r in one.results):.3f}",
                staleness(one),
                one.mean(".1%", lambda r: r.mixed_share),
                one.mean(".1%", lambda r: r.beyond_share),
                one.mean(".1%", lambda r: r.trainer_idle),
            )
        )
    return table(head, lines) + commands("peers", found)


def _sensitivity(found: Results) -> str:
    head = "change | step s (range) | × limit (range) | staleness mean, max | trainer idle"
    lines = [
        (
            one.case.label if "scale" not in one.case.tables else "**nothing: K = 3**",
            one.text(".4g", lambda r: r.step_s),
            one.text(".3f", lambda r: r.ratio),
            staleness(one),
            one.mean(".1%", lambda r: r.trainer_idle),
        )
        for one in rows_of("sensitivity", found)
    ]
    return table(head, lines) + commands("sensitivity", found)


def _agent(found: Results) -> str:
    head = (
        "strategy | K | split | step s (range) | × limit (range) | rule | `sync` / x | full | prefill | slots | "
        "tools | staleness mean, max | moves | C1: mixed answers | violations"
    )
    lines = []
    for one in rows_of("agent", found):
        sync = sync_of(one.case, found)
        lines.append(
            (
                *setting(one)[1:],
                one.text(".4g", lambda r: r.step_s),
                one.text(".3f", lambda r: r.ratio),
                one.results[0].limit.rule,
                f"{sync.step_s / one.step_s:.2f}" if sync else "–",
                one.share("full"),
                one.share("prefill"),
                one.mean(".1%", lambda r: r.slot_load),
                one.mean(".1%", lambda r: r.tool_load),
                staleness(one),
                one.mean(".0f", lambda r: r.migrations),
                one.mean(".1%", lambda r: r.mixed_share),
                str(sum(r.violations for r in one.results)),
            )
        )
    return table(head, lines) + commands("agent", found)


#: Minutes per step as published (arXiv 2604.26256), on 64 and 128 GPUs.
_PUBLISHED: Final = {
    **{("sync", 64): 22.9, ("one_step_off", 64): 22.9, ("partial_sync", 64): 17.4, ("dora", 64): 14.7},
    **{("sync", 128): 20.2, ("one_step_off", 128): 14.0, ("partial_sync", 128): 14.0, ("dora", 128): 10.5},
}


def _paper(found: Results) -> str:
    head = (
        "case | strategy | K | split | published, min | simulated, min (range) | simulated / published | trainer idle"
    )
    rows: list[tuple[int, tuple[str, ...], Found | plan_tables.PlanFound]] = [
        (one.rows[0].result.devices, (f"`{one.case.strategy}`", str(one.case.k), one.split), one)
        for one in plan_tables.published(_plans())
        if one.case.strategy != "dora" or one.case.k == 3
    ]
    rows += [(one.results[0].devices, setting(one)[1:], one) for one in rows_of("paper", found)]
    lines = []
    for devices, cells, one in sorted(rows, key=lambda row: (row[0], row[2].case.strategy != "sync")):
        label = one.case.label if isinstance(one, Found) else f"{devices} GPUs"
        minutes = _PUBLISHED[one.case.strategy, devices]
        lines.append(
            (
                *(label, *cells, f"{minutes:.1f}"),
                one.text(".1f", lambda r: r.step_s / 60),
                f"{one.step_s / 60 / minutes:.2f}",
                one.mean(".0%", lambda r: r.trainer_idle),
            )
        )
    return table(head, lines) + commands("paper", found)


def _targets(found: Results) -> str:
    own = [one for case, one in found.items() if key(case) == ("tail-bound", "dora", case.k, (), "")]
    return plan_tables.targets(_plans(), {one.case.k or 0: one.step_s for one in own})


def _plans() -> plan_tables.Plans:
    return plan_tables.found_in(plans.recorded())


def _scale(found: Results) -> str:
    head = (
        "accelerators | strategy | instances | seeds | steps measured | step s (range) | limit s | limit / step | "
        "trainer idle, uneven | staleness mean, max | moves a step | violations"
    )
    lines = []
    for one in sorted(rows_of("scale", found), key=lambda one: (one.results[0].devices, one.case.strategy)):
        first = one.results[0]
        lines.append(
            (
                f"{first.devices:,}",
                f"`{one.case.strategy}`",
                f"{first.instances:,}",
                str(len(one.results)),
                str(first.steps),
                one.text(".4g", lambda r: r.step_s),
                one.mean(".4g", lambda r: r.limit.step_s),
                f"{median(1 / r.ratio for r in one.results):.3f}",
                one.mean(".1%", lambda r: r.trainer_idle) + ", " + one.mean(".1%", lambda r: r.trainer_unbalanced),
                staleness(one),
                one.mean(",.0f", lambda r: r.migrations),
                str(sum(r.violations for r in one.results)),
            )
        )
    return table(head, lines) + commands("scale", found)


def _calls(_: Results) -> str:
    return calls.table(calls.recorded())


def _calls_split(_: Results) -> str:
    return calls_split.table(calls_split.recorded())


def _paced_calls(_: Results) -> str:
    return paced_calls.table(paced_calls.recorded())


def _adapter_plans(_: Results) -> str:
    return adapter_plans.table(adapter_plans.recorded())


def _exhaustive(_: Results) -> str:
    return exhaustive.text(exhaustive.recorded())


_BLOCKS: Final[dict[str, Callable[[Results], str]]] = {
    "headline": lambda _: plan_tables.headline(_plans()),
    "strategies": lambda _: plan_tables.strategies(_plans()),
    "targets": _targets,
    "wider": lambda _: plan_tables.wider(_plans()),
    "obstacles": lambda _: plan_tables.obstacles(_plans()),
    "adapter_plans": _adapter_plans,
    "exhaustive": _exhaustive,
    "store": lambda _: plan_tables.store(_plans()),
    "tail": lambda _: plan_tables.tail(_plans()),
    "regimes": _regimes,
    "paper": _paper,
    "rules": _rules,
    "interrupt": _interrupt,
    "speculation": _speculation,
    "peers": _peers,
    "sensitivity": _sensitivity,
    "agent": _agent,
    "scale": _scale,
    "serve": serve,
    "calls": _calls,
    "calls_split": _calls_split,
    "paced_calls": _paced_calls,
}
