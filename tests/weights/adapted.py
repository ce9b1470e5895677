"""Model folders, and versions with an adapter as the trainer's own functions write them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

import msgspec
import torch
from safetensors.torch import load_file, save_file

from dora.trainer.adapters import Factors, write_adapter
from dora.trainer.buckets import TYPES
from dora.trainer.parts import Piece
from dora.trainer.publish import make_files, write_piece
from dora.transport.messages import LoraSettings
from dora.weights.file_plan import INDEX, MAX_FILE_BYTES, TensorSpec, plan_files
from dora.weights.merging import RECIPE, MergeRecipe, Origin
from dora.weights.store import ADAPTER, Manifest, VersionStore

RANK: Final = 4
SHAPES: Final = {
    "embed.weight": (4_000, 64),
    "norm.weight": (64,),
    "q_proj.weight": (200, 64),
    "c_attn.weight": (64, 2_100),  # stored transposed; more than a block
    "scale": (),
}
KEPT: Final = ("norm.weight",)  # in float32
ADAPTED: Final = {"q_proj": False, "c_attn": True}  # module -> whether it is stored transposed
DTYPES: Final = {name: dtype for dtype, name in TYPES.items()}
SETTINGS: Final = LoraSettings(rank=RANK, alpha=12.0, rslora=True, targets=tuple(ADAPTED), seed=0)


def make_model(folder: Path, dtype: str, *, seed: int = 0, split: bool = False) -> Path:
    """`split`: into two files, with an index."""
    folder.mkdir()
    generator = torch.Generator().manual_seed(seed)
    tensors = {
        name: torch.randn(shape, generator=generator).to(torch.float32 if name in KEPT else DTYPES[dtype])
        for name, shape in SHAPES.items()
    }
    (folder / "config.json").write_text("{}")
    if not split:
        save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
        return folder
    files = {name: f"part-{number % 2}.safetensors" for number, name in enumerate(tensors)}
    for file in {*files.values()}:
        save_file({name: tensors[name] for name in tensors if files[name] == file}, folder / file)
    (folder / INDEX).write_bytes(msgspec.json.encode({"weight_map": files}))
    return folder


def factors_of(version: int) -> dict[str, Factors]:
    generator = torch.Generator().manual_seed(100 + version)
    found = {}
    for module, is_transposed in ADAPTED.items():
        shape = SHAPES[f"{module}.weight"]
        outputs, inputs = shape[::-1] if is_transposed else shape
        matrices = torch.randn(RANK, inputs, generator=generator), torch.randn(outputs, RANK, generator=generator)
        found[f"{module}.weight"] = Factors(*matrices, SETTINGS.alpha / RANK**0.5, is_transposed)
    return found


def publish_adapted(
    store: VersionStore,
    model: Path,
    *,
    version: int = 3,
    held: str = "BF16",
    dtype: str = "BF16",
    max_bytes: int = MAX_FILE_BYTES,
    damage: Callable[[Path], object] = lambda folder: None,
) -> Manifest:
    """`damage` changes the folder before it is sealed."""
    read: dict[str, Any] = {
        name: tensor for file in model.glob("*.safetensors") for name, tensor in load_file(file).items()
    }
    factors = factors_of(version)
    types = {name: ("F32", "F32") if name in KEPT else (held, dtype) for name in SHAPES}
    plan = plan_files([TensorSpec(name, types[name][1], shape) for name, shape in SHAPES.items()], max_bytes=max_bytes)
    staged = store.stage(version)
    make_files(staged, plan)
    for name, (held_type, published) in types.items():
        tensor = read[name].to(DTYPES[held_type])
        adds = factors[name].added_to(tensor, start=0, dtype=DTYPES[published]) if name in factors else tensor
        write_piece(staged, plan, Piece(name, 0, adds.to(DTYPES[published])))
    write_adapter(staged / ADAPTER, factors, SETTINGS)
    recipe = MergeRecipe(
        scale=factors["q_proj.weight"].scale,
        tensors=tuple(
            Origin(
                name=name,
                dtype=types[name][1],
                shape=shape,
                held=types[name][0],
                module=name.removesuffix(".weight") if name in factors else "",
                is_transposed=name in factors and factors[name].is_transposed,
            )
            for name, shape in SHAPES.items()
        ),
    )
    (staged / RECIPE).write_bytes(recipe.encode())
    (staged / "config.json").write_text("{}")
    damage(staged)
    return store.seal(version, staged, chain="c")
