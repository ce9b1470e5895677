"""What a model of experts chooses for each token, found by a separate process.

That process builds the model without data, for which it imports torch; this one does not, as that would take seconds
and 300 MB.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Final

import msgspec

from dora.errors import ConfigError
from dora.routing import RoutingShape

#: Usually it takes 5 s.
LIMIT_S: Final = 300
_CHILD: Final = """
import os, sys
from pathlib import Path
from dora.app.routing import answer
os.write(1, answer(Path(sys.argv[1])))
"""


class _Refusal(msgspec.Struct, frozen=True, tag=True):
    text: str


class _Replayable(msgspec.Struct, frozen=True, tag=True):
    shape: RoutingShape


def routing_of(model: Path) -> RoutingShape:
    """Return the choices of the model in a sound folder; ConfigError if it makes none, or none that can be replayed.

    It blocks.
    """
    command = [sys.executable, "-c", _CHILD, str(model)]
    env = {**os.environ, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    try:
        child = subprocess.run(
            command, env=env, stdin=subprocess.DEVNULL, capture_output=True, timeout=LIMIT_S, check=False
        )
    except subprocess.TimeoutExpired:
        raise ConfigError(f"model.path: building {model} without data took more than {LIMIT_S} s") from None
    try:
        found: _Replayable | _Refusal = msgspec.json.decode(child.stdout, type=_Replayable | _Refusal)
    except msgspec.DecodeError:
        reason = child.stderr.decode(errors="replace").strip().rpartition("\n")[2]
        raise ConfigError(f"model.path: {model} could not be built without data: {reason}") from None
    if isinstance(found, _Refusal):
        raise ConfigError(found.text)
    return found.shape


def answer(model: Path) -> bytes:
    """Return what the separate process answers."""
    import torch

    from dora.model_config import load_config
    from dora.routers import routing_shape
    from dora.trainer.model import build_on_meta

    try:
        shape = routing_shape(build_on_meta(load_config(model), torch.float32))
    except ConfigError as err:
        return msgspec.json.encode(_Refusal(str(err)))
    return msgspec.json.encode(_Replayable(shape))
