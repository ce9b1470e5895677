"""The configuration of a model as transformers understands it, which handles nesting and the names of older releases.

transformers is imported by `load_config` alone. Code in a model folder is never run.
"""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys
from collections.abc import Mapping
from contextlib import suppress
from functools import lru_cache
from importlib.metadata import version
from pathlib import Path
from typing import Any, Final

import msgspec

from dora import foreign
from dora.errors import ConfigError
from dora.model_files import read_config, require_sound

#: Limits on CPU time and memory of the process in which `limits_of` loads a configuration; usually it takes 1 s, 70 MB.
CHILD_S: Final = 20
CHILD_BYTES: Final = 2 * 2**30
_MAX_KEPT_BYTES: Final = 1_000
#: The setting of rotary embeddings that were extended to longer sequences.
ORIGINAL: Final = "original_max_position_embeddings"
#: The settings of the number of experts, and of how many of them a token has, in the families that transformers knows.
_EXPERTS: Final = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")
_CHOSEN: Final = ("num_experts_per_tok", "moe_topk", "moe_k")
_CHILD: Final = """
import resource, sys
folder, seconds, size = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
resource.setrlimit(resource.RLIMIT_CPU, (seconds, seconds))
resource.setrlimit(resource.RLIMIT_AS, (size, size))
sys.modules["torch"] = None  # so that transformers does not import it
from pathlib import Path
from dora.model_config import limits_json
sys.stdout.buffer.write(limits_json(Path(folder)))
"""


class Limits(msgspec.Struct, frozen=True, tag=True):
    """What a model's configuration says about the sequences it takes."""

    positions: int | None  # tokens of a sequence; None: unlimited
    dynamic_from: int | None  # tokens beyond which rotary angles depend on earlier sequences; None: never
    vocab_size: int | None  # number of embeddings; None if the configuration does not say


class _Problem(msgspec.Struct, frozen=True, tag=True):
    text: str


def is_of_experts(name: str) -> bool:
    """Return whether a parameter is of the experts between which a router chooses."""
    return ".experts." in name


def chosen_share(config: Any) -> float:
    """Return the share of these experts that a token has; 1 if the configuration does not say."""
    count = next((n for key in _EXPERTS if isinstance(n := getattr(config, key, None), int) and n > 0), 1)
    chosen = next((n for key in _CHOSEN if isinstance(n := getattr(config, key, None), int) and n > 0), count)
    return min(1.0, chosen / count)


def load_config(folder: Path, *, field: str = "model.path") -> Any:
    """Return transformers' configuration of a model folder; ConfigError if it has none that can be used."""
    require_sound(folder, field=field)
    found = read_config(folder, field=field)
    path, kind = folder / "config.json", found.get("model_type")
    if not isinstance(kind, str):
        raise ConfigError(f"{field}: {path}: model_type is {kind!r}, expected the name of a family of models")
    from transformers import CONFIG_MAPPING, AutoConfig, __version__

    if kind not in CONFIG_MAPPING:
        own_code = ", and code in the folder is never run" if "auto_map" in found else ""
        raise ConfigError(f"{field}: {path}: transformers {__version__} has no model_type {kind!r}{own_code}")
    try:
        config = AutoConfig.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
        text_config(config)
    except MemoryError:  # in the process that has a limit
        raise
    except Exception as err:  # anything that the class of a configuration raises
        raise ConfigError(f"{field}: {path} is not a configuration of a {kind}: {err}") from err
    return config


def text_config(config: Any) -> Any:
    """Return the part of a configuration that is about the language model; all of it for most models."""
    return config.get_text_config(decoder=True)


def positions(config: Any) -> int | None:
    """Return how many tokens a sequence of this model may have; None if nothing limits them."""
    found: int | None = getattr(text_config(config), "max_position_embeddings", None)
    return found


def dynamic_from(config: Any) -> int | None:
    """Return the length beyond which rotary angles depend on the sequences computed before ("dynamic"), if any.

    It is the smallest such length of all layers. transformers uses `max_position_embeddings`, other programs the
    original context.
    """
    text = text_config(config)
    limits = [
        limit
        for rope in ropes(config).values()
        if "dynamic" in str(rope["rope_type"])
        for limit in (rope.get(ORIGINAL), getattr(text, ORIGINAL, None), positions(config))
        if limit is not None
    ]
    return min(limits, default=None)


def rope_limit(config: Any) -> int | None:
    """Return the length beyond which all rotary angles of a row change (LongRoPE, arXiv 2402.13753), if any."""
    limits = [original_context(rope, config) for rope in ropes(config).values() if rope["rope_type"] == "longrope"]
    return min((limit for limit in limits if limit is not None), default=None)


def original_context(rope: Mapping[str, Any], config: Any) -> int | None:
    """Return the original context: the number of tokens for which a rotary embedding was first trained; None: unknown.

    `rope`: one of `ropes(config)`.
    """
    found = rope.get(ORIGINAL) or getattr(text_config(config), ORIGINAL, None) or positions(config)
    return None if found is None else int(found)


def ropes(config: Any) -> dict[str, Mapping[str, Any]]:
    """Return the parameters of each rotary embedding of a language model, by their place in its configuration."""
    found: dict[str, Mapping[str, Any]] = {}
    pending = [("rope_parameters", getattr(text_config(config), "rope_parameters", None))]
    while pending:
        place, rope = pending.pop()
        if isinstance(rope, Mapping):
            pending += [(f"{place}.{name}", value) for name, value in rope.items()]
            if "rope_type" in rope:
                found[place] = rope
    return found


def limits_json(folder: Path) -> bytes:
    """Return the `Limits` of a model folder, or the ConfigError, as JSON: what the child process answers."""
    try:
        config = load_config(folder)
    except ConfigError as err:
        return msgspec.json.encode(_Problem(str(err)))
    vocab_size = getattr(text_config(config), "vocab_size", None)
    return msgspec.json.encode(Limits(positions(config), dynamic_from(config), vocab_size))


def limits_of(folder: Path) -> Limits:
    """Return the limits of a sound model folder, found by a separate process, or by one in an earlier run.

    The separate process does not import torch, which would take seconds and 300 MB, and limits a hostile configuration
    to CHILD_S seconds and CHILD_BYTES. What it has found is kept in the user's cache if it depends on nothing but
    config.json and the releases.
    """
    return _limits_of(folder, (folder / "config.json").read_bytes())


@lru_cache(maxsize=8)
def _limits_of(folder: Path, config: bytes) -> Limits:
    if "configuration_files" in read_config(folder):  # transformers may read one of these instead
        return _ask_child(folder)
    releases = (f"{name} {version(name)}".encode() for name in ("dora-rl", "transformers"))
    kept = _cache() / f"{hashlib.sha256(b' '.join([*releases, config])).hexdigest()}.json"
    with suppress(OSError, foreign.ForeignFileError, msgspec.MsgspecError):
        return msgspec.json.decode(foreign.read(kept, max_bytes=_MAX_KEPT_BYTES), type=Limits)
    found = _ask_child(folder)
    with suppress(OSError):  # a home that cannot be written
        kept.parent.mkdir(parents=True, exist_ok=True)
        new = kept.with_suffix(f".{os.getpid()}")
        new.write_bytes(msgspec.json.encode(found))
        new.replace(kept)
    return found


def _cache() -> Path:
    """Return the folder for what is only kept to save time."""
    base = Path(os.environ.get("XDG_CACHE_HOME", ""))
    return (base if base.is_absolute() else Path(os.environ.get("HOME") or "/", ".cache")) / "dora" / "limits"


def _ask_child(folder: Path) -> Limits:
    answer, reason = b"", f"it took more than {CHILD_S} s of CPU time or {CHILD_BYTES / 2**30:.0f} GB"
    with suppress(subprocess.TimeoutExpired):
        child = subprocess.run(
            [sys.executable, "-c", _CHILD, str(folder), str(CHILD_S), str(CHILD_BYTES)],
            env={**os.environ, "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"},  # threads take memory at once
            stdin=subprocess.DEVNULL,
            capture_output=True,
            timeout=8 * CHILD_S,  # for a busy machine; normally the limit of CPU time acts first
            check=False,
        )
        answer = child.stdout
        said = child.stderr.decode(errors="replace").strip().rpartition("\n")[2]
        reason = said if child.returncode > 0 and said != MemoryError.__name__ else reason
    try:
        found: Limits | _Problem = msgspec.json.decode(answer, type=Limits | _Problem)
    except msgspec.DecodeError:
        raise ConfigError(f"model.path: {folder / 'config.json'} cannot be read by transformers: {reason}") from None
    if isinstance(found, _Problem):
        raise ConfigError(found.text)
    return found
