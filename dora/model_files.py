"""The files of a model folder, which others may have made: checked once, before anything in it is used.

Invariant: nothing outside the folder is read, and opening a file of it neither waits nor takes more memory than its
kind needs. A link must lead to a file in the folder or, as in the caches of model hubs, from `snapshots/<revision>` to
`blobs` beside it.
"""

from __future__ import annotations

import json
import os
import struct
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, Final, NamedTuple

import msgspec

from dora import foreign
from dora.errors import ConfigError
from dora.foreign import ForeignFileError

_MB: Final = 2**20
#: Largest file, by the end of its name. JSON of other kinds takes up to 20 times its size when it is parsed.
_MAX_BYTES: Final[Mapping[str, int]] = {
    ".safetensors.index.json": 32 * _MB,
    "onfig.json": 4 * _MB,  # config.json, tokenizer_config.json, generation_config.json
    ".json": 64 * _MB,  # the largest tokenizer.json have 40 MB
    ".jinja": 4 * _MB,
    ".txt": 64 * _MB,
    ".model": 64 * _MB,
}
#: Largest size of all small files of a model together.
MAX_SMALL_BYTES: Final = 256 * _MB
_MAX_HEADER: Final = 32 * _MB  # header of a safetensors file; 94,000 experts stored one by one take 14 MB
#: The deepest models have some hundred layers; a configuration has a list with an entry for each.
_MAX_LAYERS: Final = 10_000
_LAYERS: Final = ("layer", "layers", "depth", "blocks")


class ModelFolders(NamedTuple):
    """The folders with weights that a run reads."""

    model: Path
    reference: Path | None  # the reference policy; None: version 0
    adapter: Path | None  # that version 0 has; None: none


class _Index(msgspec.Struct, frozen=True):
    weight_map: dict[str, str]


def require_sound(folder: Path, *, field: str = "model.path") -> None:
    """Raise ConfigError unless the folder has a model, and `require_files` accepts its files."""
    if not (folder / "config.json").exists():
        raise ConfigError(no_model(str(folder), field=field))
    if (folder / "adapter_config.json").exists():
        raise ConfigError(f"{field}: {folder} is an adapter of another model; merge it into that model first")
    require_files(folder, field=field)
    indexed_files(folder, field=field)


def require_files(folder: Path, *, field: str) -> None:
    """Raise ConfigError unless each file that may be read is a regular file in the folder, of bounded size."""
    home = Path(os.path.realpath(folder))
    within = (home, home.parent.parent / "blobs") if home.parent.name == "snapshots" else (home,)
    for path in sorted(folder.iterdir()):
        if path.is_symlink() and not any(Path(os.path.realpath(path)).is_relative_to(root) for root in within):
            raise ConfigError(f"{field}: {path} is a link that leads out of the folder; put the file itself there")
        if path.name.endswith((*_MAX_BYTES, ".safetensors")):
            try:
                _require_file(path)
            except (ForeignFileError, OSError) as err:
                raise ConfigError(f"{field}: {err}") from err


def is_small(name: str) -> bool:
    """Return whether a file at the top of a model is one of its configuration, tokenizer or index."""
    is_other_index = name.endswith(".index.json") and not name.endswith(".safetensors.index.json")
    return "/" not in name and name.endswith((".json", ".jinja", ".txt", ".model")) and not is_other_index


def used_names(folder: Path, names: Iterable[str], *, field: str = "model.path") -> list[str]:
    """Return those files of a model that are read, of all its files. The small ones must be in `folder`."""
    top = [name for name in names if "/" not in name]
    weights = {path.name for path in indexed_files(folder, field=field).values()}
    weights = weights or {"model.safetensors"}.intersection(top) or {n for n in top if n.endswith(".safetensors")}
    return sorted({*filter(is_small, top), *weights})


def no_model(name: str, *, field: str = "model.path") -> str:
    """Return the error for a path that leads to no model folder."""
    instead = "" if os.path.exists(name) else ", or an id on the hub, such as Qwen/Qwen3-0.6B"
    return f"{field}: {name} has no config.json; give a Hugging Face model folder{instead}"


def _require_file(path: Path) -> None:
    with foreign.open_regular(path, follow_links=True) as file:
        size = os.fstat(file.fileno()).st_size
        limit = next((limit for end, limit in _MAX_BYTES.items() if path.name.endswith(end)), None)
        if limit is not None:
            if size > limit:
                raise ForeignFileError(f"{path}: has {size:,} bytes, expected at most {limit:,}; it was not read")
            return
        start = file.read(8)
        length = struct.unpack("<Q", start)[0] if len(start) == 8 else 0
        if not 2 <= length <= min(size - 8, _MAX_HEADER):
            raise ForeignFileError(f"{path}: is not a safetensors file, or is truncated; it was not read")


def read_config(folder: Path, *, field: str = "model.path") -> dict[str, Any]:
    """Return the config.json of a sound folder; ConfigError if it is not a JSON object, or has too many layers."""
    path = folder / "config.json"
    try:
        found = json.loads(foreign.read(path, max_bytes=_MAX_BYTES["onfig.json"], follow_links=True))
    except (ValueError, RecursionError) as err:
        raise ConfigError(f"{field}: {path} is not JSON ({err})") from err
    except (ForeignFileError, OSError) as err:
        raise ConfigError(f"{field}: {err}") from err
    if not isinstance(found, dict):
        raise ConfigError(f"{field}: {path} must contain a JSON object")
    for key, value in _numbers(found):
        if key.endswith(_LAYERS) and value > _MAX_LAYERS:
            shown = f"{value:.0f}" if abs(value) < 1e18 else "huge"  # an integer may fit no float
            raise ConfigError(f"{field}: {path}: {key} is {shown}; no model has more than {_MAX_LAYERS:,} layers")
    return found


def _numbers(found: Mapping[str, Any]) -> Iterator[tuple[str, float]]:
    """Yield the numbers of an object and of the objects in it, with their keys."""
    pending = [found]
    while pending:
        for key, value in pending.pop().items():
            if isinstance(value, dict):
                pending.append(value)
            elif isinstance(value, int | float):
                yield key, value


def indexed_files(folder: Path, *, field: str = "model.path") -> dict[str, Path]:
    """Return the file of each tensor, by the tensor's name, from the index of the folder; empty if it has no index."""
    path = folder / "model.safetensors.index.json"
    if not path.is_file():
        return {}
    try:
        index = msgspec.json.decode(path.read_bytes(), type=_Index)
    except (msgspec.MsgspecError, ValueError, RecursionError) as err:
        raise ConfigError(f"{field}: {path} is not an index of safetensors files ({err})") from err
    for file in set(index.weight_map.values()):
        if Path(file).name != file or not file.endswith(".safetensors"):
            raise ConfigError(f"{field}: {path} names {file!r}, which is not a safetensors file in its folder")
    return {name: folder / file for name, file in index.weight_map.items()}
