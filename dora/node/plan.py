"""Which processes a run needs on this host: pure, from the config and a few addresses.

Invariant: no secret is on a command line (every user of the machine can read it), and a child's environment is the
parent's without the parent's own DORA_ variables, plus what this child needs. Called by `cli`; carried out by
`supervise.py`.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from dora.config.schema import Config

_LOOPBACK_INTERFACE = "lo" if sys.platform == "linux" else "lo0"


@dataclass(frozen=True, slots=True, kw_only=True)
class ProcessPlan:
    """One process to start."""

    name: str  #: unique in the run; names its log file
    argv: tuple[str, ...]
    env: Mapping[str, str]  #: the whole environment
    ready_timeout_s: float | None  #: until it prints `ready <url>`; None: it prints no such line


def plan_engines(config: Config, *, model: Path, lease: Path, environ: Mapping[str, str]) -> list[ProcessPlan]:
    """The embedded engines, in instance order; none if the servers are external."""
    if config.engine.urls:
        return []
    env = _child_env(environ, lease=lease, threads=config.engine.threads)
    if config.engine.api_key is not None:
        env["DORA_SERVE_API_KEY"] = config.engine.api_key
    return [_engine(config, index=index, model=model, env=env) for index in range(config.engine.instances)]


def _engine(config: Config, *, index: int, model: Path, env: Mapping[str, str]) -> ProcessPlan:
    engine = config.engine
    options = {
        "--model": model,
        "--host": "127.0.0.1",
        "--port": engine.base_port + index if engine.base_port else 0,
        "--slots": engine.slots,
        "--kv-tokens": engine.kv_tokens,
        "--device": engine.device,
        "--dtype": config.trainer.publish_dtype,  # what is published is what is decoded
        "--threads": engine.threads,
    }
    flags = ("--incremental-streaming-output", "--skip-tokenizer-init")  # tokens only, each sent once
    argv = (sys.executable, "-m", "dora", "serve", *flags, *(str(x) for pair in options.items() for x in pair))
    return ProcessPlan(name=f"engine-{index}", argv=argv, env=env, ready_timeout_s=engine.start_timeout_s)


def plan_trainer(
    config: Config, *, controller: str, token: str, lease: Path, environ: Mapping[str, str]
) -> ProcessPlan | None:
    """The ranks on this host under one torchrun; None if others start them. `controller` is the address bound."""
    if config.trainer.external:
        return None
    env = _child_env(environ, lease=lease, threads=config.trainer.threads)
    env |= {"DORA_CONTROLLER": controller, "DORA_TOKEN": token}
    # All ranks are on this host: their collectives have no business on its other interfaces.
    env |= {"GLOO_SOCKET_IFNAME": _LOOPBACK_INTERFACE, "NCCL_SOCKET_IFNAME": _LOOPBACK_INTERFACE}
    torchrun = ("-m", "torch.distributed.run", "--standalone", "--local-addr", "127.0.0.1")
    ranks = ("--nproc-per-node", str(config.trainer.ranks))
    argv = (sys.executable, *torchrun, *ranks, "-m", "dora", "train")
    return ProcessPlan(name="trainer", argv=argv, env=env, ready_timeout_s=None)


def _child_env(environ: Mapping[str, str], *, lease: Path, threads: int) -> dict[str, str]:
    inherited = {key: value for key, value in environ.items() if not key.startswith("DORA_")}
    return inherited | {
        "DORA_LEASE": str(lease),
        "OMP_NUM_THREADS": str(threads),
        "PYTHONUNBUFFERED": "1",  # what a process says before it dies must be in its log
        "TOKENIZERS_PARALLELISM": "false",
    }
