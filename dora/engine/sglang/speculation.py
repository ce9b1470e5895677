"""Speculative decoding on a server: proof that its answers are still sampled from the model, token by token.

A draft must decide nothing. Yet SGLang can be told to accept drafts that are merely probable, and where it has no
kernel that samples (on CPUs, XPUs and some GPUs; read in 0.5.23) it takes the most probable token at any temperature;
then the answers of a group are all the same. Log-probs of accepted drafts have been missing (sgl-project/sglang#10660).
None of that is an error to the server, and no log-prob is wrong. So a server with speculative decoding has to prove
itself before it gets work.
"""

from __future__ import annotations

import uuid
from array import array
from dataclasses import dataclass, field
from typing import Any, Final

import msgspec

from dora.engine.api import GenerateRequest
from dora.engine.sglang.answers import read_server_info
from dora.engine.sglang.client import EngineClient
from dora.errors import ConfigError, RemoteError

ANSWER_TOKENS: Final = 24
#: One repeats itself, so that its answer accepts drafts; of the others, one is uncertain enough in most models.
REPEATED: Final = (*(5, 6, 7, 8) * 4,)
UNCERTAIN: Final = ((3,), (4,), (5,), (6,), (7,), (8,))
#: Log-probability under which two answers with different seeds are the same by design, not by chance.
NO_CHANCE: Final = -20.0
#: Maximum mean difference of log-probs between decoding and prefilling an answer, by dtype; bfloat16 rounds.
MEAN_TOLERANCE: Final = {"float32": 1e-3}
MEAN_TOLERANCE_16_BITS: Final = 5e-2
#: The limit of requests that SGLang sets by itself with speculative decoding (0.5.23, arg_groups/speculative_hook.py).
LOWERED_SLOTS: Final = 48


@dataclass(frozen=True, slots=True)
class Speculation:
    """The speculative decoding of a server."""

    algorithm: str = ""  # "": none
    has_draft_model: bool = False


class _Speculation(msgspec.Struct):
    """The fields of /server_info about speculative decoding."""

    speculative_algorithm: str | None = None
    speculative_draft_model_path: str | None = None
    dp_size: int = 1
    speculative_accept_threshold_single: float = 1.0
    speculative_accept_threshold_acc: float = 1.0
    dtype: str = "auto"


@dataclass(frozen=True, slots=True)
class _ProbeAnswer:
    token_ids: array[int] = field(default_factory=lambda: array("i"))
    logprobs: array[float] = field(default_factory=lambda: array("f"))

    def add(self, token_ids: Any, logprobs: Any) -> None:
        self.token_ids.extend(token_ids)
        self.logprobs.extend(logprobs)


async def require_lossless(client: EngineClient, url: str, info: dict[str, Any], *, timeout_s: float) -> Speculation:
    """Return the speculative decoding of a server.

    ConfigError if it changes what is sampled, or the log-probs: only those of plain decoding are correct; or if no push
    could leave its draft model as it is.
    """
    found = read_server_info(info, _Speculation, url=url)
    algorithm = found.speculative_algorithm
    if algorithm is None:
        return Speculation()
    if (has_draft_model := found.speculative_draft_model_path is not None) and found.dp_size != 1:
        raise ConfigError(f"{url}: every push would overwrite its draft model; start it with --dp-size 1")
    for name in ("speculative_accept_threshold_single", "speculative_accept_threshold_acc"):
        if (value := getattr(found, name)) != 1.0:
            flag = name.replace("_", "-")
            raise ConfigError(f"{url}: --{flag} {value:g} accepts drafts that were not sampled; start it without")
    await _answer(client, url, REPEATED, temperature=0.0, seed=0, found=found, timeout_s=timeout_s)
    for prompt in UNCERTAIN:
        one, other = [
            await _answer(client, url, prompt, temperature=1.0, seed=seed, found=found, timeout_s=timeout_s)
            for seed in (1, 2)
        ]
        if one.token_ids != other.token_ids:
            break
        if (chance := sum(one.logprobs)) < NO_CHANCE:
            raise ConfigError(
                f"{url}: does not sample: two answers with different seeds are the same, of probability "
                f"e^{chance:.0f}; SGLang with --speculative-algorithm {algorithm} takes the most probable token where "
                "it has no kernel that samples, as on CPUs; start it without"
            )
    return Speculation(algorithm, has_draft_model)


def slots_doubt(speculation: Speculation, *, slots: int) -> str:
    """Return why a server's number of slots may not be meant."""
    if not speculation.algorithm or slots != LOWERED_SLOTS:
        return ""
    return (
        f"decodes at most {slots} requests at a time, to which SGLang lowers its limit for --speculative-algorithm "
        f"{speculation.algorithm} unless it is given; start the server with --max-running-requests"
    )


async def _answer(
    client: EngineClient,
    url: str,
    prompt: tuple[int, ...],
    *,
    temperature: float,
    seed: int,
    found: _Speculation,
    timeout_s: float,
) -> _ProbeAnswer:
    """Return an answer; ConfigError unless its log-probs are those of the same tokens in a prompt."""
    name, answer = f"probe-{uuid.uuid4().hex}", _ProbeAnswer()
    request = GenerateRequest(
        id=name,
        tokens=prompt,
        max_new_tokens=ANSWER_TOKENS,
        temperature=temperature,
        stop_tokens=[],
        seed=seed,
        label=name,
        ignore_end=True,
    )
    if (await client.generate(url, request, answer.add)).was_stopped:
        raise RemoteError(f"{url}: stopped a probe without being asked to")
    plain = await client.prompt_logprobs(url, [*prompt, *answer.token_ids], timeout_s=timeout_s)
    gaps = [abs(a - b) for a, b in zip(answer.logprobs, plain[len(prompt) - 1 :], strict=True)]
    mean, limit = sum(gaps) / len(gaps), MEAN_TOLERANCE.get(found.dtype, MEAN_TOLERANCE_16_BITS)
    if not mean <= limit:  # NaN also fails
        raise ConfigError(
            f"{url}: with --speculative-algorithm {found.speculative_algorithm}, log-probs of an answer differ by "
            f"{mean:.1e} on average from those of the same tokens in a prompt (limit {limit:g}); start it without"
        )
    return answer
