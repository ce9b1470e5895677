"""A check, before anything starts, that this host has the CUDA devices that a run needs.

The devices are counted in a separate process, because torch takes seconds to import and the controller does not need
it. Custom commands (`engine.command`, `trainer.command`) may use another torch, so they are not checked.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Mapping

from dora.config.schema import Config
from dora.errors import ConfigError
from dora.node.plan import assign_gpus

_COUNT = "import torch; print(torch.cuda.device_count() if torch.cuda.is_available() else 0)"


def require_cuda(config: Config, *, environ: Mapping[str, str]) -> None:
    """ConfigError, naming the setting, if torch cannot use the CUDA devices that this run needs."""
    ranks, engines = _ranks(config), _engine_devices(config, environ=environ)
    if not ranks and not engines:
        return
    found = num_devices(environ)
    if ranks > found:
        raise ConfigError(
            f"trainer.device: {ranks} ranks need a CUDA device each, but torch can use {found} here; "
            f"{'lower trainer.ranks, or ' if found else ''}set it to cpu"
        )
    if engines > found:
        raise ConfigError(
            f"engine.device: the instances need {engines} CUDA devices (after those of the trainer), but torch can use "
            f"{found} here; {'start fewer instances, or ' if found else ''}set it to cpu"
        )


def _ranks(config: Config) -> int:
    trainer = config.trainer
    is_checked = trainer.device == "cuda" and not config.num_training_nodes and not trainer.command
    return config.num_ranks if is_checked else 0


def _engine_devices(config: Config, *, environ: Mapping[str, str]) -> int:
    """Return the highest device index of any instance plus 1; instances without devices of their own share device 0."""
    if config.engine.device == "cpu" or config.engine.command or config.nodes.expected or not config.num_managed:
        return 0
    visible = environ.get("CUDA_VISIBLE_DEVICES", "").split(",")
    named = [name for names in assign_gpus(config, environ=environ) for name in names.split(",") if name]
    return 1 + max((visible.index(name) if name in visible else int(name) for name in named), default=0)


def num_devices(environ: Mapping[str, str]) -> int:
    counted = subprocess.run(
        [sys.executable, "-c", _COUNT],
        env=dict(environ),
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        check=False,
    )
    return int(counted.stdout) if counted.returncode == 0 else 0
