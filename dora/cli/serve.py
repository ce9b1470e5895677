"""`dora serve`, the hidden `dora train` and `dora send`: long-lived processes that end with their run."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from dora.errors import ConfigError
from dora.node.lease import watch_lease


def serve(model: Path, **options: Any) -> None:
    """Serve until a signal, or until the holder of DORA_LEASE is gone."""
    watch_own_lease()
    from dora.embedded.server import ServeOptions, run_server

    folder = model_folder(str(model))
    run_server(ServeOptions(model_path=folder, api_key=os.environ.get("DORA_SERVE_API_KEY"), **options))


def train() -> None:
    """One trainer rank."""
    watch_own_lease()
    from dora.trainer.main import main

    main()


def send() -> None:
    """One sender of weights, under the controller that holds its pipes."""
    watch_own_lease()
    from dora.weights.sender import run

    run(_score_prompt)


def _score_prompt(folder: Path, token_ids: Sequence[int]) -> list[float]:
    from dora.trainer.score import score  # transformers takes seconds to import, and few senders are asked

    [logprobs] = score(folder, [token_ids], prompt_lengths=[1], temperature=1.0)
    return [float(logprob) for logprob in logprobs]


def model_folder(path: str) -> Path:
    """The folder of a model: `seed` is the policy shipped with DORA."""
    if path == "seed":
        from dora.seed.policy import path as seed_path

        return seed_path()
    folder = Path(path)
    if not (folder / "config.json").is_file():
        raise ConfigError(f"model.path: {path} is no model folder: it has no config.json; give a Hugging Face folder")
    return folder.resolve()


def watch_own_lease() -> None:
    """End with the holder of DORA_LEASE."""
    lease = os.environ.get("DORA_LEASE")
    if lease:
        watch_lease(Path(lease))
