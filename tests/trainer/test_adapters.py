"""Adapters are those of peft: what a plain loop over its model trains, on any number of ranks, is what the ranks train.

In float64, with two updates a step, so that π_o is an adapter too.
"""

from __future__ import annotations

import multiprocessing
import shutil
import threading
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final, NamedTuple

import msgspec
import numpy as np
import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from conftest import SETTINGS, make_batch, make_groups
from peft import PeftModel
from peft.tuners.lora import LoraLayer
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from transformers import AutoModelForCausalLM
from transformers.pytorch_utils import Conv1D

from dora.adapter_files import read_proof
from dora.core.ids import VersionId
from dora.errors import ConfigError
from dora.trainer import model as policy_module
from dora.trainer.adapters import PROXIMAL, REFERENCE, Adapters
from dora.trainer.copies import FrozenPolicy, OfAdapter, count_copies, frozen_adapters, load_reference
from dora.trainer.forecast import trial_row
from dora.trainer.forward_check import check_training
from dora.trainer.layouts import layout_of
from dora.trainer.logprobs import logprobs
from dora.trainer.meshes import make_mesh
from dora.trainer.model import Policy, build_on_meta
from dora.trainer.probe import Probe
from dora.trainer.proof import prove
from dora.trainer.score import score
from dora.transport.messages import LoraSettings
from dora.weights.checkpoints import checkpoints_in
from dora.weights.merging import Merge, has_weights, made_of
from dora.weights.store import ADAPTER, Manifest, StoreError, VersionStore
from tests.families import FAMILIES as EVERY_FAMILY
from tests.families import make_config, make_model
from tests.trainer.peft_trainer import (
    ATTENTION,
    DENSE,
    Found,
    PeftTrainer,
    answers_of,
    begun,
    difference,
    lora,
    merged,
    stored_in,
    train,
)
from tests.trainer.publishing import make_publisher, write_version
from tests.trainer.test_copies import ROW
from tests.trainer.test_loading import fp8
from tests.trainer.test_version_probe import compute

TOLERANCE: Final = 1e-10
#: Dense; dense with a tied head and windows; experts, beside adapted attention; weights that are stored transposed.
FAMILIES: Final[dict[str, tuple[dict[str, Any], Any]]] = {
    "qwen3": ({}, lora(DENSE)),
    "gemma3_text": ({"tie_word_embeddings": True}, lora(DENSE, rslora=True)),
    "qwen2_moe": ({}, lora(ATTENTION)),
    "gpt2": ({}, lora(("c_attn", "c_fc"))),
}
#: Family, and whether training begins with an adapter that peft wrote.
CASES: Final = (*((family, False) for family in FAMILIES), ("gemma3_text", True), ("gpt2", True))


class Ranks(NamedTuple):
    """How many there are, and how they share weights."""

    count: int
    shard_ranks: int
    gathered: bool = True


ALONE: Final = Ranks(1, 1)
SEVERAL: Final = (Ranks(2, 2), Ranks(2, 1), Ranks(2, 2, gathered=False), Ranks(4, 2))
#: Each continues from the checkpoint of the one before.
MOVED: Final = (Ranks(2, 2), Ranks(1, 1), Ranks(4, 2, gathered=False))


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("adapted")
    for family, (changes, _) in FAMILIES.items():
        make_model(family, **changes).save_pretrained(root / family)
    for family, begins in CASES:
        settings_of(root, family, begins)
    return root


def settings_of(models: Path, family: str, begins: bool) -> LoraSettings:
    settings = FAMILIES[family][1]
    return begun(models / family, settings) if begins else settings


@pytest.fixture(scope="module")
def alone() -> Iterator[None]:
    before = policy_module.MASTER_DTYPE, policy_module.GATHERED_BYTES, policy_module.load_config
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()
    policy_module.MASTER_DTYPE, policy_module.GATHERED_BYTES, policy_module.load_config = before


def off(found: Found, folder: Path, settings: Any) -> float:
    """The largest difference from a plain loop: of the adapter after each step, of what is published, and of the
    reference at the end, which is the model of the beginning."""
    if settings.begins_with:
        assert all(
            torch.equal(found.first[name].float(), tensor) for name, tensor in stored_in(settings.begins_with).items()
        )
    plain = PeftTrainer(folder, settings, found.first)
    differences = [float((found.reference - plain.row()).abs().max())]
    for step in range(len(found.adapters)):
        plain.step(answers_of(step), step=step, updates=2)
        differences.append(difference(found.adapters[step], plain.adapter()))
    assert all(tensor.abs().max() > 1e-3 for tensor in plain.adapter().values())  # B is no longer zero
    expected = plain.merged()
    known = {name: tensor for name, tensor in expected.items() if name in found.merged}
    adapted = {name.partition(".lora_")[0] for name in found.first}
    assert {f"{name}.weight" for name in adapted} <= known.keys()
    return max(*differences, difference({name: found.merged[name] for name in known}, known))


@pytest.mark.parametrize(("family", "begins"), CASES)
def test_one_rank_trains_and_publishes_what_a_plain_loop_over_peft_does(
    alone: None, models: Path, family: str, begins: bool
) -> None:
    settings = settings_of(models, family, begins)
    found = train(models / family, settings, steps=range(1 if begins else 2))
    assert off(found, models / family, settings) < TOLERANCE


# ---- several ranks --------------------------------------------------------------------------------------------------


def _rank(rank: int, root: Path, models: Path) -> None:
    torch.set_num_threads(1)
    for number, ranks in enumerate(SEVERAL):
        if rank < ranks.count:
            begin(root / f"several-{number}", rank, ranks)
            for family, begins in CASES:
                found = train(
                    models / family, settings_of(models, family, begins), shard_ranks=ranks.shard_ranks,
                    gathered=ranks.gathered,
                )  # fmt: skip
                keep(found, root / f"{family}-{begins}-{number}.pt")
            end()
    begin(root / "differing", rank, Ranks(4, 2))
    other = shutil.copytree(models / "gpt2-adapter", root / f"adapter-{rank}")
    if rank == 3:
        (other / "adapter_config.json").write_text((other / "adapter_config.json").read_text() + " ")
    with pytest.raises(ConfigError, match=r"^model\.adapter: its files differ between hosts; copy those of one"):
        load(models / "gpt2", targets=("c_attn", "c_fc"), begins=str(other))
    end()
    for step, ranks in enumerate(MOVED):
        if rank < ranks.count:
            begin(root / f"moved-{step}", rank, ranks)
            found = train(
                models / "gpt2", settings_of(models, "gpt2", True), shard_ranks=ranks.shard_ranks,
                gathered=ranks.gathered, steps=[step], checkpoints=root / "checkpoints",
            )  # fmt: skip
            keep(found, root / "moved.pt")
            end()
        everyone = dist.FileStore(str(root / f"everyone-{step}"), 4)
        everyone.set(f"{rank}", "done")
        everyone.wait([str(other) for other in range(4)])


def begin(store: Path, rank: int, ranks: Ranks) -> None:
    dist.init_process_group("gloo", store=dist.FileStore(str(store), ranks.count), rank=rank, world_size=ranks.count)


def keep(found: Found, path: Path) -> None:
    if dist.get_rank() == 0:
        torch.save((found.first, found.adapters, found.merged, found.reference), path)


def end() -> None:
    dist.barrier()
    dist.destroy_process_group()


@pytest.fixture(scope="module")
def played(models: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("ranks")
    (root / "checkpoints").mkdir()
    multiprocessing.set_forkserver_preload([__name__])
    mp.start_processes(_rank, (root, models), nprocs=4, start_method="forkserver")
    return root


@pytest.mark.deep
@pytest.mark.timeout(600)
@pytest.mark.parametrize(("family", "begins"), CASES)
def test_several_ranks_train_and_publish_what_a_plain_loop_over_peft_does(
    played: Path, models: Path, family: str, begins: bool
) -> None:
    for number, ranks in enumerate(SEVERAL):
        found = Found(*torch.load(played / f"{family}-{begins}-{number}.pt", weights_only=True))
        assert off(found, models / family, settings_of(models, family, begins)) < TOLERANCE, ranks


@pytest.mark.deep
@pytest.mark.timeout(600)
def test_steps_from_checkpoints_of_other_ranks_are_the_same(played: Path, models: Path, alone: None) -> None:
    expected = train(models / "gpt2", settings_of(models, "gpt2", True))
    found = Found(*torch.load(played / "moved.pt", weights_only=True))
    assert difference(found.adapters[-1], expected.adapters[-1]) < TOLERANCE
    assert difference(found.merged, expected.merged) < TOLERANCE
    assert (found.reference - expected.reference).abs().max() < TOLERANCE


# ---- one rank -------------------------------------------------------------------------------------------------------


def load(
    folder: Path, *, dtype: torch.dtype = torch.float32, gathered: bool = True, begins: str = "", **changes: Any
) -> Policy:
    policy_module.MASTER_DTYPE = torch.float32
    policy_module.GATHERED_BYTES = 2**31 if gathered else 0
    settings = msgspec.structs.replace(lora(**changes), begins_with=begins)
    frozen = (PROXIMAL, REFERENCE) if begins else (PROXIMAL,)
    return Policy(folder, mesh=make_mesh("cpu"), dtype=dtype, lora=settings, frozen_adapters=frozen)


def move(policy: Policy, by: float) -> None:
    """Change the adapter, as an update does."""
    policy.reshard()
    for number, shard in enumerate(policy.trained().values()):
        shard.add_(torch.linspace(-by, by, shard.numel()).view_as(shard) * (1 + number % 3))


def test_first_values_depend_on_the_seed_and_add_nothing(alone: None, models: Path) -> None:
    one, other = load(models / "qwen3"), load(models / "qwen3")
    for name, shard in one.trained().items():
        assert torch.equal(shard, other.trained()[name])
        assert bool(shard.any()) is ("lora_A" in name)
    plain = Policy(models / "qwen3", mesh=make_mesh("cpu"), dtype=torch.float32)
    assert all(torch.equal(tensor, merged(plain)[name]) for name, tensor in merged(one).items())


@pytest.mark.parametrize("gathered", [True, False], ids=["gathered", "by layer"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_the_reference_is_the_model_and_the_proximal_policy_the_one_before(
    alone: None, models: Path, dtype: torch.dtype, gathered: bool
) -> None:
    """To the bit, and without a copy of the weights."""
    policy = load(models / "qwen3", dtype=dtype, gathered=gathered)
    assert policy.adapters is not None
    reference, proximal = (OfAdapter(policy, policy.adapters, adapter=adapter) for adapter in (None, PROXIMAL))
    row, settings = ROW, {"temperature": 0.7, "fp32_head": False}
    version_0 = FrozenPolicy(models / "qwen3", policy=policy).logprobs(row, **settings)
    move(policy, 0.01)
    proximal.refresh(policy, version=1)  # type: ignore[arg-type]
    before = OfAdapter(policy, policy.adapters, adapter="default").logprobs(row, **settings)
    assert torch.equal(proximal.logprobs(row, **settings), before)
    move(policy, 0.02)
    policy.reshard()
    after = OfAdapter(policy, policy.adapters, adapter="default").logprobs(row, **settings)
    assert not torch.equal(after, before)
    assert torch.equal(proximal.logprobs(row, **settings), before)
    assert torch.equal(reference.logprobs(row, **settings), version_0)
    assert not torch.equal(before, version_0)


@pytest.mark.parametrize("gathered", [True, False], ids=["gathered", "by layer"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_the_reference_of_what_begins_with_an_adapter_is_that_adapter(
    alone: None, models: Path, dtype: torch.dtype, gathered: bool
) -> None:
    """To the bit, and without a copy of the weights."""
    begins = settings_of(models, "gemma3_text", True).begins_with
    policy = load(models / "gemma3_text", dtype=dtype, gathered=gathered, begins=begins, rslora=True)
    assert policy.adapters is not None
    trained, reference, none = (OfAdapter(policy, policy.adapters, adapter=one) for one in ("default", REFERENCE, None))
    settings = {"temperature": 0.7, "fp32_head": False}
    version_0 = trained.logprobs(ROW, **settings)
    move(policy, 0.01)
    policy.reshard()
    assert torch.equal(reference.logprobs(ROW, **settings), version_0)
    assert not torch.equal(trained.logprobs(ROW, **settings), version_0)
    assert not torch.equal(none.logprobs(ROW, **settings), version_0)


def test_a_reference_with_a_folder_of_its_own_is_a_model_without_adapter(alone: None, models: Path) -> None:
    policy = load(models / "qwen3")
    reference = load_reference(models / "qwen3", policy=policy)
    assert reference.adapters is None
    with pytest.raises(ConfigError, match="has another architecture than the policy"):
        load_reference(models / "qwen2_moe", policy=policy)


@pytest.mark.parametrize(
    ("kl", "reference", "copies"), [(0.0, "", 0), (0.1, "", 0), (0.1, "elsewhere", 1)], ids=["none", "own", "given"]
)
@pytest.mark.parametrize("begins", ["", "adapter"])
def test_only_a_reference_of_another_folder_is_a_copy(kl: float, reference: str, copies: int, begins: str) -> None:
    objective = f'{{"kl_coefficient": {kl}, "kl_reference": "{reference}"}}' if kl else "{}"
    adapter = msgspec.structs.replace(lora(), begins_with=begins)
    settings = msgspec.structs.replace(SETTINGS, lora=adapter, updates=2, objective=objective)
    assert count_copies(settings) == copies
    has_reference = kl and begins and not reference
    assert frozen_adapters(settings) == ((PROXIMAL, REFERENCE) if has_reference else (PROXIMAL,))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_only_the_adapter_is_trained_in_float32(alone: None, models: Path, dtype: str) -> None:
    policy = load(models / "qwen2_moe", dtype=getattr(torch, dtype), targets=ATTENTION)
    trained = policy.trained()
    assert all(".lora_" in name and shard.dtype is torch.float32 for name, shard in trained.items())
    assert len(trained) == 2 * len(ATTENTION) * policy.model.config.num_hidden_layers
    others = [tensor for name, tensor in policy.shards().items() if name not in trained]
    assert {tensor.dtype for tensor in others} == {getattr(torch, dtype)}


def test_a_checkpoint_has_the_adapter_and_its_moments_alone(alone: None, models: Path, tmp_path: Path) -> None:
    found = train(models / "qwen3", lora(), checkpoints=tmp_path, steps=[0])
    [checkpoint] = checkpoints_in(tmp_path)
    stored = load_file(checkpoint / "rank-0.safetensors")
    names = found.first.keys()
    kinds = ("exp_avg", "exp_avg_sq", "step")
    assert stored.keys() == names | {f"{kind}/{name}" for kind in kinds for name in names}
    assert all(torch.equal(stored[name], tensor) for name, tensor in found.adapters[-1].items())


def test_the_check_of_the_model_uses_an_adapter_that_has_an_effect_and_leaves_the_first_one(
    alone: None, models: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for family, begins in (("gpt2", True), ("qwen3", False)):
        targets = FAMILIES[family][1].targets
        policy = load(models / family, begins=settings_of(models, family, begins).begins_with, targets=targets)
        before = {name: shard.clone() for name, shard in policy.shards().items() if PROXIMAL not in name}
        check_training(policy, dtype="float32")
        assert all(torch.equal(policy.shards()[name], shard) for name, shard in before.items())
    bypassed = next(module for module in policy.model.modules() if isinstance(module, LoraLayer))
    monkeypatch.setattr(bypassed, "forward", bypassed.base_layer.forward)
    with pytest.raises(ConfigError, match=r"targets: an adapter of model\.layers\.0\.self_attn\.q_proj has no effect"):
        check_training(policy, dtype="float32")


#: Modules whose weight a family uses without calling them, so that the check refuses to adapt them.
IDLE: Final = ("dt_proj", "per_layer_input_gate", "per_layer_projection", "per_layer_model_projection")


@pytest.mark.deep
@pytest.mark.filterwarnings("ignore:FSDP2-wrapped module")  # OPT's layers return views
@pytest.mark.parametrize("family", sorted(EVERY_FAMILY.keys() - {"falcon"}))
def test_every_family_computes_with_an_adapter_what_its_published_weights_do(
    alone: None, family: str, tmp_path: Path
) -> None:
    """With adapters of all linear modules that may have one."""
    base, version = tmp_path / "base", tmp_path / "version"
    model = make_model(family)
    model.save_pretrained(base)
    version.mkdir()
    leaves = {name.rpartition(".")[2] for name, one in model.named_modules() if isinstance(one, nn.Linear | Conv1D)}
    policy = load(base, targets=[leaf for leaf in sorted(leaves - {*IDLE}) if may_be_adapted(family, leaf)])
    check_training(policy, dtype="float32")
    row = trial_row(60, longest=25, layout=layout_of(model))

    def compute(one: Policy) -> Tensor:
        with torch.no_grad():
            return logprobs(one.model, row, temperature=1.0)[0]

    version_0 = compute(Policy(base, mesh=make_mesh("cpu"), dtype=torch.float32))
    move(policy, 0.01)
    with policy.without_adapter():
        assert torch.equal(compute(policy), version_0)
    adapted = compute(policy)
    assert (adapted - version_0).abs().max() > 1e-4
    policy.reshard()
    write_version(policy, base, version, dtype="float32")
    published = compute(Policy(version, mesh=make_mesh("cpu"), dtype=torch.float32))
    assert (adapted - published).abs().max() < 1e-5


def may_be_adapted(family: str, target: str) -> bool:
    try:
        Adapters(build_on_meta(make_config(family), torch.float32), lora((target,)))
    except ConfigError:
        return False
    return True


@pytest.mark.parametrize(
    ("family", "target", "says"),
    [
        ("qwen3", "query", "Qwen3ForCausalLM has no linear module query; give some of down_proj, gate_proj"),
        ("qwen3", "input_layernorm", "has no linear module input_layernorm"),
        ("qwen3", "embed_tokens", "embed_tokens is an embedding or the head of Qwen3ForCausalLM"),
        ("qwen3", "lm_head", "lm_head is an embedding or the head"),
        ("qwen2_moe", "up_proj", "up_proj is beside or inside the experts of Qwen2MoeForCausalLM"),
        ("qwen2_moe", "shared_expert_gate", "is beside or inside the experts"),
        ("qwen2_moe", "gate", "gate is beside or inside the experts"),
        ("zamba2", "q_proj", "layers of Zamba2ForCausalLM share the weight of q_proj"),
        ("mamba", "out_proj", "peft refuses MambaForCausalLM"),
    ],
)
def test_a_target_that_cannot_be_adapted_is_refused(family: str, target: str, says: str) -> None:
    model = build_on_meta(make_config(family), torch.float32)
    with pytest.raises(ConfigError, match=f"trainer.lora.targets: .*{says}"):
        Adapters(model, lora((target,)))


@pytest.mark.parametrize("family", FAMILIES)
def test_a_version_has_the_adapter_as_peft_reads_it_beside_the_weights_that_include_it(
    alone: None, models: Path, family: str, tmp_path: Path
) -> None:
    """Also with rsLoRA, whose scale is folded into lora_alpha; with the proof, what peft computes for its prompt."""
    policy = load(models / family, targets=FAMILIES[family][1].targets, rslora=True)
    store = VersionStore(memory_root=tmp_path, durable_root=tmp_path)
    publisher = make_publisher(policy, models / family, store)
    move(policy, 0.01)
    proof = prove(policy, layout_of(policy.model), SETTINGS)
    publisher.publish(VersionId(0), chain="", proof=proof)
    publisher.close()
    folder = store.folder(VersionId(0))
    assert read_proof(folder / ADAPTER) == proof
    files = {f"{ADAPTER}/{name}" for name in ("adapter_config.json", "adapter_model.safetensors", "proof.json")}
    assert files <= store.manifest(VersionId(0)).files.keys()
    tokens = torch.arange(20)[None]
    with torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # about weights that are stored transposed
        base, whole = (AutoModelForCausalLM.from_pretrained(path).eval() for path in (models / family, folder))
        before = base(tokens).logits
        adapted = PeftModel.from_pretrained(base, folder / ADAPTER).eval()
        torch.testing.assert_close(adapted(tokens).logits, whole(tokens).logits, rtol=1e-4, atol=1e-5)
        prompt = torch.tensor([proof.token_ids])
        expected = adapted(prompt).logits[0, :-1].log_softmax(-1).gather(1, prompt[0, 1:, None])[:, 0]
        torch.testing.assert_close(torch.tensor(proof.logprobs), expected, rtol=1e-4, atol=1e-5)
    assert (before - whole(tokens).logits).abs().max() > 0.01
    assert {name for name in policy.trained() if "lora_A" in name} == {
        name.removeprefix("base_model.model.") for name, _ in adapted.named_parameters() if "lora_A" in name
    }
    begun = load(models / family, targets=FAMILIES[family][1].targets, rslora=True, begins=str(folder / ADAPTER))
    assert all(torch.equal(shard, policy.trained()[name]) for name, shard in begun.trained().items())
    assert all(torch.equal(tensor, merged(policy)[name]) for name, tensor in merged(begun).items())


Q_PROJ: Final = "base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight"


def change(tensors: dict[str, Tensor], name: str, tensor: Tensor | None) -> None:
    if tensor is None:
        del tensors[name]
    else:
        tensors[name] = tensor


@pytest.mark.parametrize(
    ("name", "altered", "says"),
    [
        (Q_PROJ, None, rf"adapter lacks {Q_PROJ}$"),
        (Q_PROJ.replace(".0.", ".7."), torch.zeros(4, 32), r"has 'base_model.*layers\.7\..*', for no target's weight"),
        (
            Q_PROJ,
            torch.zeros(4, 31),
            rf"{Q_PROJ} in .* has type F32 and shape \[4, 31\], expected F64 or F32 .*\[4, 32\]",
        ),
        (Q_PROJ, torch.zeros(4, 32, dtype=torch.int64), rf"{Q_PROJ} in .* has type I64 and shape \[4, 32\]"),
        (Q_PROJ, torch.full((4, 32), torch.nan), rf"{Q_PROJ} in .* has values that are infinite or not numbers"),
        (Q_PROJ, torch.full((4, 32), 1e300, dtype=torch.float64), rf"{Q_PROJ} in .* has values that are infinite"),
    ],
    ids=["missing", "extra", "shape", "type", "nan", "too large"],
)
def test_values_that_do_not_fit_are_refused_by_name(
    alone: None, models: Path, tmp_path: Path, name: str, altered: Tensor | None, says: str
) -> None:
    folder = tmp_path / "adapter"
    shutil.copytree(begun(models / "qwen3", lora()).begins_with, folder)
    tensors = load_file(folder / "adapter_model.safetensors")
    change(tensors, name, altered)
    save_file(tensors, folder / "adapter_model.safetensors")
    with pytest.raises(ConfigError, match=rf"^model\.adapter: .*{says}"):
        load(models / "qwen3", begins=str(folder))


def test_an_adapter_under_which_the_model_computes_no_numbers_is_refused(
    alone: None, models: Path, tmp_path: Path
) -> None:
    folder = shutil.copytree(begun(models / "qwen3", lora()).begins_with, tmp_path / "adapter")
    tensors = load_file(folder / "adapter_model.safetensors")
    save_file({name: 1e30 * tensor for name, tensor in tensors.items()}, folder / "adapter_model.safetensors")
    policy = load(models / "qwen3", begins=str(folder))
    with pytest.raises(ConfigError, match=r"^model\.adapter: Qwen3ForCausalLM cannot be trained: .* differ by inf"):
        check_training(policy, dtype="float32")


def test_versions_in_16_bits_are_rounded_once(alone: None, models: Path) -> None:
    """The sum of a weight and its adapter, which is published in these bits too, is in float64."""
    policy = load(models / "qwen3", dtype=torch.bfloat16)
    move(policy, 0.01)
    name = "model.layers.0.self_attn.q_proj"
    base, a, b = (
        policy.shards()[f"{name}.{part}.weight"] for part in ("base_layer", "lora_A.default", "lora_B.default")
    )
    expected = (base.double() + 3.0 * (b.bfloat16().double() @ a.bfloat16().double())).bfloat16()
    assert torch.equal(merged(policy)[f"{name}.weight"], expected)


def publish_one(
    policy: Policy, model: Path, root: Path, *, dtype: str, serves_adapters: bool = False
) -> tuple[Path, Manifest]:
    """Publish a version whose adapter is not zero."""
    store = VersionStore(memory_root=root, durable_root=root)
    publisher = make_publisher(policy, model, store, dtype=dtype, serves_adapters=serves_adapters)
    move(policy, 0.01)
    publisher.publish(VersionId(0), chain="")
    publisher.close()
    return store.folder(VersionId(0)), store.manifest(VersionId(0))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("family", FAMILIES)
def test_a_node_makes_the_same_bytes_of_the_model_and_the_adapter(
    alone: None, models: Path, family: str, dtype: str, tmp_path: Path
) -> None:
    """Of dense models and of stacked experts, with tied and with transposed weights."""
    held = torch.float32 if family == "gemma3_text" else getattr(torch, dtype)
    policy = load(models / family, dtype=held, targets=FAMILIES[family][1].targets, rslora=True)
    folder, manifest = publish_one(policy, models / family, tmp_path, dtype=dtype)
    expected = (folder / "model.safetensors").read_bytes()
    (folder / "model.safetensors").unlink()
    merge = Merge(models / family, folder, manifest)
    assert merge.names == ["model.safetensors"]
    merge.write("model.safetensors", stop=threading.Event())
    assert (folder / "model.safetensors").read_bytes() == expected
    assert expected != (models / family / "model.safetensors").read_bytes()


@pytest.mark.parametrize("kind", ["FP8", "joined rows", "high rank"])
def test_weights_that_are_computed_in_other_ways_are_not_made_on_nodes(alone: None, kind: str, tmp_path: Path) -> None:
    model = tmp_path / "model"
    make_model("olmo_hybrid" if kind == "joined rows" else "qwen3").save_pretrained(model)
    if kind == "FP8":
        fp8(model)
    policy = load(model, targets=["down_proj"], rank=129 if kind == "high rank" else 4)
    for serves_adapters in (False, True):  # the weights are there in any case
        root = tmp_path / str(serves_adapters)
        _, manifest = publish_one(policy, model, root, dtype="float32", serves_adapters=serves_adapters)
        assert {name for name in manifest.files if name.startswith(ADAPTER)} == {
            f"{ADAPTER}/adapter_config.json",
            f"{ADAPTER}/adapter_model.safetensors",
        }
        assert has_weights(manifest)


def publish_joined(rank: int, root: Path, num_ranks: int) -> None:
    torch.set_num_threads(1)
    begin(root / f"joined-{num_ranks}", rank, Ranks(num_ranks, num_ranks))
    policy = load(root / "model", targets=["q_proj", "up_proj"])
    assert policy.adapters is not None
    policy.adapters.draw(rank=rank, is_trial=True)
    for writers in {1, num_ranks}:
        write_version(policy, root / "model", root / f"{num_ranks}-{writers}", dtype="float32", writers=writers)
    end()


@pytest.mark.deep
def test_adapted_weights_that_are_parts_of_a_tensor_are_published_by_any_number_of_ranks(tmp_path: Path) -> None:
    make_model("hrm_text").save_pretrained(tmp_path / "model")
    multiprocessing.set_forkserver_preload([__name__])
    for num_ranks in (1, 2):
        mp.start_processes(publish_joined, (tmp_path, num_ranks), nprocs=num_ranks, start_method="forkserver")
    before, expected, *others = (
        load_file(tmp_path / name / "model.safetensors") for name in ("model", "1-1", "2-1", "2-2")
    )
    changed = {name for name, tensor in expected.items() if not torch.equal(tensor, before[name])}
    assert {name.partition("layers.0.")[2] for name in changed if "L_module.layers.0." in name} == {
        "attn.gqkv_proj.weight",
        "mlp.gate_up_proj.weight",
    }
    for other in others:
        assert all(torch.equal(tensor, other[name]) for name, tensor in expected.items())


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("family", FAMILIES)
def test_weights_are_made_of_a_version_that_is_its_adapter_alone(
    alone: None, models: Path, family: str, dtype: str, tmp_path: Path
) -> None:
    """To the byte those that are published otherwise, unless the model is another one; and scored as they are."""
    model, held = models / family, torch.float32 if family == "gemma3_text" else getattr(torch, dtype)
    found: dict[bool, tuple[Path, Manifest]] = {}
    for serves_adapters in (False, True):
        policy = load(model, dtype=held, targets=FAMILIES[family][1].targets, rslora=True)
        root = tmp_path / str(serves_adapters)
        found[serves_adapters] = publish_one(policy, model, root, dtype=dtype, serves_adapters=serves_adapters)
    (whole, _), (folder, manifest) = found[False], found[True]
    assert not has_weights(manifest)
    (into := tmp_path / "into").mkdir()
    merge = Merge(model, folder, manifest, into=into)
    for name in merge.names:
        merge.write(name, stop=threading.Event())
    assert (into / "model.safetensors").read_bytes() == (whole / "model.safetensors").read_bytes()
    if dtype == "float32":
        tokens, lengths = [[3, 1, 4, 1, 5, 9, 2, 6]], [2]
        expected = score(whole, tokens, prompt_lengths=lengths, temperature=1.0)
        scored = score(model, tokens, prompt_lengths=lengths, temperature=1.0, adapter=folder / ADAPTER)
        np.testing.assert_allclose(scored[0], expected[0], atol=1e-5)
        assert np.abs(scored[0] - score(model, tokens, prompt_lengths=lengths, temperature=1.0)[0]).max() > 1e-3
    other = shutil.copytree(model, tmp_path / "other")
    tensors = load_file(other / "model.safetensors")
    next(iter(tensors.values())).view(-1)[0] += 1
    save_file(tensors, other / "model.safetensors", metadata={"format": "pt"})
    made_of(model, folder)
    for use in (lambda: Merge(other, folder, manifest), lambda: made_of(other, folder)):
        with pytest.raises(StoreError, match="it is not the model that was trained"):
            use()


def test_the_probe_uses_the_adapter_of_a_version(alone: None, models: Path, tmp_path: Path) -> None:
    """Where servers hold adapters; the policy is the same afterwards, also if the version cannot be read."""
    policy = load(models / "qwen3")
    folder, _ = publish_one(policy, models / "qwen3", tmp_path, dtype="float32", serves_adapters=True)
    store = VersionStore(memory_root=tmp_path, durable_root=tmp_path)
    batch = make_batch(make_groups(3, version=0, seed=1), step=1, index=0, last=True)
    settings = msgspec.structs.replace(SETTINGS, probe_tokens=10_000, serves_adapters=True)

    def close(sampled_P: Tensor) -> dict[str, float]:
        probe = Probe(store, policy=policy, layout=layout_of(policy.model), settings=settings)
        probe.add(batch, range(len(batch.lengths)), compute(policy, batch), sampled_P)
        return probe.close()

    sampled_P = compute(policy, batch)
    move(policy, 0.02)
    before = {name: shard.clone() for name, shard in policy.shards().items() if PROXIMAL not in name}
    found = close(sampled_P)
    assert found["engine_mismatch_k3"] < 1e-9
    assert found["version_drift_k3"] > 1e-6
    (folder / ADAPTER / "adapter_model.safetensors").unlink()
    assert close(sampled_P)["probe_skipped"] == 1.0
    assert all(torch.equal(policy.shards()[name], shard) for name, shard in before.items())
