"""Learning in simulated hours: every strategy, at its best plan, on three fleets.

Three parts, each of which goes on where it stopped. A policy is trained with `sync` in the lag harness. The answers of
its last version fix how many simulated tokens a real one stands for, so that both have the same mean. Then each
strategy gets the best plan that `dora plan` finds on its fleet, for answers from all of that training. Then the curves:
one for each strategy, fleet and seed, all of the first seed before the second. They are appended as they end.
"""

from __future__ import annotations

import gc
import hashlib
import multiprocessing
import os
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from statistics import fmean
from typing import Final

import msgspec
from result import commit, hardware

from dora.config.load import load as load_config
from dora.config.schema import Config
from dora.errors import ConfigError
from dora.sim.plan import search
from dora.sim.workload import LengthModel, Workload, load
from learning import cells
from learning.jobs import finished

CALIBRATION: Final = cells.RESULTS / "calibration.json"
PLANS: Final = cells.RESULTS / "plans.jsonl"
CURVES: Final = cells.RESULTS / "curves.jsonl"
WORKLOADS: Final = cells.ROOT / "launch" / "workloads"
STEPS: Final = 60
SEEDS: Final = 5
#: Versions whose answers plans are made for, in equal shares, and the groups of each.
PLANNED_FOR: Final = (15, 30, 45, 60)
SAMPLED: Final = 64
#: Answers of a group, as in the jobs of the paper.
SIBLINGS: Final = 16
#: Share of the prompts of the held-out set that count as hard: those with most numbers.
HARDEST: Final = 0.2


class Fleet(msgspec.Struct, frozen=True):
    """A job with its fleet, and how it is learned."""

    every: int  #: one group in `every` is sampled and trained
    rate: float  #: learning rate


#: Name of the workload -> how it is learned. The jobs of the paper make 16 updates per step.
FLEETS: Final = {"tail-bound": Fleet(1, 4.5e-5), "paper-128": Fleet(16, 7e-6), "paper-64": Fleet(16, 7e-6)}


class Setting(msgspec.Struct, frozen=True):
    """A strategy with its K."""

    strategy: str
    k: int


SETTINGS: Final = (
    Setting("sync", 0), Setting("dora", 3), Setting("periodic", 0), Setting("dora", 2), Setting("dora", 1),
    Setting("one_step_off", 1), Setting("oversample", 0), Setting("partial_bounded", 3), Setting("partial", 3),
    Setting("partial_sync", 0), Setting("dora", 4), Setting("dora", 8),
)  # fmt: skip


class Control(msgspec.Struct, frozen=True):
    """How curves are made that are compared with one another."""

    settings: tuple[Setting, ...]  #: of its curves
    faster: float = 1.0  #: times the learning rate
    overrides: tuple[str, ...] = ()  #: of the configuration
    behind: int = 0  #: versions by which weights are older than the tag of what they sample, which breaks C3
    filtered: bool = True  #: whether groups without different rewards are filtered
    surplus: float = 1.5  #: job.oversample


SYNC, DORA, OVERSAMPLE = Setting("sync", 0), Setting("dora", 3), Setting("oversample", 0)
#: Of each, a curve of the first seed on 128 GPUs of which all groups are trained.
WHOLE: Final = (DORA, Setting("periodic", 0), SYNC)
#: Whether the gain depends on the learning rate: at this one, near the best of the sweep, a policy is there in a
#: few steps. Faults of DORA are compared at it, as they matter more.
FAST: Final = "eight times the learning rate"
UNCORRECTED: Final = "no correction"
BROKEN: Final = "C3 broken by 24"
BOTH: Final = f"{BROKEN}, {UNCORRECTED}"
UNFILTERED: Final = "no filtering"
_WITHOUT: Final = ("objective.weight=none",)
#: Name -> curves of the tail-bound fleet. "" are the curves of all fleets.
CONTROLS: Final = {
    "": Control(SETTINGS),
    FAST: Control((SYNC, DORA), 8.0),
    UNCORRECTED: Control((DORA,), 8.0, _WITHOUT),
    BROKEN: Control((DORA,), 8.0, behind=24),
    BOTH: Control((DORA,), 8.0, _WITHOUT, behind=24),
    UNFILTERED: Control((SYNC, OVERSAMPLE), filtered=False, surplus=3.0),
}
#: Faults that must show, or the task could not tell: the control with its strategy, and what is right.
FAULTS: Final = (
    ((UNCORRECTED, DORA), (FAST, DORA)),
    ((BROKEN, DORA), (FAST, DORA)),
    ((BOTH, DORA), (BROKEN, DORA)),
    ((BOTH, DORA), (UNCORRECTED, DORA)),
    ((UNFILTERED, OVERSAMPLE), (UNFILTERED, SYNC)),
    (("", OVERSAMPLE), ("", SYNC)),
)


class FleetCell(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One curve."""

    fleet: str
    strategy: str
    k: int
    seed: int
    control: str = ""
    every: int = 0  #: 0: as the fleet has it


class PlanFound(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The best plan of a strategy on a fleet."""

    fleet: str
    strategy: str
    k: int
    width: int
    rollout_devices: int
    slots: int
    micro_batch_tokens: int
    step_s: float  #: with the answers of the calibration
    profile: str  #: see `profile`
    commit: str


class FleetCurve(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What one curve showed."""

    cell: FleetCell
    published_s: list[float]  #: virtual seconds at which version 0, 1, ... was published
    heldout: list[tuple[int, float]]  #: (version, mean reward)
    hardest: list[tuple[int, float]]  #: (version, mean reward of the hardest prompts)
    answer_tokens: list[float]  #: mean of each step
    staleness: list[int]
    mixed: int
    discarded: int
    filtered: int
    digest: str
    seconds: float  #: of one CPU
    profile: str  #: see `profile`
    commit: str
    machine: str


class Calibration(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Answers of a policy while `sync` trains it."""

    scale: float  #: simulated tokens per real one
    tokens: list[list[int]]  #: real tokens, by group; SAMPLED groups of each version
    rewards: list[list[float]]
    profile: str  #: of the task
    commit: str


def profile(fleet: str) -> str:
    """Return a digest of the settings of the task, and of how it is learned on a fleet."""
    given = [cells.with_objective(cells.TASKS["tail"]), FLEETS[fleet]]
    return hashlib.blake2b(msgspec.json.encode(given), digest_size=8).hexdigest()


def curve_cells() -> Iterator[FleetCell]:
    """Return all curves in the order in which they are made."""
    for seed in range(SEEDS):
        for name, control in CONTROLS.items():
            for setting in control.settings:
                yield FleetCell("tail-bound", setting.strategy, setting.k, seed, name)
    for seed in range(SEEDS):
        for fleet in ("paper-128", "paper-64"):
            for setting in SETTINGS:
                yield FleetCell(fleet, setting.strategy, setting.k, seed)
    for setting in WHOLE:
        yield FleetCell("paper-128", setting.strategy, setting.k, 0, every=1)


def run(*, processes: int, fleets: Sequence[str]) -> bool:
    """Make what is missing; return whether every curve was made."""
    wanted = [cell for cell in curve_cells() if cell.fleet in fleets]
    _require_current()
    calibration = calibrate()
    spawn = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(processes, mp_context=spawn) as pool:
        _search_plans(wanted, calibration, pool)
    with ProcessPoolExecutor(processes, mp_context=spawn) as pool:  # others: those of plans do not collect garbage
        return _make_curves(wanted, calibration, pool)


def _require_current() -> None:
    """Raise ConfigError if stored results were made with other settings."""
    task = cells.with_objective(cells.TASKS["tail"])
    rows = [(PLANS, row.profile, profile(row.fleet)) for row in cells.read(PLANS, PlanFound)]
    rows += [(CURVES, row.profile, profile(row.cell.fleet)) for row in cells.read(CURVES, FleetCurve)]
    if CALIBRATION.exists():
        rows.append((CALIBRATION, stored_calibration().profile, task))
    for path, found, expected in rows:
        if found != expected:
            raise ConfigError(f"{path}: made with other settings of the task or its fleets; move the file away")


def stored_calibration() -> Calibration:
    """Return the answers in the file."""
    return msgspec.json.decode(CALIBRATION.read_bytes(), type=Calibration)


def _search_plans(wanted: Sequence[FleetCell], calibration: Calibration, pool: ProcessPoolExecutor) -> None:
    known = {(row.fleet, row.strategy, row.k) for row in cells.read(PLANS, PlanFound)}
    missing = [kind for kind in dict.fromkeys((c.fleet, c.strategy, c.k) for c in wanted) if kind not in known]
    print(f"{len(missing)} plans are to be searched", flush=True)
    for row in finished({pool.submit(plan, kind, calibration): ", ".join(map(str, kind)) for kind in missing}):
        cells.append(PLANS, row)
        print(f"{row.fleet}, {row.strategy}, K = {row.k}: {row.step_s:.4g} s a step", flush=True)


def _make_curves(wanted: Sequence[FleetCell], calibration: Calibration, pool: ProcessPoolExecutor) -> bool:
    plans = {(row.fleet, row.strategy, row.k): row for row in cells.read(PLANS, PlanFound)}
    known = {curve.cell for curve in cells.read(CURVES, FleetCurve)}
    left = [cell for cell in wanted if cell not in known]
    print(f"{len(left)} of {len(wanted)} curves are to be made", flush=True)
    running = {
        pool.submit(curve, cell, found, calibration): name(cell)
        for cell in left
        if (found := plans.get((cell.fleet, cell.strategy, cell.k)))  # else its search has failed
    }
    number = 0
    for number, made in enumerate(finished(running), start=1):
        cells.append(CURVES, made)
        score = f"held out {made.heldout[-1][1]:.3f}, {made.seconds:.0f} s"
        print(f"{number} of {len(left)}: {name(made.cell)}: {score}", flush=True)
    return number == len(left)


def configuration(cell: FleetCell, calibration: Calibration, found: PlanFound) -> tuple[Config, Workload]:
    """Return what a curve is made of."""
    from dora.app.learn import configured

    control = CONTROLS[cell.control]
    rate = FLEETS[cell.fleet].rate * control.faster
    changes = {"filter_zero_variance": control.filtered, "oversample": control.surplus}
    workload = planned(found).with_changes(job=changes, lengths={"scale": calibration.scale})
    chosen = [f"trainer.learning_rate={rate}", *control.overrides]
    return configured(cells.TASKS["tail"], workload, chosen, seed=cell.seed)


def base(fleet: str, strategy: str, k: int) -> Workload:
    """Return the job of a fleet under a strategy; as in a run, groups without different rewards are filtered."""
    changes = {"strategy": strategy, "max_staleness": k, "steps": STEPS, "filter_zero_variance": True}
    changes["max_top_up"] = 100.0  # late groups are mostly right as a whole
    return load(WORKLOADS / f"{fleet}.toml").with_changes(job=changes)


def planned(found: PlanFound) -> Workload:
    """Return the job of a fleet with a plan."""
    wide = base(found.fleet, found.strategy, found.k).with_width(found.width)
    server = msgspec.structs.replace(wide.fleet.server, slots=found.slots)
    return wide.with_changes(
        fleet={"rollout_devices": found.rollout_devices, "server": server},
        train={"micro_batch_tokens": found.micro_batch_tokens},
    )


def calibrate() -> Calibration:
    """Return the stored answers, or make and store them."""
    if CALIBRATION.exists():
        return stored_calibration()
    with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as pool:
        tokens, rewards = pool.submit(_sample_trained).result()
    simulated = base("paper-128", "sync", 0).answers(seed=0)
    mean = fmean(length for group in range(512) for length in simulated.group(group).lengths)
    scale = mean / fmean(length for group in tokens[-SAMPLED:] for length in group)
    found = Calibration(round(scale, 1), tokens, rewards, cells.with_objective(cells.TASKS["tail"]), commit())
    CALIBRATION.write_bytes(msgspec.json.encode(found) + b"\n")
    return found


def _sample_trained() -> tuple[list[list[int]], list[list[float]]]:
    """Train with `sync` in the lag harness, with a seed of its own; return tokens and rewards of later groups."""
    os.environ["OMP_NUM_THREADS"] = "1"
    from dora.learning.learner import OneRank  # after the number of threads is set
    from learning import harness

    with OneRank():
        groups = harness.answers_while_training(_config(), versions=PLANNED_FOR, groups=SAMPLED)
    return [[len(a.tokens) for a in g.answers] for g in groups], [g.rewards for g in groups]


def _config() -> Config:
    """Return the settings of the calibration: those of the task, but as many siblings as the jobs of the paper have."""
    overrides = [f"run.seed={cells.TUNING_SEED}", f"rollout.group_size={SIBLINGS}"]
    return load_config(cells.TASKS["tail"], overrides, environ={})


def plan(kind: tuple[str, str, int], calibration: Calibration) -> PlanFound:
    """Search the plan of a strategy for the answers of the calibration."""
    gc.disable()  # no reference cycles are left behind, and collections take a fifth of the time
    fleet, strategy, k = kind
    job = base(fleet, strategy, k)
    size, scale = job.job.group_size, calibration.scale
    lengths = LengthModel(
        regime="recorded",
        cap=round(scale * _config().rollout.max_new_tokens),
        prompt_tokens=job.lengths.prompt_tokens,
        prompts=(job.lengths.prompt_tokens,) * len(calibration.tokens),
        answers=tuple(tuple(round(scale * one) for one in group[:size]) for group in calibration.tokens),
        rewards=tuple(tuple(group[:size]) for group in calibration.rewards),
    )
    best = search(msgspec.structs.replace(job, lengths=lengths), staleness=[k], most=1)[0]
    server = best.workload.fleet
    return PlanFound(
        fleet,
        strategy,
        k,
        server.devices_per_instance,
        server.rollout_devices,
        server.server.slots,
        best.workload.train.micro_batch_tokens,
        best.result.step_s,
        profile(fleet),
        commit(),
    )


def curve(cell: FleetCell, found: PlanFound, calibration: Calibration) -> FleetCurve:
    """Make one curve in this process, with one thread."""
    os.environ["OMP_NUM_THREADS"] = "1"
    from dora.app.learn import learn  # after the number of threads is set

    config, workload = configuration(cell, calibration, found)
    begun = time.process_time()
    every, behind = cell.every or FLEETS[cell.fleet].every, CONTROLS[cell.control].behind
    made = learn(workload, config, seed=cell.seed, show=_quiet, every=every, behind=behind)
    hard = hardest(config)
    scored = [point for point in made.points if point.rewards]
    return FleetCurve(
        cell,
        published_s=[round(point.at_s, 1) for point in made.points],
        heldout=[(point.version, fmean(point.rewards)) for point in scored],
        hardest=[(point.version, fmean(point.rewards[i] for i in hard)) for point in scored],
        answer_tokens=[round(tokens, 2) for tokens in made.answer_tokens],
        staleness=made.staleness,
        mixed=made.mixed,
        discarded=made.discarded,
        filtered=made.filtered,
        digest=made.digest,
        seconds=round(time.process_time() - begun, 1),
        profile=profile(cell.fleet),
        commit=commit(),
        machine=hardware(),
    )


def _quiet(line: str) -> None:
    """Show no progress of a single curve."""


def hardest(config: Config) -> list[int]:
    """Return the places of the hardest prompts in the held-out set, which are the longest."""
    from dora.app.inputs import open_inputs

    prompts = [prompt for one in open_inputs(config).evaluations.sets for prompt in one.prompts]
    by_length = sorted(range(len(prompts)), key=lambda i: (-len(prompts[i].tokens), i))
    return sorted(by_length[: round(HARDEST * len(prompts))])


def name(cell: FleetCell) -> str:
    """Return what a curve is called in the progress."""
    control = f", {cell.control}" if cell.control else ""
    return f"{cell.fleet}, {cell.strategy}, K = {cell.k}{control}, seed {cell.seed}"
