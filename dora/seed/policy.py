"""The locations of the shipped seed policies, small Qwen3 checkpoints made by `dora.seed.make` and `make_tools`.

Invariant: importing this module does not import torch.
"""

from __future__ import annotations

import os
from importlib.resources import files
from pathlib import Path
from typing import Final

from dora import hub
from dora.errors import ConfigError
from dora.model_files import no_model

#: Folders of the shipped policies by the names that `model.path` may have.
SHIPPED: Final = {"seed": "checkpoint", "seed-tools": "checkpoint_tools"}


def path(name: str = "seed") -> Path:
    """A complete Hugging Face folder: config, generation config, tokenizer and safetensors."""
    return Path(str(files("dora.seed") / SHIPPED[name]))


def model_folder(name: str, *, revision: str = "", field: str = "model.path") -> Path:
    """Return the folder of a model without asking the hub. `name` is a path, an id on the hub whose files are in the
    cache, or the name of a policy that is shipped with DORA."""
    if hub.is_identifier(name, "model"):
        return hub.cached(hub.Repo(name, "model", revision, field)).folder
    if revision:
        raise ConfigError(f"{field}: {name} is here, and no id on the hub, so it has no revision '{revision}'")
    if name in SHIPPED:
        return path(name)
    folder = Path(name)
    if not os.path.isfile(folder / "config.json"):  # false, too, if the folder cannot be searched
        raise ConfigError(no_model(name, field=field))
    return folder.resolve()
