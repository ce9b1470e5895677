"""Answers to control calls: the fields that are read. Unknown keys are ignored."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any, TypeVar

import msgspec

from dora.engine.sglang import protocol
from dora.errors import ProtocolError

_Answer = TypeVar("_Answer")


class RankLoad(msgspec.Struct):
    num_running_reqs: int
    num_waiting_reqs: int
    num_used_tokens: int
    max_total_num_tokens: int
    max_running_requests: int


@dataclass(frozen=True, slots=True)
class Loads:
    """The load of a server, summed over its data-parallel ranks.

    SGLang updates the counts at each prefill, at every 15th decode step and when it becomes idle, so recent requests
    may be missing. `queues.retracted` is not read, because it outlives the requests.
    """

    num_running: int
    num_waiting: int  # for a slot or for the end of a pause, including retracted ones
    used_tokens: int  # KV tokens, without cached prefixes
    max_total_tokens: int
    max_running: int

    @property
    def is_empty(self) -> bool:
        """Whether the counts show no request. Only `flush_cache` proves it."""
        return self.num_running == self.num_waiting == 0


class LoadsAnswer(msgspec.Struct):
    loads: list[RankLoad]

    def summed(self) -> Loads:
        ranks = self.loads
        return Loads(
            num_running=sum(rank.num_running_reqs for rank in ranks),
            num_waiting=sum(rank.num_waiting_reqs for rank in ranks),
            used_tokens=sum(rank.num_used_tokens for rank in ranks),
            max_total_tokens=sum(rank.max_total_num_tokens for rank in ranks),
            max_running=sum(rank.max_running_requests for rank in ranks),
        )


class ModelInfo(msgspec.Struct):
    weight_version: str


class ServerInfo(msgspec.Struct):
    """The fields of /server_info that are read, with the defaults for missing keys."""

    version: str = "unknown"
    device: str = "cuda"
    tp_size: int = 1
    dp_size: int = 1
    max_req_input_len: int | None = None
    model_path: str | None = None


class UpdateAnswer(msgspec.Struct):
    success: bool
    message: str = ""


class AdapterAnswer(msgspec.Struct):
    success: bool
    error_message: str | None = None


class ModelCard(msgspec.Struct):
    id: str
    root: str | None = None
    parent: str | None = None  # of an adapter, the model


class ModelsAnswer(msgspec.Struct):
    data: list[ModelCard]


class AdapterInfo(msgspec.Struct):
    """The fields of /server_info about adapters, with the values of a server that has none."""

    version: str = "unknown"
    dp_size: int = 1
    enable_lora: bool | None = None
    max_loras_per_batch: int = 0  # different adapters in one batch, with none counted as one
    max_lora_rank: int | None = None
    lora_target_modules: list[str] | None = None
    max_loaded_loras: int | None = None  # beyond it, the server unloads adapters by itself
    lora_strict_loading: bool = False


class ChecksumsAnswer(msgspec.Struct):
    per_engine_checksum: str | None = None


class PromptMeta(msgspec.Struct):
    input_token_logprobs: list[tuple[float | None, int, str | None]]  # null for the first token


class PromptAnswer(msgspec.Struct):
    meta_info: PromptMeta


def read(body: bytes, shape: type[_Answer], *, what: str) -> _Answer:
    try:
        return msgspec.json.decode(body, type=shape)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as err:
        raise ProtocolError(f"{what}: unexpected answer: {err}") from err


def read_server_info(info: dict[str, Any], shape: type[_Answer], *, url: str) -> _Answer:
    """Convert an answer to /server_info."""
    try:
        return msgspec.convert(info, shape)
    except msgspec.ValidationError as err:
        raise ProtocolError(f"{url}{protocol.SERVER_INFO}: unexpected answer: {err}") from err


def is_older(version: str, first: tuple[int, ...]) -> bool:
    """Return whether a release is older than `first`; a version that is not a release, as of a build from source, is
    not."""
    found = re.match(r"(\d+)\.(\d+)\.(\d+)", version)
    return found is not None and tuple(map(int, found.groups())) < first


def without_secrets(value: Any) -> Any:
    if isinstance(value, dict):
        kept = {key: item for key, item in value.items() if key not in protocol.SECRET_SERVER_INFO_KEYS}
        return {key: without_secrets(item) for key, item in kept.items()}
    if isinstance(value, list):
        return [without_secrets(item) for item in value]
    return value
