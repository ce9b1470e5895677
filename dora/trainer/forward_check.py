"""The check of the packed forward pass on the loaded model, before anything is trained.

Random sequences are packed into one row, as in training, and compared with the same sequences one by one under
transformers' own attention: log-probs and gradients. A layer that accepts the arguments of packing proves nothing:
linear attention, state-space and convolution layers accept them, and carry state from one sequence into the next.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any, Final

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from dora.errors import ConfigError
from dora.trainer import attention
from dora.trainer.logprobs import logprobs
from dora.trainer.model import Policy, decoder_layers
from dora.trainer.packing import Row, make_row

LENGTHS: Final = (5, 40, 17, 64, 9)
#: Largest mean |Δ log-prob| between packed sequences and the same ones alone. Measured on a CPU with small random
#: models: where packing is exact, at most 5e-7 in float32 and 3e-4 in bfloat16; where it is not, at least 1e-2.
PACKING: Final = {"float64": 1e-3, "float32": 1e-3, "float16": 5e-3, "bfloat16": 5e-3}
#: A large model rounds more: in 16 bits, this multiple of the difference between the two attentions is allowed too.
ROUNDING: Final = 2.0
#: Largest difference between this package's attention and transformers' own; at most 0.016 was measured in bfloat16.
ATTENTION: Final = {"float64": 1e-3, "float32": 1e-3, "float16": 0.1, "bfloat16": 0.1}
#: Largest |Δ gradient| / |gradient| between packed sequences and the same ones alone, norms over all parameters.
GRADIENT: Final = {"float32": 1e-3, "float16": 0.3, "bfloat16": 0.3}


def require_exact_forward(model: Any, *, device: torch.device, dtype: str) -> None:
    """ConfigError unless packed sequences have the log-probs they have alone, also under transformers' attention."""
    packed, alone = _rows(model, device)
    with torch.no_grad():
        packed_P = logprobs(model, packed, temperature=1.0)[0]
        alone_P = torch.cat([logprobs(model, row, temperature=1.0)[0] for row in alone])
        with _own_attention(model):
            plain_P = torch.cat([_plain_logprobs(model, row) for row in alone])
    rounding = float((alone_P - plain_P).abs().mean())
    if not rounding <= ATTENTION[dtype]:
        raise _refusal(
            model, f"under the trainer's attention, log-probs differ by {rounding:.2g} from transformers' own"
        )
    error = float((packed_P - alone_P).abs().mean())
    if not error <= max(PACKING[dtype], ROUNDING * rounding):
        raise _refusal(model, f"log-probs of packed sequences differ by {error:.2g} from those of each alone")


def require_exact_training(policy: Policy, *, dtype: str) -> None:
    """Like `require_exact_forward`, and for the gradients. A collective: every rank computes the same."""
    model = policy.model
    require_exact_forward(model, device=policy.device, dtype=dtype)
    packed, alone = _rows(model, policy.device)
    together, expected = _gradients(policy, [packed]), _gradients(policy, alone)
    error = _norm(together[name] - gradient for name, gradient in expected.items()) / _norm(expected.values())
    if not error <= GRADIENT[dtype]:
        raise _refusal(model, f"the gradient of packed sequences differs by {error:.1%} from that of each alone")


def _gradients(policy: Policy, rows: list[Row]) -> dict[str, Tensor]:
    """Return the gradients of all log-probs, each with another weight, and leave the policy as it was."""
    weight_P = torch.linspace(-1.0, 1.0, sum(len(row.targets_P) for row in rows), device=policy.device)
    for row, weight in zip(rows, weight_P.split([len(row.targets_P) for row in rows]), strict=True):
        policy.prepare(closes_step=True)
        (logprobs(policy.model, row, temperature=1.0)[0] * weight).sum().backward()
    gradients = policy.gradients()
    policy.clear_gradients()
    policy.reshard()
    return gradients


def _rows(model: Any, device: torch.device) -> tuple[Row, list[Row]]:
    """Return random sequences as one packed row, and as rows of their own; every token but a first one is trained."""
    vocab_size = model.config.get_text_config().vocab_size
    sequences = [np.random.default_rng(length).integers(0, vocab_size, length) for length in LENGTHS]
    ends = np.cumsum(LENGTHS)
    trained = np.concatenate([np.arange(end - length + 1, end) for end, length in zip(ends, LENGTHS, strict=True)])
    packed = make_row(np.concatenate(sequences), lengths=np.array(LENGTHS), trained=trained, device=device)
    alone = [
        make_row(tokens, lengths=np.array([len(tokens)]), trained=np.arange(1, len(tokens)), device=device)
        for tokens in sequences
    ]
    return packed, alone


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
    logits_TV = model(input_ids=row.tokens_T[None], use_cache=False).logits[0]
    return logits_TV[row.predictors_P].float().log_softmax(-1).gather(-1, row.targets_P[:, None])[:, 0]


def _refusal(model: Any, reason: str) -> ConfigError:
    """Name the layers, besides attention, through which one sequence can reach the next."""
    mixers = {
        type(child).__name__
        for layer in decoder_layers(model)
        for child in layer.children()
        if any(word in type(child).__name__ for word in ("Delta", "Conv", "MambaLayer", "Mixer", "RecurrentBlock"))
    }
    layers = f" (with {', '.join(sorted(mixers))} layers)" if mixers else ""
    return ConfigError(f"model.path: {type(model).__name__}{layers} cannot be trained: {reason}")


def _norm(tensors: Iterable[Tensor]) -> float:
    """Return the Euclidean norm over the shards of all ranks."""
    squares = torch.stack([tensor.double().square().sum() for tensor in tensors]).sum()
    dist.all_reduce(squares)
    return math.sqrt(float(squares))
