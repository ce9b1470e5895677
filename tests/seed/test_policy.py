"""The shipped seed policy: small, complete, and weak in the way the default job needs."""

from __future__ import annotations

import re
import subprocess
import sys
from statistics import median

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig

from dora.config.schema import Config
from dora.seed.policy import path
from dora.tasks.arithmetic import LABELS, problem

NUM_PROMPTS = 256
MAX_NEW_TOKENS = 128


@pytest.fixture(scope="module")
def tokenizer():
    return AutoTokenizer.from_pretrained(path())


@pytest.fixture(scope="module")
def sampled(tokenizer):
    """One answer per held-out prompt at temperature 1: (text, token count with the end, was the end reached, right)."""
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_pretrained(path())
    prompts, answers = zip(*(problem(i, seed=0, split="heldout") for i in range(NUM_PROMPTS)), strict=True)
    inputs = tokenizer(list(prompts), return_tensors="pt", padding=True, padding_side="left")
    outputs = model.generate(**inputs, do_sample=True, top_k=0, max_new_tokens=MAX_NEW_TOKENS)
    pattern = re.compile(Config().task.rewards[0].pattern)
    results = []
    for tokens, answer in zip(outputs[:, inputs["input_ids"].shape[1] :].tolist(), answers, strict=True):
        ended = tokenizer.eos_token_id in tokens
        num_tokens = tokens.index(tokenizer.eos_token_id) + 1 if ended else len(tokens)
        text = tokenizer.decode(tokens[:num_tokens], skip_special_tokens=True)
        found = pattern.search(text)
        results.append((text, num_tokens, ended, found is not None and found[1] == answer))
    return results


def test_finding_the_policy_loads_no_torch():
    code = "import sys; from dora.seed.policy import path; assert path().is_dir(); assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)


def test_the_weights_are_float32_safetensors_of_at_most_two_megabytes():
    weights = [file for file in path().iterdir() if file.suffix in {".safetensors", ".bin", ".pt"}]
    assert [file.name for file in weights] == ["model.safetensors"]
    assert weights[0].stat().st_size <= 2_000_000
    model = AutoModelForCausalLM.from_pretrained(path())
    assert model.config.model_type == "qwen3"
    assert {parameter.dtype for parameter in model.parameters()} == {torch.float32}


def test_the_tokenizer_gives_back_every_text_of_the_task(tokenizer):
    longest = "".join(f"{label}99" for label in LABELS)
    for text in (longest, *(problem(i, seed=1, split="train")[0] for i in range(200))):
        tokens = tokenizer.encode(text)
        assert len(tokens) == len(text)
        assert tokenizer.unk_token_id not in tokens
        assert tokenizer.decode(tokens) == text


def test_the_end_of_an_answer_is_known_to_model_and_tokenizer(tokenizer):
    model = AutoModelForCausalLM.from_pretrained(path())
    assert tokenizer.eos_token == "<eos>"
    assert model.config.eos_token_id == tokenizer.eos_token_id
    assert GenerationConfig.from_pretrained(path()).eos_token_id == tokenizer.eos_token_id
    assert model.config.vocab_size == len(tokenizer)


def test_it_starts_weak_but_not_lost(sampled):
    assert 0.2 <= sum(right for *_, right in sampled) / NUM_PROMPTS <= 0.45


def test_its_answers_have_a_heavy_tail_from_the_first_step(sampled):
    lengths = [num_tokens for _, num_tokens, _, _ in sampled]
    assert max(lengths) >= 8 * median(lengths)


def test_almost_no_answer_needs_the_length_cap(sampled):
    assert sum(not ended for _, _, ended, _ in sampled) < NUM_PROMPTS / 100


def test_it_answers_in_both_styles(sampled):
    worked_share = sum(text.startswith("a") for text, *_ in sampled) / NUM_PROMPTS
    assert 0.1 < worked_share < 0.4
