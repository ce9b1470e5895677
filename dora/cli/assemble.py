"""The composition root: from a Config to the parts of a run, checked before anything starts.

Siblings never import each other; here they meet: the node's processes become the controller's servers, the seed's
folder the model, the transport the trainer link. Called by `run` and `check`.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import msgspec

from dora.cli.serve import model_folder
from dora.config.schema import Config
from dora.controller.evaluations import EvalSet, Evaluations
from dora.core.decode_time import DecodeTime
from dora.core.orchestration import orchestration_of
from dora.core.strategies import Settings, rules_of
from dora.errors import ConfigError
from dora.tasks.prompts import PromptStream, open_eval_prompts, open_stream
from dora.tasks.tokenizer import Tokenizer, load_tokenizer
from dora.transport.messages import Configure, TrainerSettings

#: Versions that the store must have room for beside K + 1 live ones: one under evaluation, one being published, one
#: that a push under way still reads.
SPARE_VERSIONS = 3


@dataclass(frozen=True)
class Inputs:
    """What a run reads: model folder, prompts, held-out sets. Opening them has checked them."""

    model: Path
    tokenizer: Tokenizer
    vocab_size: int  # token ids that the model knows; padding may make them more than the tokenizer's
    stream: PromptStream
    evaluations: Evaluations


def open_inputs(config: Config) -> Inputs:
    """ConfigError names the field, or file and line, that cannot work."""
    model = model_folder(config.model.path)
    tokenizer = load_tokenizer(model, thinking=config.model.thinking)
    if not tokenizer.eos_ids:
        raise ConfigError(f"model.path: {model} names no end-of-sequence token; set eos_token_id in its config.json")
    vocab_size = _check_shapes(config, model, num_tokens=tokenizer.vocab_size)
    stream = open_stream(config.task, tokenizer=tokenizer, seed=config.run.seed)
    return Inputs(model, tokenizer, vocab_size, stream, open_evaluations(config, tokenizer))


def _check_shapes(config: Config, model: Path, *, num_tokens: int) -> int:
    """The size of the model's vocabulary.

    It must have an embedding for every token, and a position for every token of the longest request.
    """
    try:
        shapes = json.loads((model / "config.json").read_bytes())
    except ValueError as err:
        raise ConfigError(f"model.path: {model / 'config.json'} is not JSON ({err})") from err
    embedded: int = shapes.get("vocab_size", num_tokens)
    if num_tokens > embedded:
        raise ConfigError(
            f"model.path: the tokenizer of {model} has {num_tokens} tokens, the model only {embedded}; "
            "they do not belong together"
        )
    positions = shapes.get("max_position_embeddings")
    longest = config.task.max_prompt_tokens + config.rollout.max_new_tokens
    if positions is not None and longest > positions:
        raise ConfigError(
            f"rollout.max_new_tokens: with task.max_prompt_tokens a request has up to {longest} tokens, but the model "
            f"knows {positions} positions; lower one of them"
        )
    return embedded


def open_evaluations(config: Config, tokenizer: Tokenizer) -> Evaluations:
    """The held-out sets. Their prompts do not depend on the run's seed, so that runs can be compared."""
    return Evaluations(
        [
            EvalSet(
                name=one.name,
                prompts=open_eval_prompts(one, task=config.task, tokenizer=tokenizer, seed=0),
                samples=one.samples,
                temperature=one.temperature,
            )
            for one in config.eval.sets
        ]
    )


def settings_of(config: Config, *, eval_prompt_tokens: Sequence[int]) -> Settings:
    """The part of a config that decisions depend on."""
    rollout, trainer = config.rollout, config.trainer
    return Settings(
        rules=config.rules,
        steps=config.run.steps,
        groups_per_step=rollout.groups_per_step,
        group_size=rollout.group_size,
        max_new_tokens=rollout.max_new_tokens,
        num_ranks=trainer.ranks,
        micro_batch_tokens=trainer.micro_batch_tokens,
        filter_zero_variance=rollout.filter_zero_variance,
        max_top_up=rollout.max_top_up,
        orchestration=orchestration_of(rollout.rules, without=rollout.without, refill=rollout.refill),
        watchdog_s=rollout.watchdog_s,
        no_progress_s=config.run.no_progress_s,
        max_attempts=rollout.max_attempts,
        max_parallel_pushes=config.engine.max_parallel_pushes,
        eval_prompt_tokens=tuple(eval_prompt_tokens),
        eval_every=config.eval.every,
        max_eval_share=config.eval.max_slot_share,
        decode_time=DecodeTime(**config.engine.decode.model_dump()),
    )


def rollout_only_settings(settings: Settings) -> Settings:
    """Version 0 generates everything: the whole job is one step, and nothing is evaluated."""
    return msgspec.structs.replace(
        settings,
        rules=rules_of("periodic", max_staleness=0),
        steps=1,
        groups_per_step=settings.groups_per_step * settings.steps,
        num_ranks=1,
        eval_prompt_tokens=(),
    )


def trainer_settings(config: Config, *, max_staleness: int) -> TrainerSettings:
    """What the ranks are told."""
    trainer = config.trainer
    return TrainerSettings(
        device=trainer.device,
        dtype=trainer.dtype,
        publish_dtype=trainer.publish_dtype,
        threads=trainer.threads,
        micro_batch_tokens=trainer.micro_batch_tokens,
        steps=config.run.steps,
        learning_rate=trainer.learning_rate,
        warmup_steps=trainer.warmup_steps,
        weight_decay=trainer.weight_decay,
        beta1=trainer.beta1,
        beta2=trainer.beta2,
        max_grad_norm=trainer.max_grad_norm,
        advantage=trainer.advantage,
        clip_low=trainer.clip_low,
        clip_high=trainer.clip_high,
        tis_cap=trainer.tis_cap,
        temperature=config.rollout.temperature,
        max_staleness=max_staleness,
        checkpoint_every=trainer.checkpoint_every,
    )


def configure_message(
    config: Config,
    *,
    run_id: str,
    model: Path,
    memory_root: Path,
    durable_root: Path,
    checkpoints: Path,
    resume_from: Path | None,
    max_staleness: int,
) -> Configure:
    """The first message to every rank."""
    return Configure(
        run_id=run_id,
        model_path=str(model),
        settings=trainer_settings(config, max_staleness=max_staleness),
        memory_root=str(memory_root.resolve()),
        durable_root=str(durable_root.resolve()),
        checkpoints=str(checkpoints.resolve()),
        resume_from=str(resume_from.resolve()) if resume_from is not None else None,
    )


def model_bytes(model: Path) -> int:
    """Size of a version: the model folder's files."""
    return sum(path.stat().st_size for path in model.iterdir() if path.is_file())
