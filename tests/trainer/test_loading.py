"""Folders as published: loaded by every number of ranks, published again under the same names, and refused alike."""

from __future__ import annotations

import inspect
import json
import multiprocessing
import shutil
import warnings
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from safetensors.torch import load_file
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel, core_model_loading
from transformers.conversion_mapping import get_model_conversion_mapping

from dora.errors import ConfigError
from dora.trainer.loading import ModelFolder, open_folder
from dora.trainer.model import Policy
from tests.families import make_model
from tests.trainer.publishing import load_policy, published, tensors_in, whole, write, write_version

WORLD_SIZES = (1, 2, 3, 4)
#: Loaded by all numbers of ranks. Tied heads, an odd vocabulary, as few experts as two, rows that are joined.
EVERYWHERE = {
    "llama": {"tie_word_embeddings": True},
    "mixtral": {},
    "qwen3_moe": {"num_experts": 2},
    "gpt_oss": {},
    "olmo_hybrid": {},
}  # fmt: skip
#: Loaded by three ranks: every conversion of experts, and buffers or layers that are built or named otherwise.
ONCE = (
    "qwen2_moe", "olmoe", "deepseek_v3", "glm4_moe", "minimax_m2", "gpt_neox", "gpt2", "llama4_text", "gemma3n_text",
    "falcon_h1", "mamba2", "granitemoehybrid", "nemotron_h", "lfm2", "qwen3_next", "jamba", "minimax", "zamba2",
)  # fmt: skip
#: What is divided among ranks, too.
DIVIDED = {
    "mixtral": ("expert_ranks",),
    "qwen3_moe": ("expert_ranks",),
    "gpt_oss": ("expert_ranks",),
    "llama": ("tensor_ranks",),
}
BLOCK = 16


def tensors_of(folder: Path) -> dict[str, Tensor]:
    return load_file(folder / "model.safetensors")


def load(folder: Path, *, dtype: torch.dtype = torch.float32) -> Any:
    """The model as transformers loads it, with no tensor missing or left over."""
    model, info = AutoModelForCausalLM.from_pretrained(
        folder, dtype=dtype, attn_implementation="eager", output_loading_info=True
    )
    assert not any(info[kind] for kind in ("missing_keys", "unexpected_keys", "mismatched_keys", "error_msgs"))
    return model


def whole_state(policy: Policy) -> dict[str, Tensor]:
    """Every parameter and buffer of the model, also those that no file contains."""
    names = [*policy.model.state_dict(), *dict(policy.model.named_buffers())]
    return {name: whole(policy.model.get_parameter_or_buffer(name)) for name in dict.fromkeys(names)}


def assert_same_bits(left: dict[str, Tensor], right: dict[str, Tensor]) -> None:
    assert left.keys() == right.keys()
    differ = [
        name for name in left if left[name].dtype != right[name].dtype or not torch.equal(left[name], right[name])
    ]
    assert not differ


@pytest.fixture
def alone() -> Iterator[None]:
    """A process group of one rank."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.fixture
def folder(tmp_path: Path, request: pytest.FixtureRequest) -> Path:
    """The folder of the family that the test is parametrized with, or of Qwen3-MoE."""
    make_model(getattr(request, "param", "qwen3_moe")).save_pretrained(tmp_path / "model")
    return tmp_path / "model"


# ---- any number of ranks --------------------------------------------------------------------------------------------


@pytest.mark.deep
@pytest.mark.timeout(300)
def test_every_number_of_ranks_loads_and_publishes_the_same_weights(tmp_path: Path) -> None:
    for family in (*EVERYWHERE, *ONCE):
        make_model(family, **EVERYWHERE.get(family, {})).save_pretrained(tmp_path / family)
    broken = tmp_path / "broken"
    shutil.copytree(tmp_path / "mixtral", broken)
    write(broken, {name: tensor for name, tensor in tensors_of(broken).items() if "experts.2.w3" not in name})
    multiprocessing.set_forkserver_preload([__name__])  # torch and transformers are imported once
    mp.start_processes(_rank, (tmp_path,), nprocs=max(WORLD_SIZES), start_method="forkserver")


def _rank(rank: int, root: Path) -> None:
    warnings.filterwarnings("ignore")
    torch.set_num_threads(1)
    for world_size in WORLD_SIZES[rank:]:
        store = dist.FileStore(str(root / f"store{world_size}"), world_size)
        dist.init_process_group("gloo", store=store, rank=rank, world_size=world_size)
        for family in (*EVERYWHERE, *(ONCE if world_size == 3 else ())):
            for shard_ranks in {world_size, world_size // 2 if world_size % 2 == 0 else world_size}:
                divided = DIVIDED.get(family, ()) if shard_ranks % 2 == 0 else ()
                for groups in ({}, *({by: 2} for by in divided)):
                    _loads_and_publishes(root / family, shard_ranks=shard_ranks, groups=groups)
        _stops_with_the_others(root, rank=rank, world_size=world_size)
        dist.destroy_process_group()


def _loads_and_publishes(folder: Path, *, shard_ranks: int, groups: dict[str, int]) -> None:
    read: list[int] = []
    plain = ModelFolder.read

    def counted(*arguments: Any) -> Tensor:
        rows = plain(*arguments)
        read.append(rows.numel())
        return rows

    ModelFolder.read = counted  # type: ignore[method-assign, assignment]
    try:
        policy = load_policy(folder, shard_ranks=shard_ranks, **groups)
    finally:
        ModelFolder.read = plain  # type: ignore[method-assign]
    # Elsewhere buffers, or rows that are joined or of which a rank has some columns, are read whole.
    if folder.name in ("llama", "mixtral", "qwen3_moe") and "tensor_ranks" not in groups:
        assert sum(read) == sum(shard.numel() for shard in policy.shards().values())
    state = whole_state(policy)
    world_size, before = dist.get_world_size(), tensors_of(folder)
    for writers in {1, shard_ranks}:  # some ranks, or none, are on other hosts
        target = folder.with_name(f"{folder.name}-{world_size}-{shard_ranks}-{'-'.join(groups)}-{writers}")
        write_version(policy, folder, target, dtype="float32", writers=writers, max_bytes=20_000)
        if dist.get_rank() == 0:
            assert_same_bits(tensors_in(target), before)
    if dist.get_rank() == 0:
        again = load(target)
        expected = dict(again.state_dict()) | dict(again.named_buffers())
        assert_same_bits(state, expected)


def _stops_with_the_others(root: Path, *, rank: int, world_size: int) -> None:
    """Only the last rank's folder lacks a tensor."""
    with pytest.raises(ConfigError, match=r"broken lacks model\.layers\.0\..*experts\.2\.w3\.weight"):
        load_policy(root / ("broken" if rank == world_size - 1 else "mixtral"))
    dist.barrier()


# ---- one rank -------------------------------------------------------------------------------------------------------


@pytest.mark.usefixtures("alone")
@pytest.mark.parametrize("family", ["qwen3", "minimax_m2", "deepseek_v3"])
def test_a_bfloat16_folder_is_published_bit_by_bit_with_what_it_keeps_in_float32(tmp_path: Path, family: str) -> None:
    make_model(family, dtype=torch.bfloat16).save_pretrained(tmp_path / "model")
    tensors = tensors_of(tmp_path / "model")
    biases = {name: torch.randn(tensor.shape) for name, tensor in tensors.items() if "correction_bias" in name}
    write(tmp_path / "model", tensors | biases)
    assert len(biases) == {"qwen3": 0, "minimax_m2": 4, "deepseek_v3": 3}[family]
    found = published(load_policy(tmp_path / "model"), tmp_path / "model", tmp_path / "published", dtype="bfloat16")
    assert_same_bits(found, tensors | biases)


def fp8(folder: Path) -> dict[str, Tensor]:
    """Store the matrices of the layers in FP8 with a scale per block; returns the numbers that are then stored."""
    stored, expected = {}, {}
    for name, tensor in tensors_of(folder).items():
        stored[name] = expected[name] = tensor
        if "layers" not in name or tensor.dim() != 2 or "mlp.gate." in name:
            continue
        eights, scales = torch.empty_like(tensor, dtype=torch.float8_e4m3fn), []
        expected[name] = torch.empty_like(tensor)
        for first in range(0, tensor.shape[0], BLOCK):
            scales.append([])
            for left in range(0, tensor.shape[1], BLOCK):
                block = (slice(first, first + BLOCK), slice(left, left + BLOCK))
                scales[-1].append(float(tensor[block].abs().max()) / 448)
                eights[block] = (tensor[block] / scales[-1][-1]).to(eights.dtype)
                expected[name][block] = eights[block].float() * torch.tensor(scales[-1][-1])
        stored |= {name: eights, f"{name}_scale_inv": torch.tensor(scales)}
    write(folder, stored)
    config = json.loads((folder / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "fp8", "weight_block_size": [BLOCK, BLOCK]}
    (folder / "config.json").write_text(json.dumps(config))
    return expected


@pytest.mark.usefixtures("alone")
@pytest.mark.parametrize("folder", ["qwen3_moe", "deepseek_v3"], indirect=True)
def test_fp8_is_dequantised_and_published_without_scales(folder: Path, tmp_path: Path) -> None:
    expected = fp8(folder)  # DeepSeek-V3's latent projections have 24 rows: one block and a half
    found = published(load_policy(folder), folder, tmp_path / "published", dtype="float32")
    assert_same_bits(found, expected)
    assert not hasattr(load(tmp_path / "published").config, "quantization_config")
    write(folder, {name: tensor for name, tensor in tensors_of(folder).items() if "o_proj.weight_scale" not in name})
    with pytest.raises(ConfigError, match=r"o_proj\.weight in .* is stored in FP8, without its scale"):
        load_policy(folder)
    config = json.loads((folder / "config.json").read_text())
    del config["quantization_config"]
    (folder / "config.json").write_text(json.dumps(config))
    with pytest.raises(ConfigError, match=r"is stored in FP8, but its config.json does not say so"):
        load_policy(folder)


@pytest.mark.usefixtures("alone")
def test_rows_of_fp8_that_begin_within_a_block(folder: Path) -> None:
    expected = fp8(folder)
    with ExitStack() as stack:
        opened = open_folder(folder, AutoConfig.from_pretrained(folder), stack)
        name = "model.layers.0.self_attn.q_proj.weight"
        for start in range(32):
            for stop in range(start, 33):
                assert torch.equal(opened.read(name, start, stop), expected[name][start:stop])


def under_another_prefix(name: str) -> str:
    return name.replace("model.", "model.language_model.")


def without_prefix(name: str) -> str:
    return name.removeprefix("transformer.")


@pytest.mark.usefixtures("alone")
@pytest.mark.parametrize(
    ("folder", "rename"),
    [("qwen3_5_moe_text", under_another_prefix), ("gpt2", without_prefix)],
    indirect=["folder"],
)
def test_names_under_other_prefixes_are_kept(
    folder: Path, tmp_path: Path, rename: Callable[[str], str], capfd: pytest.CaptureFixture[str]
) -> None:
    before = load(folder).state_dict()
    tensors = {rename(name): tensor for name, tensor in tensors_of(folder).items()}
    tensors |= {"mtp.layers.0.weight": torch.randn(3), "h.0.attn.bias": torch.randn(3)}
    write(folder, tensors)
    policy = load_policy(folder)
    assert_same_bits(published(policy, folder, tmp_path / "published", dtype="float32"), tensors)
    assert_same_bits(whole_state(policy) | before, whole_state(policy))
    assert_same_bits(AutoModelForCausalLM.from_pretrained(tmp_path / "published").state_dict(), before)
    unused = {"qwen3_5_moe_text": "h.0.attn.bias", "gpt2": "mtp.layers.0.weight"}[policy.model.config.model_type]
    assert f"has no use for {unused} and 0 other tensors" in capfd.readouterr().err


@pytest.mark.usefixtures("alone")
def test_experts_that_are_stored_stacked_stay_so(folder: Path, tmp_path: Path) -> None:
    stacked = load(folder).state_dict()
    write(folder, {name: tensor.clone() for name, tensor in stacked.items()})
    assert_same_bits(published(load_policy(folder), folder, tmp_path / "published", dtype="float32"), dict(stacked))


def lack_an_expert(tensors: dict[str, Tensor]) -> None:
    del tensors["model.layers.1.mlp.experts.3.up_proj.weight"]


def lack_a_norm(tensors: dict[str, Tensor]) -> None:
    del tensors["model.norm.weight"]


def have_an_expert_too_many(tensors: dict[str, Tensor]) -> None:
    for kind in ("gate", "up", "down"):
        tensor = tensors[f"model.layers.1.mlp.experts.0.{kind}_proj.weight"].clone()
        tensors[f"model.layers.1.mlp.experts.4.{kind}_proj.weight"] = tensor


def have_another_shape(tensors: dict[str, Tensor]) -> None:
    tensors["model.norm.weight"] = torch.ones(31)


def have_experts_of_other_shapes(tensors: dict[str, Tensor]) -> None:
    tensors["model.layers.1.mlp.experts.3.up_proj.weight"] = torch.ones(16, 31)


def have_longer_experts(tensors: dict[str, Tensor]) -> None:
    for expert in range(4):
        tensors[f"model.layers.1.mlp.experts.{expert}.down_proj.weight"] = torch.ones(32, 17)


@pytest.mark.usefixtures("alone")
@pytest.mark.parametrize(
    ("fault", "message"),
    [
        (lack_an_expert, r"model lacks model\.layers\.1\.mlp\.experts\.3\.up_proj\.weight"),
        (lack_a_norm, r"model lacks model\.norm\.weight"),
        (have_an_expert_too_many, r"model has model\.layers\.1\.mlp\.experts\.4\.\w+_proj\.weight, of 4 experts"),
        (have_another_shape, r"model\.norm\.weight in \S+/model has shape \[31\], from which .* expected \[32\]"),
        (have_experts_of_other_shapes, r"experts\.0\.gate_proj\.weight in \S+/model cannot be converted to .*stack"),
        (have_longer_experts, r"experts\.0\.down_proj\.weight in \S+/model has shape \[32, 17\]"),
    ],
)
def test_a_folder_that_does_not_fit_is_refused(
    folder: Path, fault: Callable[[dict[str, Tensor]], None], message: str
) -> None:
    tensors = tensors_of(folder)
    fault(tensors)
    write(folder, tensors)
    with pytest.raises(ConfigError, match=rf"^model\.path: .*{message}"):
        load_policy(folder)


@pytest.mark.usefixtures("alone")
def test_files_that_cannot_be_read_are_named(folder: Path) -> None:
    file = folder / "model.safetensors"
    index = {"weight_map": dict.fromkeys([*tensors_of(folder), "lost"], file.name)}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(ConfigError, match=r"lost in \S+/model\.safetensors cannot be read"):
        load_policy(folder)
    (folder / "model.safetensors.index.json").unlink()
    file.write_bytes(file.read_bytes()[:-1])
    with pytest.raises(ConfigError, match=r"model\.safetensors is not a readable safetensors file"):
        load_policy(folder)
    file.unlink()
    with pytest.raises(ConfigError, match="has no safetensors file"):
        load_policy(folder)


@pytest.mark.usefixtures("alone")
def test_other_quantizations_are_refused(folder: Path) -> None:
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"quantization_config": {"quant_method": "mxfp4"}}))
    with pytest.raises(ConfigError, match=r"is quantized \(mxfp4\); give a bfloat16"):
        load_policy(folder)


@pytest.mark.usefixtures("alone")
def test_a_head_that_is_tied_may_be_stored_under_its_own_name_too(folder: Path, tmp_path: Path) -> None:
    make_model("llama", tie_word_embeddings=True).save_pretrained(folder)
    tensors = tensors_of(folder)
    head = tensors["model.embed_tokens.weight"].clone()
    write(folder, tensors | {"lm_head.weight": head})
    found = published(load_policy(folder), folder, tmp_path / "published", dtype="float32")
    assert_same_bits(found, tensors | {"lm_head.weight": head})
    write(folder, tensors | {"lm_head.weight": head + 1})
    with pytest.raises(ConfigError, match=r"embed_tokens\.weight and lm_head\.weight differ in .*tie_word_embeddings"):
        load_policy(folder)


# ---- what is used of transformers without being promised ------------------------------------------------------------


def test_the_internals_of_transformers_that_are_used_are_what_they_were(folder: Path) -> None:
    """If this fails, transformers has moved what dora/trainer/loading.py calls: adapt it, then the floor."""
    parameters = {
        core_model_loading.rename_source_key: [
            "source_key", "weight_renamings", "weight_converters", "base_model_prefix", "meta_state_dict",
        ],
        core_model_loading.revert_weight_conversion: ["model", "state_dict"],
        core_model_loading.dot_natural_key: ["s"],
        core_model_loading.WeightConverter.add_tensor: ["self", "target_key", "source_key", "source_pattern", "future"],
        core_model_loading.WeightConverter.convert: ["self", "layer_name", "model", "config"],
        get_model_conversion_mapping: ["model"],
        PreTrainedModel._init_weights: ["self", "module"],
        PreTrainedModel.get_parameter_or_buffer: ["self", "target"],
    }  # fmt: skip
    for call, names in parameters.items():
        assert list(inspect.signature(call).parameters)[: len(names)] == names, call
    with torch.device("meta"):
        model = make_model("qwen3_moe")
    up = get_model_conversion_mapping(model)[0]
    assert up.source_patterns == ["mlp.experts.*.gate_proj.weight", "mlp.experts.*.up_proj.weight"]
    assert [(type(operation), operation.dim) for operation in up.operations] == [
        (core_model_loading.MergeModulelist, 0),
        (core_model_loading.Concatenate, 1),
    ]
    assert not up.was_used()
    assert isinstance(model._keys_to_ignore_on_load_unexpected, set)
    assert model.base_model_prefix == "model"


def test_the_weights_initialization_of_transformers_leaves_what_is_marked() -> None:
    model = make_model("llama")
    embedding = model.model.embed_tokens
    embedding.weight._is_hf_initialized = True
    before = embedding.weight.clone()
    model._init_weights(embedding)
    assert torch.equal(embedding.weight, before)
    del embedding.weight._is_hf_initialized
    model._init_weights(embedding)
    assert not torch.equal(embedding.weight, before)


def test_transformers_publishes_by_the_conversions_that_the_model_notes(folder: Path) -> None:
    model = load(folder)
    name, tensor = "model.layers.0.mlp.experts.down_proj", model.model.layers[0].mlp.experts.down_proj.detach()
    assert len(core_model_loading.revert_weight_conversion(model, {name: tensor})) == 4
    model._weight_conversions = []
    assert core_model_loading.revert_weight_conversion(model, {name: tensor}).keys() == {name}
