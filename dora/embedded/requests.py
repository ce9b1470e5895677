"""Bodies of POST /generate: what is accepted, and SGLang's wording of each refusal.

`parse` turns bytes into a GenerateCall or a RefusedCall, whose three kinds of error have SGLang's three shapes. Unknown
top-level keys are ignored, unknown sampling keys are refused.
"""

from __future__ import annotations

import uuid
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import msgspec

from dora.embedded.generation import Generation, SamplingParams

#: What msgspec raises for bytes that are not the expected JSON, including invalid UTF-8 and endless nesting.
NOT_A_BODY = (msgspec.MsgspecError, UnicodeDecodeError, RecursionError)


class BadValue(Exception):
    """400 `{"error": {"message"}}`; inside a stream, an error event."""


class BadBody(Exception):
    """400 `{"object": "error", "message", ...}`: not JSON, or a field of the wrong type."""


class UnknownSamplingKey(Exception):
    """400 `{"error": "<text>"}`, or 500 plain text, depending on the dialect."""


class _Unsupported(msgspec.Struct):
    """Fields that SGLang supports but the embedded engine refuses, instead of ignoring them."""

    input_embeds: Any = None
    image_data: Any = None
    top_logprobs_num: Any = None
    token_ids_logprob: Any = None
    return_text_in_logprobs: Any = None
    return_hidden_states: Any = None
    return_sampling_mask: Any = None
    return_entropy: Any = None
    session_params: Any = None


class _Body(_Unsupported):
    text: str | list[str] | None = None
    input_ids: list[int | list[int]] | None = None
    rid: str | list[str] | None = None
    sampling_params: Any = None  # decoded separately, because unknown keys in it have their own error shape
    stream: bool = False
    return_logprob: bool | list[bool] | None = None
    logprob_start_len: int | list[int] | None = None
    return_prompt_token_ids: bool = False
    extra_key: str | list[str] | None = None
    cache_salt: str | list[str] | None = None
    lora_path: str | list[str | None] | None = None  # the name of a loaded adapter
    return_routed_experts: bool = False
    routed_experts_start_len: int = 0


class _SamplingBody(msgspec.Struct, forbid_unknown_fields=True):
    max_new_tokens: int | None = 128
    min_new_tokens: int = 0
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = -1
    min_p: float = 0.0
    stop_token_ids: list[int] | None = None
    ignore_eos: bool = False
    sampling_seed: int | None = None
    n: int = 1
    # Accepted with neutral values only: a refusal is better than a silent difference in the distribution.
    frequency_penalty: float = 0.0
    presence_penalty: float = 0.0
    repetition_penalty: float = 1.0
    stop: str | list[str] | None = None
    stop_regex: str | list[str] | None = None
    json_schema: str | None = None
    regex: str | None = None
    ebnf: str | None = None
    structural_tag: str | None = None
    logit_bias: dict[str, float] | None = None
    custom_params: dict[str, Any] | None = None
    # Accepted, but without effect on tokens.
    skip_special_tokens: bool = True
    spaces_between_special_tokens: bool = True
    no_stop_trim: bool = False
    stream_interval: int | None = None


#: Sampling parameters that must have their defaults, or be empty.
_NEUTRAL = (
    *("frequency_penalty", "presence_penalty", "repetition_penalty"),
    *("stop", "stop_regex", "json_schema", "regex", "ebnf", "structural_tag", "logit_bias", "custom_params"),
)
_DEFAULTS = _SamplingBody()


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestLimits:
    """Limits of the server; `encode` is None in skip-tokenizer mode."""

    context_tokens: int
    kv_tokens: int
    vocab_size: int
    eos_token_ids: frozenset[int]
    draw_seed: Callable[[], int]
    encode: Callable[[str], list[int]] | None = None
    returns_experts: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerateCall:
    """A parsed call: the generation to run and how to answer."""

    generation: Generation
    adapter: str | None  # the name of its adapter
    stream: bool
    return_logprob: bool
    return_prompt_token_ids: bool


@dataclass(frozen=True, slots=True)
class RefusedCall:
    """Why a call is refused, and whether the refusal must be sent as an event of a stream."""

    error: BadValue | BadBody | UnknownSamplingKey
    stream: bool = False


def parse(raw: bytes, limits: RequestLimits) -> GenerateCall | RefusedCall:
    try:
        body = msgspec.json.decode(raw, type=_Body)
    except NOT_A_BODY as err:
        return RefusedCall(BadBody(f"1 validation error:\n  {err}"))
    try:
        return GenerateCall(
            generation=_generation(body, limits),
            adapter=_single(body.lora_path, "lora_path") or None,
            stream=body.stream,
            return_logprob=bool(_single(body.return_logprob, "return_logprob")),
            return_prompt_token_ids=body.return_prompt_token_ids,
        )
    except BadValue as err:
        return RefusedCall(err, stream=body.stream)
    except (BadBody, UnknownSamplingKey) as err:
        return RefusedCall(err)


def _generation(body: _Body, limits: RequestLimits) -> Generation:
    for name in _Unsupported.__struct_fields__:
        if getattr(body, name):
            raise BadValue(f"{name} is not supported by the embedded engine; leave it out.")
    sampling = _sampling(body.sampling_params, limits)
    prompt_ids = _prompt_ids(body, limits)
    _check_length(len(prompt_ids), sampling.max_new_tokens, limits)
    start = _single(body.logprob_start_len, "logprob_start_len")
    wants_prompt = bool(body.return_logprob) and start is not None and 0 <= start < len(prompt_ids)
    return Generation(
        rid=_single(body.rid, "rid") or uuid.uuid4().hex,
        prompt_ids=prompt_ids,
        sampling=sampling,
        namespace=f"{_single(body.extra_key, 'extra_key') or ''}\0{_single(body.cache_salt, 'cache_salt') or ''}",
        logprob_start=start if wants_prompt else None,
        experts_from=_experts_from(body, len(prompt_ids), limits),
    )


def _experts_from(body: _Body, prompt: int, limits: RequestLimits) -> int | None:
    """Return the first token whose experts are asked for; None if none are. SGLang without its flag returns none."""
    if not body.return_routed_experts:
        return None
    if not limits.returns_experts:
        raise BadValue("return_routed_experts: the engine was started without --routed-experts.")
    if not 0 <= body.routed_experts_start_len <= prompt:
        raise BadValue(f"routed_experts_start_len must be in [0, {prompt}], got {body.routed_experts_start_len}.")
    return body.routed_experts_start_len


def _single(value: Any, name: str) -> Any:
    if isinstance(value, list):
        raise BadValue(f"{name} is a list: the embedded engine takes one prompt per call, send one call per prompt.")
    return value


def _prompt_ids(body: _Body, limits: RequestLimits) -> list[int]:
    ids: list[Any] | None = body.input_ids
    if ids is None:
        if body.text is None:
            raise BadValue("Either text, input_ids or input_embeds should be provided.")
        if limits.encode is None:
            raise BadValue("The engine runs with skip_tokenizer_init, so it takes input_ids, not text.")
        ids = limits.encode(_single(body.text, "text"))
    if not ids:
        raise BadValue("input_ids cannot be empty.")
    if any(isinstance(one, list) for one in ids):
        raise BadValue("input_ids holds several prompts: the embedded engine takes one, send one call per prompt.")
    if min(ids) < 0 or max(ids) >= limits.vocab_size:  # SGLang itself dies here
        raise BadValue(f"input_ids must be in [0, {limits.vocab_size}), got {min(ids)}..{max(ids)}.")
    return ids


def _check_length(prompt: int, new: int, limits: RequestLimits) -> None:
    context = limits.context_tokens
    if prompt >= context:
        raise BadValue(f"The input ({prompt} tokens) is longer than the model's context length ({context} tokens).")
    if prompt + new > context:
        raise BadValue(
            f"Requested token count exceeds the model's maximum context length of {context} tokens. You requested a "
            f"total of {prompt + new} tokens: {prompt} tokens from the input messages and {new} tokens for the "
            "completion. Please reduce the number of tokens in the input messages or the completion to fit within "
            "the limit."
        )
    if prompt + new > limits.kv_tokens:
        raise BadValue(
            f"The request needs up to {prompt + new} tokens of KV cache, the engine holds {limits.kv_tokens}: reduce "
            "max_new_tokens or raise kv_tokens."
        )


def _sampling(fields: Any, limits: RequestLimits) -> SamplingParams:
    fields = _single(fields, "sampling_params") or {}
    if not isinstance(fields, dict):
        raise BadBody("1 validation error:\n  sampling_params: Input should be a valid dictionary")
    known = _SamplingBody.__struct_fields__
    if unknown := fields.keys() - set(known):
        expected = ", ".join(f"`{name}`" for name in known)
        raise UnknownSamplingKey(f"unknown field `{min(unknown)}`, expected one of {expected}")
    try:
        body = msgspec.convert(fields, _SamplingBody)
    except msgspec.ValidationError as err:
        raise BadBody(f"1 validation error:\n  sampling_params: {err}") from err
    _check_ranges(body)
    asked = frozenset(body.stop_token_ids or ()) | limits.eos_token_ids
    stops = frozenset(token for token in asked if 0 <= token < limits.vocab_size)
    return SamplingParams(
        max_new_tokens=128 if body.max_new_tokens is None else body.max_new_tokens,
        min_new_tokens=body.min_new_tokens,
        temperature=body.temperature,
        top_p=body.top_p,
        top_k=min(body.top_k, limits.vocab_size),
        min_p=body.min_p,
        seed=limits.draw_seed() if body.sampling_seed is None else body.sampling_seed,
        stop_ids=frozenset() if body.ignore_eos else stops,
    )


def _check_ranges(body: _SamplingBody) -> None:
    """SGLang's checks with its messages, then parameters that only SGLang supports."""
    new = 128 if body.max_new_tokens is None else body.max_new_tokens
    if body.temperature < 0:
        raise BadValue(f"temperature must be non-negative, got {body.temperature}.")
    if not 0 < body.top_p <= 1:
        raise BadValue(f"top_p must be in (0, 1], got {body.top_p}.")
    if not 0 <= body.min_p <= 1:
        raise BadValue(f"min_p must be in [0, 1], got {body.min_p}.")
    if body.top_k < 1 and body.top_k != -1:
        raise BadValue(f"top_k must be -1 (disable) or at least 1, got {body.top_k}.")
    if new < 0:
        raise BadValue(f"max_new_tokens must be at least 0, got {new}.")
    if not 0 <= body.min_new_tokens <= new:
        raise BadValue(f"min_new_tokens must be in [0, max_new_tokens({new})], got {body.min_new_tokens}.")
    if body.sampling_seed is not None and not -(2**63) <= body.sampling_seed < 2**63:
        raise BadValue("sampling_seed must be a 64-bit signed integer.")
    if body.n != 1:
        raise BadValue(f"n must be 1 on the embedded engine, got {body.n}: send {body.n} calls.")
    for name in _NEUTRAL:
        if getattr(body, name) not in (getattr(_DEFAULTS, name), [], "", {}):
            raise BadValue(f"{name} is not supported by the embedded engine; leave it out.")
