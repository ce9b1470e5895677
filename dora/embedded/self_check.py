"""The check of a loaded model before it serves: its log-probs must be those of transformers' own forward pass.

Requests join, decode side by side, leave and move to another row, and one continues a prompt of the prefix cache. If
the layers of a family keep state that the slots do not hold, the log-probs differ, and the model is refused.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

import torch
from torch import Tensor

from dora.embedded.batcher import Decoder, Joiner
from dora.embedded.slots import ATTENTION

#: Largest mean |Δ log-prob|; with small random models on a CPU, 1e-6 was measured in float32.
LIMIT: Final = {torch.float32: 1e-3, torch.float16: 0.1, torch.bfloat16: 0.1}
STEPS: Final = 2  # number of steps before a row leaves, and again after that


@dataclass(frozen=True, slots=True)
class _Request:
    token_ids: list[int]
    logprobs: list[float]  # of the last tokens


def require_exact(decoder: Decoder, model: Any, *, slots: int) -> None:
    """Raise ValueError unless a few requests get the log-probs of a plain forward pass. Leaves the decoder empty."""
    requests = _served(decoder, _prompts(decoder, count=slots))
    expected = [_plain_logprobs(model, request.token_ids)[-len(request.logprobs) :] for request in requests]
    given = torch.tensor([logprob for request in requests for logprob in request.logprobs])
    error = float((given - torch.cat(expected)).abs().mean())
    if error > LIMIT.get(model.dtype, 0.0):  # weights that give NaN are served, and their requests fail
        raise ValueError(f"its log-probs differ by {error:.2g} from those of a plain forward pass")


def _prompts(decoder: Decoder, *, count: int) -> list[list[int]]:
    """Return prompts of which the second continues the first."""
    longest = max(2, min(32, decoder.context_tokens - 2 * STEPS))
    rng = random.Random(0)
    one, other = ([rng.randrange(decoder.vocab_size) for _ in range(longest)] for _ in range(2))
    return [one[: longest // 2], one, other[:1], other[: longest * 3 // 4]][:count]


def _served(decoder: Decoder, prompts: Sequence[list[int]]) -> list[_Request]:
    """Return the requests with the log-probs of their sampled tokens, and for the last request also of its prompt."""
    rows: list[_Request] = []
    left: list[_Request] = []
    for wave in (prompts[:1], prompts[1:]):
        starts = [0 if prompt is prompts[-1] else None for prompt in wave]
        joiners = [
            Joiner(token_ids=tuple(prompt), namespace="", seed=len(prompt), logprob_start=start)
            for prompt, start in zip(wave, starts, strict=True)
        ]
        for joined in decoder.join(joiners) if joiners else []:
            known = [logprob for logprob in joined.prompt_logprobs or [] if logprob is not None]
            rows.append(_Request(list(wave[joined.joiner]), known))
    while rows:
        for _ in range(STEPS):
            for request, token, logprob in zip(rows, *decoder.step(), strict=True):
                request.token_ids.append(token)
                request.logprobs.append(logprob)
        for _ in range(1 if not left else len(rows)):
            decoder.leave(0)
            left.append(rows[0])
            rows[0] = rows[-1]
            rows.pop()
    decoder.flush()
    return left


def _plain_logprobs(model: Any, token_ids: list[int]) -> Tensor:
    """Return the log-prob of each token after the first, under transformers' own attention and without a cache."""
    tokens_T = torch.tensor(token_ids, device=model.device)
    model.set_attn_implementation("eager")
    try:
        logits_TV = model(input_ids=tokens_T[None], use_cache=False).logits[0]
    finally:
        model.set_attn_implementation(ATTENTION)
    return logits_TV[:-1].float().log_softmax(-1).gather(1, tokens_T[1:, None])[:, 0].cpu()
