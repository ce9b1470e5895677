"""Make the policy of the job with a tool: a small Qwen3 model that knows how a call is written, and nothing else.

    python -m dora.seed.make_tools OUT

It is trained on random transcripts, from which nothing can be learned about the task. Chance decides whether a turn is
a call or an answer. A call looks up a random key of those seen so far, and the tool returns a random key or value. An
answer is a random value of those seen so far, or of all values if none was seen. So the policy calls and answers at
random: when to call, which key to look up, and when to answer are left to reinforcement learning.

The tokenizer has the control tokens of Qwen3 and its chat template, so that the renderer `qwen3` continues its turns.
The constant parts of the template, the schema of the tool and the frame of a call are single tokens: a prompt has about
25 tokens, a call 6, its result 14. Everything else is spelled by characters.

Invariant: the result is a function of `ToolsRecipe` alone (on one torch build, with one thread). Run this when the
recipe or `dora.environments.lookup` changes, and commit the result under `dora/seed/checkpoint_tools/`.
"""

from __future__ import annotations

import argparse
import json
import random
import string
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import torch
from tokenizers import AddedToken, Tokenizer, decoders, models
from transformers import PreTrainedTokenizerFast

from dora.environments.lookup import KEYS, VALUES, Lookup
from dora.seed import make as common

PAD, END = "<|endoftext|>", "<|im_end|>"
CONTROL = (PAD, "<|im_start|>", END)
TAGS = ("<think>", "</think>", "<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>")
ROLES = ("system", "user", "assistant")

#: Constant parts of the chat template of Qwen3.
TOOLS_HEADER = """# Tools

You may call one or more functions to assist with the user query.

You are provided with function signatures within <tools></tools> XML tags:
<tools>"""
TOOLS_FOOTER = """
</tools>

For each function call, return a json object with function name and arguments within <tool_call></tool_call> XML tags:
<tool_call>
{"name": <function-name>, "arguments": <args-json-object>}
</tool_call>"""

TEMPLATE = """{%- if tools %}
<|im_start|>system
{% if messages[0].role == 'system' %}{{ messages[0].content + '\\n\\n' }}{% endif -%}
{{- HEADER }}
{%- for tool in tools %}{{ '\\n' + tool | tojson }}{% endfor %}
{{- FOOTER }}
{%- elif messages[0].role == 'system' %}
{{- '<|im_start|>system\\n' + messages[0].content + '<|im_end|>\\n' }}
{%- endif %}
{%- set last = namespace(question=messages|length - 1) %}
{%- for message in messages %}
{%- if message.role == 'user' %}{% set last.question = loop.index0 %}{% endif %}
{%- endfor %}
{%- for message in messages %}
{%- if message.role == 'tool' %}
{%- if loop.first or messages[loop.index0 - 1].role != 'tool' %}{{ '<|im_start|>user' }}{% endif %}
{{- '\\n<tool_response>\\n' + message.content + '\\n</tool_response>' }}
{%- if loop.last or messages[loop.index0 + 1].role != 'tool' %}{{ '<|im_end|>\\n' }}{% endif %}
{%- elif message.role != 'system' or not loop.first %}
{{- '<|im_start|>' + message.role + '\\n' }}
{%- if message.role == 'assistant' and message.reasoning_content and loop.index0 > last.question %}
{{- '<think>\\n' + message.reasoning_content.strip('\\n') + '\\n</think>\\n\\n' + message.content.lstrip('\\n') }}
{%- else %}{{ message.content }}{% endif %}
{%- for call in message.tool_calls or [] %}
{%- if not loop.first or message.content %}{{ '\\n' }}{% endif %}
{{- '<tool_call>\\n{"name": "' + call.function.name + '", "arguments": ' }}
{{- call.function.arguments | tojson + '}\\n</tool_call>' }}
{%- endfor %}
{{- '<|im_end|>\\n' }}
{%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}
""".replace("HEADER", json.dumps(TOOLS_HEADER)).replace("FOOTER", json.dumps(f"{TOOLS_FOOTER}{END}\n"))

CALL_START, CALL_END = '<tool_call>\n{"name": "look_up", "arguments": {"key": "', '"}}\n</tool_call>'
RESULT_START, RESULT_END = "\n<|im_start|>user\n<tool_response>\n", f"\n</tool_response>{END}\n<|im_start|>assistant\n"


@dataclass(frozen=True)
class ToolsRecipe:
    """Everything that determines the result."""

    seed: int = 7
    #: Family, sizes and initial weights.
    model: common.Recipe = field(default_factory=lambda: common.Recipe(hidden_size=64))
    steps: int = 1400
    #: Maximum number of tokens in one batch, padding included.
    batch_tokens: int = 1280
    peak_learning_rate: float = 2e-3
    #: Probability that a turn is a call, and maximum number of calls in a transcript.
    call_share: float = 0.65
    max_calls: int = 5
    #: Maximum number of keys in a prompt.
    max_keys: int = 5


def make(out: Path, *, recipe: ToolsRecipe) -> None:
    """Train by the recipe and write a Hugging Face folder."""
    torch.set_num_threads(1)  # sums in a fixed order
    tokenizer = build_tokenizer()
    model = common.build_model(tokenizer, recipe=recipe.model)
    batches = _batches(tokenizer, recipe=recipe)
    common.train(model, batches, num_steps=recipe.steps, peak_learning_rate=recipe.peak_learning_rate)
    model.save_pretrained(out)
    tokenizer.save_pretrained(out)


def build_tokenizer() -> PreTrainedTokenizerFast:
    """Printable characters, and one token for each key, value, role, tag and constant part of the template."""
    characters = [*string.printable[:95], "\n"]
    backend = Tokenizer(models.BPE({token: i for i, token in enumerate(characters)}, merges=[]))
    backend.decoder = decoders.Fuse()
    backend.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in CONTROL])
    frame = [CALL_START.removeprefix("<tool_call>"), CALL_END.removesuffix("</tool_call>")]
    phrases = [TOOLS_HEADER, TOOLS_FOOTER, *map(json.dumps, Lookup().schemas()), *frame]
    words = [*TAGS, *ROLES, *KEYS, *VALUES, *phrases]
    backend.add_tokens([AddedToken(word, special=False, normalized=False) for word in words])
    return PreTrainedTokenizerFast(
        tokenizer_object=backend,
        pad_token=PAD,
        eos_token=END,
        chat_template=TEMPLATE,
        clean_up_tokenization_spaces=False,
        model_input_names=["input_ids", "attention_mask"],
    )


@dataclass(frozen=True)
class Transcript:
    """A random episode: keys of the prompt, calls as (key, result), and the answer ("" if there is none)."""

    prompt: tuple[str, ...]
    calls: tuple[tuple[str, str], ...]
    answer: str


def transcript(rng: random.Random, *, recipe: ToolsRecipe) -> Transcript:
    """Draw a transcript; see the module's first lines."""
    prompt = rng.sample(KEYS, rng.randint(1, recipe.max_keys))
    keys, values = [*prompt], list[str]()
    calls: list[tuple[str, str]] = []
    for _ in range(recipe.max_calls):
        if rng.random() >= recipe.call_share:
            return Transcript(tuple(prompt), tuple(calls), rng.choice(values or VALUES))
        result = rng.choice(rng.choice((KEYS, VALUES)))
        calls.append((rng.choice(keys), result))
        shown = keys if result in KEYS else values
        if result not in shown:
            shown.append(result)
    return Transcript(tuple(prompt), tuple(calls), "")


def as_tokens(shown: Transcript, tokenizer: PreTrainedTokenizerFast) -> common.Row:
    """Return the tokens of a transcript and their targets: what the policy would sample."""
    start = tokenizer.apply_chat_template(
        [{"role": "user", "content": " ".join(shown.prompt)}],
        tools=Lookup().schemas(),
        add_generation_prompt=True,
        tokenize=False,
    )
    parts = [("", str(start))]
    for key, result in shown.calls:
        parts.append((f"{CALL_START}{key}{CALL_END}{END}", f"{RESULT_START}{result}{RESULT_END}"))
    tokens: list[int] = []
    targets: list[int] = []
    for sampled, given in [*parts, (shown.answer and f"{shown.answer}{END}", "")]:
        turn, after = (tokenizer.encode(text, add_special_tokens=False) for text in (sampled, given))
        tokens += [*turn, *after]
        targets += [*turn, *[common.IGNORED] * len(after)]
    return tokens, targets


def _batches(tokenizer: PreTrainedTokenizerFast, *, recipe: ToolsRecipe) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Endless batches (input ids, targets), each (B, T), of rows of similar length, to keep padding small."""
    rng = random.Random(recipe.seed)
    while True:
        rows = [as_tokens(transcript(rng, recipe=recipe), tokenizer) for _ in range(common.BLOCK)]
        batches = common.cut(rows, batch_tokens=recipe.batch_tokens)
        block = [common.pad(batch, pad_id=tokenizer.pad_token_id) for batch in batches]
        rng.shuffle(block)
        yield from block


if __name__ == "__main__":
    parser = argparse.ArgumentParser(prog="python -m dora.seed.make_tools", description="Make the policy with a tool.")
    parser.add_argument("out", type=Path, help="the folder to write")
    make(parser.parse_args().out, recipe=ToolsRecipe())
