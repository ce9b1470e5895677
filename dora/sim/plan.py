"""The search for the best plan: how wide the servers are, the split, K, slots and micro-batches, on given devices, and
whether an adapter is served or merged into the weights.

The limit of every split (dora/sim/limit.py) is cheap and says where to begin; the rest is short simulations. For each
K, each width begins where the limit is smallest, with some time added for decoding in batches that are not full,
unless its limit is above what another width has reached.
Widths that come close to the best then move to better splits at halving distances, as the step time is not smooth in
the number of servers. The best plan of all tries other slots and micro-batches; the best ones are simulated for longer.

A larger K is never slower by more than the noise, so K is a range of the caller's: what staleness it accepts. Served
and merged adapters are searched apart, so that both are seen at their best plans.
"""

from __future__ import annotations

import multiprocessing
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import count
from typing import Final

import msgspec

from dora.errors import ConfigError, RunFailed
from dora.sim.limit import Limit, limits
from dora.sim.measure import Result
from dora.sim.sweep import Case, simulate
from dora.sim.workload import AdapterUse, Workload, checked

#: Steps that a simulation measures between its warm-up and its run-out: of the search, and of its results.
MEASURED_STEPS: Final = 8
FINAL_STEPS: Final = 20
#: Splits of a width, at most: a fleet of thousands has no more, as closer ones are not told apart.
SPLITS: Final = 64
#: The first distance between two splits is their number over this number; it is halved down to 1.
COARSEST: Final = 16
#: Time of decoding over its bound, which assumes full batches, at the split where a search begins.
UNFILLED: Final = 1.2
#: Plans that are so much slower than the best of the same K move no further.
CLOSE: Final = 1.08
#: Other slots and micro-batches must be so much faster; less is noise.
WORTH: Final = 1.02
#: Number of plans that a search returns, unless it is told.
BEST: Final = 3

#: Simulates workloads; a run that fails has no result.
Simulate = Callable[[Sequence[Workload]], list[Result | None]]
Progress = Callable[[int], object]


class SimulatedPlan(msgspec.Struct, frozen=True):
    """A plan and its simulation."""

    workload: Workload
    result: Result

    @property
    def key(self) -> tuple[int, int, AdapterUse]:
        """K, the width, and what becomes of an adapter: a search returns one plan of each."""
        return self.result.max_staleness, self.workload.fleet.devices_per_instance, self.workload.adapters.use


def search(
    workload: Workload,
    *,
    staleness: Sequence[int],
    widths: Sequence[int] = (),
    uses: Sequence[AdapterUse] = (),
    why_not: Callable[[Workload], str] = lambda _: "",
    seed: int = 0,
    most: int = BEST,
    processes: int = 1,
    progress: Progress = lambda _: None,
) -> list[SimulatedPlan]:
    """Return the best plan of each K and width, fastest first, at most `most` of them and the best of each of `uses`;
    the workload's own K, width and split are ignored. Without `widths`, those of the workload are tried. Without
    `uses`, an adapter is both served and merged.

    `why_not` says why a plan is impossible as far as the workload does not say it, or ""; `progress` is told the number
    of simulations so far. ConfigError if no plan is possible.
    """
    spaces: list[_Space] = []
    problems: list[str] = []
    for use in uses or uses_of(workload):
        one = workload.with_changes(adapters={"use": use})
        some, refused = _spaces(one, staleness=staleness, widths=widths, why_not=why_not, seed=seed)
        spaces += some
        problems += refused
    if not spaces:
        raise ConfigError(f"fleet.devices: no plan for {workload.fleet.devices} devices is possible", *problems)
    with _simulations(processes, seed=seed, progress=progress) as run:
        for alike in dict.fromkeys(space.alike for space in spaces):
            _search_splits([space for space in spaces if space.alike == alike], run)
        ranked = sorted((space.best for space in spaces if space.tried), key=lambda plan: plan.result.step_s)
        if not ranked:
            raise RunFailed("every simulation of a plan failed: the job cannot end with these lengths and faults")
        firsts = {plan.workload.adapters.use: plan for plan in reversed(ranked)}
        best = [plan for place, plan in enumerate(ranked) if place < most or plan in firsts.values()]
        best = [_search_sizes(plan, run, why_not=why_not) if plan in firsts.values() else plan for plan in best]
        longer = [shortened(plan.workload, steps=FINAL_STEPS) for plan in best]
        final = [SimulatedPlan(plan.workload, r) for plan, r in zip(best, run(longer), strict=True) if r is not None]
    return sorted(final, key=lambda plan: plan.result.step_s)


@dataclass(slots=True)
class _Space:
    """All splits of one K and width."""

    splits: list[Workload]  #: by rollout devices
    limits: list[Limit]
    tried: dict[int, SimulatedPlan] = field(default_factory=dict)  #: simulated, by place in `splits`

    @property
    def alike(self) -> tuple[int, AdapterUse]:
        """K and what becomes of an adapter: the widths of these are compared as they are searched."""
        return self.splits[0].rules.max_staleness, self.splits[0].adapters.use

    @property
    def start(self) -> int:
        """The split with the smallest limit if decoding takes longer than its bound, as it does."""
        terms = [(max(limit.step_s, UNFILLED * limit.decode_s), limit.train_s) for limit in self.limits]
        return terms.index(min(terms))

    @property
    def bound_s(self) -> float:
        """The smallest limit."""
        return min(limit.step_s for limit in self.limits)

    @property
    def place(self) -> int:
        """The place of the fastest split simulated."""
        return min(self.tried, key=lambda i: self.tried[i].result.step_s)

    @property
    def best(self) -> SimulatedPlan:
        return self.tried[self.place]

    def near(self, distance: int) -> list[int]:
        """Return the places at this distance from the fastest that were not simulated and may be faster."""
        places = [self.place - distance, self.place + distance]
        reached = self.best.result.step_s
        return [
            i for i in places if 0 <= i < len(self.splits) and i not in self.tried and self.limits[i].step_s < reached
        ]


def _spaces(
    workload: Workload,
    *,
    staleness: Sequence[int],
    widths: Sequence[int],
    why_not: Callable[[Workload], str],
    seed: int,
) -> tuple[list[_Space], list[str]]:
    """Return the possible plans of each K and width, and why others are impossible."""
    spaces, problems = [], []
    for k in sorted({workload.with_changes(job={"max_staleness": k}).rules.max_staleness for k in staleness}):
        for width in widths or workload.fleet.widths:
            splits: list[Workload] = []
            origin = f"K = {k}, {width} devices a server{', merged' if workload.adapters.use == 'merged' else ''}"
            try:
                one = workload.with_changes(job={"max_staleness": k}).with_width(width)
                splits, problem = splits_of(one, why_not=why_not, origin=origin)
            except ConfigError as err:
                problem = f"{origin}: {err}"
            if splits:
                spaces.append(_Space(splits, limits([shortened(split) for split in splits], seed=seed)))
            else:
                problems += problem.split("\n")
    return spaces, problems


def uses_of(workload: Workload) -> tuple[AdapterUse, ...]:
    """Return what may become of the adapter of a job; servers of adapters do not update weights under requests."""
    if workload.adapters.use == "none":
        return ("none",)
    return ("merged",) if workload.rules.in_flight is not None else ("served", "merged")


def splits_of(
    workload: Workload, *, origin: str, why_not: Callable[[Workload], str] = lambda _: ""
) -> tuple[list[Workload], str]:
    """Return the workload at its possible splits, at most SPLITS of them in equal distances, or why there is none."""
    fleet, problem = workload.fleet, f"{origin}: there are too few devices"
    last = fleet.devices - workload.train.devices_per_rank
    sizes = [fleet.rollout_devices] if workload.is_shared else _sizes(last, fleet.devices_per_instance)
    found = []
    for size in sizes:
        split = workload.with_changes(fleet={"rollout_devices": size})
        try:
            checked(split, origin=origin)
        except ConfigError as err:
            problem = str(err)
            continue
        if reason := why_not(split):
            problem = f"{origin}: {reason}"
        else:
            found.append(split)
    return found, problem


def _sizes(last: int, width: int) -> range:
    """Return numbers of rollout devices up to `last`, in whole servers."""
    return range(0, last + 1, width * max(1, -(-last // (width * SPLITS))))


def _search_splits(spaces: Sequence[_Space], run: Simulate) -> None:
    """Simulate splits of all widths of one K."""
    for space in sorted(spaces, key=lambda space: space.bound_s):
        reached = min((s.best.result.step_s for s in spaces if s.tried), default=float("inf"))
        if space.bound_s < reached:
            _try([(space, space.start)], run)
    tried = [space for space in spaces if space.tried]
    distances = {id(space): max(1, len(space.splits) // COARSEST) for space in tried}
    while True:
        reached = min(space.best.result.step_s for space in tried)
        moving = [s for s in tried if s.best.result.step_s <= CLOSE * reached and distances[id(s)]]
        if not moving:
            return
        before = {id(space): space.place for space in moving}
        _try([(space, i) for space in moving for i in space.near(distances[id(space)])], run)
        for space in moving:
            if space.place == before[id(space)]:
                distances[id(space)] //= 2


def _try(wanted: Sequence[tuple[_Space, int]], run: Simulate) -> None:
    results = run([shortened(space.splits[i]) for space, i in wanted])
    for (space, i), result in zip(wanted, results, strict=True):
        if result is not None:
            space.tried[i] = SimulatedPlan(space.splits[i], result)


def _search_sizes(plan: SimulatedPlan, run: Simulate, *, why_not: Callable[[Workload], str]) -> SimulatedPlan:
    """Return the plan with half or twice the slots and the micro-batch, where that is worth it."""
    server, train = plan.workload.fleet.server, plan.workload.train
    changed = []
    for half in (1, 4):
        slots = msgspec.structs.replace(server, slots=max(1, server.slots * half // 2))
        changed.append(plan.workload.with_changes(fleet={"server": slots}))
        tokens = max(1, train.micro_batch_tokens * half // 2)
        changed.append(plan.workload.with_changes(train={"micro_batch_tokens": tokens}))
    changed = [workload for workload in changed if not why_not(workload)]
    results = run([shortened(workload) for workload in changed])
    found = [SimulatedPlan(workload, r) for workload, r in zip(changed, results, strict=True) if r is not None]
    fastest = min(found, key=lambda other: other.result.step_s, default=plan)
    return fastest if WORTH * fastest.result.step_s < plan.result.step_s else plan


def shortened(workload: Workload, *, steps: int = MEASURED_STEPS) -> Workload:
    """Return the workload with as many steps as its steady state needs for `steps` of them to be measured."""
    return workload.with_changes(job={"steps": 3 * (workload.rules.max_staleness + 1) + steps})


@contextmanager
def _simulations(processes: int, *, seed: int, progress: Progress) -> Iterator[Simulate]:
    done = count(1)

    def told(result: Result | None) -> Result | None:
        progress(next(done))
        return result

    if processes == 1:
        yield lambda workloads: [told(_attempt((workload, seed))) for workload in workloads]
        return
    with ProcessPoolExecutor(processes, mp_context=multiprocessing.get_context("spawn")) as pool:
        yield lambda workloads: [told(r) for r in pool.map(_attempt, [(workload, seed) for workload in workloads])]


def _attempt(case: Case) -> Result | None:
    try:
        return simulate(case)
    except RunFailed:
        return None
