"""A grader process, forked by its guard (guard.py). It handles one request at a time.

Frames on stdin and stdout: 4 bytes of length (big endian), then msgpack. The first request is the set-up written by
`GraderPool`; the reply is `{}` (ready) or `{"config_error": text}`. Each later one is a `GradeRequest`; the reply is
`{"reward": x}` or `{"error": text}`.

Invariant: only frames reach the pipes. Stdin and stdout are moved to other descriptors before user code is imported, so
a reward may print and read freely. Grading runs in the main thread, so that libraries may use signals. The process
exits when its stdin closes. Its memory is limited, which protects from accidents but is not a sandbox.
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

#: Timeout of an HTTP endpoint, as a share of the time limit: an error that names the endpoint, before the process is
#: killed.
_HTTP_SHARE = 0.8


def main() -> None:
    requests, replies = _take_pipes()
    setup = _read(requests)
    if setup is None:
        return
    memory = setup["memory_mb"] << 20
    resource.setrlimit(resource.RLIMIT_AS, (memory, memory))
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
    except Exception as err:  # noqa: BLE001  the sum may overflow or be undefined
        return {"error": f"{type(err).__name__}: {err}"}


def _take_pipes() -> tuple[BinaryIO, BinaryIO]:
    """Move both pipes to new descriptors; redirect fd 0 from /dev/null and fd 1 to stderr."""
    requests, replies = os.fdopen(os.dup(0), "rb"), os.fdopen(os.dup(1), "wb")
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, 0)
    os.dup2(2, 1)
    os.close(nothing)
    return requests, replies


def _read(pipe: BinaryIO) -> Any | None:
    header = pipe.read(HEADER.size)
    if len(header) < HEADER.size:
        return None  # the pool is gone
    return msgpack.unpackb(pipe.read(HEADER.unpack(header)[0]))


def _write(pipe: BinaryIO, content: dict[str, Any]) -> None:
    frame = msgpack.packb(content)
    pipe.write(HEADER.pack(len(frame)) + frame)
    pipe.flush()
