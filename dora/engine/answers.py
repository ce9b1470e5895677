"""What servers answer to control calls, as far as it is read; unknown keys are ignored. Used by `client`."""

from __future__ import annotations

from typing import Any, TypeVar

import msgspec

from dora.engine import protocol
from dora.errors import ProtocolError

_Answer = TypeVar("_Answer")


class RankLoad(msgspec.Struct):
    num_running_reqs: int
    num_waiting_reqs: int
    num_used_tokens: int
    max_total_num_tokens: int
    max_running_requests: int


class LoadsAnswer(msgspec.Struct):
    loads: list[RankLoad]


class ModelInfo(msgspec.Struct):
    weight_version: str


class UpdateAnswer(msgspec.Struct):
    success: bool
    message: str = ""


class ChecksumsAnswer(msgspec.Struct):
    per_engine_checksum: str | None = None


class PromptMeta(msgspec.Struct):
    input_token_logprobs: list[tuple[float | None, int, str | None]]  # of the first token: null


class PromptAnswer(msgspec.Struct):
    meta_info: PromptMeta


def read(body: bytes, shape: type[_Answer], *, what: str) -> _Answer:
    try:
        return msgspec.json.decode(body, type=shape)
    except (msgspec.DecodeError, UnicodeDecodeError) as err:
        raise ProtocolError(f"{what}: unexpected answer: {err}") from err


def without_secrets(value: Any) -> Any:
    if isinstance(value, dict):
        kept = {key: item for key, item in value.items() if key not in protocol.SECRET_SERVER_INFO_KEYS}
        return {key: without_secrets(item) for key, item in kept.items()}
    if isinstance(value, list):
        return [without_secrets(item) for item in value]
    return value
