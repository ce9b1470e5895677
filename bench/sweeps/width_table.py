"""The tables of docs/SIMULATION.md about servers of more GPUs, and what the headline says of them."""

from __future__ import annotations

from statistics import median

from simulation_cases import SimulationCase
from simulation_found import Found, Results, commands, rows_of, setting, staleness, sync_of, table


def widths(found: Results) -> str:
    """Each strategy on servers of two, four and eight GPUs."""
    head = (
        "GPUs a server | strategy | K | split | step s (range) | × limit | `sync` / x, as wide | "
        "fastest `sync` / x | trainer idle | staleness mean, max | violations"
    )
    rows = sorted(rows_of("width", found), key=lambda one: (_gpus(one.case), one.case.strategy != "sync", one.case.k))
    fastest = min((one.step_s for one in rows if one.case.strategy == "sync"), default=None)
    lines = []
    for one in rows:
        sync = sync_of(one.case, found)
        lines.append(
            (
                str(_gpus(one.case)),
                *setting(one)[1:],
                one.text(".4g", lambda r: r.step_s),
                f"{median(r.ratio for r in one.results):.3f}",
                f"{sync.step_s / one.step_s:.2f}" if sync else "–",
                f"{fastest / one.step_s:.2f}" if fastest else "–",
                one.mean(".1%", lambda r: r.trainer_idle),
                staleness(one),
                str(sum(r.violations for r in one.results)),
            )
        )
    return table(head, lines) + commands("width", found)


def physics(found: Results) -> str:
    """The fastest `sync` and a fast `dora` with other physics of wider servers."""
    head = (
        "fixed | efficiency | per sequence | `sync`, 8 GPUs a server: step s | "
        "`dora`, K = 3, 4 GPUs a server: step s | `sync` / `dora`"
    )
    by_label: dict[str, dict[str, Found]] = {}
    for one in rows_of("physics", found):
        by_label.setdefault(one.case.label, {})[one.case.strategy] = one
    both = {label: (of["sync"].step_s, of["dora"].step_s) for label, of in by_label.items() if len(of) == 2}
    lines = [(label, f"{sync:.4g}", f"{dora:.4g}", f"{sync / dora:.2f}") for label, (sync, dora) in both.items()]
    return table(head, lines) + commands("physics", found)


def headline(found: Results) -> str:
    """Return what becomes of the ratio on 128 GPUs if servers are as wide as suits each strategy."""
    rows = rows_of("width", found)
    by_k = {k: [one for one in rows if one.case.k == k] for k in (None, 0, 1, 3)}  # None: `sync`
    if not all(by_k.values()):
        return ""
    shipped = {k: next(one.step_s for one in of if _gpus(one.case) == 2) for k, of in by_k.items()}
    best = {k: min(of, key=lambda one: one.step_s) for k, of in by_k.items()}
    sync_s = best[None].step_s
    times = {k: f"{sync_s / one.step_s:.2f}" for k, one in best.items()}
    wide = _gpus(best[None].case)
    return (
        f"\nBoth have servers of two GPUs, which suit `sync` least. With {wide} GPUs a server `sync` takes "
        f"{sync_s:.0f} s a step on\n128 GPUs instead of {shipped[None]:,.0f}, and this `dora` is "
        f"**{sync_s / shipped[3]:.2f}** times as fast. If `dora` has servers of the best\nwidth too, it is {times[3]} "
        f"times as fast with K = 3, {times[1]} with K = 1 and {times[0]} with K = 0."
    )


def _gpus(case: SimulationCase) -> int:
    return case.workload().fleet.devices_per_instance
