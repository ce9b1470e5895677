"""Sources of task rows: files, data sets, generators and user functions with one interface.

Invariant: `row(index)` is a pure function of (config, seed, index), in any process and any order; a source has no
position. Generators are endless. All other sources are finite and are read completely when they are opened, so that
malformed lines are found before anything starts. A row of a finite source that cannot be read is a ConfigError whenever
it is asked for; it keeps its index. RunFailed if its file has gone since it was opened.
"""

from __future__ import annotations

import hashlib
import sys
from array import array
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from difflib import get_close_matches
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import msgspec

from dora import hub
from dora.errors import ConfigError, RunFailed
from dora.extras import require_extra
from dora.functions import load_function
from dora.tasks import data_sets

if TYPE_CHECKING:
    from dora.config.schema import SourceConfig

Row = Mapping[str, Any]
Split = Literal["train", "heldout"]  # splits of a generator's items; other sources use separate files or data sets

#: Seeds of items lie below 2**30 (training) or between it and 2**31 (held out), so they never overlap.
_GENERATOR_SEEDS = 2**29

#: Items per reasoning_gym data set object: the default size, which every data set accepts.
_CHUNK = 500

#: Data sets of reasoning_gym 0.1.x that depend on the order of Python sets, which changes with the hash seed.
HASH_DEPENDENT = frozenset(
    {"isomorphic_strings", "knight_swap", "polynomial_multiplication", "ransom_note", "word_ladder"}
)


@dataclass(frozen=True, slots=True)
class Source:
    """Rows by index."""

    name: str
    num_rows: int | None  # None: endless
    row: Callable[[int], Row]
    where: Callable[[int], str]  # name of a row in errors: file and line if it has them
    prompt: str  # column names; answer may be ""
    answer: str
    label: str = ""


def open_source(config: SourceConfig, *, field: str, seed: int, split: Split) -> Source:
    """Open the source that `config`, at `field` of the configuration, describes; `seed` is for this source alone."""
    return replace(_open(config, field=field, seed=seed, split=split), label=config.label)


def _open(config: SourceConfig, *, field: str, seed: int, split: Split) -> Source:
    match config.kind:
        case "arithmetic":
            return _arithmetic(config, field=field, seed=seed, split=split)
        case "reasoning_gym":
            return _reasoning_gym(config, field=field, seed=seed, split=split)
        case "seeds":
            return _seeds(config, seed=seed, split=split)
        case "jsonl":
            return _jsonl(config, field=field)
        case "parquet":
            return _parquet(config, field=field)
        case "datasets":
            return _datasets(config, field=field)
        case "function":
            return _function(config, field=field)
        case "verifiers":  # of a run, they are files by now (app/task_sets.py)
            raise ConfigError(f"{field}.kind: the tasks of verifiers are read by a run only, with its environment")


def derive_seed(*parts: object) -> int:
    """Return 128 bits that depend on `parts` alone (Python's own hash differs between processes)."""
    return int.from_bytes(hashlib.blake2b("/".join(map(str, parts)).encode(), digest_size=16).digest(), "little")


# --- generators -------------------------------------------------------------------------------------------------


def _arithmetic(config: SourceConfig, *, field: str, seed: int, split: Split) -> Source:
    from dora.tasks.arithmetic import OPTIONS, problem

    if unknown := [name for name in config.options if name not in OPTIONS]:
        raise ConfigError(f"{field}.options: unknown option {unknown[0]}; arithmetic takes {', '.join(OPTIONS)}")

    def row(index: int) -> Row:
        prompt, answer = problem(index, seed=seed, split=split, **config.options)
        return {"prompt": prompt, "answer": answer}

    try:
        row(0)
    except (TypeError, ValueError, ConfigError) as err:
        raise ConfigError(f"{field}.options: {err}") from err
    return _generator("arithmetic", row)


def _reasoning_gym(config: SourceConfig, *, field: str, seed: int, split: Split) -> Source:
    first = _first_seed(seed, split=split)
    options = msgspec.json.encode(config.options).decode()
    _check_reasoning_gym(config, field=field)

    def row(index: int) -> Row:
        item = {"dataset": config.name, "options": options, "seed": first + index // _CHUNK * _CHUNK}
        entry = reasoning_gym_dataset(**item)[index % _CHUNK]
        return {"prompt": entry["question"], "answer": entry["answer"], **item, "index": index % _CHUNK}

    try:
        row(0)
    except (TypeError, ValueError, AssertionError) as err:
        raise ConfigError(f"{field}.options: reasoning_gym '{config.name}' rejects them ({err})") from err
    return _generator(f"reasoning_gym:{config.name}", row)


def _check_reasoning_gym(config: SourceConfig, *, field: str) -> None:
    require_extra("reasoning_gym", field=f"{field}.kind")
    from reasoning_gym.factory import DATASETS

    if config.name not in DATASETS:
        close = get_close_matches(config.name, DATASETS, n=1) or sorted(DATASETS)[:1]
        raise ConfigError(f"{field}.name: reasoning_gym has no data set '{config.name}'; did you mean '{close[0]}'?")
    if {"seed", "size"} & config.options.keys():
        raise ConfigError(f"{field}.options: seed and size of a reasoning_gym data set are set by the run; remove them")
    if config.name in HASH_DEPENDENT and sys.flags.hash_randomization:
        raise ConfigError(
            f"{field}.name: reasoning_gym '{config.name}' draws from Python's set order, so its prompts would change "
            "when the run is resumed; set PYTHONHASHSEED=0 in the environment"
        )


@lru_cache(maxsize=4)  # siblings and neighbors share a chunk; some data sets take a second to set up
def reasoning_gym_dataset(dataset: str, options: str, seed: int) -> Any:
    """Return a data set of `_CHUNK` items with the seeds seed, seed + 1, ...; `options` are JSON. Graders make the same
    data set again."""
    import reasoning_gym

    return reasoning_gym.create_dataset(dataset, seed=seed, size=_CHUNK, **msgspec.json.decode(options))


def _seeds(config: SourceConfig, *, seed: int, split: Split) -> Source:
    first = _first_seed(seed, split=split)
    return replace(_generator("seeds", lambda index: {**config.options, "seed": first + index}), prompt="", answer="")


def _first_seed(seed: int, *, split: Split) -> int:
    return seed % _GENERATOR_SEEDS + (0 if split == "train" else 2 * _GENERATOR_SEEDS)


def _generator(name: str, row: Callable[[int], Row]) -> Source:
    return Source(
        name=name,
        num_rows=None,
        row=row,
        where=lambda index: f"{name} item {index}",
        prompt="prompt",
        answer="answer",
    )


# --- finite sources ---------------------------------------------------------------------------------------------


def _jsonl(config: SourceConfig, *, field: str) -> Source:
    path = _file(config, field=field)
    return _lines([path], config, field=field, name=path.name)


def _lines(paths: Sequence[Path], config: SourceConfig, *, field: str, name: str) -> Source:
    """Return the lines of files as rows, of which few may be unreadable."""
    files, offsets, lines = array("q"), array("q"), array("q")
    unreadable: list[str] = []
    for index, path in enumerate(paths):
        for offset, number, line in _numbered(path, field=field):
            unreadable += _problem(line, where=f"{path}:{number}")
            files.append(index)
            offsets.append(offset)
            lines.append(number)
    require_readable(unreadable, of=len(offsets))

    def row(index: int) -> Row:
        try:
            with paths[files[index]].open("rb") as file:
                file.seek(offsets[index])
                line = file.readline()
        except OSError as err:
            raise RunFailed(f"{where(index)}: cannot be read any more: {err.strerror}") from err
        return _decode_line(line, where=where(index))

    def where(index: int) -> str:
        return f"{paths[files[index]]}:{lines[index]}"

    return _table(config, field=field, name=name, num_rows=len(offsets), row=row, where=where)


def _numbered(path: Path, *, field: str) -> Iterator[tuple[int, int, bytes]]:
    """Yield offset, number and text of each line that is not blank."""
    offset = 0
    try:
        with path.open("rb") as file:
            for number, line in enumerate(file, start=1):
                if line.strip():
                    yield offset, number, line
                offset += len(line)
    except OSError as err:
        raise ConfigError(f"{field}.path: {path} cannot be read ({err.strerror})") from err


def _problem(line: bytes, *, where: str) -> list[str]:
    """Return what is wrong with a line, in a list; nothing if it can be read."""
    try:
        _decode_line(line, where=where)
    except ConfigError as err:
        return [str(err)]
    return []


def require_readable(unreadable: Sequence[str], *, of: int) -> None:
    """Raise ConfigError if more than one in a hundred rows cannot be read. `unreadable`: what is wrong with each."""
    if 100 * len(unreadable) > of:
        count = f"{len(unreadable):,} of {of:,} rows cannot be used; at most 1 % may be left out"
        raise ConfigError(f"{unreadable[0]} ({count})" if of > 1 else unreadable[0])


def _decode_line(line: bytes, *, where: str) -> Row:
    try:
        return msgspec.json.decode(line, type=dict[str, Any])
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as err:
        raise ConfigError(f"{where}: not a JSON object ({err}); every line must be one") from err


def _parquet(config: SourceConfig, *, field: str) -> Source:
    require_extra("pyarrow", field=f"{field}.kind")
    import pyarrow
    from pyarrow import parquet

    path = _file(config, field=field)
    try:
        table = parquet.read_table(path)
    except (pyarrow.ArrowException, OSError) as err:
        raise ConfigError(f"{field}.path: {path} is not a Parquet file ({err})") from err

    def row(index: int) -> Row:
        try:
            rows: list[Row] = table.slice(index, 1).to_pylist()
        except (pyarrow.ArrowException, ValueError, OverflowError) as err:
            raise ConfigError(f"{path} row {index}: cannot be read ({err})") from err
        return rows[0]

    return _table(
        config, field=field, name=path.name, num_rows=table.num_rows, row=row, where=lambda i: f"{path} row {i}"
    )


def _datasets(config: SourceConfig, *, field: str) -> Source:
    require_extra("datasets", field=f"{field}.kind")
    folder, names = _data_set(config, field=field)
    found = data_sets.find_split(folder, names, config, field=field)
    name = str(config.path)
    if found.has_lines and config.split in found.files:  # which `datasets` would refuse if one line were broken
        return _lines([folder / file for file in found.names], config, field=field, name=name)
    return _listed(data_sets.read_rows(folder, found, config, field=field), config, field=field, name=name)


def _data_set(config: SourceConfig, *, field: str) -> tuple[Path, Iterable[str]]:
    """Return the folder of a data set, which has the files of the split, and the paths of all its files."""
    if (repo := repository(config, field=field)) is not None:
        snapshot = hub.cached(repo)
        return snapshot.folder, snapshot.sizes
    folder = Path(str(config.path))
    if config.revision:
        raise ConfigError(f"{field}.revision: {folder} is here, and no id on the hub; remove the revision")
    if not folder.is_dir():
        instead = '; set kind to "jsonl" or "parquet" to read a file' if folder.is_file() else ""
        raise ConfigError(f"{field}.path: {folder} is neither a folder nor an id on the hub{instead}")
    return folder, data_sets.names_in(folder)


def repository(config: SourceConfig, *, field: str) -> hub.Repo | None:
    """Return the data set of the hub that a source reads; None if it reads none."""
    if config.kind != "datasets" or not hub.is_identifier(str(config.path), "dataset"):
        return None
    return hub.Repo(str(config.path), "dataset", config.revision, f"{field}.path")


def _function(config: SourceConfig, *, field: str) -> Source:
    function = load_function(config.name, field=f"{field}.name")
    try:
        rows = list(function(**config.options))
    except Exception as err:  # user code may raise anything
        raise ConfigError(f"{field}.name: {config.name} failed ({type(err).__name__}: {err})") from err
    return _listed(rows, config, field=field, name=config.name)


def _listed(rows: Sequence[Any], config: SourceConfig, *, field: str, name: str) -> Source:
    def row(index: int) -> Row:
        try:
            found = rows[index]
        except Exception as err:  # decoders of columns may raise anything
            raise ConfigError(f"{name} row {index}: cannot be read ({type(err).__name__}: {err})") from err
        if not isinstance(found, Mapping):
            raise ConfigError(f"{name} row {index}: a row must be a dict of columns, not {type(found).__name__}")
        return found

    return _table(
        config, field=field, name=name, num_rows=len(rows), row=row, where=lambda index: f"{name} row {index}"
    )


def _table(
    config: SourceConfig,
    *,
    field: str,
    name: str,
    num_rows: int,
    row: Callable[[int], Row],
    where: Callable[[int], str],
) -> Source:
    if num_rows == 0:
        raise ConfigError(f"{field}: {name} has no rows")
    return Source(
        name=name,
        num_rows=num_rows,
        row=row,
        where=where,
        prompt=config.prompt,
        answer=config.answer,
    )


def _file(config: SourceConfig, *, field: str) -> Path:
    if config.path is None:
        raise ConfigError(f"{field}.path: kind '{config.kind}' needs a file")
    if not config.path.is_file():
        is_hub = hub.is_identifier(str(config.path), "dataset")
        instead = '; for a data set of the hub, set kind to "datasets"' if is_hub else ""
        raise ConfigError(f"{field}.path: {config.path} is not a file{instead}")
    return config.path
