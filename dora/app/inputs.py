"""Opens and checks the inputs of a run: model folder, prompts and held-out sets."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from pathlib import Path

from dora.adapter_files import adapter_digest, require_adapter
from dora.app.fetch import model_folders
from dora.app.routing import routing_of
from dora.config.schema import Config, EvalConfig, TaskConfig
from dora.controller.evaluations import EvalSet, Evaluations
from dora.engine.model_check import shape_differences
from dora.errors import ConfigError
from dora.model_config import limits_of
from dora.model_files import require_sound, used_names
from dora.routing import RoutingShape
from dora.tasks.prompts import Converse, PromptStream, open_eval_prompts, open_stream
from dora.tasks.tokenizer import Tokenizer, load_tokenizer

#: Bytes read from the start of a safetensors file; nearly all headers, which list every tensor, fit in them.
_HEADER_BYTES = 1 << 20


@dataclass(frozen=True)
class Inputs:
    """The opened and checked inputs."""

    model: Path
    reference: Path | None  # the reference policy; None: version 0
    adapter: Path | None  # that version 0 has; None: none
    tokenizer: Tokenizer
    vocab_size: int  # number of embeddings; padding may make it larger than the tokenizer's vocabulary
    stream: PromptStream
    evaluations: Evaluations
    routing: RoutingShape | None = None  # of the choices of experts that are replayed; None: none are


def open_inputs(config: Config, *, converse: Converse | None = None) -> Inputs:
    """Open the inputs; ConfigError names the invalid field, or the file and line. `converse` makes the prompts of
    episodes."""
    model, reference, adapter = model_folders(config)
    require_sound(model)
    tokenizer = load_tokenizer(model, thinking=config.model.thinking)
    if not tokenizer.eos_ids:
        raise ConfigError(f"model.path: {model} has no end-of-sequence token; set eos_token_id in its config.json")
    if reference is not None:
        _check_reference(reference, model)
    if adapter is not None:
        lora = config.trainer.lora
        require_adapter(adapter, rank=lora.rank, alpha=lora.alpha, rslora=lora.rslora, targets=lora.targets)
    vocab_size = _check_limits(config, model, num_tokens=tokenizer.vocab_size)
    task = config.task if config.run.steps else config.task.model_copy(update={"sources": ()})  # nothing is trained
    stream = open_stream(task, tokenizer=tokenizer, seed=config.run.seed, converse=converse)
    evaluations = open_evaluations(config.eval, task, tokenizer, converse=converse)
    routing = routing_of(model) if config.replays_routing else None
    return Inputs(model, reference, adapter, tokenizer, vocab_size, stream, evaluations, routing)


def _check_reference(reference: Path, model: Path) -> None:
    require_sound(reference, field="objective.kl_reference")
    if not any(reference.glob("*.safetensors")):
        raise ConfigError(f"objective.kl_reference: {reference} has no *.safetensors; give a Hugging Face model folder")
    if differing := shape_differences(reference, model):
        raise ConfigError(
            f"objective.kl_reference: the shape of {reference} differs from model.path ({differing}); give weights of "
            "the same architecture"
        )


def _check_limits(config: Config, model: Path, *, num_tokens: int) -> int:
    """Return the model's vocabulary size; ConfigError if it lacks embeddings for the tokenizer, or positions for the
    longest request."""
    limits = limits_of(model)
    embedded = num_tokens if limits.vocab_size is None else limits.vocab_size
    if num_tokens > embedded:
        raise ConfigError(
            f"model.path: the tokenizer of {model} has {num_tokens} tokens, the model only {embedded}; "
            "use the tokenizer that belongs to the model"
        )
    longest = config.longest_request
    if limits.positions is not None and longest > limits.positions:
        raise ConfigError(
            f"rollout.max_new_tokens: with task.max_prompt_tokens a request has up to {longest} tokens, but the model "
            f"has {limits.positions} positions; lower one of them"
        )
    if limits.dynamic_from is not None and longest > limits.dynamic_from:  # no log-prob would be reproducible
        raise ConfigError(
            f"rollout.max_new_tokens: with task.max_prompt_tokens a request has up to {longest} tokens; beyond "
            f"{limits.dynamic_from}, the dynamic rotary embedding of {model} depends on earlier sequences; lower one"
        )
    return embedded


def open_evaluations(
    config: EvalConfig, task: TaskConfig, tokenizer: Tokenizer, *, converse: Converse | None = None
) -> Evaluations:
    """Open the held-out sets. Their prompts do not depend on the run's seed, so that runs can be compared."""
    sets = []
    for held_out in config.sets:
        rows = open_eval_prompts(held_out, task=task, tokenizer=tokenizer, seed=0, converse=converse)
        prompts = [prompt for prompt in rows if not prompt.skipped]
        unreadable = [prompt.skipped for prompt in rows if not prompt.is_readable]
        sets.append(
            EvalSet(
                held_out.name,
                prompts,
                held_out.samples,
                held_out.temperature,
                num_skipped=len(rows) - len(prompts) - len(unreadable),
                unreadable=unreadable,
            )
        )
    return Evaluations(sets)


def model_files(model: Path) -> list[Path]:
    """Return the files of a model folder, in order; of one in the hub's cache, which others write into too, those that
    are read."""
    found = sorted(path for path in model.iterdir() if path.is_file())
    if model.parent.name != "snapshots":
        return found
    used = used_names(model, [path.name for path in found])
    return [path for path in found if path.name in used]


def model_digest(model: Path) -> str:
    """Return a digest of the name, size and first MiB of each file of the model folder. If weights change but their
    header does not, that is only detected when version 0 is made again."""
    digest = hashlib.blake2b(digest_size=16)
    for path in model_files(model):
        with path.open("rb") as file:
            digest.update(f"{path.name} {path.stat().st_size} ".encode() + file.read(_HEADER_BYTES))
    return digest.hexdigest()


def weights_digest(inputs: Inputs) -> str:
    """Return a digest of what training starts from: the model folder, and those of reference and adapter if they have
    one."""
    digest = model_digest(inputs.model)
    digest += model_digest(inputs.reference) if inputs.reference is not None else ""
    return digest + (adapter_digest(inputs.adapter) if inputs.adapter is not None else "")


def model_bytes(model: Path) -> int:
    """Return the total size of the model folder's files."""
    return sum(path.stat().st_size for path in model_files(model))
