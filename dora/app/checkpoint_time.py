"""The time that a checkpoint takes, against the time between two of them, for `dora check`."""

from __future__ import annotations

import math
import os
import tempfile
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from dora.app.estimate import Shapes, size_text, starts_all_on_gpus, step_time
from dora.config.schema import Config
from dora.errors import ConfigError

if TYPE_CHECKING:  # torch takes seconds to import
    from dora.trainer.forecast import Outline

#: Largest file that is written to measure a rate.
TRIAL_BYTES: Final = 64 << 20


@dataclass(frozen=True, slots=True)
class WriteRate:
    """How fast checkpoints get to where a resume finds them."""

    bytes_per_s: float
    source: str  # where it was measured


def checkpoint_bytes(config: Config, outline: Outline) -> int:
    """Return the size of a checkpoint, the files of all ranks together."""
    from dora.trainer.optimizer import moment_bytes

    trainer = config.trainer
    kept = "device" if trainer.optimizer_state == "host" else trainer.optimizer_state  # in float32, wherever they are
    return outline.checkpoint_bytes(moment_bytes(optimizer=trainer.optimizer, optimizer_state=kept))


def measure_rate(config: Config, num_bytes: int) -> WriteRate | None:
    """Write a short file, as a rank does, near the folder of checkpoints and delete it; None if this host cannot see
    that folder."""
    folder = config.nodes.checkpoints or config.run.folder
    found = next((path for path in (folder, *folder.resolve().parents) if path.is_dir()), None)
    if found is None or (config.nodes.checkpoints and found != folder):
        return None
    data = os.urandom(min(num_bytes, TRIAL_BYTES))  # some disks compress zeros
    try:
        with tempfile.TemporaryFile(dir=found) as file:
            began = time.perf_counter()
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
            return WriteRate(len(data) / (time.perf_counter() - began), f"measured in {found}")
    except OSError as err:
        raise ConfigError(f"{found}: no checkpoint can be written there ({err.strerror})") from err


def interval_s(config: Config, shapes: Shapes) -> float | None:
    """Return a lower bound of the time between two checkpoints; None if it is unknown, or there is only one."""
    if not starts_all_on_gpus(config) or config.trainer.checkpoint_every >= config.run.steps:
        return None
    step = step_time(config, shapes, instances=config.num_managed, ranks=config.trainer.ranks)
    return config.trainer.checkpoint_every * step.limit_s


def time_of_checkpoint(config: Config, num_bytes: int, *, rate: WriteRate | None, interval: float | None) -> str:
    """Return a text about the time; ConfigError if a checkpoint takes longer than the interval between two."""
    every = config.trainer.checkpoint_every
    due = f"one every {every} steps" + (f", that is, every {interval:,.0f} s or more" if interval is not None else "")
    if rate is None:
        needed = f"; {size_text(num_bytes / interval)} per second are needed" if interval is not None else ""
        return f"{size_text(num_bytes)}, {due}{needed}; not measured here"
    taken = num_bytes / rate.bytes_per_s
    text = f"{taken:,.1f} s for {size_text(num_bytes)}, at {size_text(rate.bytes_per_s)} per second ({rate.source})"
    if interval is not None and taken > interval:
        raise ConfigError(
            f"trainer.checkpoint_every: a checkpoint takes {text}, and {due} is due; raise it to at least "
            f"{math.ceil(every * taken / interval)}, or use faster storage"
        )
    return f"{text}; {due}"
