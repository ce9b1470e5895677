"""The decoder against transformers' plain forward: same log-probs in every mix of rows."""

from __future__ import annotations

import math
import random
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from dora.embedded.batcher import Joiner
from dora.embedded.decoder import CausalDecoder
from dora.errors import ConfigError
from tests.embedded.conftest import CONTEXT, VOCAB, Reference, decoder_of, qwen3, save
from tests.embedded.rows import CLOSE, Row, churn, join, leave, prompt_of, step, verify


@pytest.mark.parametrize("seed", range(3))
def test_logprobs_are_those_of_a_plain_forward_while_rows_join_and_leave(
    model_a: Path, reference_a: Reference, seed: int
) -> None:
    rng, decoder = random.Random(seed), decoder_of(model_a)
    for row in churn(decoder, rng, lengths=[1, 2, 7, 40, 150], turns=120):
        row.agrees_with(reference_a)


@pytest.mark.parametrize("name", ["llama", "gpt2"])
def test_other_architectures_run_through_their_own_forward(other_architectures: dict[str, Path], name: str) -> None:
    rng, decoder = random.Random(0), decoder_of(other_architectures[name])
    rows: list[Row] = []
    join(decoder, rows, [Joiner(token_ids=prompt_of(rng, n), namespace="", seed=n) for n in (3, 30, 11)])
    for _ in range(5):
        step(decoder, rows)
    leave(decoder, rows, 0)
    join(decoder, rows, [Joiner(token_ids=prompt_of(rng, 9), namespace="", seed=9)])
    for _ in range(5):
        step(decoder, rows)
    reference = Reference(other_architectures[name])
    for row in rows:
        row.agrees_with(reference)


def test_a_prefill_longer_than_one_chunk_is_computed_whole(model_a: Path, reference_a: Reference) -> None:
    rng, decoder = random.Random(1), decoder_of(model_a, kv_tokens=65536)
    rows: list[Row] = []
    lengths = (1900, 700, 1400)  # 3 rows of up to 1900 tokens: three chunks of 2048 new tokens
    join(decoder, rows, [Joiner(token_ids=prompt_of(rng, n), namespace="", seed=n) for n in lengths])
    for _ in range(3):
        step(decoder, rows)
    for row in rows:
        row.agrees_with(reference_a)


def test_a_sibling_takes_the_prompt_from_the_cache_and_computes_only_its_last_token(
    model_a: Path, reference_a: Reference
) -> None:
    rng, decoder = random.Random(2), decoder_of(model_a)
    rows: list[Row] = []
    prompt = prompt_of(rng, 25)
    first = Joiner(token_ids=prompt, namespace="v1", seed=1)
    assert join(decoder, rows, [first]) == [0]
    assert join(decoder, rows, [replace(first, seed=2)]) == [24]
    leave(decoder, rows, 0)
    leave(decoder, rows, 0)
    assert join(decoder, rows, [replace(first, seed=3), replace(first, token_ids=[*prompt[:10], 3, 3, 3])]) == [10, 24]
    for _ in range(5):
        step(decoder, rows)
    for row in rows:
        row.agrees_with(reference_a)


def test_namespaces_share_no_prefix_and_a_flush_forgets_all(model_a: Path) -> None:
    decoder, rows = decoder_of(model_a), []
    first = Joiner(token_ids=[5, 6, 7, 8], namespace="v1", seed=1)
    join(decoder, rows, [first])
    assert join(decoder, rows, [replace(first, namespace="v2"), first]) == [0, 3]
    decoder.flush()
    assert join(decoder, rows, [first]) == [0]


def test_prompt_logprobs_are_those_of_a_plain_forward(model_a: Path, reference_a: Reference) -> None:
    rng, decoder = random.Random(3), decoder_of(model_a, kv_tokens=65536)
    prompts = [prompt_of(rng, 1500), prompt_of(rng, 40), [7]]
    decoder.join([Joiner(token_ids=prompts[1], namespace="", seed=0)])  # cached, and yet computed anew below
    starts = (0, 0, 0)
    joined = decoder.join(
        [Joiner(token_ids=ids, namespace="", seed=0, logprob_start=at) for ids, at in zip(prompts, starts, strict=True)]
    )
    assert [one.cached_tokens for one in joined] == [0, 0, 0]
    for one in joined:
        ids = prompts[one.joiner]
        assert one.prompt_logprobs is not None
        assert one.prompt_logprobs[0] is None
        assert one.prompt_logprobs[1:] == pytest.approx(reference_a.logprobs(ids), abs=CLOSE)


def test_prompt_logprobs_from_the_middle_use_the_cache_up_to_there(model_a: Path, reference_a: Reference) -> None:
    decoder, ids = decoder_of(model_a), prompt_of(random.Random(4), 30)
    decoder.join([Joiner(token_ids=ids, namespace="", seed=0)])
    [one] = decoder.join([Joiner(token_ids=ids, namespace="", seed=0, logprob_start=20)])
    assert one.cached_tokens == 20
    assert one.prompt_logprobs is not None
    assert one.prompt_logprobs[0] is None
    assert one.prompt_logprobs[1:] == pytest.approx(reference_a.logprobs(ids)[20:], abs=CLOSE)


def test_temperature_zero_is_greedy(model_a: Path, reference_a: Reference) -> None:
    decoder, rows = decoder_of(model_a), []
    join(decoder, rows, [Joiner(token_ids=[9, 8, 7], namespace="", seed=0, temperature=0.0)])
    for _ in range(10):
        step(decoder, rows)
    assert rows[0].output_ids == reference_a.greedy([9, 8, 7], 10)


def test_banned_tokens_are_not_sampled_before_their_index(model_a: Path, reference_a: Reference) -> None:
    [wanted] = reference_a.greedy([9, 8, 7], 1)
    decoder, rows = decoder_of(model_a), []
    banned = Joiner(token_ids=[9, 8, 7], namespace="", seed=0, temperature=0.0, banned_ids=(wanted,), ban_until=6)
    join(decoder, rows, [banned])
    for _ in range(20):
        step(decoder, rows)
    assert wanted not in rows[0].output_ids[:3]
    whole = [9, 8, 7, *rows[0].output_ids]
    assert rows[0].output_ids[3:] == reference_a.greedy(whole[:6], 17)


@pytest.mark.parametrize("right", [1.0, 0.7, 0.0], ids=["right", "right at times", "wrong"])
def test_drafts_change_no_token_and_no_logprob(model_a: Path, right: float) -> None:
    rng = random.Random(5)
    joiners = [
        Joiner(
            token_ids=prompt_of(rng, length),
            namespace="",
            seed=length,
            temperature=temperature,
            top_p=top_p,
            top_k=top_k,
            min_p=min_p,
            banned_ids=(3, 4, 5, 6),
            ban_until=length + 30,
        )
        for length, temperature, top_p, top_k, min_p in (
            (1, 1.0, 1.0, -1, 0.0),
            (7, 0.0, 1.0, -1, 0.0),
            (40, 0.7, 0.9, -1, 0.0),
            (90, 1.3, 1.0, 9, 0.05),
        )
    ]
    decoder, plain = decoder_of(model_a), []
    join(decoder, plain, joiners)
    for _ in range(60):
        step(decoder, plain)
    decoder, rows = decoder_of(model_a), []
    join(decoder, rows, joiners)
    steps, kept, drafted = 0, 0, 0
    while any(len(row.output_ids) < 50 for row in rows):
        drafts = []
        for row, known in zip(rows, plain, strict=True):
            done = len(row.output_ids)
            ahead = known.output_ids[done : done + rng.randint(0, 4)] if done < 50 else []
            drafts.append([token if rng.random() < right else (token + 1) % VOCAB for token in ahead])
        steps += 1
        if any(drafts):
            kept += sum(verify(decoder, rows, drafts)) - len(rows)
            drafted += sum(map(len, drafts))
        else:
            step(decoder, rows)
    assert {1.0: kept == drafted > 0, 0.7: 0 < kept < drafted, 0.0: kept == 0}[right]
    for row, known in zip(rows, plain, strict=True):
        count = min(len(row.output_ids), 60)
        assert row.output_ids[:count] == known.output_ids[:count]
        assert row.logprobs[:count] == pytest.approx(known.logprobs[:count], abs=CLOSE)


def test_a_rejected_draft_that_gives_no_numbers_affects_nothing(tmp_path: Path) -> None:
    config = qwen3()
    config.tie_word_embeddings = False
    whole, rows = save(tmp_path / "whole", config, seed=6), []
    asked = Joiner(token_ids=[4, 5, 6, 7], namespace="", seed=0)
    decoder = decoder_of(whole)
    join(decoder, rows, [asked])
    for _ in range(12):
        step(decoder, rows)
    expected = leave(decoder, rows, 0).output_ids
    absent = min({*range(VOCAB)} - {*asked.token_ids, *expected})
    tensors = load_file(whole / "model.safetensors")
    tensors["model.embed_tokens.weight"][absent] = torch.nan
    save_file(tensors, tmp_path / "model.safetensors")
    decoder.load(tmp_path)
    decoder.flush()
    join(decoder, rows, [asked])
    assert verify(decoder, rows, [[absent, absent, absent]]) == [1]
    assert verify(decoder, rows, [[expected[1], absent]]) == [1]
    assert verify(decoder, rows, [expected[2:4]]) == [3]
    for _ in range(4):
        step(decoder, rows)
    assert rows[0].output_ids == expected[:9]
    rows[0].agrees_with(Reference(whole))


def test_loading_replaces_the_weights_in_place(
    model_a: Path, model_b: Path, reference_a: Reference, reference_b: Reference
) -> None:
    decoder = decoder_of(model_a)
    for folder, reference in ((model_b, reference_b), (model_a, reference_a)):
        decoder.load(folder)
        decoder.flush()
        rows: list[Row] = []
        join(decoder, rows, [Joiner(token_ids=[4, 5, 6, 7], namespace="", seed=0)])
        for _ in range(5):
            step(decoder, rows)
        rows[0].agrees_with(reference)
        leave(decoder, rows, 0)


def test_weights_that_produce_nan_do_not_affect_the_weights_loaded_after_them(
    model_a: Path, reference_a: Reference, tmp_path: Path
) -> None:
    broken = load_file(model_a / "model.safetensors")
    broken["model.layers.0.self_attn.v_proj.weight"].fill_(torch.nan)
    save_file(broken, tmp_path / "model.safetensors")
    decoder = decoder_of(model_a)
    decoder.load(tmp_path)
    decoder.join([Joiner(token_ids=[3] * 40, namespace="", seed=0)])
    assert math.isnan(decoder.step()[1][0])
    decoder.leave(0)
    decoder.flush()
    decoder.load(model_a)
    rows: list[Row] = []
    join(decoder, rows, [Joiner(token_ids=[4, 5, 6, 7], namespace="", seed=0)])
    step(decoder, rows)
    rows[0].agrees_with(reference_a)


def test_a_checkpoint_of_another_shape_names_the_tensor(model_a: Path, model_of_other_shape: Path) -> None:
    with pytest.raises(ConfigError, match=r"has shape \[.*48.*\], the served model has \[.*32.*\]"):
        decoder_of(model_a).load(model_of_other_shape)


def test_a_folder_without_weights_changes_nothing(model_a: Path, reference_a: Reference, tmp_path: Path) -> None:
    decoder, rows = decoder_of(model_a), []
    with pytest.raises(FileNotFoundError, match="holds no safetensors"):
        decoder.load(tmp_path)
    join(decoder, rows, [Joiner(token_ids=[4, 5, 6, 7], namespace="", seed=0)])
    step(decoder, rows)
    rows[0].agrees_with(reference_a)


def test_a_folder_without_a_model_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"has no config\.json"):
        decoder_of(tmp_path)


def test_a_dtype_that_does_not_exist_is_named(model_a: Path) -> None:
    with pytest.raises(ConfigError, match="dtype 'float33' is not one of float32"):
        CausalDecoder(model_a, slots=1, kv_tokens=10, device="cpu", dtype="float33", threads=1)


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has the device that has to be absent")
def test_an_absent_device_is_named(model_a: Path) -> None:
    with pytest.raises(ConfigError, match="device 'cuda': this machine has no CUDA device"):
        CausalDecoder(model_a, slots=1, kv_tokens=10, device="cuda", dtype="float32", threads=1)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_the_engine_on_a_gpu_gives_the_logprobs_of_a_plain_forward(model_a: Path, reference_a: Reference) -> None:
    rng, rows = random.Random(0), []
    decoder = CausalDecoder(model_a, slots=8, kv_tokens=4096, device="cuda", dtype="float32", threads=1)
    join(decoder, rows, [Joiner(token_ids=prompt_of(rng, n), namespace="", seed=n) for n in (3, 200, 30, 30)])
    for _ in range(20):
        step(decoder, rows)
    leave(decoder, rows, 1)
    join(decoder, rows, [Joiner(token_ids=prompt_of(rng, n), namespace="", seed=n) for n in (9, 60)])
    for _ in range(20):
        step(decoder, rows)
    for row in rows:
        row.agrees_with(reference_a)


def test_a_sliding_window_shorter_than_the_context_is_the_context(tmp_path: Path) -> None:
    config = qwen3()
    config.use_sliding_window, config.sliding_window, config.max_window_layers = True, 64, 0
    config.layer_types = ["sliding_attention", "sliding_attention"]
    assert decoder_of(save(tmp_path / "sliding", config, seed=0)).context_tokens == 64
    assert CONTEXT > 64
