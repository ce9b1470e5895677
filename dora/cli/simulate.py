"""`dora simulate`: a workload file, a run's config or a finished run, swept and tabulated. Called by app.py."""

from __future__ import annotations

import os
import sys
import tomllib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Final

import msgspec

from dora.config.load import load as load_config
from dora.config.load import set_key
from dora.config.schema import Config
from dora.errors import ConfigError
from dora.sim.answers import cap_of
from dora.sim.measure import Result, window
from dora.sim.pictures import draw
from dora.sim.recorded import Record, read_run
from dora.sim.report import rows, table
from dora.sim.server import Server
from dora.sim.split import search
from dora.sim.sweep import Case, as_json, cases, run
from dora.sim.workload import Fleet, Job, Lengths, Train, Workload, checked
from dora.sim.workload import load as load_workload

#: A config says nothing of lengths: this regime, scaled so that the token budget cuts one answer in a hundred.
CONFIG_REGIME: Final = "A"
REGIME_P99: Final = 2_447


def simulate(
    path: Path | None,
    *,
    recorded: Path | None,
    overrides: Sequence[str],
    strategies: Sequence[str],
    staleness: Sequence[int],
    splits: Sequence[int],
    best_split: bool,
    instances: Sequence[int],
    rules: Sequence[str],
    ablate: bool,
    seeds: int,
    steps: int | None,
    json: Path | None,
    pictures: Path | None,
    processes: int | None,
) -> None:
    """Simulate every combination and print the table."""
    if instances and min(instances) < 1:
        raise ConfigError(f"--instances {min(instances)}: a fleet has at least one instance")
    if path is not None and recorded is not None:
        raise ConfigError(f"--from {recorded}: a finished run says everything; leave {path} away")
    workload, note = _from_run(recorded) if recorded is not None else _from_file(path)
    if overrides:
        workload = _with(workload, overrides)
    if steps is not None:
        workload = checked(workload.with_changes(job={"steps": steps}), origin="--steps")
    found = cases(
        workload,
        strategies=strategies,
        staleness=staleness,
        splits=splits,
        instances=instances,
        seeds=range(seeds),
        rules=rules,
        ablate=ablate,
    )
    _require_writable(json, pictures)
    sys.stdout.write(note)
    processes = processes or min(2, os.cpu_count() or 1)
    if best_split:
        found = _at_best_splits(found, processes=processes)
    results: list[Result] = []
    for result in run(found, processes=processes):
        results.append(result)
        if sys.stderr.isatty():
            sys.stderr.write(f"\r{len(results)} of {len(found)} simulations\x1b[K")
    if sys.stderr.isatty():
        sys.stderr.write("\r\x1b[K")
    made = rows(results)
    sys.stdout.write(f"{table(made)}\n")
    if pictures is not None:
        drawn = draw(made, found)
        with _writing("--pictures", pictures):
            for name, picture in drawn.items():
                (pictures / f"{name}.svg").write_text(picture, encoding="utf-8")
    if json is not None:
        with _writing("--json", json):
            json.write_bytes(as_json(results))


def _require_writable(json: Path | None, pictures: Path | None) -> None:
    """Found out before the first simulation, not after the last."""
    if pictures is not None:
        with _writing("--pictures", pictures):
            pictures.mkdir(parents=True, exist_ok=True)
    if json is not None:
        with _writing("--json", json):
            json.touch()


@contextmanager
def _writing(option: str, path: Path) -> Iterator[None]:
    try:
        yield
    except OSError as err:
        raise ConfigError(f"{option} {path}: cannot be written: {err.strerror}") from err


def _with(workload: Workload, overrides: Sequence[str]) -> Workload:
    """The workload with some of its keys changed."""
    data, origin = msgspec.to_builtins(workload), " ".join(f"--set {override}" for override in overrides)
    for override in overrides:
        set_key(data, override)
    try:
        return checked(msgspec.convert(data, Workload), origin=origin)
    except msgspec.ValidationError as err:
        raise ConfigError(f"{origin}: {err}") from err


def _at_best_splits(found: Sequence[Case], *, processes: int) -> list[Case]:
    """The same cases, each setting at the split that its first seed finds."""
    best: dict[Workload, Workload] = {}
    for workload, seed in found:
        if workload not in best and workload.is_shared:
            best[workload] = workload
        elif workload not in best:
            result = search(workload, seed=seed, processes=processes)
            sys.stdout.write(f"{result}\n")
            best[workload] = result.workload
    return [(best[workload], seed) for workload, seed in found]


def _from_run(folder: Path) -> tuple[Workload, str]:
    workload, record = read_run(folder)
    return workload, (
        f"{folder}: {len(workload.lengths.answers)} groups recorded, {workload.num_instances} instances; "
        f"the run itself took {_own_step_s(record, workload):.2f} s per step\n{_measured(workload)}\n"
    )


def _measured(workload: Workload) -> str:
    """What was read of it, and what it holds besides."""
    fleet, server, decode = workload.fleet, workload.fleet.server, workload.fleet.server.decode
    return (
        f"measured: a decoding step {1e3 * decode.base_s:.3g} ms and {1e3 * decode.per_request_s:.3g} ms a request, "
        f"prefill {1e6 * server.prefill_s_per_token:.3g} us a token, a request {1e3 * fleet.answer_s:.3g} ms besides, "
        f"a push {workload.push_s:.3g} s, training {workload.train.tokens_s_per_device:.0f} tokens/s a rank; processes "
        "that shared cores contended for them, and the prediction holds where they would as much"
    )


def _own_step_s(record: Record, workload: Workload) -> float:
    """Over the same window as a simulation's, so that the two can be compared."""
    first, last = window(len(record.trained), max_staleness=workload.rules.max_staleness)
    return (record.trained[last] - record.trained[first]) / (last - first)


def _from_file(path: Path | None) -> tuple[Workload, str]:
    if path is None:
        return Workload(), "the built-in example: regime A, 16 devices\n"
    try:
        keys = set(tomllib.loads(path.read_text(encoding="utf-8")))
    except (OSError, ValueError):
        keys = set()  # load_workload says what is wrong with it
    if not keys or keys & {"job", "lengths", "tools", "fleet", "train", "grade", "faults"}:
        workload = load_workload(path)
        return workload, f"{path}: regime {workload.lengths.regime}, {workload.fleet.devices} devices\n"
    note = (
        f"{path}: a config; lengths of regime {CONFIG_REGIME} scaled to its token budget, times of an example server\n"
    )
    return checked(_from_config(load_config(path, environ=os.environ)), origin=str(path)), note


def _from_config(config: Config) -> Workload:
    """What a config says; nobody has measured its lengths and rates (`--from` does)."""
    rollout, engine, trainer = config.rollout, config.engine, config.trainer
    scale = min(1.0, rollout.max_new_tokens / REGIME_P99)
    return Workload(
        job=Job(
            strategy=rollout.strategy,
            max_staleness=rollout.max_staleness,
            pause=rollout.pause,
            oversample=rollout.oversample,
            steps=config.run.steps,
            groups_per_step=rollout.groups_per_step,
            group_size=rollout.group_size,
            filter_zero_variance=rollout.filter_zero_variance,
            rules=rollout.rules,
            without=rollout.without,
            refill=rollout.refill,
        ),
        lengths=Lengths(
            regime=CONFIG_REGIME,
            cap=min(rollout.max_new_tokens, cap_of(CONFIG_REGIME)),
            scale=scale,
            prompt_tokens=config.task.max_prompt_tokens,
        ),
        fleet=Fleet(
            devices=config.num_instances * engine.tensor_parallel + trainer.ranks,
            rollout_devices=config.num_instances * engine.tensor_parallel,
            devices_per_instance=engine.tensor_parallel,
            server=Server(slots=engine.slots, kv_tokens=engine.kv_tokens),
            parallel_pushes=engine.max_parallel_pushes,
        ),
        train=Train(micro_batch_tokens=trainer.micro_batch_tokens),
    )
