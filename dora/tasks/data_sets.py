"""Data sets in the form of the Hugging Face hub, of which only the files of one split are here.

Invariant: the hub is not asked, no name leads out of the data set (links are followed, as in the hub's cache), and no
file is of a form that can hold Python objects. Which files belong to a split follows from the names of all files and
from the card (README.md) alone, so it is the same wherever it is computed.
"""

from __future__ import annotations

import os
import re
import tempfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from copy import copy
from dataclasses import dataclass, fields, replace
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING, Any, Final

from dora import foreign
from dora.errors import ConfigError

if TYPE_CHECKING:
    from dora.config.schema import SourceConfig

#: Files that say how the others are laid out.
CARDS: Final = ("README.md", "dataset_infos.json")
MAX_CARD_BYTES: Final = 4 * 2**20
_MAX_NAMED: Final = 8
#: Readers of the package `datasets` that take plain data; others can hold pickled objects, or need further packages.
_READERS: Final = ("json", "csv", "parquet", "arrow", "text")
_ANCHOR: Final = re.compile(r"[\s\[{,:-]&([^\s,\[\]{}]+)")
#: Fields of a builder's configuration that say what is read, not how.
_NOT_OPTIONS: Final = ("name", "version", "data_dir", "data_files", "description", "features")


@dataclass(frozen=True, slots=True)
class SplitFiles:
    """The files of a split, and how they are read."""

    files: Mapping[str, Sequence[str]]  # by split: a part of one, or a sum of several, may be asked for
    reader: str  # of the package `datasets`
    options: Mapping[str, Any]  # of the reader
    features: Any  # types of the columns; None: as found

    @property
    def names(self) -> list[str]:
        """The paths of all files, relative to the data set."""
        return [name for names in self.files.values() for name in names]

    @property
    def has_lines(self) -> bool:
        """Whether every line of every file is a row."""
        return self.reader == "json" and not self.options and all(name.endswith(".jsonl") for name in self.names)


def names_in(folder: Path) -> list[str]:
    """Return the paths of all files of a local data set, relative to it."""
    return sorted(path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file())


def find_split(folder: Path, names: Iterable[str], config: SourceConfig, *, field: str) -> SplitFiles:
    """Return what belongs to the split. `names`: the paths of all files, of which the cards must be in `folder`."""
    names, shown = [*names], f"{field}.path: {config.path}"
    if (script := f"{Path(str(config.path)).name}.py") in names:
        raise ConfigError(
            f"{shown} is made by a script of its own ({script}), which is not executed; use a data set that consists "
            f'of files or, if it has this branch, {field}.revision = "refs/convert/parquet"'
        )
    try:
        with tempfile.TemporaryDirectory(prefix="dora-") as temporary:
            outline = Path(temporary) / "outline"
            _draw(outline, folder, names)
            return _found(outline, config, shown=shown, field=field)
    except ConfigError:
        raise
    except Exception as err:  # errors of the package, of YAML and of the file system share no base class
        raise ConfigError(f"{shown}: cannot tell which files its rows are in ({type(err).__name__}: {err})") from err


def _draw(outline: Path, folder: Path, names: Sequence[str]) -> None:
    """Make an empty file for each name, and copy the cards."""
    outline.mkdir()
    for name in names:
        path = outline / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.touch()
    for name in {*CARDS}.intersection(names):
        (outline / name).write_bytes(foreign.read(folder / name, max_bytes=MAX_CARD_BYTES, follow_links=True))


def _found(outline: Path, config: SourceConfig, *, shown: str, field: str) -> SplitFiles:
    _require_own_files(outline, shown=shown)
    datasets = _package()
    subsets = datasets.get_dataset_config_names(str(outline))
    if config.subset and config.subset not in subsets:
        raise ConfigError(f"{shown} has no subset '{config.subset}'; set {field}.subset to {_one_of(subsets)}")
    try:
        builder = datasets.load_dataset_builder(str(outline), name=config.subset or None, cache_dir=str(outline.parent))
    except ValueError:
        if config.subset or len(subsets) < 2:
            raise
        raise ConfigError(f"{shown} has several subsets; set {field}.subset to {_one_of(subsets)}") from None
    home = os.path.realpath(outline)
    files = {str(split): [os.path.relpath(file, home) for file in found] for split, found in
             builder.config.data_files.items()}  # fmt: skip
    wanted = [part.partition("[")[0].strip() for part in config.split.split("+")]
    if unknown := [split for split in wanted if split not in files]:
        raise ConfigError(f"{shown} has no split '{unknown[0]}'; set {field}.split to {_one_of(sorted(files))}")
    if (reader := type(builder).__mro__[1].__module__.rpartition(".")[2]) not in _READERS:
        raise ConfigError(
            f"{shown} has files of the kind '{reader}', which are not read: some of their forms hold Python objects; "
            "write .jsonl, .csv or .parquet"
        )
    return SplitFiles(
        files={split: files[split] for split in wanted},
        reader=reader,
        options={
            option.name: value
            for option in fields(builder.config)
            if option.name not in _NOT_OPTIONS and (value := getattr(builder.config, option.name)) != option.default
        },
        features=builder.info.features,
    )


def _one_of(names: Sequence[str]) -> str:
    more = f" and {len(names) - _MAX_NAMED} more" if len(names) > _MAX_NAMED else ""
    return f"one of {', '.join(names[:_MAX_NAMED])}{more}" if len(names) > 1 else f"{names[0]}"


def _require_own_files(outline: Path, *, shown: str) -> None:
    """Raise ConfigError if the card names files elsewhere, or could be made to name very many."""
    from huggingface_hub import DatasetCard

    card = outline / CARDS[0]
    if not card.is_file():
        return
    text = card.read_text(encoding="utf-8")
    head = text.split("\n---", 1)[0] if text.startswith("---") else ""
    if any(re.search(rf"[\s\[{{,:-]\*{re.escape(name)}\b", head) for name in _ANCHOR.findall(head)):
        raise ConfigError(f"{shown}: {CARDS[0]} has YAML aliases, which are not followed")
    for config in DatasetCard.load(card).data.get("configs") or ():
        for pattern in _texts([config.get("data_files"), config.get("data_dir")]):
            if pattern.startswith(("/", "~")) or "://" in pattern or ".." in PurePosixPath(pattern).parts:
                raise ConfigError(f"{shown}: {CARDS[0]} names {pattern}, which is not a file of the data set")


def _texts(value: Any) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict | list):
        for inner in value.values() if isinstance(value, dict) else value:
            yield from _texts(inner)


def read_rows(folder: Path, found: SplitFiles, config: SourceConfig, *, field: str) -> Sequence[Any]:
    """Return the rows of the split from its files in `folder`; the package keeps a copy in its cache, as Arrow."""
    files = {split: [str(folder / name) for name in names] for split, names in found.files.items()}
    try:
        rows: Any = _package().load_dataset(
            found.reader, data_files=files, split=config.split, features=found.features, **found.options
        )
    except Exception as err:  # loader, type and disk errors share no base class
        raise ConfigError(f"{field}.path: {config.path} cannot be read ({type(err).__name__}: {_root(err)})") from err
    rows.info.features = _undecoded(rows.features)
    read: Sequence[Any] = rows
    return read


def _undecoded(feature: Any) -> Any:
    """Return types of columns under which no file is opened. An image or a sound is stored as bytes or as a path, which
    may lead anywhere: `datasets` would open it, also at an address, whenever a row is read."""
    if isinstance(feature, dict):
        undecoded = copy(feature)
        for name, inner in feature.items():
            undecoded[name] = _undecoded(inner)
        return undecoded
    if isinstance(feature, list | tuple):
        return [*map(_undecoded, feature)]
    if hasattr(feature, "feature"):  # List, LargeList
        return replace(feature, feature=_undecoded(feature.feature))
    if hasattr(feature, "decode") and type(feature).__name__ != "Json":  # which only parses
        return replace(feature, decode=False)
    return feature


def _root(err: BaseException) -> str:
    """Return the text of an error and of its cause."""
    return f"{err}; {err.__cause__}" if err.__cause__ is not None else str(err)


def _package() -> Any:
    """Import `datasets`, which takes seconds; it shows no progress, and reports no use to its makers."""
    import datasets

    datasets.config.HF_UPDATE_DOWNLOAD_COUNTS = False
    datasets.disable_progress_bars()
    datasets.logging.set_verbosity_error()
    return datasets
