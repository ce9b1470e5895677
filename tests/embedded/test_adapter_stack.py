"""Adapters in the decoder against peft: any mixture of rows has the log-probs of each adapter alone."""

from __future__ import annotations

import itertools
import math
import os
import random
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from dora.adapter_files import CONFIG, WEIGHTS
from dora.embedded.adapter_stack import AdapterStack
from dora.embedded.batcher import Joiner
from dora.embedded.decoder import CausalDecoder
from dora.embedded.self_check import require_exact
from dora.errors import ConfigError
from tests.embedded.adapted import (
    ATTENTION,
    DENSE,
    RANK,
    AdaptedReference,
    alter,
    refill,
    room,
    write_adapter,
)
from tests.embedded.conftest import Reference, decoder_of
from tests.embedded.rows import Row, churn, join, leave, prompt_of, step
from tests.families import SHAPE, make_model

#: Dense; stored transposed; experts; latent attention; layers with states, of three kinds; windows and a tied head.
FAMILIES: dict[str, Sequence[str]] = {
    "llama": DENSE,
    "gpt2": ("c_attn", "c_fc"),
    "qwen3_moe": ATTENTION,
    "deepseek_v3": ("q_a_proj", "q_b_proj", "kv_a_proj_with_mqa", "kv_b_proj", "o_proj"),
    "lfm2": ("q_proj", "in_proj", "out_proj", "w1"),
    "qwen3_5_text": (*DENSE, "in_proj_qkv", "in_proj_z", "out_proj"),
    "granitemoehybrid": ATTENTION,
    "gemma2": DENSE,
}
VOCAB = SHAPE["vocab_size"]


def put(decoder: CausalDecoder, *adapters: Path) -> CausalDecoder:
    """Load adapters at the places from 0 on."""
    assert decoder.adapters is not None
    for place, adapter in enumerate(adapters):
        decoder.adapters.put(place, decoder.adapters.read(adapter))
    return decoder


@pytest.fixture(scope="module")
def pair(model_a: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """Two adapters of model a."""
    root = tmp_path_factory.mktemp("adapters")
    return write_adapter(root / "one", model_a, seed=1), write_adapter(root / "two", model_a, seed=2)


@pytest.mark.parametrize("family", FAMILIES)
def test_every_row_has_the_logprobs_of_its_adapter_alone(tmp_path: Path, family: str) -> None:
    folder, targets = tmp_path / "model", FAMILIES[family]
    make_model(family).save_pretrained(folder)
    adapters = [write_adapter(tmp_path / str(seed), folder, targets=targets, seed=seed) for seed in range(2)]
    decoder = put(decoder_of(folder, adapters=room(targets)), *adapters)
    limit = decoder.context_tokens - 1
    rows = churn(
        decoder, random.Random(0), lengths=[1, 2, 5, limit // 3], turns=40, vocab=VOCAB, room=limit, adapters=2
    )
    references = {None: Reference(folder), **{n: AdaptedReference(folder, one) for n, one in enumerate(adapters)}}
    for row in rows:
        row.agrees_with(references[row.joiner.adapter])
    prompt, tokens = list(rows[0].joiner.token_ids), rows[0].output_ids
    found = [reference.logprobs(prompt + tokens)[-1] for reference in references.values()]
    assert min(abs(one - other) for one, other in itertools.pairwise(found)) > 1e-2  # they do differ


def logprobs_of(decoder: CausalDecoder, places: Sequence[int | None]) -> list[list[float]]:
    """The log-probs of a row for each place, which join together."""
    rows: list[Row] = []
    decoder.flush()
    prompts = [prompt_of(random.Random(number), 20) for number in range(len(places))]
    join(
        decoder,
        rows,
        [Joiner(token_ids=ids, namespace=str(n), seed=n, adapter=places[n]) for n, ids in enumerate(prompts)],
    )
    for _ in range(8):
        step(decoder, rows)
    for _ in places:
        decoder.leave(0)
    return [row.logprobs for row in rows]


def test_a_row_without_an_adapter_has_the_models_own_logprobs_to_the_bit(
    model_a: Path, pair: tuple[Path, Path]
) -> None:
    decoder = put(decoder_of(model_a, adapters=room()), *pair)
    own = logprobs_of(decoder_of(model_a), [None] * 4)
    assert logprobs_of(decoder, [None] * 4) == own
    mixed = logprobs_of(decoder, [0, None, 1, None])
    assert [mixed[1], mixed[3]] == [own[1], own[3]]
    assert mixed[0] != own[0]


def test_other_rows_change_an_adapters_row_by_rounding_alone(model_a: Path, pair: tuple[Path, Path]) -> None:
    decoder = put(decoder_of(model_a, adapters=room()), *pair, pair[0])
    alone = logprobs_of(decoder, [0, 2, 2, 0])
    mixed = logprobs_of(decoder, [0, 1, None, 2])
    assert mixed[0] == pytest.approx(alone[0], abs=1e-5)
    assert logprobs_of(decoder, [2, 1, None, 0])[0] == pytest.approx(alone[0], abs=1e-4)  # at another place


def test_an_adapter_of_a_smaller_rank_or_of_fewer_targets_leaves_nothing_of_the_one_before(
    model_a: Path, pair: tuple[Path, Path], tmp_path: Path
) -> None:
    small = write_adapter(tmp_path / "small", model_a, targets=("v_proj",), rank=2, seed=3)
    decoder = put(put(decoder_of(model_a, adapters=room()), *pair), small)
    rows: list[Row] = []
    join(decoder, rows, [Joiner(token_ids=[4, 5, 6], namespace="small", seed=0, adapter=0)])
    for _ in range(5):
        step(decoder, rows)
    rows[0].agrees_with(AdaptedReference(model_a, small))


def test_a_place_that_is_loaded_again_has_the_new_adapter_whatever_others_run_beside_it(
    model_a: Path, pair: tuple[Path, Path]
) -> None:
    decoder = put(decoder_of(model_a, adapters=room()), *pair, pair[0])
    first = logprobs_of(decoder, [0, 2])
    put(decoder, pair[0], pair[1], pair[1])
    second = logprobs_of(decoder, [0, 2])
    assert second[0] == first[0]
    assert second[1] != pytest.approx(first[1], abs=1e-2)
    assert second[1] == pytest.approx(logprobs_of(decoder, [0, 1])[1], abs=1e-4)


def test_an_adapter_that_overflows_ends_its_own_row_alone_and_leaves_its_slot_usable(
    model_a: Path, pair: tuple[Path, Path], reference_a: Reference, tmp_path: Path
) -> None:
    wild = write_adapter(tmp_path / "wild", model_a, targets=("v_proj",), seed=4)
    refill(wild, v_proj_lora_A_weight=torch.full((RANK, 32), 3e38))
    decoder = put(decoder_of(model_a, adapters=room()), pair[0], wild)
    expected = logprobs_of(decoder, [0, 0, None])
    rows: list[Row] = []
    decoder.flush()
    prompts = [prompt_of(random.Random(number), 20) for number in range(3)]
    join(
        decoder,
        rows,
        [Joiner(token_ids=ids, namespace=str(n), seed=n, adapter=(0, 1, None)[n]) for n, ids in enumerate(prompts)],
    )
    for _ in range(8):
        step(decoder, rows)
    assert [rows[0].logprobs, rows[2].logprobs] == [pytest.approx(one, abs=1e-5) for one in expected[::2]]
    assert all(math.isnan(logprob) for logprob in rows[1].logprobs)
    for index in (1, 0, 0):  # its row is taken by the last one
        leave(decoder, rows, index)
    decoder.join([Joiner(token_ids=[3] * 30, namespace="wild", seed=0, adapter=1) for _ in range(3)])  # without a step
    for _ in range(3):
        decoder.leave(0)
    join(decoder, rows, [Joiner(token_ids=[4, 5, n], namespace="", seed=n) for n in range(3)])
    for _ in range(5):
        step(decoder, rows)
    for row in rows:
        row.agrees_with(reference_a)


# --- loading what others have made


def as_pickle(folder: Path) -> None:
    os.rename(folder / WEIGHTS, folder / "adapter_model.bin")


def as_pipe(folder: Path) -> None:
    (folder / WEIGHTS).unlink()
    os.mkfifo(folder / WEIGHTS)


def as_link(folder: Path) -> None:
    os.rename(folder / CONFIG, folder.parent / "elsewhere.json")
    (folder / CONFIG).symlink_to(folder.parent / "elsewhere.json")


def cut(folder: Path) -> None:
    os.truncate(folder / WEIGHTS, 5_000)


REFUSED: list[tuple[Callable[[Path], Any], str]] = [
    (shutil.rmtree, r"has no adapter_config\.json"),
    (as_pickle, r"has no adapter_model\.safetensors, the only form"),
    (as_pipe, r"is a pipe, not a regular file"),
    (as_link, r"is a link that leads out of the folder"),
    (cut, r"has a damaged header"),
    (lambda folder: (folder / CONFIG).write_text("[" * 100_000), r"is not the configuration of an adapter"),
    (lambda folder: alter(folder, r=RANK + 1), r"has rank 5, above --max-lora-rank 4"),
    (lambda folder: alter(folder, r=RANK - 1), r"lora_A\.weight .* shape \[4, 32\], expected .* and \[3, 32\]"),
    (lambda folder: alter(folder, target_modules=["q_proj", "lm_head"]), r"adapts lm_head, not among --lora-target"),
    (lambda folder: alter(folder, target_modules=["q_proj"]), r"has 24 tensors that belong to none of its targets"),
    (lambda folder: alter(folder, use_dora=True), r"has 'use_dora': not supported"),
    (lambda folder: alter(folder, rank_pattern={"q_proj": 2}), r"has 'rank_pattern': not supported"),
    (lambda folder: refill(folder, v_proj_lora_B_weight=None), r"lacks 2 tensors, first base_model\.model\.model\.l"),
    (lambda folder: refill(folder, o_proj_lora_A_weight=torch.zeros(RANK, 31)), r"shape \[4, 31\], expected .*4, 32\]"),
    (lambda folder: refill(folder, o_proj_lora_A_weight=torch.zeros(RANK, 32, 1)), r"shape \[4, 32, 1\], expected"),
    (lambda folder: refill(folder, o_proj_lora_A_weight=torch.zeros(RANK, 32).long()), r"has type I64 .*expected BF16"),
    (lambda folder: refill(folder, o_proj_lora_A_weight=torch.full((RANK, 32), torch.nan)), r"infinite or not numbers"),
    (lambda folder: refill(folder, o_proj_lora_B_weight=torch.full((32, RANK), 3e38)), r"infinite or not numbers"),
]


@pytest.mark.parametrize(("damage", "says"), REFUSED, ids=[says[:25] for _, says in REFUSED])
def test_a_folder_that_cannot_be_served_is_refused_in_one_line(
    served_stack: AdapterStack, pair: tuple[Path, Path], tmp_path: Path, damage: Callable[[Path], Any], says: str
) -> None:
    folder = shutil.copytree(pair[0], tmp_path / "adapter")
    damage(folder)
    with pytest.raises(ConfigError, match=rf"^lora_path: .*{says}") as caught:
        served_stack.read(folder)
    assert "\n" not in str(caught.value)


@pytest.fixture(scope="module")
def served_stack(model_a: Path) -> AdapterStack:
    stack = decoder_of(model_a, adapters=room()).adapters
    assert stack is not None
    return stack


def test_use_rslora_is_not_read_as_in_the_release(
    served_stack: AdapterStack, pair: tuple[Path, Path], tmp_path: Path
) -> None:
    folder = alter(shutil.copytree(pair[0], tmp_path / "adapter"), use_rslora=True)
    as_it_was = served_stack.read(pair[0])
    assert all(torch.equal(up, as_it_was[name][1]) for name, (_, up) in served_stack.read(folder).items())


# --- refused at the start


@pytest.mark.parametrize(
    ("family", "target", "says"),
    [
        ("llama", "lm_head", "lm_head is an embedding or the head of LlamaForCausalLM, which is not adapted"),
        ("gemma2", "embed_tokens", "embed_tokens is an embedding or the head of Gemma2ForCausalLM"),
        ("qwen2_moe", "up_proj", "up_proj is beside or inside the experts of Qwen2MoeForCausalLM"),
        ("llama", "proj", "LlamaForCausalLM has no linear module proj; give some of down_proj, gate_proj"),
    ],
)
def test_a_target_that_cannot_be_adapted_is_refused_by_name(
    tmp_path: Path, family: str, target: str, says: str
) -> None:
    make_model(family).save_pretrained(tmp_path)
    with pytest.raises(ConfigError, match=f"^--lora-target-modules: {says}"):
        decoder_of(tmp_path, adapters=room([target]))


def test_a_weight_that_is_used_without_its_module_is_found_at_the_start(tmp_path: Path) -> None:
    make_model("jamba").save_pretrained(tmp_path)
    with pytest.raises(ConfigError, match=r"^JambaForCausalLM is not served .*does not call model\.layers\.0\.mamba\."):
        decoder_of(tmp_path, adapters=room(["in_proj", "dt_proj"]))


def test_the_check_at_the_start_finds_rows_that_get_the_adapter_of_another(model_a: Path) -> None:
    decoder = decoder_of(model_a, adapters=room())
    stack = decoder.adapters
    assert stack is not None
    aim = stack.aim
    decoder._aim_adapters = lambda rows: aim(decoder._places[rows][::-1])  # type: ignore[method-assign]
    with torch.inference_mode(), pytest.raises(ValueError, match=r"log-probs differ by [\d.]+ from those of a plain"):
        require_exact(decoder, decoder._model, slots=8, adapters=stack)


def test_a_checked_decoder_has_no_live_rows_and_serves_the_model(model_a: Path, reference_a: Reference) -> None:
    decoder, rows = decoder_of(model_a, adapters=room(count=1), slots=1), []
    join(decoder, rows, [Joiner(token_ids=[4, 5, 6], namespace="", seed=0)])
    step(decoder, rows)
    rows[0].agrees_with(reference_a)
