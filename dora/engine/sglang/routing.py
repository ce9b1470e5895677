"""The choice of experts: how SGLang is asked for it and returns it, and which servers would not tell the truth.

A server records the experts of every token beside its KV, and returns those of a request once, in its last chunk:
base64 of little-endian int32 [tokens but the last, layers of the model, top_k], zeros for layers without experts. A
request that was aborted in the waiting queue has none, even if it had generated tokens before a retraction. What was
never recorded is zeros, or what an earlier token left in the same place; so a server is refused whose arguments let KV
come from elsewhere, or tokens be computed apart from where they are recorded (read in 0.5.23, srt/state_capturer/).
"""

from __future__ import annotations

from typing import Any, Final

import msgspec
import numpy as np

from dora.engine.api import AskedRouting, GenerateRequest
from dora.engine.errors import InvalidChoices
from dora.engine.sglang.answers import is_older, read_server_info
from dora.engine.sglang.launch import SGLANG_ROUTING
from dora.engine.sglang.stream import MAX_EVENT_BYTES
from dora.routing import Chosen, Experts, RoutingShape

FIRST_RELEASE: Final = (0, 5, 23)
#: Decoded at a time: the interpreter lock is given up in between, and a piece stays in the processor's cache.
_PIECE_BYTES: Final = 2**18
_FLAG: Final = SGLANG_ROUTING[0]
#: MoE runners that choose experts in their own kernels (0.5.23: output formats BYPASSED and TRITON_KERNEL of topk.py).
_OWN_CHOICE: Final = ("experimental_sgl_trtllm", "flashinfer_mxfp4", "flashinfer_trtllm", "triton_kernel")


class _RoutingInfo(msgspec.Struct):
    """The fields of /server_info that decide whether recorded experts are true."""

    version: str = "unknown"
    has_flag: bool | None = msgspec.field(default=None, name="enable_return_routed_experts")
    enable_hierarchical_cache: bool | None = None
    enable_hisparse: bool | None = None
    enable_lmcache: bool | None = None
    enable_flexkv: bool | None = None
    radix_cache_backend: str | None = None
    disaggregation_decode_enable_offload_kvcache: bool | None = None
    disaggregation_mode: str | None = None
    speculative_algorithm: str | None = None
    enable_two_batch_overlap: bool | None = None
    enable_prefill_cp: bool | None = None
    pp_size: int = 1
    dcp_size: int = 1
    attn_cp_size: int = 1
    moe_runner_backend: str | None = None


_OTHER_KV: Final = "KV that comes from elsewhere has the experts of other tokens"
_OTHER_BATCH: Final = "experts are recorded as if a batch were computed in one piece"
#: Why servers with these arguments are refused.
_UNTRUE: Final = {
    "enable_hierarchical_cache": _OTHER_KV,
    "enable_hisparse": _OTHER_KV,
    "enable_lmcache": _OTHER_KV,
    "enable_flexkv": _OTHER_KV,
    "radix_cache_backend": _OTHER_KV,
    "disaggregation_decode_enable_offload_kvcache": _OTHER_KV,
    "speculative_algorithm": "drafts that are not accepted may be recorded",
    "enable_two_batch_overlap": _OTHER_BATCH,
    "enable_prefill_cp": _OTHER_BATCH,
}
_MUST_BE_ONE: Final = ("pp_size", "attn_cp_size", "dcp_size")


def routing_doubt(arguments: dict[str, Any], *, url: str) -> str:
    """Return why a server would not return the true choice of experts, and what to do; "" if nothing says so.

    `arguments`: its answer to /server_info.
    """
    info = read_server_info(arguments, _RoutingInfo, url=url)
    if is_older(info.version, FIRST_RELEASE):
        return f"the choice of experts needs SGLang 0.5.23 or newer; this is {info.version}"
    if not info.has_flag:
        return f"does not return the choice of experts; start it with {_FLAG}"
    for name, reason in _UNTRUE.items():
        if getattr(info, name):
            return f"{reason}; start it without {_flag(name)}"
    if (mode := info.disaggregation_mode or "null") != "null":
        return f"{_OTHER_KV}; start it without --disaggregation-mode {mode}"
    for name in _MUST_BE_ONE:
        if (size := getattr(info, name)) != 1:
            return f"its ranks record parts of the experts only; start it with {_flag(name)} 1, not {size}"
    if (backend := info.moe_runner_backend) in _OWN_CHOICE:
        return f"{backend} chooses experts without recording them; start it with --moe-runner-backend triton"
    return ""


def _flag(name: str) -> str:
    return "--" + name.replace("_", "-")


def fields(asked: AskedRouting) -> dict[str, Any]:
    """Return what a request asks for the choice of experts with."""
    return {"return_routed_experts": True, "routed_experts_start_len": asked.start}


def max_event_bytes(request: GenerateRequest) -> int:
    """Return the size of the largest event that may answer a request."""
    if (asked := request.routing) is None:
        return MAX_EVENT_BYTES
    rows = len(request.tokens) + request.max_new_tokens - 1 - asked.start
    return MAX_EVENT_BYTES + _text_bytes(rows * _row_bytes(asked.shape))


def read_chosen(text: msgspec.Raw, asked: AskedRouting, *, rows: int, source: str) -> Chosen:
    """Return the choices of an answer, `text` being the string in its JSON; InvalidChoices if they are not valid.

    Takes 1 to 2 ms per MB of text, and gives up the interpreter lock every millisecond.
    """
    try:
        return Chosen(asked.start, _decode(text, asked.shape, rows=rows))
    except (msgspec.DecodeError, ValueError) as err:
        raise InvalidChoices(
            f"{source}: returned an invalid choice of experts: {err}; check the server's flags against docs/SGLANG.md, "
            "or set objective.router_replay to off"
        ) from err


def missing(source: str, *, num_tokens: int) -> InvalidChoices:
    """Return the error for an answer without the choices that were asked for."""
    return InvalidChoices(
        f"{source}: an answer of {num_tokens} tokens came without the choice of experts; start the server with {_FLAG} "
        "(SGLang 0.5.23 or newer), or set objective.router_replay to off"
    )


def _decode(raw: msgspec.Raw, shape: RoutingShape, *, rows: int) -> Experts:
    """Decode piece by piece, each a multiple of three rows, so that no base64 group is split."""
    row_bytes = _row_bytes(shape)
    expected = _text_bytes(rows * row_bytes)
    text = memoryview(raw)[1:-1]
    if len(text) != expected:  # also if it is not a string, or has escapes
        text = memoryview(msgspec.json.decode(raw, type=str).encode())
    if len(text) != expected:
        found = (len(text) * 3 // 4 - bytes(text[-2:]).count(b"=")) / row_bytes
        raise ValueError(f"{found:.6g} tokens of {shape.num_layers} layers and {shape.top_k} experts, expected {rows}")
    experts = shape.empty(rows)
    layers = slice(None) if len(shape.layers) == shape.num_layers else np.array(shape.layers)
    step = 3 * max(1, _PIECE_BYTES // (3 * row_bytes))
    for start in range(0, rows, step):
        end = min(start + step, rows)
        part = text[start * row_bytes // 3 * 4 : _text_bytes(end * row_bytes)]
        piece = msgspec.json.decode(b'"%b"' % bytes(part), type=bytes)  # faster than binascii
        if len(piece) != (end - start) * row_bytes:
            raise ValueError("base64 that ends early")
        chosen = np.frombuffer(piece, "<i4").reshape(end - start, shape.num_layers, shape.top_k)[:, layers]
        for expert in (int(chosen.min()), int(chosen.max())):
            if not 0 <= expert < shape.num_experts:
                raise ValueError(f"expert {expert} of {shape.num_experts}")
        experts[start:end] = chosen
        if shape.fault(experts[start:end]):
            raise ValueError(shape.fault(experts[:end]))
    return experts


def _row_bytes(shape: RoutingShape) -> int:
    """Return the size of one token's choices as SGLang returns them."""
    return shape.num_layers * shape.top_k * 4


def _text_bytes(size: int) -> int:
    """Return the length of `size` bytes in base64."""
    return -(-size // 3) * 4
