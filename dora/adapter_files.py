"""The folder of an adapter as peft writes it, which others may have made: checked before anything in it is used.

Invariant: an adapter is accepted only if the trainer's own (dora/trainer/adapters.py) can be the same. Nothing outside
the folder is read, and opening a file of it neither waits nor takes more memory than its kind needs.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
from collections.abc import Collection
from pathlib import Path
from typing import Annotated, Any, Final, Literal

import msgspec

from dora import foreign
from dora.errors import ConfigError
from dora.foreign import ForeignFileError
from dora.model_files import require_files

CONFIG: Final = "adapter_config.json"
WEIGHTS: Final = "adapter_model.safetensors"
#: Beside the adapter of a version: see `Proof`.
PROOF: Final = "proof.json"
FIELD: Final = "model.adapter"
#: What peft puts before the names of matrices.
PREFIX: Final = "base_model.model."

#: Settings of peft that an adapter cannot have here, and why.
UNSUPPORTED: Final = {
    "use_dora": "servers have no magnitudes beside the two matrices of an adapter",
    "modules_to_save": "servers take no whole modules with an adapter",
    "bias": "servers take no biases with an adapter",
    "lora_bias": "servers take no biases with an adapter",
    "rank_pattern": "servers know one rank for all of an adapter",
    "alpha_pattern": "servers know one alpha for all of an adapter",
    "layers_to_transform": "the targets of all layers are adapted",
    "layers_pattern": "the targets of all layers are adapted",
    "exclude_modules": "all modules with the name of a target are adapted",
    "target_parameters": "only linear modules are adapted",
    "trainable_token_indices": "embeddings are not adapted",
    "layer_replication": "it changes the layers of the model",
}
#: Settings of peft without effect on what a finished adapter computes, or that are read.
_KNOWN: Final = frozenset(
    {
        "peft_type", "r", "lora_alpha", "use_rslora", "target_modules", "init_lora_weights", "task_type",
        "auto_mapping", "peft_version", "base_model_name_or_path", "revision", "inference_mode", "lora_dropout",
        "fan_in_fan_out", "megatron_core", "qalora_group_size", "eva_config", "runtime_config", "ensure_weight_tying",
    }
)  # fmt: skip
#: Ways to begin an adapter that leave the weights of the model as they are.
_BEGINNINGS: Final = (True, False, None, "gaussian", "orthogonal", "eva")
_MAX_CONFIG_BYTES: Final = 1 << 20
#: Relative difference of equal scales that were computed differently.
_ROUNDING: Final = 1e-9


class AdapterConfig(msgspec.Struct, frozen=True):
    """What is read of adapter_config.json, with the defaults of peft. `target_modules` is a list."""

    peft_type: str
    r: Annotated[int, msgspec.Meta(ge=1, le=1 << 16)]
    lora_alpha: Annotated[float, msgspec.Meta(gt=0.0, lt=1e9)]
    target_modules: list[str] | str
    use_rslora: bool = False
    init_lora_weights: bool | str | None = True


class Proof(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What the trainer computes under an adapter: a server that computes the same for a request has this adapter."""

    dtype: Literal["float32", "bfloat16"]  # the coarser one of trainer and servers
    token_ids: Annotated[list[int], msgspec.Meta(min_length=2, max_length=1024)]
    logprobs: list[float]  # of all tokens but the first


def read_proof(folder: Path) -> Proof:
    """Return the proof in an adapter's folder; ConfigError if there is none, or if it is damaged."""
    path = folder / PROOF
    try:
        return msgspec.json.decode(foreign.read(path, max_bytes=_MAX_CONFIG_BYTES), type=Proof)
    except (ForeignFileError, OSError, msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as err:
        raise ConfigError(f"{path}: cannot tell which adapter a server has ({err})") from err


def adapter_folder(name: str, *, field: str = FIELD) -> Path:
    """Return the folder of an adapter; ConfigError if it has none. Ids on the hub are not supported.

    `field`: the setting that has the name, for the message.
    """
    folder = Path(name)
    if not os.path.isfile(folder / CONFIG):  # false, too, if the folder cannot be searched
        raise ConfigError(
            f"{field}: {name} has no {CONFIG}; give the folder of an adapter, as dora export --adapter writes it"
        )
    return folder.resolve()


def require_adapter(folder: Path, *, rank: int, alpha: float, rslora: bool, targets: Collection[str]) -> None:
    """Raise ConfigError unless the folder has an adapter of these `trainer.lora`, one line for each difference."""
    found = read_adapter(folder)
    of = f"{FIELD} {folder}"
    problems = []
    if found.r != rank:
        problems.append(f"trainer.lora.rank: {of} has rank {found.r}; set it to {found.r}")
    scale = found.lora_alpha / _divisor(found.r, rslora=found.use_rslora)
    wanted = scale * _divisor(found.r, rslora=rslora)  # servers scale by alpha / rank, so a folder may have that
    if not math.isclose(alpha, wanted, rel_tol=_ROUNDING):
        how = "with" if rslora else "without"
        problems.append(
            f"trainer.lora.alpha: {of} scales its product by {scale:.12g}; set it to {wanted:.12g} ({how} rslora)"
        )
    if {*found.target_modules} != {*targets}:
        names = json.dumps(sorted({*found.target_modules}))
        problems.append(f"trainer.lora.targets: {of} adapts other modules; set it to {names}")
    if problems:
        raise ConfigError(*problems)


def stored_name(weight: str, part: Literal["A", "B"]) -> str:
    """Return peft's name of a matrix of an adapted weight."""
    return f"{PREFIX}{weight.removesuffix('.weight')}.lora_{part}.weight"


def adapter_digest(folder: Path) -> str:
    """Return a digest of an adapter: of its two files."""
    digest = hashlib.blake2b(digest_size=16)
    for name in (CONFIG, WEIGHTS):
        with foreign.open_regular(folder / name, follow_links=True) as file:
            digest.update(hashlib.file_digest(file, "blake2b").digest())
    return digest.hexdigest()


def _divisor(rank: int, *, rslora: bool) -> float:
    return math.sqrt(rank) if rslora else rank


def read_adapter(folder: Path, *, field: str = FIELD) -> AdapterConfig:
    """Return the configuration of an adapter; ConfigError if the folder is not one, or has what is not supported.

    `field`: the setting that has the folder, for the message.
    """
    if not (folder / WEIGHTS).exists():
        raise ConfigError(f"{field}: {folder} has no {WEIGHTS}, the only form of its values that is read")
    require_files(folder, field=field)
    path = folder / CONFIG
    try:
        settings = msgspec.json.decode(foreign.read(path, max_bytes=_MAX_CONFIG_BYTES, follow_links=True), type=dict)
        found = msgspec.convert(settings, AdapterConfig)
    except (ForeignFileError, OSError) as err:
        raise ConfigError(f"{field}: {err}") from err
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as err:
        raise ConfigError(f"{field}: {path} is not the configuration of an adapter ({err})") from err
    if found.peft_type != "LORA":
        raise ConfigError(f"{field}: {path} has peft_type {found.peft_type[:40]!r}; expected LORA")
    if isinstance(found.target_modules, str):
        raise ConfigError(
            f"{field}: {path} has target_modules {found.target_modules[:40]!r}, an expression; list the names of the "
            "modules in its place"
        )
    if found.init_lora_weights not in _BEGINNINGS:
        raise ConfigError(
            f"{field}: {path} has init_lora_weights {str(found.init_lora_weights)[:40]!r}, which changes the weights "
            "of the model too; convert it, as peft does with path_initial_model_for_weight_conversion"
        )
    for key, value in settings.items():
        if key not in _KNOWN and value and (key, value) != ("bias", "none"):
            raise ConfigError(f"{field}: {path} has {key[:40]!r}: {_reason(key)}")
    return found


def _reason(key: Any) -> str:
    if key in UNSUPPORTED:
        return f"not supported, because {UNSUPPORTED[key]}"
    return "not known here, so what it changes would be lost; remove it if the adapter does not depend on it"
