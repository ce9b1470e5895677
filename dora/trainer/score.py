"""Log-probs of given responses under a model folder, in one process, for `dora check` and `dora audit --deep`.

They come from the trainer's own forward pass, so they are what the trainer would compute.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM
from transformers.utils.logging import disable_progress_bar

from dora.adapter_files import PREFIX, WEIGHTS
from dora.model_config import load_config
from dora.trainer import attention
from dora.trainer.forward_check import check_forward
from dora.trainer.logprobs import logprobs
from dora.trainer.model import require_device, require_text_decoder
from dora.trainer.packing import Layout, PromptTokens, make_row, split_passes
from dora.trainer.replay import replayed

TOKENS_PER_ROW = 4_096  # sequences are packed up to this many tokens; a longer one is a row by itself


def score(
    model_path: Path,
    sequences: Sequence[Sequence[int]],
    *,
    prompt_lengths: Sequence[int],
    temperature: float,
    device: str = "cpu",
    dtype: str = "float32",
    fp32_head: bool = False,
    adapter: Path | None = None,
    experts: Sequence[NDArray[np.int16]] | None = None,
) -> list[NDArray[np.float32]]:
    """Return the log-probs of each sequence's tokens after the prompt, under softmax(logits / temperature).

    `adapter`: folder of one that the model has beside its weights. `experts`: to replay, for each sequence [its tokens,
    layers with experts, top_k]; -1: those that the model chooses.
    """
    if min(prompt_lengths, default=1) < 1:
        raise ValueError("the first token of a sequence has no log-prob; prompts have at least one token")
    require_device(device)
    disable_progress_bar()
    config = load_config(model_path)
    require_text_decoder(config)
    attention.require_interface(config)
    model = AutoModelForCausalLM.from_pretrained(
        model_path,
        config=config,
        dtype=getattr(torch, dtype),
        attn_implementation=attention.NAME,
        local_files_only=True,
        trust_remote_code=False,
        use_safetensors=True,
    )
    if adapter is not None:
        _add(adapter, model)
    model = model.to(device).eval()
    longest = max(map(len, sequences), default=1)
    layout = check_forward(model, device=torch.device(device), dtype=dtype, longest=longest).layout
    return score_with(
        model,
        layout,
        sequences,
        prompt_lengths=prompt_lengths,
        temperature=temperature,
        device=torch.device(device),
        fp32_head=fp32_head,
        experts=experts,
    )


def _add(adapter: Path, model: Any) -> None:
    """Give a model an adapter."""
    from peft import LoraConfig, inject_adapter_in_model, set_peft_model_state_dict

    inject_adapter_in_model(LoraConfig.from_pretrained(str(adapter)), model)
    matrices = load_file(adapter / WEIGHTS)
    set_peft_model_state_dict(model, {name.removeprefix(PREFIX): value for name, value in matrices.items()})
    model.to(model.dtype)


def score_with(
    model: Any,
    layout: Layout,
    sequences: Sequence[Sequence[int]],
    *,
    prompt_lengths: Sequence[int],
    temperature: float,
    device: torch.device,
    fp32_head: bool = False,
    experts: Sequence[NDArray[np.int16]] | None = None,
) -> list[NDArray[np.float32]]:
    """Like `score`, under a loaded model; `layout` must be a layout in which its forward pass is exact."""
    scored: list[NDArray[np.float32]] = [np.empty(0, np.float32)] * len(sequences)
    lengths = [len(sequence) for sequence in sequences]
    mask = [np.arange(length) >= prompt for length, prompt in zip(lengths, prompt_lengths, strict=True)]
    chosen = (
        [b""] * len(lengths) if experts is None else [experts[n][:k].tobytes() for n, k in enumerate(prompt_lengths)]
    )
    prompts = [
        PromptTokens(length, np.asarray(sequence[:length], np.int64).tobytes(), of_prompt)
        for sequence, length, of_prompt in zip(sequences, prompt_lengths, chosen, strict=True)
    ]
    for members in split_passes(lengths, prompts=prompts, layout=layout, budget=TOKENS_PER_ROW):
        tokens = np.concatenate([np.asarray(sequences[n], np.int64) for n in members])
        trained = np.concatenate([mask[n] for n in members]).nonzero()[0]
        row = make_row(
            tokens,
            lengths=[lengths[n] for n in members],
            trained=trained,
            experts=None if experts is None else np.concatenate([experts[n] for n in members]),
            layout=layout,
            device=device,
        )
        with torch.no_grad(), replayed(model, row):
            values = logprobs(model, row, temperature=temperature, fp32_head=fp32_head)[0].float().cpu().numpy()
        ends = np.cumsum([mask[n].sum() for n in members])
        for n, logprobs_P in zip(members, np.split(values, ends[:-1]), strict=True):
            scored[n] = logprobs_P
    return scored
