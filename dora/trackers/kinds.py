"""The trackers by name: their packages, classes and environment variables."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Final

from dora.extras import require_extra
from dora.functions import load_function
from dora.trackers.api import Position, TrackedRun, Tracker

#: Name in `tracking.trackers` -> class. The name is also that of the package, and of the extra that installs it.
KINDS: Final = {
    "wandb": "dora.trackers.wandb:WandbTracker",
    "tensorboard": "dora.trackers.tensorboard:TensorBoardTracker",
    "trackio": "dora.trackers.trackio:TrackioTracker",
}
#: Environment variables that a process needs to run, to find its user's files and to reach the network.
_COMMON: Final = re.compile(
    r"PATH|HOME|USER|LOGNAME|LANG|LC_\w+|TZ|TMPDIR|PYTHONPATH|VIRTUAL_ENV|LD_LIBRARY_PATH|XDG_\w+|"
    r"SSL_CERT_(FILE|DIR)|REQUESTS_CA_BUNDLE|(?i:https?_proxy|no_proxy|all_proxy)"
)
_OWN: Final = {"wandb": re.compile(r"WANDB_\w+"), "trackio": re.compile(r"(TRACKIO|HF)_\w+")}
FIELD: Final = "tracking.trackers"


def title(name: str) -> str:
    """Return the name of a tracker's folder and log: for `FILE.py:Class`, the class."""
    return name.rpartition(":")[2]


def require_installed(names: Iterable[str]) -> None:
    """Raise ConfigError if the package of a tracker is missing, or its class cannot be imported."""
    for name in names:
        if name not in KINDS:
            load_function(name, field=FIELD)
        else:
            require_extra(name, field=FIELD)


def open_tracker(name: str, run: TrackedRun, position: Position) -> Tracker:
    """Open the record of a run in a tracker."""
    tracker: Tracker = load_function(KINDS.get(name, name), field=FIELD)(run, position)
    return tracker


def tracker_env(name: str, environ: Mapping[str, str], *, passed: Sequence[str] = ()) -> dict[str, str]:
    """Return the environment of a tracker's process: what every process needs, its own variables, and `passed`."""
    own = _OWN.get(name)
    return {
        key: value
        for key, value in environ.items()
        if key in passed or _COMMON.fullmatch(key) or (own is not None and own.fullmatch(key))
    }
