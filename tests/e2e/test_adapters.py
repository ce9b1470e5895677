"""A run that trains an adapter: servers get weights that include it, it outlives its ranks, and is exported alone."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from peft import PeftModel
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from dora.controller.recorder import read_rows
from dora.core import commands as cmd
from dora.seed.policy import path as seed_path
from tests.e2e.runs import Run, assert_audit_clean, orders_of, run_to_end, settings, small

pytestmark = [pytest.mark.deep, pytest.mark.timeout(400)]

STEPS = 6


def test_an_adapter_is_trained_after_a_kill_by_other_ranks_and_exported(tmp_path: Path) -> None:
    """With π_o, a reference and the probe of versions."""
    trainer = {"trainer__lora__rank": 4, "trainer__lora__rslora": True, "trainer__learning_rate": 1e-3}
    policies = {"trainer__updates": 2, "objective__kl_coefficient": 0.01, "trainer__probe_every": 1}
    others = {"trainer__ranks": 2, "trainer__checkpoint_every": 2, "engine__instances": 2, "rollout__max_staleness": 1}
    with Run(*small(tmp_path, run__steps=STEPS, **trainer, **policies, **others)) as run:
        folder = run.folder
        run.until_trained(3)
        run.process.kill()
        run.end()
    with Run("--resume", str(folder.root), *settings(status__port=0, trainer__ranks=1)) as run:
        assert run.end() == 0, run.told()
    assert [order.reason for order in orders_of(folder, cmd.FinishRun)] == [f"all {STEPS} steps are trained"]
    assert_audit_clean(folder)
    rows = [row["trainer"] for row in read_rows(folder.metrics, kind="step")]
    assert len(rows) == STEPS
    assert all(row["probe_skipped"] == 0 for row in rows)
    assert all(row.get("engine_mismatch_k3", 0.0) < 1e-6 for row in rows)  # servers have the policy of the ranks
    assert max(row["all/kl_reference"] for row in rows) > 0

    exported = {option: tmp_path / f"exported{option}" for option in ("--merged", "--adapter")}
    for option, target in exported.items():
        result = run_to_end("export", str(folder.root), option, "--to", str(target))
        assert result.returncode == 0, result.stderr
    names = {path.name for path in exported["--adapter"].iterdir()}
    assert names == {"adapter_config.json", "adapter_model.safetensors"}
    base = AutoModelForCausalLM.from_pretrained(seed_path())
    merged = AutoModelForCausalLM.from_pretrained(exported["--merged"])
    adapted = PeftModel.from_pretrained(base, exported["--adapter"])
    tokens = torch.arange(40)[None]
    with torch.no_grad():
        torch.testing.assert_close(adapted(tokens).logits, merged(tokens).logits, rtol=1e-4, atol=1e-4)
    names = {path.name for path in exported["--merged"].iterdir()}
    assert names == {path.name for path in folder.versions.glob("v*6/*")} - {"adapter", "manifest.json"}
    start = load_file(seed_path() / "model.safetensors")
    version_0 = load_file(folder.versions / "v000000" / "model.safetensors")
    assert all(torch.equal(version_0[name], tensor.float()) for name, tensor in start.items())


def test_a_run_begins_with_the_adapter_of_another_and_is_resumed_with_the_same_one_only(tmp_path: Path) -> None:
    """The exported adapter of rsLoRA has the whole scale in lora_alpha; the reference is the first adapter."""
    lora = {"trainer__lora__rank": 4, "trainer__lora__rslora": True, "trainer__learning_rate": 1e-3}
    with Run(*small(tmp_path, run__steps=2, **lora)) as run:
        assert run.end() == 0, run.told()
        before = run.folder
    adapter = tmp_path / "adapter"
    result = run_to_end("export", str(before.root), "--adapter", "--to", str(adapter))
    assert result.returncode == 0, result.stderr

    others = {"trainer__ranks": 2, "trainer__checkpoint_every": 2, "objective__kl_coefficient": 0.01}
    job = small(tmp_path, run__steps=4, model__adapter=str(adapter), **lora, **others)
    checked = run_to_end("check", *job)
    assert checked.returncode == 0, checked.stderr
    assert "server and trainer agree under model.path, without model.adapter (" in checked.stdout
    with Run(*job) as run:
        folder = run.folder
        run.until_trained(3)
        run.process.kill()
        run.end()
    last = load_file(before.versions / "v000002" / "model.safetensors")
    first = load_file(folder.versions / "v000000" / "model.safetensors")
    assert last.keys() == first.keys()
    for name, tensor in last.items():
        torch.testing.assert_close(first[name], tensor, rtol=1e-5, atol=1e-6)

    weights = adapter / "adapter_model.safetensors"
    stored = weights.read_bytes()
    weights.write_bytes(stored[:-1] + bytes([stored[-1] ^ 1]))
    result = run_to_end("run", "--resume", str(folder.root), *settings(status__port=0))
    assert result.returncode == 1
    assert f"or model.adapter: {adapter} is not its adapter; restore it" in result.stderr
    weights.write_bytes(stored)
    with Run("--resume", str(folder.root), *settings(status__port=0, trainer__ranks=1)) as run:
        assert run.end() == 0, run.told()
    assert_audit_clean(folder)
    rows = [row["trainer"] for row in read_rows(folder.metrics, kind="step")]
    assert rows[0]["all/kl_reference"] < 1e-6 < rows[-1]["all/kl_reference"]
    assert all(row.get("engine_mismatch_k3", 0.0) < 1e-6 for row in rows)


def test_a_run_without_an_adapter_has_none_to_export(tmp_path: Path) -> None:
    with Run(*small(tmp_path, run__steps=1)) as run:
        assert run.end() == 0, run.told()
        folder = run.folder
    result = run_to_end("export", str(folder.root), "--adapter")
    assert result.returncode == 2
    assert "--adapter: version 1 of" in result.stderr
