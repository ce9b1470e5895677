"""Runs whose servers hold versions as adapters: several in one batch, on one server, through kills; and a wrong one."""

from __future__ import annotations

import json
import re
import shutil
import sys
from pathlib import Path

import pytest
import torch
from peft import PeftModel
from transformers import AutoModelForCausalLM

from dora.controller.recorder import read_rows
from dora.core import commands as cmd
from dora.core import events as ev
from dora.journal.run_folder import RunFolder
from dora.seed.policy import path as seed_path
from tests.e2e.runs import Run, assert_audit_clean, events_of, get, orders_of, run_to_end, settings, slow
from tests.e2e.test_fleet import serving

pytestmark = [pytest.mark.deep, pytest.mark.timeout(600)]

STEPS, K, RANK = 8, 2, 4
TARGETS = "q_proj,k_proj,v_proj,o_proj,gate_proj,up_proj,down_proj"
#: Room for K + 3 adapters and for requests without one.
ROOM = ("--dialect", "0.5.23", "--max-lora-rank", str(RANK), "--lora-target-modules", TARGETS)
ROOM = (*ROOM, "--max-loras-per-batch", str(K + 4))
ADAPTERS = {
    "engine__adapters": True,
    "trainer__lora__rank": RANK,
    "trainer__learning_rate": 3e-3,
    "trainer__ranks": 1,
    "rollout__max_staleness": K,
    "rollout__max_new_tokens": 96,
    "run__steps": STEPS,
}


def mixtures(url: str) -> dict[int, float]:
    """Return the decoding steps of a server, by the number of different adapters in the batch."""
    found = re.findall(r'^dora:decode_steps_total\{.*adapters="(\d+)"\} (\S+)$', get(f"{url}/metrics")[2], re.MULTILINE)
    return {int(number): float(steps) for number, steps in found}


def killed_and_resumed(arguments: list[str]) -> RunFolder:
    """Kill the controller after three steps, and resume the run to its end."""
    with Run(*arguments) as run:
        folder = run.folder
        run.until_trained(3)
        run.process.kill()
        run.end()
    with Run("--resume", str(folder.root), *settings(status__port=0)) as run:
        assert run.end() == 0, run.told()
    return folder


def assert_nothing_moved(folder: RunFolder) -> None:
    assert not orders_of(folder, cmd.StopRequest)
    assert_audit_clean(folder)


def test_one_server_decodes_answers_of_several_versions_in_one_batch(tmp_path: Path) -> None:
    """The default job, whose answers have very different lengths, on a server that takes 10 ms for a step."""
    room = ("--slots", "24", "--kv-tokens", "16384", "--min-step-ms", "10")
    with serving(seed_path(), tmp_path / "log", *ROOM, *room) as (url, _):
        fleet = {"engine__urls": json.dumps([url]), "eval__sets": "[]", "status__port": 0}
        learning = {**ADAPTERS, "trainer__learning_rate": 3e-4, "run__steps": 16}
        with Run(*settings(run__folder=tmp_path, **fleet, **learning)) as run:
            folder = run.folder
            assert run.end() == 0, run.told()
        steps = mixtures(url)
        assert json.loads(get(f"{url}/v1/models")[2])["data"][0]["parent"] is None
    assert sum(n for number, n in steps.items() if number >= 2) > 0.3 * sum(steps.values()), steps
    assert max(steps) > K, steps
    assert_nothing_moved(folder)
    rows = [row["trainer"] for row in read_rows(folder.metrics, kind="step")]
    assert max(row.get("engine_mismatch_k3", 0.0) for row in rows) < 1e-6


@pytest.mark.parametrize("servers", [1, 2])
def test_a_run_with_adapters_outlives_its_controller(slow_model: Path, tmp_path: Path, servers: int) -> None:
    folder = killed_and_resumed(slow(tmp_path, slow_model, engine__instances=servers, **ADAPTERS))
    assert [order.reason for order in orders_of(folder, cmd.FinishRun)] == [f"all {STEPS} steps are trained"]
    assert_nothing_moved(folder)


def test_versions_are_adapters_alone_whose_weights_are_made_when_they_are_needed(tmp_path: Path) -> None:
    with Run(*settings(run__folder=tmp_path, status__port=0, **{**ADAPTERS, "engine__instances": 1})) as run:
        folder = run.folder
        assert run.end() == 0, run.told()
    assert not [*folder.versions.glob("v*/*.safetensors")]
    model = seed_path() / "model.safetensors"
    assert sum(path.stat().st_size for path in folder.versions.rglob("*.*")) < (STEPS + 1) * model.stat().st_size / 4

    exported = {option: tmp_path / f"exported{option}" for option in ("--merged", "--adapter")}
    for option, target in exported.items():
        result = run_to_end("export", str(folder.root), option, "--to", str(target))
        assert result.returncode == 0, result.stderr
    names = {path.name for path in exported["--adapter"].iterdir()}
    assert names == {"adapter_config.json", "adapter_model.safetensors"}
    merged = AutoModelForCausalLM.from_pretrained(exported["--merged"])
    base = AutoModelForCausalLM.from_pretrained(seed_path())
    adapted = PeftModel.from_pretrained(base, exported["--adapter"])
    tokens = torch.arange(40)[None]
    with torch.no_grad():
        torch.testing.assert_close(adapted(tokens).logits, merged(tokens).logits, rtol=1e-4, atol=1e-4)

    deep = run_to_end("audit", str(folder.root), "--deep")
    assert deep.returncode == 0, deep.stdout
    for _ in range(2):  # the weights are made, and then kept
        scored = run_to_end("eval", "--model", f"{folder.root}@{STEPS}", "--prompts", "8", "--trust-folder")
        assert scored.returncode == 0, scored.stderr
    kept = folder.merged / f"v{STEPS:06}" / "model.safetensors"
    assert kept.read_bytes() == (exported["--merged"] / "model.safetensors").read_bytes()

    (other := tmp_path / "other").mkdir()
    for path in seed_path().iterdir():
        shutil.copy(path, other)
    data = bytearray(model.read_bytes())
    data[-1] ^= 1
    (other / model.name).write_bytes(data)
    folder.config.write_text(re.sub('path = "[^"]*"', f'path = "{other}"', folder.config.read_text(), count=1))
    refused = run_to_end("export", str(folder.root), "--merged", "--to", str(tmp_path / "wrong"))
    assert refused.returncode == 1, refused.stdout
    assert f"cannot make version {STEPS} of {other}: it is not the model that was trained" in refused.stderr
    assert not (tmp_path / "wrong").exists()


def test_servers_that_outlive_the_controller_are_emptied_of_its_adapters(slow_model: Path, tmp_path: Path) -> None:
    """The names of loads are never used again, and the places of earlier ones are free."""
    with serving(slow_model, tmp_path / "log", *ROOM, "--slots", "24", "--kv-tokens", "16384") as (url, _):
        folder = killed_and_resumed(slow(tmp_path, slow_model, engine__urls=json.dumps([url]), **ADAPTERS))
    assert_nothing_moved(folder)


def test_a_server_that_mixes_adapters_up_is_found(tmp_path: Path) -> None:
    """After the proofs of later versions it answers from the first, as the audit and the trainer's mismatch say."""
    script = Path(__file__).with_name("mixing_server.py")
    words = ["serve", *("--incremental-streaming-output", "--skip-tokenizer-init"), "--model", "{model}", *ROOM]
    words += ["--host", "{host}", "--port", "{port}", "--slots", "{slots}", "--kv-tokens", "{kv_tokens}"]
    command = json.dumps([sys.executable, str(script), *words])
    fleet = {"engine__command": command, "engine__instances": 1, "engine__slots": 24, "engine__kv_tokens": 16384}
    job = {"run__folder": tmp_path, "rollout__groups_per_step": 4, "eval__sets": "[]", "status__port": 0}
    with Run(*settings(**job, **fleet, **{**ADAPTERS, "rollout__max_new_tokens": 40})) as run:
        folder = run.folder
        assert run.end() == 3, run.told()
    audit = run_to_end("audit", str(folder.root))
    assert audit.returncode == 3
    found = r"VIOLATION C1 serving: instance 0 answered under version (\d+) from another adapter: \S+ \S+-v\1 is an"
    assert re.search(found, audit.stdout), audit.stdout
    unloads = events_of(folder, ev.VersionUnloadFailed)
    assert unloads
    assert all(event.disproved for event in unloads)
    rows = [row["trainer"] for row in read_rows(folder.metrics, kind="step")]
    assert max(row.get("engine_mismatch_k3", 0.0) for row in rows) > 1e-5
