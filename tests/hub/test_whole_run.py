"""From ids of a model and a data set to trained steps, as typed; what the hub was asked; a resume that asks nothing."""

from __future__ import annotations

import re
import signal
import subprocess
from pathlib import Path

import pytest

from dora.config.load import load
from dora.journal.run_folder import RunFolder
from tests.e2e.runs import command, heed_ctrl_c, small, until
from tests.hub.conftest import DATA, MODEL, ROWS, HubStub, lines, model_files
from tests.hub.stub import add

SOURCE = f'[{{kind="datasets", path="{DATA}", subset="main"}}]'
HELD_OUT = f'[{{name="test", prompts=2, source={{kind="datasets", path="{DATA}", subset="main", split="test"}}}}]'


def dora(stub: HubStub, *arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        command(*arguments),
        env=stub.environment(**environment),
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )


def by_ids(folder: Path, **changes: object) -> list[str]:
    return small(folder, model__path=MODEL, task__sources=SOURCE, task__rewards='[{kind="exact"}]',
                 eval__sets=HELD_OUT, rollout__max_new_tokens=16, **changes)  # fmt: skip


@pytest.mark.deep
def test_a_model_and_a_data_set_by_id_are_trained_and_a_resume_asks_nothing(filled: HubStub, tmp_path: Path) -> None:
    checked = dora(filled, "check", *by_ids(tmp_path / "runs"))
    assert checked.returncode == 0, checked.stderr
    assert re.search(rf"^download +{MODEL}@\w+: 1\.7 MB in 1 files \(4 more are here\)$", checked.stdout, re.MULTILINE)
    assert re.search(rf"^download +{DATA}@\w+: 0\.0 MB in 1 files", checked.stdout, re.MULTILINE)
    assert "what can be checked before the download is right; nothing was changed" in checked.stdout
    assert not (tmp_path / "runs").exists()

    run = dora(filled, "run", *by_ids(tmp_path / "runs", run__steps=1))
    assert run.returncode == 0, run.stderr
    assert f"dora: downloading {MODEL}@" in run.stderr
    [folder] = (tmp_path / "runs").iterdir()
    config = load(RunFolder(folder).config, environ={})
    assert re.fullmatch(r"[0-9a-f]{40}", config.model.revision)
    [source], [held_out] = config.task.sources, config.eval.sets
    assert source.revision == held_out.source.revision != ""
    fetched = {one["path"].rpartition("/")[2] for one in filled.asked() if one["method"] == "GET"}
    assert {"model.safetensors", "train-0.jsonl", "test-0.jsonl"} <= fetched
    assert not fetched & {"pytorch_model.bin", "model.gguf", "model.onnx", "consolidated.safetensors"}

    again = dora(filled, "run", "--continue", *by_ids(tmp_path / "runs", run__steps=2))
    assert again.returncode == 0, again.stderr
    assert "changed: run.steps: 1 -> 2" in again.stderr
    assert "revision" not in again.stderr, "the commit is that of the run"
    whole = dora(filled, "check", *by_ids(tmp_path / "runs"), HF_HUB_OFFLINE="1")
    assert whole.returncode == 0, whole.stderr
    assert "all checks passed; nothing was changed" in whole.stdout
    assert filled.asked() == []


def test_a_new_configuration_names_ids_whose_rows_are_looked_at(filled: HubStub, tmp_path: Path) -> None:
    add(filled.folder, "dataset", "someone/plain", {"train.jsonl": lines(ROWS), "test.jsonl": lines(ROWS[:2])})
    job = tmp_path / "job.toml"
    made = dora(filled, "init", str(job), "--model", MODEL, "--data", "someone/plain", "--reward", "exact",
                "--preset", "laptop", "--yes")  # fmt: skip
    assert made.returncode == 0, made.stderr
    assert "someone/plain: columns prompt, answer, 8 rows" in made.stdout
    config = load(job, environ={})
    assert (config.model.path, config.task.sources[0].path) == (MODEL, Path("someone/plain"))
    fetched = {one["path"].rpartition("/")[2] for one in filled.asked() if one["method"] == "GET"}
    assert "train.jsonl" in fetched
    assert not fetched & {"test.jsonl", "model.safetensors"}


@pytest.mark.deep
@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGKILL, -9)])
def test_a_download_can_be_stopped_and_the_next_one_is_whole(
    filled: HubStub, tmp_path: Path, number: int, code: int
) -> None:
    weights = model_files()["model.safetensors"] + bytes(20 * 2**20)
    add(filled.folder, "model", MODEL, {**model_files(), "model.safetensors": weights})
    filled.fail(pause_s=0.5)
    run = subprocess.Popen(
        command("run", *by_ids(tmp_path / "runs")),
        env=filled.environment(),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        preexec_fn=heed_ctrl_c,
    )
    with run:
        until(lambda: [*filled.home.rglob("*.incomplete")], what="a download under way")
        run.send_signal(number)
        _, told = run.communicate(timeout=60)
    assert run.returncode == code
    assert "Traceback" not in told
    assert not (tmp_path / "runs").exists()
    filled.fail()
    [fetched] = filled.ask({"do": "models", "set": [f"model.path={MODEL}"]})
    assert (Path(fetched["folders"][0]) / "model.safetensors").read_bytes() == weights
