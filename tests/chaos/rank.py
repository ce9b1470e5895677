"""A trainer rank that stops itself (SIGSTOP) at a moment that a test names, to be killed in exactly this one.

The test makes the file `<moment>-<rank>` in the folder CHAOS_MOMENTS. The rank writes its process id and host into it
and renames it to `reached` before it stops. If the file has the word `wedged`, only the thread that comes by stands
still, for ever. Started in place of `dora train`.
"""

from __future__ import annotations

import os
import signal
import socket
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

from dora.cli.serve import train
from dora.trainer import checkpoint, probe, publish
from dora.trainer.optimizer import ShardOptimizer
from dora.trainer.spans import RankClock
from dora.transport.messages import RankPulse
from dora.transport.trainer_end import TrainerEnd

#: Name of the file of the rank that has stopped.
REACHED: Final = "reached"


def pass_by(moment: str) -> None:
    """Stop here if a test wants it."""
    wanted = Path(os.environ["CHAOS_MOMENTS"], f"{moment}-{os.environ['RANK']}")
    if wanted.exists():
        is_wedged = wanted.read_text() == "wedged"
        wanted.write_text(f"{os.getpid()} {socket.gethostname()}")
        wanted.rename(wanted.with_name(REACHED))
        if is_wedged:
            threading.Event().wait()
        os.kill(os.getpid(), signal.SIGSTOP)


def stop_before(owner: Any, name: str, moment: Callable[..., str]) -> None:
    """Pass by the moment that `moment` returns for the arguments of a function, before each call of it."""
    call = getattr(owner, name)

    def watched(*arguments: Any, **options: Any) -> Any:
        if found := moment(*arguments):
            pass_by(found)
        return call(*arguments, **options)

    setattr(owner, name, watched)


def watch() -> None:
    """Watch the moments; each is in the middle of what it is named after."""
    stop_before(TrainerEnd, "try_send", lambda _, message: "waiting" if _is_idle(message) else "")
    stop_before(RankClock, "beat", lambda clock: "forward" if clock.activity == "forward_backward" else "")
    stop_before(ShardOptimizer, "update", lambda *_: "close")
    stop_before(probe, "logprobs", lambda *_: "probe")  # the weights of another version are in place
    stop_before(publish, "write_piece", lambda *_: "publish")
    stop_before(checkpoint, "checksum_of", lambda *_: "checkpoint")  # the file is written, and the manifest is not
    stop_before(checkpoint, "load_file", lambda *_: "loading")


def _is_idle(message: object) -> bool:
    return isinstance(message, RankPulse) and message.activity == "waiting"


if __name__ == "__main__":
    watch()
    train()
