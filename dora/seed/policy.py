"""The location of the shipped seed policy, a small Qwen3 checkpoint made by `dora.seed.make`.

Invariant: importing this module does not import torch.
"""

from __future__ import annotations

from importlib.resources import files
from pathlib import Path

from dora.errors import ConfigError


def path() -> Path:
    """A complete Hugging Face folder: config, generation config, tokenizer and safetensors."""
    return Path(str(files("dora.seed") / "checkpoint"))


def model_folder(name: str) -> Path:
    """The folder of a model: `seed` is the policy shipped with DORA."""
    if name == "seed":
        return path()
    folder = Path(name)
    if not (folder / "config.json").is_file():
        raise ConfigError(
            f"model.path: {name} is not a model folder: it has no config.json; give a Hugging Face folder"
        )
    return folder.resolve()
