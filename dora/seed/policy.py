"""Where the shipped seed policy lies: a small Qwen3 checkpoint, made by `dora.seed.make`.

Invariant: importing this module loads no torch. Called by the CLI when `model.path` is `seed`.
"""

from __future__ import annotations

from importlib.resources import files
from pathlib import Path


def path() -> Path:
    """A complete Hugging Face folder: config, generation config, tokenizer and safetensors."""
    return Path(str(files("dora.seed") / "checkpoint"))
