"""The check of the forward pass, on the loaded model at the start and again on trained weights. A failure ends the run.

Random sequences are laid out as in training, and compared with the same sequences one by one under transformers' own
attention: log-probs and, at the start, gradients. A layer that accepts the arguments of packing proves nothing: linear
attention, state-space and convolution layers accept them, and carry state from one sequence into the next. So models
with such layers are padded by their kind (dora/trainer/layouts.py).

In 16 bits rounding hides such state, above all under untrained weights: packing then changes log-probs by less than
their rounding. So the same rows are computed once more with other tokens in every second sequence. Shapes, kernels and
rounding are the same, so the log-probs of the unchanged sequences must stay the same too.

An adapter may be new, and so have no effect: at the start, another one is in its place. One that was given is checked
after that.

A row in which the sequences share their prompts is checked likewise. If only that fails, prompts are not shared.
Where several ranks divide each row, they divide those of the check too; a sequence alone is computed by every rank.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Final

import torch
import torch.distributed as dist
from torch import Tensor

from dora.adapter_files import FIELD
from dora.errors import ConfigError, RunFailed
from dora.trainer import attention
from dora.trainer.check_rows import LENGTHS, MembersAndRow, Sequences, sequences_for
from dora.trainer.context import Context
from dora.trainer.layouts import layout_of, require_divided, why_padded
from dora.trainer.logprobs import logprobs
from dora.trainer.model import Policy
from dora.trainer.packing import SHARE_ABOVE, Layout, Row, Sharing

#: Steps from one check of trained weights to the next; each costs about fifteen short forward passes.
CHECK_EVERY: Final = 50
#: Largest mean |Δ log-prob| between packed sequences and the same ones alone. Measured on a CPU with small random
#: models: where packing is exact, at most 5e-7 in float32 and 7e-4 in bfloat16; where it is not, at least 1e-2.
PACKING: Final = {"float64": 1e-3, "float32": 1e-3, "float16": 5e-3, "bfloat16": 5e-3}
#: A large model rounds more. So the limit is at least this multiple of the difference between the two attentions.
ROUNDING: Final = 2.0
#: Largest mean |Δ log-prob| of sequences when those before them in a row change. Measured likewise, under random and
#: trained weights: at most 1e-7 where nothing leaks (0 in bfloat16), at least 4e-5 (8e-5) if 1 % of the last hidden
#: state of one sequence is added to the first of the next.
LEAK: Final = 1e-6
#: Other tokens may change the shapes of the experts' matrix products, and so the rounding even of the sequences before
#: them. The limit is at least this multiple of that rounding.
NOISE: Final = 4.0
#: Largest difference between this package's attention and transformers' own; at most 0.016 was measured in bfloat16.
ATTENTION: Final = {"float64": 1e-3, "float32": 1e-3, "float16": 0.1, "bfloat16": 0.1}
#: Largest |Δ gradient| / |gradient| between packed sequences and the same ones alone, norms over all parameters.
GRADIENT: Final = {"float32": 1e-3, "float16": 0.3, "bfloat16": 0.3}
#: Maximum number of attention scores of a layer under transformers' own attention, which keeps all of them: about 1
#: GiB. Longer sequences are compared under the trainer's attention alone.
SCORES: Final = 2**27

#: Parts of torch's messages about operands that do not fit together: the configuration describes an impossible model.
_WORDS_OF_TENSORS: Final = ("dtype", "scalar type", "size", "shape")


@dataclass(frozen=True, slots=True)
class CheckedLayout:
    """A layout under which the forward pass is exact."""

    layout: Layout
    note: str = ""  # for the user, if sequences cannot be packed, or cannot share prompts


def check_forward(
    model: Any,
    *,
    device: torch.device,
    dtype: str,
    shared_prompts: Sharing = "auto",
    longest: int = max(LENGTHS),
    context: Context | None = None,
) -> CheckedLayout:
    """Return the layout in which each sequence has the same log-probs as alone, also under transformers' attention.

    `longest`: tokens of the longest sequence of the run. `context`: the ranks that divide each row. ConfigError if
    there is no such layout.
    """
    if context is not None:
        require_divided(model, ranks=context.size, longest=longest)
    try:
        comparison = _Comparison(model, sequences_for(model.config, longest=longest), device=device, dtype=dtype)
        found = CheckedLayout(replace(layout_of(model), context=context), _note(model))
        if problem := comparison.problem(found.layout):
            raise _refusal(model, problem)
        return _check_sharing(model, found, shared_prompts, comparison=comparison)
    except (TypeError, ValueError, LookupError, AttributeError, NotImplementedError) as err:
        raise _refusal(model, f"its forward pass raises {err!r}") from err
    except RuntimeError as err:  # also raised where memory runs out, or a rank ends
        if isinstance(err, torch.OutOfMemoryError) or not any(word in str(err) for word in _WORDS_OF_TENSORS):
            raise
        raise _refusal(model, f"its forward pass in {dtype} raises {err!r}") from err


def check_training(
    policy: Policy,
    *,
    dtype: str,
    shared_prompts: Sharing = "auto",
    longest: int = max(LENGTHS),
    context: Context | None = None,
) -> CheckedLayout:
    """Like `check_forward`, and check the gradients too. A collective: every rank computes and finds the same.

    Gradients are compared for sequences that fit in one rank alone, so up to its part of the longest one.
    """
    with policy.trial_adapter():
        found = _check_training(policy, dtype, shared_prompts, longest=longest, context=context)
    if policy.adapters is not None and policy.adapters.settings.begins_with:
        try:
            check_forward(
                policy.model, device=policy.device, dtype=dtype, shared_prompts=shared_prompts, longest=longest,
                context=context,
            )  # fmt: skip
        except ConfigError as err:
            raise ConfigError(str(err).replace("model.path", FIELD)) from err
        policy.reshard()
    return found


def _check_training(
    policy: Policy, dtype: str, shared_prompts: Sharing, *, longest: int, context: Context | None
) -> CheckedLayout:
    model, device = policy.model, policy.device
    found = check_forward(
        model, device=device, dtype=dtype, shared_prompts=shared_prompts, longest=longest, context=context
    )
    sequences = sequences_for(model.config, longest=-(-longest // found.layout.slices))
    expected = _gradients(policy, sequences, None)
    _require_effect(policy, expected)

    def error_of(layout: Layout) -> float:
        together = _gradients(policy, sequences, layout)
        return _norm(together[name] - gradient for name, gradient in expected.items()) / _norm(expected.values())

    alone = _unshared(found.layout)
    if not (error := error_of(alone)) <= GRADIENT[dtype]:
        raise _refusal(
            model, f"the gradient of {_kind(alone)} sequences differs by {error:.1%} from that of each alone"
        )
    if found.layout != alone and not (error := error_of(_sharing(alone))) <= GRADIENT[dtype]:
        reason = f"the gradient would differ by {error:.1%} from that of each answer alone"
        return _without_sharing(model, found, shared_prompts, reason)
    return found


def check_again(policy: Policy, layout: Layout, *, dtype: str, longest: int, weights: str) -> None:
    """Raise RunFailed unless `layout` is exact under weights that were trained; `weights` says which.

    A collective of forward passes, which changes no weight and no gradient: every rank finds the same.
    """
    model = policy.model
    policy.reshard()
    comparison = _Comparison(model, sequences_for(model.config, longest=longest), device=policy.device, dtype=dtype)
    unshared = _unshared(layout)
    advice = "report it" if dtype == "float32" else 'resume with trainer.dtype = "float32", and report it'
    problem = comparison.problem(unshared)
    if not problem and layout != unshared:
        advice = 'resume with trainer.shared_prompts = "off"'
        problem = comparison.problem(_sharing(unshared))
    policy.reshard()
    if problem:
        raise RunFailed(f"under {weights}, {_name(model)} can no longer be trained: {problem}; {advice}")


class _Comparison:
    """Compares sequences that are laid out in rows with each of them alone."""

    def __init__(self, model: Any, sequences: Sequences, *, device: torch.device, dtype: str) -> None:
        """Compute the log-probs of each alone, under both attentions."""
        self._model, self._sequences, self._device, self._dtype = model, sequences, device, dtype
        self._alone = self._logprobs(sequences.rows(None, device), partial(_packed_logprobs, model))
        self._rounding = self._against_plain()

    def _against_plain(self) -> float:
        """Return the mean |Δ log-prob| of the trainer's attention and transformers' own."""
        heads = getattr(self._model.config.get_text_config(decoder=True), "num_attention_heads", None) or 0
        rows = [
            (of, row) for of, row in self._sequences.rows(None, self._device) if heads * row.lengths[0] ** 2 <= SCORES
        ]
        with _own_attention(self._model):
            plain = self._logprobs(rows, partial(_plain_logprobs, self._model))
        return _mean_difference(self._alone, plain, plain)

    def problem(self, layout: Layout) -> str:
        """Say what is wrong with the log-probs of the sequences in this layout; empty if they are exact."""
        rounding = self._rounding
        if not rounding <= ATTENTION[self._dtype]:
            return f"under the trainer's attention, log-probs differ by {rounding:.2g} from transformers' own"
        rows = self._sequences.rows(layout, self._device)
        together = self._logprobs(rows, partial(_packed_logprobs, self._model))
        error = _mean_difference(together, self._alone, together)
        if not error <= max(PACKING[self._dtype], ROUNDING * rounding):
            return f"log-probs of {_kind(layout)} sequences differ by {error:.2g} from those of each alone"
        orders = [self._sequences.in_order(members, row) for members, row in rows]
        leak = self._effect(layout, together, changed=[n for order in orders for n in order[::2]])
        if leak <= LEAK:
            return ""
        noise = self._effect(layout, together, changed=[order[-1] for order in orders])
        if not leak <= NOISE * noise:
            return f"log-probs of {_kind(layout)} sequences change by {leak:.2g} if those before them have other tokens"
        return ""

    def _effect(self, layout: Layout, before: dict[int, Tensor], *, changed: list[int]) -> float:
        """Return the mean |Δ log-prob| of the unchanged sequences when the sequences `changed` get other tokens."""
        rows = self._sequences.rows(layout, self._device, changed=changed)
        after = self._logprobs(rows, partial(_packed_logprobs, self._model))
        return _mean_difference(before, after, set(before).difference(changed))

    @torch.no_grad()
    def _logprobs(self, rows: list[MembersAndRow], compute: Callable[[Row], Tensor]) -> dict[int, Tensor]:
        """Return the log-probs of each sequence's response."""
        found: dict[int, Tensor] = {}
        for members, row in rows:
            found |= zip(members, compute(row).split([self._sequences.responses[n] for n in members]), strict=True)
        return found


def _check_sharing(model: Any, found: CheckedLayout, wanted: Sharing, *, comparison: _Comparison) -> CheckedLayout:
    """Return the layout with shared prompts, if they are wanted and exact."""
    if wanted == "off":
        return found
    if found.layout.padded:
        return _without_sharing(model, found, wanted, "its rows are padded, one sequence a line")
    if problem := comparison.problem(_sharing(found.layout)):
        return _without_sharing(model, found, wanted, f"with shared prompts, {problem}")
    return replace(found, layout=replace(found.layout, share_above=SHARE_ABOVE[wanted]))


def _without_sharing(model: Any, found: CheckedLayout, wanted: Sharing, reason: str) -> CheckedLayout:
    """Return the layout without shared prompts, with a note unless the model is padded anyway; ConfigError if "on"."""
    if wanted == "on":
        raise ConfigError(f"trainer.shared_prompts: {_name(model)} cannot share prompts: {reason}; use auto or off")
    note = found.note or f"{_name(model)} computes each prompt once per answer: {reason}"
    return CheckedLayout(_unshared(found.layout), note)


def _sharing(layout: Layout) -> Layout:
    return replace(layout, share_above=SHARE_ABOVE["on"])


def _unshared(layout: Layout) -> Layout:
    return replace(layout, share_above=SHARE_ABOVE["off"])


def _gradients(policy: Policy, sequences: Sequences, layout: Layout | None) -> dict[str, Tensor]:
    """Return the gradients of a sum of all log-probs, each with its own weight, and leave the policy as it was."""
    responses = sequences.responses
    weights = torch.linspace(-1.0, 1.0, sum(responses), device=policy.device).split(responses)
    ranks = 1 if layout is None else layout.slices  # each has a part of the gradient, where it would have all of it
    for members, row in sequences.rows(layout, policy.device):
        policy.prepare(closes_update=True)
        weight_P = torch.cat([weights[n] for n in members]) * ranks
        (logprobs(policy.model, row, temperature=1.0)[0] * weight_P).sum().backward()
    gradients = policy.gradients()
    policy.clear_gradients()
    policy.reshard()
    return gradients


def _require_effect(policy: Policy, gradients: dict[str, Tensor]) -> None:
    """Raise ConfigError if part of an adapter has no gradient: a model may use a weight without its module."""
    if policy.adapters is None:
        return
    names = [*policy.trained()]
    zero = torch.zeros((), device=policy.device)
    squares = torch.stack([gradients.get(name, zero).double().square().sum() for name in names])
    dist.all_reduce(squares)
    if idle := [name for name, square in zip(names, squares.tolist(), strict=True) if not square]:
        target = idle[0].partition(".lora_")[0]
        raise ConfigError(
            f"trainer.lora.targets: an adapter of {target} has no effect in {_name(policy.model)}; remove "
            f"{target.rpartition('.')[2]}"
        )


def _packed_logprobs(model: Any, row: Row) -> Tensor:
    return logprobs(model, row, temperature=1.0)[0]


@contextmanager
def _own_attention(model: Any) -> Iterator[None]:
    """In this context, the model uses transformers' own attention, in the form that every family supports."""
    model.set_attn_implementation("eager")
    try:
        yield
    finally:
        model.set_attn_implementation(attention.NAME)


def _plain_logprobs(model: Any, row: Row) -> Tensor:
    """Return the [P] log-probs of a row with a single sequence, without any argument of packing."""
    logits_TV = model(input_ids=row.tokens_BT, use_cache=False).logits[0]
    return logits_TV[row.predictors_P].float().log_softmax(-1).gather(-1, row.targets_P[:, None])[:, 0]


def _mean_difference(found: dict[int, Tensor], wanted: dict[int, Tensor], of: Iterable[int]) -> float:
    """Return the mean |Δ log-prob| of these sequences, the largest of all ranks; NaN counts as infinite."""
    differences = [(found[n] - wanted[n]).abs().double() for n in of]
    if not differences:
        return 0.0
    mean = torch.cat(differences).mean().nan_to_num(nan=math.inf)
    if dist.is_initialized():
        dist.all_reduce(mean, op=dist.ReduceOp.MAX)
    return float(mean)


def _refusal(model: Any, reason: str) -> ConfigError:
    return ConfigError(f"model.path: {_name(model)} cannot be trained: {reason}")


def _note(model: Any) -> str:
    """Say why sequences are not packed; empty if they are."""
    reason = why_padded(model)
    return reason and (
        f"{_name(model)} {reason}, so it is trained in padded rows; the metric padding_frac is the share of the "
        "computation that this costs"
    )


def _name(model: Any) -> str:
    return type(model).__name__.removeprefix("FSDP")  # FSDP2 makes a subclass of this name


def _kind(layout: Layout) -> str:
    return "padded" if layout.padded else "packed"


def _norm(tensors: Iterable[Tensor]) -> float:
    """Return the Euclidean norm over the shards of all ranks."""
    squares = torch.stack([tensor.double().square().sum() for tensor in tensors]).sum()
    dist.all_reduce(squares)
    return math.sqrt(float(squares))
