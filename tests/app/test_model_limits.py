"""What a model's configuration says of its limits is asked of transformers once, and kept in the user's cache."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path

import pytest

from dora import model_config
from dora.errors import ConfigError
from dora.model_config import Limits, limits_of
from dora.seed.policy import path as seed_path


@pytest.fixture
def asked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[Path]:
    """The folders that a process was asked about; the cache is empty."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    found: list[Path] = []
    ask = model_config._ask_child

    def noted(folder: Path) -> Limits:
        found.append(folder)
        return ask(folder)

    monkeypatch.setattr(model_config, "_ask_child", noted)
    return found


def again(folder: Path) -> Limits:
    """Ask as another process does."""
    model_config._limits_of.cache_clear()
    return limits_of(folder)


def kept(tmp_path: Path) -> Path:
    [file] = (tmp_path / "cache").rglob("*.json")
    return file


def test_it_is_asked_once_for_all_folders_with_that_configuration(asked: list[Path], tmp_path: Path) -> None:
    folder = shutil.copytree(seed_path(), tmp_path / "copy")
    found = again(seed_path())
    assert found.positions
    assert again(seed_path()) == again(folder) == found
    assert asked == [seed_path()]


def test_a_changed_configuration_or_another_release_is_asked_anew(
    asked: list[Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = shutil.copytree(seed_path(), tmp_path / "copy")
    before = again(folder)
    config = folder / "config.json"
    config.write_text(config.read_text().replace(f'"max_position_embeddings": {before.positions}',
                                                 '"max_position_embeddings": 77'))  # fmt: skip
    assert again(folder).positions == 77
    monkeypatch.setattr(model_config, "version", lambda name: "0.0")
    assert again(folder).positions == 77
    assert asked == [folder] * 3


def test_a_configuration_that_names_other_files_is_asked_every_time(asked: list[Path], tmp_path: Path) -> None:
    """transformers may then read one of those instead."""
    for name, positions in (("a", 100), ("b", 77)):
        folder = shutil.copytree(seed_path(), tmp_path / name)
        config = json.loads((folder / "config.json").read_text())
        (folder / "config.4.0.0.json").write_text(json.dumps({**config, "max_position_embeddings": positions}))
        (folder / "config.json").write_text(json.dumps({**config, "configuration_files": ["config.4.0.0.json"]}))
        assert again(folder).positions == positions


@pytest.mark.parametrize("damage", ["torn", "huge", "a pipe", "another type", "a link"])
def test_what_others_put_there_is_not_believed(asked: list[Path], tmp_path: Path, damage: str) -> None:
    found = again(seed_path())
    file = kept(tmp_path)
    match damage:
        case "torn":
            file.write_bytes(file.read_bytes()[:-1])
        case "huge":
            file.write_bytes(file.read_bytes() + b" " * 10_000)
        case "another type":
            file.write_text('{"type": "Limits", "positions": "77", "dynamic_from": null, "vocab_size": null}')
        case _:
            file.unlink()
            if damage == "a pipe":
                os.mkfifo(file)
            else:
                (tmp_path / "elsewhere").write_text('{"type": "Limits", "positions": 77}')
                file.symlink_to(tmp_path / "elsewhere")
    assert again(seed_path()) == found
    assert len(asked) == 2


def test_without_a_cache_it_is_asked_every_time(asked: list[Path], tmp_path: Path) -> None:
    (tmp_path / "cache").write_text("a file")
    assert again(seed_path()) == again(seed_path())
    assert len(asked) == 2


def test_a_refusal_is_not_kept(asked: list[Path], tmp_path: Path) -> None:
    folder = shutil.copytree(seed_path(), tmp_path / "copy")
    (folder / "config.json").write_text('{"model_type": "unheard-of"}')
    for _ in range(2):
        with pytest.raises(ConfigError, match="has no model_type 'unheard-of'"):
            again(folder)
    assert len(asked) == 2
    assert not (tmp_path / "cache").exists()
