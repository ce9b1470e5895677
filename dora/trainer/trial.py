"""A trainer of one rank in this process, without an optimizer: for the checks before a run."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Self

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray
from torch._C._distributed_c10d import HashStore
from transformers.utils.logging import disable_progress_bar

from dora.trainer.checkpointing import Mode
from dora.trainer.forecast import trial_row
from dora.trainer.forward_check import check_training
from dora.trainer.live_bytes import LiveBytes
from dora.trainer.logprobs import logprobs
from dora.trainer.meshes import make_mesh
from dora.trainer.model import Policy, require_device
from dora.trainer.packing import Sharing
from dora.trainer.score import score_with
from dora.transport.messages import LoraSettings


class Trial:
    """A loaded model, with its forward pass checked as in a run. It uses the default process group of this process."""

    def __init__(
        self,
        model_path: Path,
        *,
        device: str,
        dtype: str,
        checkpointing: Mode,
        shared_prompts: Sharing,
        compiled: bool,
        longest: int,
        lora: LoraSettings | None = None,
    ) -> None:
        """Load and check the model, for sequences of up to `longest` tokens; ConfigError if it cannot be trained."""
        require_device(device)
        disable_progress_bar()
        dist.init_process_group("nccl" if device == "cuda" else "gloo", store=HashStore(), rank=0, world_size=1)
        try:
            self._policy = Policy(
                model_path,
                mesh=make_mesh(device),
                dtype=getattr(torch, dtype),
                activation_checkpointing=checkpointing,
                compiled=compiled,
                lora=lora,
            )
            self.checked = check_training(self._policy, dtype=dtype, shared_prompts=shared_prompts, longest=longest)
        except BaseException:
            dist.destroy_process_group()
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        dist.destroy_process_group()

    def measure(self, *, tokens: int, longest: int) -> int:
        """Train two passes, without an update; return the peak of the allocator or, on a CPU, the bytes kept.

        The memory of the second pass is measured, because the gradients of the first one exist by then.
        """
        policy = self._policy
        row = trial_row(tokens, longest=longest, layout=self.checked.layout, device=policy.device)
        is_cuda = policy.device.type == "cuda"
        for closes_update in (False, True) if is_cuda else (True,):
            if is_cuda:
                torch.cuda.reset_peak_memory_stats(policy.device)
            policy.prepare(closes_update=closes_update)
            with LiveBytes() as live:
                loss = logprobs(policy.model, row, temperature=1.0)[0].sum()
            kept = live.now
            loss.backward()
        policy.clear_gradients()
        policy.reshard()
        return torch.cuda.max_memory_allocated(policy.device) if is_cuda else kept

    def score(
        self,
        sequences: Sequence[Sequence[int]],
        *,
        prompt_lengths: Sequence[int],
        temperature: float,
        fp32_head: bool,
    ) -> list[NDArray[np.float32]]:
        """Return the log-probs of each sequence's tokens after the prompt, without an adapter; see
        `dora.trainer.score`."""
        with self._policy.without_adapter():
            return score_with(
                self._policy.model,
                self.checked.layout,
                sequences,
                prompt_lengths=prompt_lengths,
                temperature=temperature,
                device=self._policy.device,
                fp32_head=fp32_head,
            )
