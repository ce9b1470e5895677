"""Families with experts, recurrent states or attention of their own: served with the log-probs of a plain forward."""

from __future__ import annotations

import json
import math
import random
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from dora.embedded.batcher import Joiner
from dora.embedded.decoder import CausalDecoder
from dora.embedded.self_check import require_exact
from dora.errors import ConfigError
from tests.embedded.conftest import Reference, decoder_of
from tests.embedded.rows import Row, churn, join, leave, prompt_of, step
from tests.families import SHAPE, make_model

VOCAB = SHAPE["vocab_size"]
HYBRIDS = ["lfm2", "qwen3_5_text", "jamba"]  # short convolutions, gated delta net, state space
SERVED = [*HYBRIDS, "qwen3_next", "granitemoehybrid", "qwen3_moe", "mixtral", "deepseek_v3", "gpt_oss", "gemma2"]


class Folders:
    """Model folders, each made when first asked for; `seed` gives other weights."""

    def __init__(self, root: Path) -> None:
        self._root = root

    def __call__(self, family: str, *, seed: int = 0) -> Path:
        folder = self._root / f"{family}-{seed}"
        if not folder.exists():
            make_model(family, seed=seed).save_pretrained(folder)
        return folder


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Folders:
    return Folders(tmp_path_factory.mktemp("families"))


@pytest.mark.parametrize("family", SERVED)
def test_logprobs_are_those_of_a_plain_forward_while_rows_join_and_leave(folders: Folders, family: str) -> None:
    decoder, reference = decoder_of(folders(family)), Reference(folders(family))
    room = decoder.context_tokens - 1  # a sliding window is the context
    for row in churn(decoder, random.Random(0), lengths=[1, 2, 5, room // 3], turns=40, vocab=VOCAB, room=room):
        row.agrees_with(reference)


@pytest.mark.parametrize("family", HYBRIDS)
def test_a_hybrid_takes_whole_prompts_from_the_cache(folders: Folders, family: str) -> None:
    rng, decoder, rows = random.Random(1), decoder_of(folders(family)), []
    ids = prompt_of(rng, 25, vocab=VOCAB)
    first = Joiner(token_ids=ids, namespace="", seed=1)
    assert join(decoder, rows, [first]) == [0]
    longer, branch = [*ids, 5, 6, 7], [*ids[:20], 9, 9, 9]
    assert join(decoder, rows, [replace(first, seed=2)]) == [24]
    for other in (branch, longer, ids[:10], ids[:1]):
        assert join(decoder, rows, [replace(first, token_ids=other)]) == [0]
    for _ in range(6):
        step(decoder, rows)
    reference = Reference(folders(family))
    for row in rows:
        row.agrees_with(reference)


def test_the_prefix_cache_of_a_hybrid_has_as_many_states_as_two_times_the_slots_at_most(folders: Folders) -> None:
    decoder = decoder_of(folders("lfm2"), slots=2)
    for first in range(12):
        decoder.join([Joiner(token_ids=[first, 1], namespace="", seed=0)])
        decoder.leave(0)
    assert decoder.cached_tokens == 4


def test_prompt_logprobs_of_a_hybrid_are_those_of_a_plain_forward(folders: Folders) -> None:
    decoder, ids = decoder_of(folders("lfm2")), prompt_of(random.Random(2), 30, vocab=VOCAB)
    decoder.join([Joiner(token_ids=ids, namespace="", seed=0)])
    [one] = decoder.join([Joiner(token_ids=ids, namespace="", seed=0, logprob_start=20)])
    assert one.prompt_logprobs is not None
    assert one.prompt_logprobs[1:] == pytest.approx(Reference(folders("lfm2")).logprobs(ids)[20:], abs=1e-4)


def test_states_that_are_nan_do_not_affect_the_weights_loaded_after_them(folders: Folders, tmp_path: Path) -> None:
    broken = load_file(folders("qwen3_5_text") / "model.safetensors")
    broken["model.layers.0.linear_attn.in_proj_qkv.weight"].fill_(torch.nan)
    save_file(broken, tmp_path / "model.safetensors")
    decoder, rows = decoder_of(folders("qwen3_5_text")), []
    decoder.load(tmp_path)
    decoder.join([Joiner(token_ids=[3] * 40, namespace="", seed=0)])
    assert math.isnan(decoder.step()[1][0])
    decoder.leave(0)
    decoder.flush()
    decoder.load(folders("qwen3_5_text"))
    join(decoder, rows, [Joiner(token_ids=ids, namespace="", seed=0) for ids in ([4], [4, 5, 6, 7])])
    for _ in range(3):
        step(decoder, rows)
    reference = Reference(folders("qwen3_5_text"))
    for row in rows:
        row.agrees_with(reference)


# --- weights as published


def serves(decoder: CausalDecoder, folder: Path) -> None:
    """The decoder gives the log-probs of the folder's weights."""
    rows: list[Row] = []
    decoder.flush()
    join(decoder, rows, [Joiner(token_ids=[4, 5, 6, 7], namespace="", seed=0)])
    for _ in range(3):
        step(decoder, rows)
    leave(decoder, rows, 0).agrees_with(Reference(folder))


@pytest.mark.parametrize("family", ["qwen3_moe", "mixtral", "deepseek_v3"])
def test_weights_come_in_under_their_published_names(folders: Folders, family: str) -> None:
    decoder = decoder_of(folders(family))
    before, published = decoder.checksums(), load_file(folders(family, seed=1) / "model.safetensors")
    assert published.keys() <= before.keys()
    assert sum(".experts.1." in name for name in published) >= 3
    decoder.load(folders(family, seed=1))
    serves(decoder, folders(family, seed=1))
    after = decoder.checksums()
    decoder.load(folders(family))
    assert decoder.checksums() == before
    for bucket in (list(published.items())[::2], list(published.items())[1::2]):  # parts of an expert in each
        decoder.put([*bucket, ("no.such.weight", torch.zeros(1))])
    assert decoder.checksums() == after
    serves(decoder, folders(family, seed=1))


def test_a_folder_that_lacks_an_expert_is_refused_and_the_parameter_named(folders: Folders, tmp_path: Path) -> None:
    weights = load_file(folders("qwen3_moe") / "model.safetensors")
    del weights["model.layers.2.mlp.experts.3.up_proj.weight"]
    save_file(weights, tmp_path / "model.safetensors")
    with pytest.raises(ConfigError, match=r"lacks 1 weights of the served model, first .*layers\.2\.mlp\.experts"):
        decoder_of(folders("qwen3_moe")).load(tmp_path)


def test_an_expert_too_many_is_named(folders: Folders, tmp_path: Path) -> None:
    extra = {"model.layers.9.mlp.experts.3.up_proj.weight": torch.zeros(16, 32)}
    save_file(extra, tmp_path / "model.safetensors")
    with pytest.raises(ConfigError, match=r"holds model\.layers\.9\.mlp.* which the served model does not have"):
        decoder_of(folders("qwen3_moe")).load(tmp_path)


def test_tensors_that_a_family_leaves_out_on_purpose_are_skipped(folders: Folders, tmp_path: Path) -> None:
    weights = load_file(folders("qwen3_next") / "model.safetensors")
    save_file(weights | {"mtp.fc.weight": torch.zeros(1)}, tmp_path / "model.safetensors")
    decoder_of(folders("qwen3_next")).load(tmp_path)


# --- refused at the start


def test_a_layer_that_remembers_more_than_the_slots_hold_is_found_at_the_start(folders: Folders) -> None:
    decoder = decoder_of(folders("qwen3_moe"))
    seen: list[torch.Tensor] = []

    def leak(_module: object, _args: object, output: torch.Tensor) -> torch.Tensor:
        seen.append(output.mean())
        return output + torch.stack(seen).sum()

    decoder._model.model.layers[1].register_forward_hook(leak)
    with torch.inference_mode(), pytest.raises(ValueError, match=r"log-probs differ by [\d.]+ from those of a plain"):
        require_exact(decoder, decoder._model, slots=8)


def test_a_family_with_a_cache_of_its_own_is_refused(folders: Folders) -> None:
    with pytest.raises(ConfigError, match="MiniMaxForCausalLM is not served by the embedded engine: it has a cache"):
        decoder_of(folders("minimax"))


def test_a_quantized_folder_is_refused(folders: Folders, tmp_path: Path) -> None:
    config = json.loads((folders("qwen3_moe") / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "fp8", "weight_block_size": [8, 8]}
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(ConfigError, match="cannot be loaded as a causal LM: it is quantized"):
        decoder_of(tmp_path)


def test_rope_that_depends_on_the_length_limits_the_context(folders: Folders) -> None:
    assert SHAPE["max_position_embeddings"] == 128
    assert decoder_of(folders("phi3")).context_tokens == 32  # its short factors
