"""`dora serve` and the hidden `dora train` and `dora send`: processes that end with their run."""

from __future__ import annotations

import gc
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from dora.cli.output import tell
from dora.engine.engines import run_sender
from dora.errors import ConfigError
from dora.node.lease import watch_lease
from dora.node.plan import SERVE_KEY


def serve(model: Path, **options: Any) -> None:
    """Serve until a signal arrives or the holder of DORA_LEASE ends."""
    watch_own_lease()
    from dora.app.fetch import fetch_model  # imports the configuration, which ranks and senders do not need
    from dora.embedded.server import ServeOptions, run_server

    api_key = os.environ.get(SERVE_KEY, "").strip() or None  # as the run reads its own
    if api_key is None:
        _require_local(options["host"])
        tell(f"{SERVE_KEY} is not set: every user of this machine can control this server")
    run_server(ServeOptions(model_path=fetch_model(str(model), tell=tell), api_key=api_key, **options))


def _require_local(host: str) -> None:
    """Raise ConfigError if other machines could reach the server, which has no key."""
    from dora.guard import is_loopback  # imports aiohttp, which ranks and senders do not need

    if host != "localhost" and not is_loopback(host):
        raise ConfigError(f"--host {host}: other machines could control a server without a key; set {SERVE_KEY}")


def train() -> None:
    """Run one trainer rank."""
    watch_own_lease()
    gc.disable()  # the imports create a million objects that stay: collecting them takes a fifth of the start
    from dora.trainer.main import main

    gc.freeze()  # exempt them from later collections too
    gc.enable()
    main()


def send() -> None:
    """Run one sender of weights, with the controller at its standard input and output."""
    watch_own_lease()
    run_sender(_score_prompt)


def _score_prompt(folder: Path, token_ids: Sequence[int]) -> list[float]:
    from dora.trainer.score import score  # transformers takes seconds to import, and few senders need it

    [logprobs] = score(folder, [token_ids], prompt_lengths=[1], temperature=1.0)
    return [float(logprob) for logprob in logprobs]


def watch_own_lease() -> None:
    """End this process when the holder of DORA_LEASE ends."""
    lease = os.environ.get("DORA_LEASE")
    if lease:
        watch_lease(Path(lease))
