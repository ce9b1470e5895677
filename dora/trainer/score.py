"""Log-probs of given responses under a model folder, in one process, for `dora check` and `dora audit --deep`.

They come from the trainer's own forward pass, so they are what the trainer would compute.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.utils.logging import disable_progress_bar

from dora.trainer import attention
from dora.trainer.forward_check import require_exact_forward
from dora.trainer.logprobs import logprobs
from dora.trainer.model import require_device
from dora.trainer.packing import make_row

TOKENS_PER_ROW = 4_096  # sequences are packed up to this many tokens; a longer one is a row by itself


def score(
    model_path: Path,
    sequences: Sequence[Sequence[int]],
    *,
    prompt_lengths: Sequence[int],
    temperature: float,
    device: str = "cpu",
    dtype: str = "float32",
) -> list[NDArray[np.float32]]:
    """Return the log-probs of each sequence's tokens after the prompt, under softmax(logits / temperature)."""
    if min(prompt_lengths, default=1) < 1:
        raise ValueError("the first token of a sequence has no log-prob; prompts have at least one token")
    require_device(device)
    disable_progress_bar()
    attention.require_interface(AutoConfig.from_pretrained(model_path, local_files_only=True, trust_remote_code=False))
    model = AutoModelForCausalLM.from_pretrained(
        model_path,
        dtype=getattr(torch, dtype),
        attn_implementation=attention.NAME,
        local_files_only=True,
        trust_remote_code=False,
        use_safetensors=True,
    )
    model = model.to(device).eval()
    require_exact_forward(model, device=torch.device(device), dtype=dtype)
    scored: list[NDArray[np.float32]] = []
    for part in _parts(sequences):
        lengths = np.array([len(sequences[i]) for i in part])
        ends = np.cumsum(lengths)
        response_lengths = lengths - np.array([prompt_lengths[i] for i in part])
        trained = np.concatenate([np.arange(end - n, end) for end, n in zip(ends, response_lengths, strict=True)])
        tokens = np.concatenate([np.asarray(sequences[i], np.int64) for i in part])
        row = make_row(tokens, lengths=lengths, trained=trained, device=torch.device(device))
        with torch.no_grad():
            values = logprobs(model, row, temperature=temperature)[0].float().cpu().numpy()
        scored += np.split(values, np.cumsum(response_lengths)[:-1])
    return scored


def _parts(sequences: Sequence[Sequence[int]]) -> list[list[int]]:
    """Split into consecutive sequences with at most TOKENS_PER_ROW tokens together; return their indices."""
    parts: list[list[int]] = []
    used = TOKENS_PER_ROW + 1
    for number, sequence in enumerate(sequences):
        if used + len(sequence) > TOKENS_PER_ROW:
            parts.append([])
            used = 0
        parts[-1].append(number)
        used += len(sequence)
    return parts
