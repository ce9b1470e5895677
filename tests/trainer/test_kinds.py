"""Kinds of models, told by their configuration alone: encoders, models of images and sound, and what is too much."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoConfig, AutoModelForImageTextToText
from transformers.models.auto import modeling_auto

from dora.errors import ConfigError
from dora.trainer.forecast import Outline
from dora.trainer.forward_check import check_training
from dora.trainer.meshes import make_mesh
from dora.trainer.model import Policy, build_on_meta, require_text_decoder
from dora.trainer.score import score
from tests.families import FAMILIES, SHAPE, make_config, make_model
from tests.trainer.publishing import gather, tensors_in, write_version

CAUSAL = modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
ENCODERS = sorted(
    CAUSAL.keys()
    & {*modeling_auto.MODEL_FOR_MASKED_LM_MAPPING_NAMES, *modeling_auto.MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES}
)
VISION = {
    "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1, "num_attention_heads": 4, "image_size": 28,
    "patch_size": 14, "vision_output_dim": 32, "projector_input_dim": 32, "projector_output_dim": 32,
}  # fmt: skip
QWEN_VISION = {
    "depth": 1, "hidden_size": 32, "intermediate_size": 48, "num_heads": 4, "out_hidden_size": 32, "patch_size": 4,
    "num_position_embeddings": 16,
}  # fmt: skip
#: Models of images whose text model transformers builds alone: family of the text, and the vision part.
TEXT_ALONE = {"qwen3_5": ("qwen3_5_text", QWEN_VISION), "llama4": ("llama4_text", VISION)}


@pytest.fixture
def alone() -> Iterator[None]:
    """A process group of one rank."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def of_images(kind: str, text: str, vision: dict[str, Any], **others: Any) -> Any:
    """The tiny config of a model of images and text."""
    tokens = {"eos_token_id": None, "bos_token_id": None, "pad_token_id": None}
    inner = {"model_type": text, **SHAPE, **FAMILIES.get(text, {}), **tokens}
    images = {"image_token_id": 96, "video_token_id": 95, "vision_start_token_id": 94, "vision_end_token_id": 93}
    return AutoConfig.for_model(kind, text_config=inner, vision_config=vision, **images, **others)


@pytest.mark.parametrize("kind", ENCODERS)
@pytest.mark.parametrize("is_decoder", [False, True])
def test_encoders_are_refused_by_their_kind(kind: str, is_decoder: bool) -> None:
    config = AutoConfig.for_model(kind, is_decoder=is_decoder, is_encoder_decoder=False)
    with pytest.raises(ConfigError, match=rf"^model\.path: {kind} is a family of encoders.*; not supported$"):
        build_on_meta(config, torch.bfloat16)


def test_an_encoder_in_bfloat16_is_not_scored_either(tmp_path: Path) -> None:
    shape = {key: SHAPE[key] for key in SHAPE if key != "num_key_value_heads"}
    config = AutoConfig.for_model("xlm-roberta", is_decoder=True, **shape)
    config.save_pretrained(tmp_path)
    with pytest.raises(ConfigError, match="xlm-roberta is a family of encoders"):
        score(tmp_path, [[1, 2, 3]], prompt_lengths=[1], temperature=1.0, dtype="bfloat16")


@pytest.mark.parametrize("family", FAMILIES)
def test_no_other_family_is_refused_by_its_kind(family: str) -> None:
    require_text_decoder(make_config(family))


@pytest.mark.parametrize(
    ("kind", "text", "says"),
    [
        (
            "gemma3",
            "gemma3_text",
            "the text model alone can be trained from a folder of Gemma3ForCausalLM: text_config",
        ),
        (
            "gemma4",
            "gemma4_text",
            "the text model alone can be trained from a folder of Gemma4ForCausalLM: text_config",
        ),
        ("llava", "llama", "the text model alone can be trained from a folder of LlamaForCausalLM: text_config as"),
        ("mistral3", "mistral", "the text model alone can be trained from a folder of MistralForCausalLM: text_conf"),
        (
            "qwen2_5_vl",
            "qwen2_5_vl_text",
            "transformers has no class for its text model alone, so it cannot be trained",
        ),
    ],
)
def test_a_model_of_images_says_what_can_be_trained(kind: str, text: str, says: str) -> None:
    visions = {"llava": {"model_type": "clip_vision_model"}, "mistral3": {"model_type": "pixtral"}}
    config = of_images(kind, text, visions.get(kind, {}))
    with pytest.raises(ConfigError, match=rf"^model\.path: {kind} is multimodal: {says}"):
        build_on_meta(config, torch.float32)


def published(folder: Path, target: Path, *, compute: torch.dtype, dtype: str) -> dict[str, Tensor]:
    """Return what the trainer publishes of a folder before any training, and write it as a whole folder."""
    policy = Policy(folder, mesh=make_mesh("cpu"), dtype=compute)
    write_version(policy, folder, target, dtype=dtype)
    return tensors_in(target)


@pytest.mark.usefixtures("alone")
@pytest.mark.parametrize("kind", TEXT_ALONE)
def test_the_tensors_of_a_vision_part_are_published_bit_for_bit(tmp_path: Path, kind: str) -> None:
    torch.manual_seed(0)
    config = of_images(kind, *TEXT_ALONE[kind])
    folder = tmp_path / "model"
    AutoModelForImageTextToText.from_config(config, dtype=torch.float32).save_pretrained(folder)
    before = load_file(folder / "model.safetensors")
    after = published(folder, tmp_path / "published", compute=torch.bfloat16, dtype="bfloat16")
    assert after.keys() == before.keys()
    vision = [name for name in before if "language_model" not in name and "lm_head" not in name]
    assert vision
    for name in vision:
        assert after[name].dtype == torch.float32
        assert torch.equal(after[name], before[name])
    assert all(after[name].dtype == torch.bfloat16 for name in before.keys() - set(vision))
    _, found = AutoModelForImageTextToText.from_pretrained(tmp_path / "published", output_loading_info=True)
    assert not found["missing_keys"]
    assert not found["unexpected_keys"]


@pytest.mark.usefixtures("alone")
def test_layers_that_predict_several_tokens_are_kept_as_they_were_read(tmp_path: Path) -> None:
    """DeepSeek-V3's config.json promises them, and transformers leaves them out without a word."""
    folder = tmp_path / "model"
    make_model("deepseek_v3", num_hidden_layers=61).save_pretrained(folder)
    tensors = load_file(folder / "model.safetensors")
    extra = {"model.layers.61.eh_proj.weight": torch.randn(3, 5, dtype=torch.float16)}
    save_file(tensors | extra, folder / "model.safetensors", metadata={"format": "pt"})
    after = published(folder, tmp_path / "published", compute=torch.float32, dtype="float32")
    assert after.keys() == tensors.keys() | extra.keys()
    assert torch.equal(after["model.layers.61.eh_proj.weight"], extra["model.layers.61.eh_proj.weight"])


@pytest.mark.usefixtures("alone")
@pytest.mark.parametrize("stored", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("family", ["minimax", "minimax_m2"])
def test_buffers_compute_in_16_bits_and_are_published_as_they_were_read(
    tmp_path: Path, family: str, stored: torch.dtype
) -> None:
    folder = tmp_path / "model"
    make_model(family, dtype=stored).save_pretrained(folder)
    Outline(folder, dtype=torch.bfloat16)  # the forecast of a run, before anything is loaded
    policy = Policy(folder, mesh=make_mesh("cpu"), dtype=torch.bfloat16)
    check_training(policy, dtype="bfloat16")
    before, after = load_file(folder / "model.safetensors"), gather(policy, dtype="bfloat16")
    names = [name for name in before if any(word in name for word in ("decay", "slope_rate", "correction_bias"))]
    assert names
    for name in names:
        assert after[name].dtype == before[name].dtype
        assert torch.equal(after[name], before[name])


@pytest.mark.usefixtures("alone")
def test_a_type_that_a_layer_cannot_compute_in_is_one_line(tmp_path: Path) -> None:
    make_model("minimax", dtype=torch.bfloat16).save_pretrained(tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")  # kept in float32 on purpose, so they stay so
    tensors |= {name: tensor.float() for name, tensor in tensors.items() if "decay" in name}
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    policy = Policy(tmp_path, mesh=make_mesh("cpu"), dtype=torch.bfloat16)
    says = r"^model\.path: MiniMaxForCausalLM .*cannot be trained: its forward pass in bfloat16 raises RuntimeError"
    with pytest.raises(ConfigError, match=says):
        check_training(policy, dtype="bfloat16")


def test_a_model_of_endless_layers_is_refused_while_it_is_built(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("dora.trainer.model.MAX_PARTS", 2_000)
    config = make_config("llama")
    config.num_hidden_layers = 10**9
    with pytest.raises(ConfigError, match=r"^model\.path: its config\.json describes more than 2,000 modules"):
        build_on_meta(config, torch.float32)


#: Entries of other types, and numbers that no model has.
WRONG = ("x", [], {}, None, -1, 0, 10**30, 1e400, True, [[1]], {"model_type": 1}, [None])


@pytest.mark.usefixtures("alone")
def test_entries_of_another_type_are_one_line_or_harmless(tmp_path: Path) -> None:
    make_model("gemma3_text", num_hidden_layers=1, layer_types=["full_attention"]).save_pretrained(tmp_path)
    sound = json.loads((tmp_path / "config.json").read_bytes())
    refused = 0
    keys = [*sound, "quantization_config", "text_config", "auto_map", "attn_implementation", "_name_or_path"]
    for number, key in enumerate(keys):
        for value in [*WRONG, *WRONG][3 * number % len(WRONG) :][:3]:  # three of them for each
            (tmp_path / "config.json").write_text(json.dumps(sound | {key: value}))
            try:
                Policy(tmp_path, mesh=make_mesh("cpu"), dtype=torch.float32)
            except ConfigError as err:
                assert "\n" not in str(err)  # noqa: PT017
                assert "trust" not in str(err)  # noqa: PT017
                refused += 1
    assert refused > len(sound)


@pytest.mark.usefixtures("alone")
@pytest.mark.parametrize("size", ["x", [8], [8, 0], [8, "8"], {"a": 1}, 10**9])
def test_a_block_size_of_fp8_that_is_none(tmp_path: Path, size: object) -> None:
    make_model("llama", num_hidden_layers=1).save_pretrained(tmp_path)
    config = json.loads((tmp_path / "config.json").read_bytes())
    quantization = {"quantization_config": {"quant_method": "fp8", "weight_block_size": size}}
    (tmp_path / "config.json").write_text(json.dumps(config | quantization))
    with pytest.raises(ConfigError, match=r"^model\.path: weight_block_size of .* expected two positive integers"):
        Policy(tmp_path, mesh=make_mesh("cpu"), dtype=torch.float32)
