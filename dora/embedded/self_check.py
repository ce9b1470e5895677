"""The check of a loaded model before it serves: its log-probs must be those of transformers' own forward pass.

Requests join, decode side by side, with and without drafts, leave and move to another row, and one continues a prompt
of the prefix cache. If the layers of a family keep state that the slots do not hold, the log-probs differ, and the
model is refused. Where adapters are served, all that is repeated with requests of several adapters and of none; each
must have the log-probs of its adapter alone.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Final

import torch
from torch import Tensor

from dora.embedded.adapter_stack import AdapterStack
from dora.embedded.batcher import Decoder, Joiner
from dora.embedded.slots import ATTENTION

#: Largest mean |Δ log-prob|; with small random models on a CPU, 1e-6 was measured in float32.
LIMIT: Final = {torch.float32: 1e-3, torch.float16: 0.1, torch.bfloat16: 0.1}
STEPS: Final = 2  # number of steps before a row leaves, and again after that
DRAFT: Final = (0, 0)  # what each row drafts after these


@dataclass(frozen=True, slots=True)
class _Request:
    token_ids: list[int]
    logprobs: list[float]  # of the last tokens
    adapter: int | None


def require_exact(decoder: Decoder, model: Any, *, slots: int, adapters: AdapterStack | None = None) -> None:
    """Raise ValueError unless a few requests get the log-probs of a plain forward pass. Leaves the decoder empty."""
    prompts = _prompts(decoder, count=slots)
    _compare(model, _served(decoder, [(prompt, None) for prompt in prompts]), adapters)
    if adapters is None:
        return
    places = (0, None, adapters.room.count - 1, 0)
    for place in {0, adapters.room.count - 1}:
        adapters.draw(place)
    with _all_called(adapters.modules()):
        _compare(model, _served(decoder, list(zip(prompts, places, strict=False))), adapters)


def _compare(model: Any, requests: Sequence[_Request], adapters: AdapterStack | None) -> None:
    expected = [_plain_logprobs(model, request, adapters)[-len(request.logprobs) :] for request in requests]
    given = torch.tensor([logprob for request in requests for logprob in request.logprobs])
    error = float((given - torch.cat(expected)).abs().mean())
    if error > LIMIT.get(model.dtype, 0.0):  # weights that give NaN are served, and their requests fail
        raise ValueError(f"its log-probs differ by {error:.2g} from those of a plain forward pass")


@contextmanager
def _all_called(modules: Mapping[str, Any]) -> Iterator[None]:
    """Raise ValueError unless each of the modules is called. (Some families use a weight without its module.)"""
    called: set[str] = set()
    hooks = [module.register_forward_hook(lambda *_, name=name: called.add(name)) for name, module in modules.items()]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()
    if missed := sorted(modules.keys() - called):
        raise ValueError(f"it does not call {missed[0]}, which would therefore have no adapter")


def _prompts(decoder: Decoder, *, count: int) -> list[list[int]]:
    """Return prompts of which the second continues the first."""
    longest = max(2, min(32, decoder.context_tokens - 2 * (STEPS + 1 + len(DRAFT))))
    rng = random.Random(0)
    one, other = ([rng.randrange(decoder.vocab_size) for _ in range(longest)] for _ in range(2))
    return [one[: longest // 2], one, other[:1], other[: longest * 3 // 4]][:count]


def _served(decoder: Decoder, asked: Sequence[tuple[list[int], int | None]]) -> list[_Request]:
    """Return the requests with the log-probs of their sampled tokens, and for the last request also of its prompt.

    `asked`: prompts, and the places of their adapters.
    """
    rows: list[_Request] = []
    left: list[_Request] = []
    for wave in (asked[:1], asked[1:]):
        joiners = [
            Joiner(
                token_ids=tuple(prompt),
                namespace=str(adapter),
                seed=len(prompt),
                logprob_start=0 if prompt is asked[-1][0] else None,
                adapter=adapter,
            )
            for prompt, adapter in wave
        ]
        for joined in decoder.join(joiners) if joiners else []:
            known = [logprob for logprob in joined.prompt_logprobs or [] if logprob is not None]
            prompt, adapter = wave[joined.joiner]
            rows.append(_Request(list(prompt), known, adapter))
    while rows:
        for _ in range(STEPS):
            for request, token, logprob in zip(rows, *decoder.step(), strict=True):
                request.token_ids.append(token)
                request.logprobs.append(logprob)
        if decoder.can_verify:
            for request, (tokens, logprobs) in zip(rows, decoder.verify([DRAFT] * len(rows)), strict=True):
                request.token_ids.extend(tokens)
                request.logprobs.extend(logprobs)
        for _ in range(1 if not left else len(rows)):
            decoder.leave(0)
            left.append(rows[0])
            rows[0] = rows[-1]
            rows.pop()
    decoder.flush()
    return left


def _plain_logprobs(model: Any, request: _Request, adapters: AdapterStack | None) -> Tensor:
    """Return the log-prob of each token after the first, under transformers' own attention and without a cache."""
    tokens_T = torch.tensor(request.token_ids, device=model.device)
    if adapters is not None:
        adapters.aim([request.adapter])
    model.set_attn_implementation("eager")
    try:
        logits_TV = model(input_ids=tokens_T[None], use_cache=False).logits[0]
    finally:
        model.set_attn_implementation(ATTENTION)
    return logits_TV[:-1].float().log_softmax(-1).gather(1, tokens_T[1:, None])[:, 0].cpu()
