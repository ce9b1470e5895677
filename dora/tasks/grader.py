"""One grader process, forked by its guard (guard.py): one request at a time.

Frames on stdin and stdout: 4 bytes of length (big endian), then msgpack. The first frame in is the set-up
(`GraderPool` writes it), answered by `{}` (ready) or `{"config_error": text}`; each later one is a `GradeRequest`,
answered by `{"reward": x}` or `{"error": text}`.

Invariant: nothing but frames reaches the pipes: stdin and stdout are moved away before any code of the user is
imported, so a reward may print and read what it likes. Grading runs in the main thread, where libraries may use
signals. The process ends when its stdin closes; its guard ends it when it hangs. Memory is limited; this is protection
from accidents, no sandbox for hostile code.
"""

from __future__ import annotations

import os
import resource
import struct
from typing import Any, BinaryIO

import msgpack

from dora.config.schema import RewardConfig
from dora.errors import ConfigError
from dora.tasks.rewards import GradeRequest, RewardFailed, Scorer, build_scorer

HEADER = struct.Struct(">I")

#: Share of the time limit that an HTTP endpoint gets: its silence is then an error with a name, not a killed process.
_HTTP_SHARE = 0.8


def main() -> None:
    requests, replies = _take_pipes()
    setup = _read(requests)
    if setup is None:
        return
    _limit(memory_mb=setup["memory_mb"])
    try:
        scorer = build_scorer(
            [RewardConfig(**reward) for reward in setup["rewards"]],
            field=setup["field"],
            http_timeout_s=_HTTP_SHARE * setup["timeout_s"],
        )
    except ConfigError as err:
        _write(replies, {"config_error": str(err)})
        return
    _write(replies, {})
    while (request := _read(requests)) is not None:
        _write(replies, _grade(scorer, GradeRequest(**request)))


def _grade(scorer: Scorer, request: GradeRequest) -> dict[str, Any]:
    try:
        return {"reward": scorer(request)}
    except RewardFailed as err:
        return {"error": str(err)}
    except Exception as err:  # noqa: BLE001  the terms may have no sum; the reply says why
        return {"error": f"{type(err).__name__}: {err}"}


def _take_pipes() -> tuple[BinaryIO, BinaryIO]:
    """Our two pipes under new numbers; fd 0 reads nothing and fd 1 is stderr from here on."""
    requests, replies = os.fdopen(os.dup(0), "rb"), os.fdopen(os.dup(1), "wb")
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, 0)
    os.dup2(2, 1)
    os.close(nothing)
    return requests, replies


def _limit(*, memory_mb: int) -> None:
    resource.setrlimit(resource.RLIMIT_AS, (memory_mb << 20, memory_mb << 20))


def _read(pipe: BinaryIO) -> Any | None:
    header = pipe.read(HEADER.size)
    if len(header) < HEADER.size:
        return None  # the pool is gone
    return msgpack.unpackb(pipe.read(HEADER.unpack(header)[0]))


def _write(pipe: BinaryIO, content: dict[str, Any]) -> None:
    frame = msgpack.packb(content)
    pipe.write(HEADER.pack(len(frame)) + frame)
    pipe.flush()
