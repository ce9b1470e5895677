"""Nodes without a model of their own: each downloads it, at the commit that the controller has found."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.e2e.test_node_check import checked
from tests.hub.conftest import MODEL, HubStub, model_files
from tests.hub.stub import add


@pytest.mark.deep
def test_each_node_downloads_the_model_while_the_controller_waits_for_it(filled: HubStub, tmp_path: Path) -> None:
    """For longer than the lease after which silent nodes are lost."""
    filled.fail(pause_s=0.4)  # between two of 27 chunks
    code, told = checked(
        tmp_path,
        lambda name: filled.environment(HF_HOME=str(tmp_path / "homes" / name)),
        model__path=MODEL,
        nodes__lease_s=6.0,
    )
    assert code == 0, told
    assert "all nodes are ready; nothing was changed" in told
    commit = add(filled.folder, "model", MODEL, model_files())
    for name in ("check", "a", "b"):
        [weights] = (tmp_path / "homes" / name).rglob(f"snapshots/{commit}/model.safetensors")
        assert weights.read_bytes() == model_files()["model.safetensors"]
