"""Adapters that others may have made: their settings and matrices, and recipes of versions."""

from __future__ import annotations

import json
import shutil
import tempfile
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from typing import Any, Final

import pytest
import torch
from safetensors.torch import save

from dora.adapter_files import CONFIG, WEIGHTS, require_adapter, stored_name
from dora.trainer.stored_adapter import StoredAdapter
from dora.transport.messages import LoraSettings
from dora.weights import merging
from dora.weights.merging import MATRICES, RECIPE, Merge
from dora.weights.store import Manifest
from tests.fuzz.parsers import LONG, Parser, drive, require_robust, require_samples
from tests.weights.adapted import make_model, publish_adapted
from tests.weights.nodes import store_at

SETTINGS: Final[dict[str, Any]] = {"rank": 2, "alpha": 4.0, "rslora": False, "targets": ("q_proj", "v_proj")}
SHAPES: Final = {stored_name("q_proj.weight", "A"): (2, 3), stored_name("q_proj.weight", "B"): (4, 2)}
CONFIGURATION: Final[dict[str, Any]] = {
    "peft_type": "LORA", "r": 2, "lora_alpha": 4, "target_modules": ["v_proj", "q_proj"], "bias": "none",
    "use_rslora": False, "init_lora_weights": True, "rank_pattern": {}, "modules_to_save": None,
}  # fmt: skip


def folder_of(scratch: Path, files: dict[str, bytes]) -> Path:
    (folder := scratch / "adapter").mkdir(exist_ok=True)
    for name, data in files.items():
        (folder / name).write_bytes(data)
    return folder


def parse_configuration(data: bytes, scratch: Path) -> None:
    folder = folder_of(scratch, {CONFIG: data, WEIGHTS: matrices()})
    require_adapter(folder, **SETTINGS)


def parse_matrices(data: bytes, scratch: Path) -> None:
    folder = folder_of(scratch, {CONFIG: json.dumps(CONFIGURATION).encode(), WEIGHTS: data})
    shapes = {name: torch.Size(shape) for name, shape in SHAPES.items()}
    stored = StoredAdapter(folder, LoraSettings(**SETTINGS, seed=0), shapes)
    for name, shape in SHAPES.items():
        assert stored.rows(name, range(shape[0])).isfinite().all()


def matrices() -> bytes:
    data: bytes = save({name: torch.ones(shape) for name, shape in SHAPES.items()})
    return data


@cache
def version() -> tuple[Path, Path, Manifest]:
    """A model, and the folder and the manifest of a version with an adapter."""
    root = Path(tempfile.mkdtemp())
    model, store = make_model(root / "model", "BF16"), store_at(root / "store")
    manifest = publish_adapted(store, model)
    return model, store.folder(manifest.version), manifest


def parse_of_version(name: str) -> Callable[[bytes, Path], None]:
    def parse(data: bytes, scratch: Path) -> None:
        model, _, manifest = version()
        (scratch / "adapter").mkdir(exist_ok=True)
        for other in (RECIPE, MATRICES):
            (scratch / other).write_bytes(data if other == name else sample_of(other))
        merge = Merge(model, scratch, manifest)
        assert merge.names == ["model.safetensors"]

    return parse


def sample_of(name: str) -> bytes:
    return (version()[1] / name).read_bytes()


@pytest.fixture(scope="module", autouse=True)
def _one_version() -> Iterator[None]:
    """A read allocates what the file may have at most; then the version is deleted."""
    with pytest.MonkeyPatch.context() as changed:
        changed.setattr(merging, "_MAX_RECIPE_BYTES", 1 << 20)
        yield
    if version.cache_info().currsize:
        shutil.rmtree(version()[0].parent)


PARSERS: Final = [
    Parser("adapter configuration", lambda: [json.dumps(CONFIGURATION).encode()], parse_configuration, many_lines=True),
    Parser("adapter matrices", lambda: [matrices()], parse_matrices),
    Parser("recipe of a version", lambda: [sample_of(RECIPE)], parse_of_version(RECIPE)),
    Parser("matrices of a version", lambda: [sample_of(MATRICES)], parse_of_version(MATRICES)),
]


@pytest.mark.parametrize("parser", PARSERS, ids=str)
def test_any_bytes_of_an_adapter_are_read_or_refused_in_one_line(parser: Parser, tmp_path: Path) -> None:
    require_samples(parser, tmp_path)
    require_robust(parser, tmp_path)


@pytest.mark.deep
@pytest.mark.timeout(0 if LONG else 120)
@pytest.mark.parametrize("parser", PARSERS, ids=str)
def test_many_more_adapters_are_read_or_refused(parser: Parser, tmp_path: Path) -> None:
    drive(parser, tmp_path)
