"""What a run reads: model folder, prompts, held-out sets.

Invariant: opening them has checked them; a ConfigError names the setting, or file and line, that cannot work.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass
from pathlib import Path

from dora.config.schema import Config
from dora.controller.evaluations import EvalSet, Evaluations
from dora.errors import ConfigError
from dora.seed.policy import model_folder
from dora.tasks.prompts import PromptStream, open_eval_prompts, open_stream
from dora.tasks.tokenizer import Tokenizer, load_tokenizer

#: Of a safetensors file: the header, which names every tensor, lies within this in nearly all models.
_HEADER_BYTES = 1 << 20


@dataclass(frozen=True)
class Inputs:
    """Opened and checked."""

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
    longest = config.longest_request
    if positions is not None and longest > positions:
        raise ConfigError(
            f"rollout.max_new_tokens: with task.max_prompt_tokens a request has up to {longest} tokens, but the model "
            f"knows {positions} positions; lower one of them"
        )
    return embedded


def open_evaluations(config: Config, tokenizer: Tokenizer) -> Evaluations:
    """The held-out sets. Their prompts do not depend on the run's seed, so that runs can be compared."""
    sets = []
    for one in config.eval.sets:
        rows = open_eval_prompts(one, task=config.task, tokenizer=tokenizer, seed=0)
        prompts = [prompt for prompt in rows if not prompt.skipped]
        sets.append(EvalSet(one.name, prompts, one.samples, one.temperature, num_skipped=len(rows) - len(prompts)))
    return Evaluations(sets)


def model_digest(model: Path) -> str:
    """Of the model folder: small files by their bytes, weights by size and header. Whether the weights themselves are
    the same shows when version 0 is made again."""
    digest = hashlib.blake2b(digest_size=16)
    for path in sorted(path for path in model.iterdir() if path.is_file()):
        with path.open("rb") as file:
            digest.update(f"{path.name} {path.stat().st_size} ".encode() + file.read(_HEADER_BYTES))
    return digest.hexdigest()


def model_bytes(model: Path) -> int:
    """Size of a version: the model folder's files."""
    return sum(path.stat().st_size for path in model.iterdir() if path.is_file())
