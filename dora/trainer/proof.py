"""The log-probs of a short prompt under an adapter, by which a server proves that it has it (adapter_files.Proof)."""

from __future__ import annotations

from typing import Final

import numpy as np
import torch

from dora.adapter_files import Proof
from dora.trainer.logprobs import logprobs
from dora.trainer.model import Policy
from dora.trainer.packing import Layout, make_row
from dora.transport.messages import TrainerSettings

#: More would tell more adapters apart; each push costs a server a prompt of this length, and a second one at the end.
PROMPT_TOKENS: Final = 16


def prove(policy: Policy, layout: Layout, settings: TrainerSettings) -> Proof:
    """Compute the log-probs under the weights as they are now; a collective."""
    vocab_size = policy.model.config.get_text_config().vocab_size
    tokens = np.arange(PROMPT_TOKENS) * vocab_size // PROMPT_TOKENS
    trained = np.arange(1, PROMPT_TOKENS)
    row = make_row(tokens, lengths=[PROMPT_TOKENS], trained=trained, layout=layout, device=policy.device)
    with torch.no_grad():
        found_P, _ = logprobs(policy.model, row, temperature=1.0, fp32_head=settings.fp32_head)
    policy.reshard()  # the weights that the pass has gathered are about to change
    is_coarse = "bfloat16" in (settings.dtype, settings.publish_dtype)
    return Proof("bfloat16" if is_coarse else "float32", tokens.tolist(), [round(one, 6) for one in found_P.tolist()])
