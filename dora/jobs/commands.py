"""`dora check`, `dora simulate` and `dora eval` from Python: in processes of their own, with results as plain data."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

import msgspec
import tomli_w

from dora import foreign
from dora.app.evaluate import evaluation_name, run_named
from dora.config.load import dump
from dora.errors import ConfigError
from dora.jobs.rows import Rows
from dora.jobs.run import Run, reserve, start_run
from dora.jobs.settings import Source, as_overrides, configuration, plain
from dora.jobs.start import call

#: Largest file of results.
_MAX_RESULTS_BYTES: Final = 256 << 20


def check(config: Source = None, /, **settings: Any) -> Rows:
    """Do what `dora check` does and return its findings as rows with `topic` and `text`; ConfigError at a problem.

    `config` and settings are as for `run`.
    """
    made = configuration(config, settings)
    with _results() as (folder, found):
        path = folder / "config.toml"
        path.write_text(dump(made), encoding="utf-8")
        call(["check", str(path), "--json", str(found)])
        return Rows(_read(found))


def simulate(
    workload: str | os.PathLike[str] | Mapping[str, Any] | None = None,
    /,
    *,
    run: Run | str | os.PathLike[str] | None = None,
    strategy: Sequence[str] = (),
    k: Sequence[int] = (),
    split: Sequence[int] = (),
    instances: Sequence[int] = (),
    rules: Sequence[str] = (),
    seeds: int = 1,
    steps: int | None = None,
    **settings: Any,
) -> Rows:
    """Do what `dora simulate` does, for every combination of the listed values, and return a row for each.

    `workload`: a workload or configuration file, or its tables; None is a built-in example. `run`: a finished run to
    simulate instead. Settings change keys of the workload.
    """
    lists = {"--strategy": strategy, "--k": k, "--split": split, "--instances": instances, "--rules": rules}
    options = [part for option, values in lists.items() if values for part in (option, ",".join(map(str, values)))]
    options += ["--seeds", str(seeds), *(["--steps", str(steps)] if steps is not None else [])]
    options += [part for override in as_overrides(settings) for part in ("--set", override)]
    if run is not None:
        options += ["--from", str(run.folder if isinstance(run, Run) else run)]
    with _results() as (folder, found):
        if isinstance(workload, Mapping):
            path = folder / "workload.toml"
            path.write_text(tomli_w.dumps(plain(workload, key="")), encoding="utf-8")
            options.insert(0, str(path))
        elif workload is not None:
            options.insert(0, os.fspath(workload))
        call(["simulate", *options, "--json", str(found)])
        return Rows(_read(found))


def evaluate(
    config: Source = None,
    /,
    *,
    model: Run | str | os.PathLike[str] | None = None,
    urls: Sequence[str] = (),
    samples: int | None = None,
    **settings: Any,
) -> dict[str, Any]:
    """Score a model without training it, as `dora eval` does, and return the contents of its results.json, and its
    `folder`.

    `model`: a folder, a hub id, or a run, whose newest version is scored, without `config` as its own configuration
    says.
    """
    if samples is not None and samples < 1:
        raise ConfigError(f"samples: {samples} is not a number of answers; use at least 1")
    name = None if model is None else str(model.folder if isinstance(model, Run) else model)
    run = run_named(name) if name is not None and config is None else None
    made = configuration(config if run is None else run[0].config, {**settings, "run__steps": 0})
    folder = reserve(made.model_copy(update={"run": evaluation_name(made.run)}))
    options = [part for url in urls for part in ("--url", url)]
    options += ["--samples", str(samples)] if samples is not None else []
    options += ["--model", name] if name is not None else []
    if run is None:
        options.append(str(folder.config))
    else:  # the command refuses what another user has written
        options += [part for override in as_overrides(settings) for part in ("--set", override)]
    start_run(folder, ["eval", "--into", str(folder.root), *options]).wait()
    results: dict[str, Any] = _read(folder.root / "results.json")
    return {**results, "folder": folder.root}


@contextmanager
def _results() -> Iterator[tuple[Path, Path]]:
    """Make a folder for the files of a command; yield it, and the path for its results."""
    with tempfile.TemporaryDirectory(prefix="dora-") as name:
        yield Path(name), Path(name, "results.json")


def _read(path: Path) -> Any:
    try:
        return msgspec.json.decode(foreign.read(path, max_bytes=_MAX_RESULTS_BYTES))
    except FileNotFoundError:
        raise ConfigError(f"{path}: no results were written") from None
