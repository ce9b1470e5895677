"""The tables of docs/SIMULATION.md and docs/SCALE.md, as functions of the stored results alone.

A block of a document, between `<!-- NAME -->` and `<!-- end -->`, is written by the function of that name. A row whose
seeds are not all simulated is left out, and its command is listed as missing.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from statistics import fmean, median
from typing import Final

import calls
import calls_split
import paced_calls
import width_table
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
    seconds,
    setting,
    staleness,
    sync_of,
    table,
)

from dora.sim.measure import Result
from dora.sim.report import mean_tail

DOCUMENTS: Final = ("README.md", "docs/SIMULATION.md", "docs/SCALE.md")
_BLOCK: Final = re.compile(r"<!-- (\w+) -->\n(.*?)<!-- end -->\n", re.DOTALL)


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


def _limit(found: Results) -> str:
    head = (
        "case | strategy | K | split | step s (range) | × limit (range) | rule | × floor | `sync` / x | trainer idle | "
        "uneven | staleness mean, max | moves | evictions | violations"
    )
    lines = []
    for one in rows_of("limit", found):
        first = one.results[0]
        sync = sync_of(one.case, found)
        cells = (
            *setting(one),
            one.text(".4g", lambda r: r.step_s),
            f"**{one.text('.3f', lambda r: r.ratio)}**".replace(" (", "** (").removesuffix("**"),
            first.limit.rule,
            f"{median(r.step_s / r.limit.floor_s for r in one.results):.3f}",
            f"{sync.step_s / one.step_s:.2f}" if sync else "–",
            one.mean(".1%", lambda r: r.trainer_idle),
            one.mean(".1%", lambda r: r.trainer_unbalanced),
            staleness(one),
            one.mean(".0f", lambda r: r.migrations),
            one.mean(".0f", lambda r: r.evictions),
            str(sum(r.violations for r in one.results)),
        )
        lines.append(cells)
    return table(head, lines) + commands("limit", found)


def _tail(found: Results) -> str:
    head = (
        "case | strategy | K | K + 1 steps, s | alone | in its batch | queued | push | grading | last micro-batch | "
        "batch / alone"
    )
    lines = []
    for one in rows_of("tail", found):
        tail = mean_tail([r.tail for r in one.results if r.tail is not None])
        assert tail is not None
        parts = (tail.alone_s, tail.batch_s, tail.queue_s, tail.push_s, tail.grade_s, tail.train_s)
        label, strategy, k, _ = setting(one)
        ratio = f"{1 + tail.batch_s / tail.alone_s:.2f}"
        lines.append((label, strategy, k, f"{sum(parts):.4g}", *(seconds(part) for part in parts), ratio))
    return table(head, lines)


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


def _sensitivity(found: Results) -> str:
    head = "change | step s (range) | × limit (range) | staleness mean, max | trainer idle"
    lines = [
        (
            one.case.label if "limit" not in one.case.tables else "**nothing: K = 3**",
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
    lines = []
    for one in sorted(rows_of("paper", found), key=lambda one: (one.results[0].devices, one.case.strategy != "sync")):
        published = _PUBLISHED[one.case.strategy, one.results[0].devices]
        lines.append(
            (
                *setting(one),
                f"{published:.1f}",
                one.text(".1f", lambda r: r.step_s / 60),
                f"{one.step_s / 60 / published:.2f}",
                one.mean(".0%", lambda r: r.trainer_idle),
            )
        )
    return table(head, lines) + commands("paper", found)


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


def _targets(found: Results) -> str:
    def of(file: str, strategy: str = "dora", k: int | None = 3, *, sets: tuple[str, ...] = ()) -> Found | None:
        return next((one for case, one in found.items() if key(case) == (file, strategy, k, sets, "")), None)

    def ratio(one: Found | None) -> float | None:
        return one and median(r.ratio for r in one.results)

    def over(one: Found | None, other: Found | None) -> float | None:
        return one.step_s / other.step_s if one and other else None

    half = next((f for c, f in found.items() if c.rules == "paper" and c.split == 64), None)
    best = next((f for c, f in found.items() if c.rules == "paper" and c.split == 76), None)
    big, small = of("paper-128"), of("paper-64")
    regimes = [of("paper-64", sets=(f"lengths.regime={name}",)) for name in "ABC"]
    stale = [fmean(r.staleness_mean for r in one.results) for one in (big, small, *regimes) if one]
    judged: list[tuple[str, float | None, str, float]] = [
        ("128 GPUs, K = 3: step / limit", ratio(big), "≤", 1.03),
        ("128 GPUs, K = 3: `sync` on as many GPUs / step", over(of("paper-128", "sync", None), big), "≥", 2.3),
        ("64 GPUs, K = 3: step / limit", ratio(small), "≤", 1.05),
        ("64 GPUs, K = 1: step / limit", ratio(of("paper-64", k=1)), "≤", 1.2),
        ("128 GPUs, K = 1, 76 that roll out: step / limit", ratio(of("paper-128", k=1)), "≤", 1.2),
        *(
            (f"64 GPUs, regime {n}, K = 3: step / limit", ratio(one), "≤", 1.05)
            for n, one in zip("ABC", regimes, strict=True)
        ),
        ("128 GPUs: the paper's rules at half and half / step", over(half, big), "≥", 1.2),
        ("128 GPUs: the paper's rules on 76 / step", over(best, big), "≥", 1.2),
        ("largest mean staleness, K = 3, where the trainer rules", max(stale, default=None), "≤", 1.5),
        *((f"tail-bound, K = {k}: step / limit", ratio(of("tail-bound", k=k)), "≤", 1.1) for k in (1, 2, 3)),
        ("tail-bound, `periodic`: step / limit", ratio(of("tail-bound", "periodic", None)), "≤", 1.03),
        ("violations of C1, C2, C3 by `dora`, all of this page", float(_violations(found)), "≤", 0),
    ]
    lines = []
    for what, value, sign, bar in judged:
        if value is not None:
            reached = value <= bar if sign == "≤" else value >= bar
            text = f"{value:.0f}" if bar == 0 else f"{value:.3f}"
            lines.append((what, text, f"{sign} {bar:g}", "reached" if reached else "**missed**"))
    return table("what | found | target | result", lines)


def _violations(found: Results) -> int:
    return sum(r.violations for one in found.values() for r in one.results)


def _headline(found: Results) -> str:
    """Return how much faster `dora` is than `sync`, or nothing while one of them is not simulated."""
    texts = []
    for file, num_gpus in (("paper-128", 128), ("paper-64", 64)):
        one = next((one for case, one in found.items() if key(case) == (file, "dora", 3, (), "")), None)
        sync = sync_of(one.case, found) if one else None
        if one and sync:
            texts.append(f"**{sync.step_s / one.step_s:.2f}** times as fast as `sync` on {num_gpus} GPUs")
    return (
        "In simulation, on the job of the paper (arXiv 2604.26256: Qwen2.5-32B, 512 × 16 answers a step), `dora` with\n"
        f"K = 3 is {', and '.join(texts)}.\n"
        "`sync` is our own baseline, not another framework: it has the same answers, and uses all GPUs in turn to\n"
        f"generate and to train.{width_table.headline(found)}"
    )


def _calls(_: Results) -> str:
    return calls.table(calls.recorded())


def _calls_split(_: Results) -> str:
    return calls_split.table(calls_split.recorded())


def _paced_calls(_: Results) -> str:
    return paced_calls.table(paced_calls.recorded())


_BLOCKS: Final[dict[str, Callable[[Results], str]]] = {
    "headline": _headline,
    "limit": _limit,
    "targets": _targets,
    "tail": _tail,
    "paper": _paper,
    "width": width_table.widths,
    "physics": width_table.physics,
    "rules": _rules,
    "interrupt": _interrupt,
    "sensitivity": _sensitivity,
    "agent": _agent,
    "scale": _scale,
    "serve": serve,
    "calls": _calls,
    "calls_split": _calls_split,
    "paced_calls": _paced_calls,
}
