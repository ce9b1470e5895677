"""`dora serve`, the hidden `dora train` and `dora send`: long-lived processes that end with their run."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from dora.engine.engines import run_sender
from dora.errors import ConfigError
from dora.node.lease import watch_lease
from dora.node.plan import SERVE_KEY
from dora.seed.policy import model_folder


def serve(model: Path, **options: Any) -> None:
    """Serve until a signal, or until the holder of DORA_LEASE is gone."""
    watch_own_lease()
    from dora.embedded.server import ServeOptions, run_server

    api_key = os.environ.get(SERVE_KEY) or None
    if api_key is None:
        _require_local(options["host"])
        sys.stderr.write(f"dora: no {SERVE_KEY} is set: every user of this machine can steer this server\n")
    run_server(ServeOptions(model_path=model_folder(str(model)), api_key=api_key, **options))


def _require_local(host: str) -> None:
    """Without a key, a server is not offered to other machines."""
    from dora.guard import is_loopback  # with aiohttp, which ranks and senders have no use for

    if host != "localhost" and not is_loopback(host):
        raise ConfigError(f"--host {host}: other machines could steer a server without a key; set {SERVE_KEY}")


def train() -> None:
    """One trainer rank."""
    watch_own_lease()
    from dora.trainer.main import main

    main()


def send() -> None:
    """One sender of weights, under the controller that holds its pipes."""
    watch_own_lease()
    run_sender(_score_prompt)


def _score_prompt(folder: Path, token_ids: Sequence[int]) -> list[float]:
    from dora.trainer.score import score  # transformers takes seconds to import, and few senders are asked

    [logprobs] = score(folder, [token_ids], prompt_lengths=[1], temperature=1.0)
    return [float(logprob) for logprob in logprobs]


def watch_own_lease() -> None:
    """End with the holder of DORA_LEASE."""
    lease = os.environ.get("DORA_LEASE")
    if lease:
        watch_lease(Path(lease))
