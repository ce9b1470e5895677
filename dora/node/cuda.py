"""The CUDA devices that a run needs on this host, counted before anything starts.

torch is asked in a process of its own: it takes seconds to import, and the controller has no other use for it. Commands
of the user's own (`engine.command`, `trainer.command`) bring their own torch, and are not judged by ours.
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
    """ConfigError that names the setting if torch cannot use the CUDA devices that this run would take."""
    ranks, engines = _ranks(config), _engine_devices(config, environ=environ)
    if not ranks and not engines:
        return
    found = _num_devices(environ)
    if ranks > found:
        raise ConfigError(
            f"trainer.device: {ranks} ranks need a CUDA device each, but torch can use {found} here; "
            f"{'lower trainer.ranks, or ' if found else ''}set it to cpu"
        )
    if engines > found:
        raise ConfigError(
            f"engine.device: the instances need {engines} CUDA devices (those of the trainer come first), but torch "
            f"can use {found} here; {'start fewer instances, or ' if found else ''}set it to cpu"
        )


def _ranks(config: Config) -> int:
    trainer = config.trainer
    is_ours = trainer.device == "cuda" and not trainer.external and not trainer.command
    return trainer.ranks if is_ours else 0


def _engine_devices(config: Config, *, environ: Mapping[str, str]) -> int:
    """One more than the highest index that an instance is given; all share the first device where none is named."""
    if config.engine.device == "cpu" or config.engine.command or not config.num_managed:
        return 0
    visible = environ.get("CUDA_VISIBLE_DEVICES", "").split(",")
    named = [name for names in assign_gpus(config, environ=environ) for name in names.split(",") if name]
    return 1 + max((visible.index(name) if name in visible else int(name) for name in named), default=0)


def _num_devices(environ: Mapping[str, str]) -> int:
    asked = subprocess.run(
        [sys.executable, "-c", _COUNT],
        env=dict(environ),
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        check=False,
    )
    return int(asked.stdout) if asked.returncode == 0 else 0
