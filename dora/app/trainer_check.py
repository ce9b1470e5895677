"""The trainer's part of `dora check`: its forward pass, and the memory of a rank, forecast and measured.

The memory of a rank is forecast from the model's config. If this host has the rank's device and one rank alone can hold
the model, the model is loaded as in a run, the trainer's own code checks its forward pass, and one pass is measured.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Final, TypedDict

import numpy as np
from numpy.typing import NDArray

from dora.app.checkpoint_time import checkpoint_bytes
from dora.app.estimate import size_text
from dora.app.settings import lora_settings, trainer_settings
from dora.config.schema import Config
from dora.transport.messages import LoraSettings

if TYPE_CHECKING:  # torch takes seconds to import
    from dora.trainer.checkpointing import Mode
    from dora.trainer.forecast import Outline
    from dora.trainer.optimizer import MomentBytes
    from dora.trainer.packing import Layout
    from dora.trainer.trial import Trial

#: Maximum number of operations in a trial on a CPU, about 5 s on one core: a larger model is tried on fewer tokens.
CPU_OPERATIONS: Final = 1e11
MIN_TOKENS: Final = 64
#: Largest number of ranks that is proposed.
MAX_RANKS: Final = 1024


class _Forecast(TypedDict):
    copies: int
    copies_on_host: bool
    expert_ranks: int
    tensor_ranks: int
    lora: LoraSettings | None
    frozen_adapters: tuple[str, ...]


@dataclass(frozen=True)
class CheckedTrainer:
    """The findings, and the loaded model (None if it could not be tried)."""

    config: Config
    model: Path
    lines: list[tuple[str, str]]
    trial: Trial | None
    checkpoint_bytes: int

    def score(self, sequences: Sequence[Sequence[int]], *, prompt_lengths: Sequence[int]) -> list[NDArray[np.float32]]:
        """Return the log-probs of each sequence's tokens after the prompt, as the trainer computes them under
        `model.path`, which servers start from."""
        trainer, temperature = self.config.trainer, self.config.rollout.temperature
        if self.trial is not None:
            return self.trial.score(
                sequences, prompt_lengths=prompt_lengths, temperature=temperature, fp32_head=trainer.fp32_head
            )
        from dora.trainer.score import score

        return score(
            self.model,
            sequences,
            prompt_lengths=prompt_lengths,
            temperature=temperature,
            device=trainer.device,
            dtype=trainer.dtype,
            fp32_head=trainer.fp32_head,
        )


def check_trainer(config: Config, model: Path, stack: ExitStack) -> CheckedTrainer:
    """Forecast a rank, and try one if possible; ConfigError if the model cannot be trained. It blocks."""
    import torch

    torch.set_num_threads(config.trainer.threads)
    trainer = config.trainer
    is_here = trainer.device == "cpu" or torch.cuda.is_available()
    memory = _memory(config) if is_here and not config.num_training_nodes else None
    mode, outline = outline_of(config, model, memory)
    alone = outline.forecast(tokens=trainer.micro_batch_tokens, longest=config.longest_slice, ranks=1, is_trial=True)
    lines = []
    trial = None
    if config.num_training_nodes:
        lines.append(("trial", "not tried: the ranks run on nodes"))
    elif memory is None:
        lines.append(("trial", "not tried: torch can use no CUDA device here"))
    elif alone.total > memory:
        lines.append(("trial", f"not tried: one rank alone would take {size_text(alone.total)}"))
    else:
        trial = _try(config, model, mode, stack)
        note = trial.checked.note or "log-probs and gradients of packed sequences equal those of each alone"
        lines += [("forward", note), ("trial", _measure(config, outline, trial))]
    layout = trial.checked.layout if trial is not None else None
    lines += memory_lines(config, model, outline, mode=mode, memory=memory, layout=layout)
    return CheckedTrainer(config, model, lines, trial, checkpoint_bytes(config, outline))


def outline_of(config: Config, model: Path, memory: int | None) -> tuple[Mode, Outline]:
    """Return the kind of checkpointing that ranks with this memory will use, and the forecast of a rank."""
    import torch

    from dora.trainer.forecast import Outline

    mode = _mode(config, model, memory)
    dtype = getattr(torch, config.trainer.dtype)
    outline = Outline(model, dtype=dtype, checkpointing=mode, moments=_moments(config), **_forecast(config))
    outline.require_divided(ranks=config.trainer.parallel.context, longest=config.longest_request)
    return mode, outline


def _memory(config: Config) -> int:
    """Return the bytes that one rank may use."""
    import torch

    from dora.trainer.memory import rank_memory

    device = torch.device("cuda", 0) if config.trainer.device == "cuda" else torch.device("cpu")
    return rank_memory(device, ranks_here=config.trainer.ranks)


def _moments(config: Config) -> MomentBytes:
    from dora.trainer.optimizer import moment_bytes

    return moment_bytes(optimizer=config.trainer.optimizer, optimizer_state=config.trainer.optimizer_state)


def _mode(config: Config, model: Path, memory: int | None) -> Mode:
    """Return the kind of checkpointing that the ranks will use; `none` for `auto` if their memory is unknown."""
    import torch

    from dora.trainer.forecast import choose_mode

    trainer = config.trainer
    if trainer.activation_checkpointing != "auto":
        return trainer.activation_checkpointing
    if memory is None:
        return "none"
    return choose_mode(
        model,
        dtype=getattr(torch, trainer.dtype),
        tokens=trainer.micro_batch_tokens,
        longest=config.longest_slice,
        ranks=config.shard_ranks,
        memory=memory,
        moments=_moments(config),
        **_forecast(config),
    )[0]


def _forecast(config: Config) -> _Forecast:
    """Return the forecast's arguments about what a rank holds: policies in addition to the trained one, and experts."""
    from dora.trainer.copies import count_copies, frozen_adapters

    settings, trainer = trainer_settings(config, max_staleness=config.max_staleness), config.trainer
    return {
        "copies": count_copies(settings),
        "copies_on_host": trainer.copies == "host",
        "expert_ranks": trainer.parallel.expert,
        "tensor_ranks": trainer.parallel.tensor,
        "lora": settings.lora,
        "frozen_adapters": frozen_adapters(settings),
    }


def _try(config: Config, model: Path, mode: Mode, stack: ExitStack) -> Trial:
    with _memory_errors(config, during="while the model was loaded for a trial"):
        return stack.enter_context(make_trial(config, model, mode))


def make_trial(config: Config, model: Path, mode: Mode) -> Trial:
    """Return a trainer of one rank, with the settings of the configuration."""
    from dora.trainer.trial import Trial

    trainer = config.trainer
    return Trial(
        model,
        device=trainer.device,
        dtype=trainer.dtype,
        checkpointing=mode,
        shared_prompts=trainer.shared_prompts,
        compiled=trainer.compile,
        lora=lora_settings(config),
        longest=config.longest_slice,
    )


def trial_sizes(config: Config, outline: Outline) -> tuple[int, int]:
    """Return the tokens of a pass to try, and the length of its sequences."""
    tokens, longest = config.trainer.micro_batch_tokens, config.longest_slice
    if config.trainer.device != "cpu":
        return tokens, longest
    most = max(MIN_TOKENS, int(CPU_OPERATIONS / (8 * outline.parameters)))
    return min(tokens, most), min(longest, most)


def _memory_errors(config: Config, *, during: str) -> AbstractContextManager[None]:
    import torch

    from dora.trainer.memory import memory_errors

    change = "lower trainer.micro_batch_tokens, set trainer.activation_checkpointing to full"
    return memory_errors(torch.device(config.trainer.device), during=during, change=change)


def _measure(config: Config, outline: Outline, trial: Trial) -> str:
    """Return the forecast and the measured memory of a pass."""
    tokens, longest = trial_sizes(config, outline)
    is_cpu = config.trainer.device == "cpu"
    forecast = outline.forecast(tokens=tokens, longest=longest, ranks=1, layout=trial.checked.layout, is_trial=True)
    with _memory_errors(config, during=f"in a trial of {max(tokens, longest)} tokens"):
        measured = trial.measure(tokens=tokens, longest=longest)
    what = "kept for the backward pass" if is_cpu else "at most allocated, without the optimizer"
    return (
        f"{max(tokens, longest)} tokens, sequences of {longest}: forecast "
        f"{size_text(forecast.kept if is_cpu else forecast.total)}, measured {size_text(measured)} {what}"
    )


def memory_lines(
    config: Config, model: Path, outline: Outline, *, mode: Mode, memory: int | None, layout: Layout | None = None
) -> list[tuple[str, str]]:
    """Return the forecast of a rank, and the longest answer that fits, or what to change."""
    from dora.trainer.forecast import largest_pass

    trainer, context = config.trainer, config.trainer.parallel.context
    tokens, longest = max(trainer.micro_batch_tokens, config.longest_slice), config.longest_slice
    what = f"a pass of {tokens} tokens" if context == 1 else f"{tokens} of {context * tokens} tokens of a pass"
    need = outline.forecast(tokens=tokens, longest=longest, ranks=config.shard_ranks, layout=layout)
    available = ""
    if memory is not None:
        left = f" ({size_text(memory - need.total)} left)" if need.total <= memory else ""
        available = f" of {size_text(memory)}{left}"
    lines = [
        (
            "memory",
            f"one rank: {size_text(need.total)}{available}: {size_text(need.states)} weights, gradients, optimizer, "
            f"{size_text(need.gathered)} gathered, {size_text(need.kept + need.working)} for {what} "
            f"(activation checkpointing {mode}, {outline.parameters / 1e6:,.1f} M parameters)",
        )
    ]
    if memory is not None:
        most = largest_pass(
            outline, tokens=tokens, longest=longest, ranks=config.shard_ranks, memory=memory, layout=layout
        )
        if most >= tokens:
            text = (
                f"answers of up to {context * most - config.task.max_prompt_tokens:,} tokens would fit in this memory"
            )
        else:
            change = _change(config, model, mode=mode, most=most, memory=memory)
            text = f"DOES NOT FIT in {size_text(memory)}: {change}"
        lines.append(("", text))
    if trainer.min_ranks is not None and trainer.parallel.replicate == 1:  # otherwise a rank's share stays the same
        need = outline.forecast(tokens=tokens, longest=longest, ranks=trainer.min_ranks, layout=layout)
        fits = memory is None or need.total <= memory
        change = "raise trainer.min_ranks, or replicate the weights (trainer.parallel.replicate)"
        text = "" if fits else f"; DOES NOT FIT: {change}"
        lines.append(("", f"one of {trainer.min_ranks} ranks (trainer.min_ranks): {size_text(need.total)}{text}"))
    return lines


def _change(config: Config, model: Path, *, mode: Mode, most: int, memory: int) -> str:
    """Return what to change so that a pass fits; with the current settings, passes of up to `most` tokens fit."""
    import torch

    from dora.trainer.forecast import FITS, Outline, choose_mode, largest_pass

    longest, ranks = config.longest_slice, config.shard_ranks
    if most >= longest:
        return f"set trainer.micro_batch_tokens to at most {most}"
    dtype, moments = getattr(torch, config.trainer.dtype), _moments(config)
    if mode != "full":
        other, need = choose_mode(
            model,
            dtype=dtype,
            tokens=longest,
            longest=longest,
            ranks=ranks,
            memory=memory,
            moments=moments,
            **_forecast(config),
        )
        if need.total <= FITS * memory:
            return f"set trainer.activation_checkpointing to {other} and trainer.micro_batch_tokens to {longest}"
    outline = Outline(model, dtype=dtype, checkpointing="full", moments=moments, **_forecast(config))
    while ranks < MAX_RANKS:
        ranks *= 2
        if outline.forecast(tokens=longest, longest=longest, ranks=ranks).total <= FITS * memory:
            needed = ranks * config.trainer.parallel.replicate
            return f"start at least {needed} trainer.ranks with trainer.activation_checkpointing = full"
    most = largest_pass(outline, tokens=longest, longest=longest, ranks=config.shard_ranks, memory=memory)
    most *= config.trainer.parallel.context
    if most > config.task.max_prompt_tokens:
        answer = most - config.task.max_prompt_tokens
        return f"set rollout.max_new_tokens to at most {answer}, or divide sequences more (trainer.parallel.context)"
    return "the model is too large for this device"
