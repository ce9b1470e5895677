"""What `dora export` leaves behind when it does not get to its end."""

from __future__ import annotations

from pathlib import Path

import pytest

from dora import foreign
from dora.app.export import export
from dora.core.ids import VersionId
from dora.errors import ConfigError
from dora.journal.run_folder import RunFolder
from dora.weights.store import VersionStore


@pytest.fixture
def run(tmp_path: Path) -> RunFolder:
    """A run with one version, of two files."""
    run = RunFolder.create(tmp_path, name="run")
    store = VersionStore(memory_root=run.versions, durable_root=run.versions)
    staged = store.stage(VersionId(1))
    for name in ("config.json", "model.safetensors"):
        (staged / name).write_bytes(name.encode())
    store.seal(VersionId(1), staged)
    return run


def test_an_export_that_is_interrupted_leaves_nothing(run: RunFolder, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(source: Path, target: Path) -> None:
        target.write_bytes(source.read_bytes())
        if source.name == "model.safetensors":
            raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(foreign, "copy", interrupted)
        with pytest.raises(KeyboardInterrupt):
            export(run, version=None, to=None)
    version, folder = export(run, version=None, to=None)
    assert version == 1
    assert {path.name: path.read_text() for path in folder.iterdir()} == {
        "config.json": "config.json", "model.safetensors": "model.safetensors",
    }  # fmt: skip


def test_an_export_leaves_what_is_there(run: RunFolder) -> None:
    _, folder = export(run, version=None, to=None)
    with pytest.raises(ConfigError, match=r"already exists; choose another folder with --to$"):
        export(run, version=None, to=None)
    assert len([*folder.iterdir()]) == 2
