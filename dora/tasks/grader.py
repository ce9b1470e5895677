"""A grader process, forked by its guard (guard.py). It handles one request at a time.

Frames on stdin and stdout: 4 bytes of length (big endian), then JSON, which has numbers of any size, or a reply in
msgpack. The first request is the set-up written by `GraderPool`; the reply is `{}` (ready) or `{"config_error": text}`.
Each later one is a `GradeRequest`; the reply is `{"reward": x, "terms": [[name, y], ...]}` or `{"error": text}`.

Invariant: only frames of this process reach the pipes (dora/pipes.py). Grading runs in the main thread, so that
libraries may use signals. The process exits when its stdin closes. Its memory is limited; that protects from accidents,
but it is not a sandbox.
"""

from __future__ import annotations

import json
import os
import resource
from collections.abc import Callable
from typing import Any, BinaryIO

import msgspec

from dora.config.schema import RewardConfig
from dora.errors import ConfigError
from dora.pipes import read_frame, take_pipes, write_frame
from dora.tasks.rewards import GradeRequest, RewardFailed, Terms, build_scorer, total

#: Timeout of an HTTP endpoint, as a share of the time limit: an error that names the endpoint, before the process is
#: killed.
_HTTP_SHARE = 0.8


def main() -> None:
    requests, replies = take_pipes()
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
        _write(replies, {"config_error": _text(str(err))})
        return
    _write(replies, {})
    own = os.getpid()
    while (request := _read(requests)) is not None:
        reply = _grade(scorer, GradeRequest(**request))
        if os.getpid() != own:  # a child that code of the user has forked and not ended
            os._exit(1)
        _write(replies, reply)


def _grade(scorer: Callable[[GradeRequest], Terms], request: GradeRequest) -> dict[str, Any]:
    try:
        terms = scorer(request)
        return {"reward": total(terms), "terms": terms}
    except RewardFailed as err:
        return {"error": _text(str(err))}
    except Exception as err:  # noqa: BLE001  the sum may overflow or be undefined
        return {"error": _text(f"{type(err).__name__}: {err}")}


def _text(message: str) -> str:
    """Return a message; a lone surrogate, which has no UTF-8, becomes a question mark."""
    return message.encode(errors="replace").decode()


def _read(pipe: BinaryIO) -> Any | None:
    frame = read_frame(pipe)
    return None if frame is None else json.loads(frame)


def _write(pipe: BinaryIO, content: dict[str, Any]) -> None:
    write_frame(pipe, msgspec.msgpack.encode(content))
