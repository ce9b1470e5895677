"""The check of the forward pass on the loaded model, before anything is trained; it chooses the layout of rows.

Random sequences are packed into one row, as in training, and compared with the same sequences one by one under
transformers' own attention: log-probs and gradients. A layer that accepts the arguments of packing proves nothing:
linear attention, state-space and convolution layers accept them, and carry state from one sequence into the next. A
model with such layers is checked, and trained, in padded rows instead. A model that fails is refused.

A row in which the sequences share their prompts is compared likewise. If only that fails, prompts are not shared.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Final

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from dora.errors import ConfigError
from dora.trainer import attention
from dora.trainer.logprobs import logprobs
from dora.trainer.model import Policy, decoder_layers
from dora.trainer.packing import SHARE_ABOVE, Layout, Row, Sharing, make_row, prompts_of, split_passes

#: Of the sequences and of their prompts; prompts of the same length are the same.
LENGTHS: Final = (5, 40, 17, 64, 9)
PROMPTS: Final = (1, 11, 11, 11, 1)
RESPONSES: Final = tuple(length - prompt for length, prompt in zip(LENGTHS, PROMPTS, strict=True))
#: Largest mean |Δ log-prob| between packed sequences and the same ones alone. Measured on a CPU with small random
#: models: where packing is exact, at most 5e-7 in float32 and 3e-4 in bfloat16; where it is not, at least 1e-2.
PACKING: Final = {"float64": 1e-3, "float32": 1e-3, "float16": 5e-3, "bfloat16": 5e-3}
#: A large model rounds more: in 16 bits, this multiple of the difference between the two attentions is allowed too.
ROUNDING: Final = 2.0
#: Largest difference between this package's attention and transformers' own; at most 0.016 was measured in bfloat16.
ATTENTION: Final = {"float64": 1e-3, "float32": 1e-3, "float16": 0.1, "bfloat16": 0.1}
#: Largest |Δ gradient| / |gradient| between packed sequences and the same ones alone, norms over all parameters.
GRADIENT: Final = {"float32": 1e-3, "float16": 0.3, "bfloat16": 0.3}
#: Parts of the class names of layers that mix tokens by other means than attention.
MIXERS: Final = ("Delta", "Conv", "Mamba", "Mixer", "Recurrent", "Lightning")


@dataclass(frozen=True, slots=True)
class CheckedLayout:
    """A layout under which the forward pass is exact."""

    layout: Layout
    note: str = ""  # for the user, if sequences cannot be packed, or cannot share prompts


def check_forward(model: Any, *, device: torch.device, dtype: str, shared_prompts: Sharing = "auto") -> CheckedLayout:
    """Return the layout under which sequences have the log-probs they have alone, also under transformers' attention.

    ConfigError if there is none.
    """
    try:
        return _exact_layout(model, device=device, dtype=dtype, shared_prompts=shared_prompts)
    except (TypeError, ValueError, LookupError, AttributeError, NotImplementedError) as err:
        raise _refusal(model, f"its forward pass raises {err!r}") from err
    except RuntimeError as err:  # also raised where memory runs out, or a rank ends
        if "dtype" not in str(err) and "scalar type" not in str(err):
            raise
        raise _refusal(model, f"its forward pass in {dtype} raises {err!r}") from err


def _exact_layout(model: Any, *, device: torch.device, dtype: str, shared_prompts: Sharing) -> CheckedLayout:
    alone_P = _logprobs(_rows(model, None, device), partial(_packed_logprobs, model))
    with _own_attention(model):
        plain_P = _logprobs(_rows(model, None, device), partial(_plain_logprobs, model))
    rounding = float((alone_P - plain_P).abs().mean())
    if not rounding <= ATTENTION[dtype]:
        raise _refusal(
            model, f"under the trainer's attention, log-probs differ by {rounding:.2g} from transformers' own"
        )

    def error_of(layout: Layout) -> float:
        together_P = _logprobs(_rows(model, layout, device), partial(_packed_logprobs, model))
        return float((together_P - alone_P).abs().mean())

    allowed = max(PACKING[dtype], ROUNDING * rounding)
    for padded in (False, True) if not _scales_by_row(model) else (True,):
        layout = Layout(padded=padded, rope_limit=rope_limit(model.config.get_text_config()))
        error = error_of(layout)
        if error <= allowed:
            found = CheckedLayout(layout, _note(model) if padded else "")
            return _check_sharing(model, found, shared_prompts, error_of=error_of, allowed=allowed)
        if not _mixers(model):
            break
    raise _refusal(model, f"log-probs of {_kind(layout)} sequences differ by {error:.2g} from those of each alone")


def _check_sharing(
    model: Any, found: CheckedLayout, wanted: Sharing, *, error_of: Callable[[Layout], float], allowed: float
) -> CheckedLayout:
    """Return the layout with shared prompts, if they are wanted and exact."""
    if wanted == "off":
        return found
    if found.layout.padded:
        return _unshared(model, found, wanted, "its rows are padded, one sequence a line")
    error = error_of(_sharing(found.layout))
    if not error <= allowed:
        return _unshared(model, found, wanted, f"log-probs would differ by {error:.2g} from those of each answer alone")
    return replace(found, layout=replace(found.layout, share_above=SHARE_ABOVE[wanted]))


def _unshared(model: Any, found: CheckedLayout, wanted: Sharing, reason: str) -> CheckedLayout:
    """Return the layout without shared prompts, with a note unless the model is padded anyway; ConfigError if "on"."""
    if wanted == "on":
        raise ConfigError(f"trainer.shared_prompts: {_name(model)} cannot share prompts: {reason}; use auto or off")
    note = found.note or f"{_name(model)} computes each prompt once per answer: {reason}"
    return CheckedLayout(replace(found.layout, share_above=SHARE_ABOVE["off"]), note)


def _sharing(layout: Layout) -> Layout:
    return replace(layout, share_above=SHARE_ABOVE["on"])


def check_training(policy: Policy, *, dtype: str, shared_prompts: Sharing = "auto") -> CheckedLayout:
    """Like `check_forward`, and for the gradients. A collective: every rank computes the same."""
    model = policy.model
    found = check_forward(model, device=policy.device, dtype=dtype, shared_prompts=shared_prompts)
    expected = _gradients(policy, _rows(model, None, policy.device))

    def error_of(layout: Layout) -> float:
        together = _gradients(policy, _rows(model, layout, policy.device))
        return _norm(together[name] - gradient for name, gradient in expected.items()) / _norm(expected.values())

    alone = replace(found.layout, share_above=SHARE_ABOVE["off"])
    if not (error := error_of(alone)) <= GRADIENT[dtype]:
        raise _refusal(
            model, f"the gradient of {_kind(alone)} sequences differs by {error:.1%} from that of each alone"
        )
    if found.layout != alone and not (error := error_of(_sharing(alone))) <= GRADIENT[dtype]:
        return _unshared(
            model, found, shared_prompts, f"the gradient would differ by {error:.1%} from that of each answer alone"
        )
    return found


def likely_layout(model: Any) -> Layout:
    """Return the layout that the check is going to find, told by the kinds of layers alone."""
    return Layout(
        padded=_scales_by_row(model) or bool(_mixers(model)), rope_limit=rope_limit(model.config.get_text_config())
    )


def rope_limit(config: Any) -> int | None:
    """Return the length beyond which all rotary angles of a row change (LongRoPE, arXiv 2402.13753), if any."""
    rope = getattr(config, "rope_parameters", None) or {}
    if rope.get("rope_type") != "longrope":
        return None
    limit = rope.get("original_max_position_embeddings") or config.original_max_position_embeddings
    return int(limit)


def _scales_by_row(model: Any) -> bool:
    """Return whether queries are scaled by their position in the row, in steps far beyond `LENGTHS` (Llama 4)."""
    return bool(getattr(model.config.get_text_config(), "attn_temperature_tuning", False))


def _rows(model: Any, layout: Layout | None, device: torch.device) -> list[tuple[list[int], Row]]:
    """Return rows of random sequences, with the sequences of each; without a layout, each has a row of its own.

    Every token after a prompt is trained.
    """
    vocab_size = model.config.get_text_config().vocab_size
    sequences = [
        np.concatenate([np.random.default_rng(count).integers(0, vocab_size, count) for count in (prompt, response)])
        for prompt, response in zip(PROMPTS, RESPONSES, strict=True)
    ]
    mask = [np.arange(length) >= prompt for length, prompt in zip(LENGTHS, PROMPTS, strict=True)]
    if layout is None:
        passes, layout = [[n] for n in range(len(LENGTHS))], Layout()
    else:
        prompts = prompts_of(np.concatenate(sequences), lengths=LENGTHS, trained=np.concatenate(mask).nonzero()[0])
        passes = split_passes(LENGTHS, prompts=prompts, layout=layout, budget=len(LENGTHS) * max(LENGTHS))
    rows = []
    for members in passes:
        tokens, trained = (np.concatenate([column[n] for n in members]) for column in (sequences, mask))
        lengths = [LENGTHS[n] for n in members]
        row = make_row(tokens, lengths=lengths, trained=trained.nonzero()[0], layout=layout, device=device)
        rows.append((members, row))
    return rows


@torch.no_grad()
def _logprobs(rows: list[tuple[list[int], Row]], compute: Callable[[Row], Tensor]) -> Tensor:
    """Return the [P] log-probs of all responses, in their own order."""
    parts: dict[int, Tensor] = {}
    for members, row in rows:
        parts |= zip(members, compute(row).split([RESPONSES[n] for n in members]), strict=True)
    return torch.cat([parts[n] for n in range(len(LENGTHS))])


def _gradients(policy: Policy, rows: list[tuple[list[int], Row]]) -> dict[str, Tensor]:
    """Return the gradients of all log-probs, each with another weight, and leave the policy as it was."""
    weights = torch.linspace(-1.0, 1.0, sum(RESPONSES), device=policy.device).split(RESPONSES)
    for members, row in rows:
        policy.prepare(closes_update=True)
        weight_P = torch.cat([weights[n] for n in members])
        (logprobs(policy.model, row, temperature=1.0)[0] * weight_P).sum().backward()
    gradients = policy.gradients()
    policy.clear_gradients()
    policy.reshard()
    return gradients


def _packed_logprobs(model: Any, row: Row) -> Tensor:
    return logprobs(model, row, temperature=1.0)[0]


@contextmanager
def _own_attention(model: Any) -> Iterator[None]:
    """Use transformers' own attention meanwhile: the one that every family has."""
    model.set_attn_implementation("eager")
    try:
        yield
    finally:
        model.set_attn_implementation(attention.NAME)


def _plain_logprobs(model: Any, row: Row) -> Tensor:
    """Return the [P] log-probs of a row with a single sequence, without any argument of packing."""
    logits_TV = model(input_ids=row.tokens_BT, use_cache=False).logits[0]
    return logits_TV[row.predictors_P].float().log_softmax(-1).gather(-1, row.targets_P[:, None])[:, 0]


def _refusal(model: Any, reason: str) -> ConfigError:
    mixers = _mixers(model)
    layers = f" (with {mixers} layers)" if mixers else ""
    return ConfigError(f"model.path: {_name(model)}{layers} cannot be trained: {reason}")


def _note(model: Any) -> str:
    if _scales_by_row(model):
        reason = "scales queries by their position in the row"
    else:
        reason = f"has {_mixers(model)} layers, which would carry state from one packed sequence into the next"
    return (
        f"{_name(model)} {reason}, so it is trained in padded rows; the metric padding_frac is the share of the "
        "computation that this costs"
    )


def _name(model: Any) -> str:
    return type(model).__name__.removeprefix("FSDP")  # FSDP2 makes a subclass of this name


def _kind(layout: Layout) -> str:
    return "padded" if layout.padded else "packed"


def _mixers(model: Any) -> str:
    """Name the kinds of layers, besides attention, through which one token can reach the next; empty if none."""
    family = _name(model).removesuffix("ForCausalLM")  # a prefix of the names, like Mamba2 or RecurrentGemma
    kinds = {type(child).__name__ for layer in decoder_layers(model) for child in layer.children()}
    return ", ".join(sorted(kind for kind in kinds if any(word in kind.removeprefix(family) for word in MIXERS)))


def _norm(tensors: Iterable[Tensor]) -> float:
    """Return the Euclidean norm over the shards of all ranks."""
    squares = torch.stack([tensor.double().square().sum() for tensor in tensors]).sum()
    dist.all_reduce(squares)
    return math.sqrt(float(squares))
