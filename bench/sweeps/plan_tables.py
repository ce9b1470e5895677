"""The tables of docs/SIMULATION.md that compare strategies, each at its best plan, from bench/results/plans.jsonl."""

from __future__ import annotations

import textwrap
from collections.abc import Callable, Iterable, Mapping
from statistics import fmean, median
from typing import Final, NamedTuple

from plans import CASES, OBSTACLES, SEEDS, PlanCase, PlanRow
from simulation_found import seconds, table

from dora.sim.measure import Result
from dora.sim.report import mean_tail

#: How the documents call the jobs.
JOBS: Final = {"paper-128": "128 GPUs", "paper-64": "64 GPUs", "tail-bound": "tail-bound, 12 GPUs"}
#: Strategies that train on answers of the newest version only, with their K: the baselines of the headline.
ON_POLICY: Final = (("sync", 0), ("dora", 0))
#: What the terms of the limit are called.
TERMS: Final = {"train": "training", "decode": "decoding", "slowest": "longest answer"}


class PlanFound(NamedTuple):
    """A case with the rows of its seeds."""

    case: PlanCase
    rows: list[PlanRow]

    @property
    def step_s(self) -> float:
        """The median of the seeds."""
        return median(row.result.step_s for row in self.rows)

    def text(self, digits: str, value: Callable[[Result], float]) -> str:
        """The median of a figure with its range."""
        values = sorted(value(row.result) for row in self.rows)
        return f"{median(values):{digits}} ({values[0]:{digits}}-{values[-1]:{digits}})"

    def mean(self, digits: str, value: Callable[[Result], float]) -> str:
        """The mean of a figure over the seeds."""
        return f"{fmean(value(row.result) for row in self.rows):z{digits}}"

    @property
    def split(self) -> str:
        first = self.rows[0].result
        return f"{first.rollout_devices}/{first.devices}"


Plans = Mapping[PlanCase, PlanFound]


def found_in(rows: Iterable[PlanRow]) -> dict[PlanCase, PlanFound]:
    """Return the cases of which all seeds are simulated."""
    by_command: dict[str, dict[int, PlanRow]] = {}
    for row in rows:
        by_command.setdefault(row.command, {})[row.seed] = row
    return {
        case: PlanFound(case, [by_command[case.command][seed] for seed in range(SEEDS)])
        for case in CASES
        if len(by_command.get(case.command, ())) == SEEDS
    }


def _of(found: Plans, name: str) -> list[PlanFound]:
    return [found[case] for case in CASES if case.table == name and case in found]


def _commands(name: str, found: Plans) -> str:
    done = [f"    {case.command}" for case in CASES if case.table == name and case in found]
    left = [f"    {case.command}" for case in CASES if case.table == name and case not in found]
    return (f"\n\nEach row is the best plan of one command:\n\n{chr(10).join(done)}" if done else "") + (
        "\n\nNot searched yet:\n\n" + "\n".join(left) if left else ""
    )


def _best(
    found: Plans, file: str, wanted: Iterable[tuple[str, int]], *, sets: tuple[str, ...] = ()
) -> PlanFound | None:
    """Return the fastest of these strategies on a job, with servers of any width."""
    chosen = set(wanted)
    same = [
        one
        for case, one in found.items()
        if (case.file, case.sets) == (file, sets) and len(case.widths) > 1 and (case.strategy, case.k) in chosen
    ]
    return min(same, key=lambda one: one.step_s, default=None)


def strategies(found: Plans) -> str:
    """Each strategy at its best width, split, slots and micro-batch."""
    head = (
        "job | strategy | K | GPUs a server | split | step s (range) | × limit | bound by | best on-policy / x | "
        "trainer idle | staleness mean, max | pushes at once | violations"
    )
    lines = []
    for one in _of(found, "strategies"):
        base = _best(found, one.case.file, ON_POLICY)
        first = one.rows[0]
        lines.append(
            (
                JOBS[one.case.file],
                f"`{one.case.strategy}`",
                str(one.case.k),
                str(first.width),
                one.split,
                one.text(".4g", lambda r: r.step_s),
                f"{median(row.result.ratio for row in one.rows):.3f}",
                TERMS[first.result.limit.rule],
                f"{base.step_s / one.step_s:.2f}" if base else "–",
                one.mean(".1%", lambda r: r.trainer_idle),
                f"{one.mean('.2f', lambda r: r.staleness_mean)}, {max(row.result.staleness_max for row in one.rows)}",
                str(max(min(row.result.push_limit, row.result.instances) for row in one.rows)),
                str(sum(row.result.violations for row in one.rows)),
            )
        )
    return table(head, lines) + _commands("strategies", found)


def wider(found: Plans) -> str:
    """The claim, with wider servers slower than extrapolated."""
    head = (
        "job | added to a step of wider servers | `sync`: step s, GPUs a server | `dora` K = 0 | `dora` K = 3 | "
        "best on-policy / K = 3"
    )
    lines = []
    for file in ("paper-128", "paper-64"):
        for added in (0, 2, 4):
            sets = (f"fleet.wider_step_s={added}e-3",) if added else ()
            cells = [_best(found, file, [one], sets=sets) for one in (("sync", 0), ("dora", 0), ("dora", 3))]
            base = _best(found, file, ON_POLICY, sets=sets)
            if base is None or any(cell is None for cell in cells):
                continue
            texts = [f"{one.step_s:.4g}, {one.rows[0].width}" for one in cells if one is not None]
            fast = cells[2]
            assert fast is not None
            lines.append((JOBS[file], f"{added} ms", *texts, f"{base.step_s / fast.step_s:.2f}"))
    return table(head, lines) + _commands("wider", found)


def store(found: Plans) -> str:
    """What the store's rate costs on 128 GPUs."""
    head = "store | K | GPUs a server | split | step s (range) | × limit | pushes a step | pushes at once"
    names: dict[tuple[str, ...], str] = {
        (): "200 GB/s",
        ("fleet.store_bytes_s=50e9",): "50 GB/s",
        ("fleet.store_bytes_s=50e9", "fleet.relay=true"): "50 GB/s, servers pass versions on",
    }
    lines = []
    for sets, name in names.items():
        for k in (1, 3):
            one = _best(found, "paper-128", [("dora", k)], sets=sets)
            if one is not None:
                lines.append(
                    (
                        name,
                        str(k),
                        str(one.rows[0].width),
                        one.split,
                        one.text(".4g", lambda r: r.step_s),
                        f"{median(row.result.ratio for row in one.rows):.3f}",
                        one.mean(".0f", lambda r: r.pushes),
                        str(max(min(row.result.push_limit, row.result.instances) for row in one.rows)),
                    )
                )
    return table(head, lines) + _commands("store", found)


def tail(found: Plans) -> str:
    """Where the time between a version and that K + 1 later goes."""
    head = (
        "job | strategy | K | K + 1 steps, s | alone | in its batch | queued | push | grading | last micro-batch | "
        "batch / alone"
    )
    lines = []
    for one in _of(found, "strategies"):
        mean = mean_tail([row.result.tail for row in one.rows if row.result.tail is not None])
        if mean is None:
            continue
        parts = (mean.alone_s, mean.batch_s, mean.queue_s, mean.push_s, mean.grade_s, mean.train_s)
        lines.append(
            (
                *(JOBS[one.case.file], f"`{one.case.strategy}`", str(one.case.k), f"{sum(parts):.4g}"),
                *(seconds(part) for part in parts),
                f"{1 + mean.batch_s / mean.alone_s:.2f}",
            )
        )
    return table(head, lines)


def obstacles(found: Plans) -> str:
    """What keeps `dora` from twice the speed of the best on-policy plan on 128 GPUs."""
    head = "if | best on-policy: step s | `dora` K = 3: step s, its limit, bound by | times as fast"
    lines = []
    for name, sets in {"nothing changes": (), **OBSTACLES}.items():
        base = _best(found, "paper-128", ON_POLICY, sets=sets)
        fast = _best(found, "paper-128", [("dora", 3)], sets=sets)
        if base is not None and fast is not None:
            limit = fmean(row.result.limit.step_s for row in fast.rows)
            bound = TERMS[fast.rows[0].result.limit.rule]
            lines.append(
                (
                    name,
                    f"{base.step_s:.4g}",
                    f"{fast.step_s:.4g}, {limit:.4g}, {bound}",
                    f"{base.step_s / fast.step_s:.2f}",
                )
            )
    return table(head, lines) + _commands("obstacles", found)


def targets(found: Plans, narrow: Mapping[int, float]) -> str:
    """What was to be reached, and what is. `narrow`: K -> step seconds of the small job on servers of one GPU."""
    judged: list[tuple[str, float | None, str, float]] = []
    for k, bar in ((1, 640.0), (3, 506.0)):
        case = PlanCase("paper", "paper-128", "dora", k, widths=(2,))
        one = found.get(case)
        judged.append((f"128 GPUs, servers of two, K = {k}: step s", one.step_s if one else None, "≤", bar))
    for k, before in narrow.items():
        one = _best(found, "tail-bound", [("dora", k)])
        value = before / one.step_s if one else None
        judged.append((f"tail-bound, K = {k}: times as fast as with servers of one GPU", value, "≥", 1.15))
    for file, bar in (("paper-128", 1.4), ("paper-64", 1.2)):
        base, fast = _best(found, file, ON_POLICY), _best(found, file, [("dora", k) for k in (1, 2, 3)])
        value = base.step_s / fast.step_s if base and fast else None
        judged.append((f"{JOBS[file]}: best on-policy plan / best `dora` with K ≤ 3", value, "≥", bar))
        judged.append((f"{JOBS[file]}: the same, the goal", value, "≥", 2.0))
    lines = []
    for what, value, sign, bar in judged:
        if value is not None:
            reached = value <= bar if sign == "≤" else value >= bar
            lines.append((what, f"{value:.4g}", f"{sign} {bar:g}", "reached" if reached else "**missed**"))
    return table("what | found | target | result", lines)


def headline(found: Plans) -> str:
    """Return how much faster `dora` is than the best on-policy baseline, as far as it was searched."""
    texts: list[str] = []
    others: list[str] = []
    for file, name in (("paper-128", "128 GPUs"), ("paper-64", "64 GPUs")):
        base, fast = _best(found, file, ON_POLICY), _best(found, file, [("dora", k) for k in (1, 2, 3)])
        sync = _best(found, file, [("sync", 0)])
        if base is None or fast is None or sync is None:
            continue
        label = "periodic" if base.case.strategy == "dora" else "sync"
        texts.append(
            f"**{base.step_s / fast.step_s:.2f}** times{'' if texts else ' as fast as the best on-policy baseline'} on "
            f"{name} ({fast.step_s:.0f} s a step with K = {fast.case.k}; `{label}` takes {base.step_s:.0f})"
        )
        others.append(f"{sync.step_s / fast.step_s:.2f} times on {name}")
    text = (
        "In simulation, on the job of the paper (arXiv 2604.26256: Qwen2.5-32B, 512 × 16 answers a step), `dora` is "
        f"{', and '.join(texts)}. The baselines are `sync` and `periodic`, our own, in "
        "the same simulator; each strategy has the server width, split, slots and micro-batch that suit it best. How "
        f"fast wider servers are is extrapolated, not measured. Against `sync` alone it is {' and '.join(others)}."
    )
    return textwrap.fill(text, 110, break_on_hyphens=False) if texts else ""


def published(found: Plans) -> list[PlanFound]:
    """Return the plans with servers of two GPUs, as the paper has them."""
    return _of(found, "paper")
