"""A server whose model has other shapes is refused if this host can see its folder."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from dora.engine.model_check import require_same_shapes
from dora.errors import ConfigError

SHAPES = {"model_type": "qwen3", "vocab_size": 66, "hidden_size": 96, "num_hidden_layers": 4}


def model(folder: Path, **changes: object) -> Path:
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps({**SHAPES, **changes}))
    return folder


def test_the_same_shapes_are_fine_whatever_else_differs(tmp_path: Path) -> None:
    ours, theirs = model(tmp_path / "ours", dtype="float32"), model(tmp_path / "theirs", dtype="bfloat16")
    require_same_shapes("http://a", str(theirs), model=ours, path_map={})


@pytest.mark.parametrize(("key", "value"), [("vocab_size", 67), ("hidden_size", 128), ("model_type", "qwen2")])
def test_another_shape_is_refused_by_name(tmp_path: Path, key: str, value: object) -> None:
    ours, theirs = model(tmp_path / "ours"), model(tmp_path / "theirs", **{key: value})
    with pytest.raises(ConfigError, match=rf"http://a: serves .*theirs, .* \({key} {value} instead of {SHAPES[key]}\)"):
        require_same_shapes("http://a", str(theirs), model=ours, path_map={})


def test_a_folder_is_looked_for_where_it_is_mounted_here(tmp_path: Path) -> None:
    ours = model(tmp_path / "here" / "ours")
    model(tmp_path / "here" / "theirs", hidden_size=128)
    with pytest.raises(ConfigError, match="hidden_size"):
        require_same_shapes("http://a", "/there/theirs", model=ours, path_map={str(tmp_path / "here"): "/there"})


def test_a_folder_that_cannot_be_seen_from_here_is_no_reason_to_refuse(tmp_path: Path) -> None:
    require_same_shapes("http://a", "/somewhere/else", model=model(tmp_path / "ours"), path_map={})
    require_same_shapes("http://a", "", model=tmp_path / "ours", path_map={})
