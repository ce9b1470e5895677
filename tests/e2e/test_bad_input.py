"""Input that cannot work: one clear line, exit code 2, and nothing has been started or written."""

from __future__ import annotations

import json
import socket
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.e2e.runs import assert_one_clear_error, command, environment, run_to_end, settings


@pytest.fixture
def taken_port() -> Iterator[int]:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        yield listener.getsockname()[1]


def refused(tmp_path: Path, *arguments: str, says: str) -> None:
    folder = tmp_path / "runs"
    result = run_to_end("run", "--set", f"run.folder={folder}", "--set", "status.port=0", *arguments, cwd=tmp_path)
    assert_one_clear_error(result, code=2, says=says)
    assert result.stdout == ""
    assert not folder.exists()


def jsonl(path: Path, *rows: object) -> str:
    path.write_text("".join((row if isinstance(row, str) else json.dumps(row)) + "\n" for row in rows))
    return f'task.sources=[{{kind="jsonl", path="{path}"}}]'


NO_EVALUATION = settings(eval__sets="[]", task__rewards='[{kind="exact"}]')


@pytest.mark.parametrize(
    ("setting", "says"),
    [
        ("rollout.max_stalenes=1", r"unknown key rollout.max_stalenes; did you mean rollout.max_staleness\?"),
        ("run.steps=many", r'run.steps: got "many", expected an integer'),
        ("rollout.max_staleness=4", r"K = 4 keeps up to 5 versions alive, but there are 4 instances; lower K or raise"),
        (
            "model.path=/no/such/model",
            r"model.path: /no/such/model .*has no config.json; give a Hugging Face model folder",
        ),
        (
            "rollout.group_size=1",
            r"rollout.group_size: 1 answer .*advantage 'dr_grpo' is group-relative; use at least 2",
        ),
        (
            'task.rewards=[{kind="function", name="no_such_module:reward"}]',
            r"task.rewards.0.name: .*no_such_module",
        ),
        ('task.rewards=[{kind="function", name="json:no_such_reward"}]', r"task.rewards.0.name: .*no_such_reward"),
        ("run", r"--set run: expected SECTION.NAME=VALUE"),
        ("task.sources=[]", r"task.sources: at least one source is needed"),
        ("status.host=no.such.host.invalid", r"status.host: no.such.host.invalid is not an address \("),
    ],
)
def test_a_setting_that_cannot_work_is_one_line_before_anything_starts(tmp_path: Path, setting: str, says: str) -> None:
    refused(tmp_path, "--set", setting, says=says)


def test_a_config_file_is_named_with_line_and_column(tmp_path: Path) -> None:
    config = tmp_path / "job.toml"
    config.write_text("[run]\nsteps = = 3\n")
    refused(tmp_path, str(config), says=rf"{config}:2:9: ")


@pytest.mark.parametrize("command", ["run", "check"])
@pytest.mark.parametrize(
    ("settings", "says"),
    [
        (("trainer.device=cuda",), r"trainer.device: 2 ranks need a CUDA device each, .*can use 0 here; set it to cpu"),
        (("engine.device=cuda",), r"engine.device: the instances need 1 CUDA devices .*can use 0 here; set it to cpu"),
        (("engine.kind=sglang", "engine.device=cuda"), r"engine.kind: sglang is not installed; run pip install .*"),
    ],
)
def test_a_missing_gpu_or_engine_is_found_before_anything_starts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, command: str, settings: tuple[str, ...], says: str
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    overrides = [word for pair in (*settings, "status.port=0") for word in ("--set", pair)]
    result = run_to_end(command, "--set", f"run.folder={tmp_path / 'runs'}", *overrides, cwd=tmp_path)
    assert_one_clear_error(result, code=2, says=says)
    assert result.stdout == ""
    assert not (tmp_path / "runs").exists()


def test_a_port_in_use_is_named(tmp_path: Path, taken_port: int) -> None:
    says = rf"status.port: .* cannot listen on 127.0.0.1:{taken_port}"
    refused(tmp_path, "--set", f"status.port={taken_port}", says=says)


def test_the_port_for_the_ranks_is_asked_for_first_too(tmp_path: Path, taken_port: int) -> None:
    address = f"tcp://127.0.0.1:{taken_port}"
    refused(tmp_path, "--set", f"trainer.address={address}", says=rf"trainer.address: .*{taken_port}")


def test_a_server_that_does_not_answer_is_named(tmp_path: Path, taken_port: int) -> None:
    url = f"http://127.0.0.1:{taken_port - 1}"
    urls = settings(engine__urls=f'["{url}"]', rollout__max_staleness=0)
    refused(tmp_path, *urls, says=rf"engine.urls: {url} does not answer; start the server or correct the address")


def test_a_malformed_line_is_named_with_file_and_line(tmp_path: Path) -> None:
    rows = jsonl(tmp_path / "rows.jsonl", {"prompt": "a1=", "answer": "01"}, '{"prompt": "b')
    refused(tmp_path, "--set", rows, *NO_EVALUATION, says=rf"{tmp_path}/rows.jsonl:2: not a JSON object")


def test_a_missing_column_is_named_with_those_present(tmp_path: Path) -> None:
    rows = jsonl(tmp_path / "rows.jsonl", {"question": "a1=", "answer": "01"})
    says = rf"{tmp_path}/rows.jsonl:1: no column 'prompt' .*present: answer, question"
    refused(tmp_path, "--set", rows, *NO_EVALUATION, says=says)


@pytest.mark.parametrize(
    ("command", "folder", "says"),
    [
        ("check", "file/runs", r"/file/runs: \S+/file is not a writable folder"),
        ("run", "file/runs", r"/file/runs/\S+: Not a directory"),
        ("run", "file", r"/file/\S+: File exists"),
    ],
)
def test_a_run_folder_that_cannot_be_made_is_named(tmp_path: Path, command: str, folder: str, says: str) -> None:
    (tmp_path / "file").touch()
    result = run_to_end(command, *settings(run__folder=tmp_path / folder, status__port=0))
    assert_one_clear_error(result, code=2, says=rf"run.folder: cannot create {tmp_path}{says}")


@pytest.mark.parametrize("command", ["audit", "export", "run --resume"])
def test_a_folder_that_is_no_run_is_refused(tmp_path: Path, command: str) -> None:
    result = run_to_end(*command.split(), str(tmp_path / "none"))
    assert_one_clear_error(result, code=2, says="no such run folder")
    result = run_to_end(*command.split(), str(tmp_path))
    assert_one_clear_error(result, code=2, says="is not a run folder: it has no config.toml and no journal.msgpack")


def test_a_status_address_where_nobody_listens_is_one_line(taken_port: int) -> None:
    result = run_to_end("status", f"http://127.0.0.1:{taken_port - 1}")
    assert result.returncode in (1, 2)
    assert_one_clear_error(result, code=result.returncode, says=str(taken_port - 1))


@pytest.mark.parametrize("content", [b"\xff\xfe", b"", None])
def test_a_file_without_a_token_is_one_line(tmp_path: Path, content: bytes | None) -> None:
    file = tmp_path / "token"
    if content is not None:
        file.write_bytes(content)
    result = run_to_end("instances", "http://127.0.0.1:9", "drain", "0", "--token-file", str(file))
    assert_one_clear_error(result, code=2, says=f"{file} cannot be read" if content != b"" else "token is needed")


@pytest.mark.parametrize(("closed", "is_told"), [("<&- >&-", True), ("<&- >&- 2>&-", False)])
def test_a_command_whose_streams_are_closed_ends_as_any_other(closed: str, is_told: bool) -> None:
    words = ["sh", "-c", f'exec "$@" {closed}', "sh", *command("run", "--set", "run.steps=many")]
    result = subprocess.run(words, env=environment(), capture_output=True, text=True, timeout=60)
    assert result.returncode == 2
    assert result.stderr == 'dora: --set run.steps=many: run.steps: got "many", expected an integer\n' * is_told


def test_ways_of_running_exclude_each_other(tmp_path: Path) -> None:
    refused(tmp_path, "--rollout-only", "--train-only", str(tmp_path), says="exclude each other; choose one")
    refused(tmp_path, "--train-only", str(tmp_path), says=r"no step-\*.rollout")
    assert_one_clear_error(run_to_end("check", "--set", "run.steps=0"), code=2, says="run.steps: 0 steps train nothing")
    says = "--push, --drift, --nodes and --gpus exclude each other; choose one"
    assert_one_clear_error(run_to_end("check", "--drift", "--push"), code=2, says=says)


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (("--measure", "mine.toml"), "mine.toml: exists; name a new file, or remove this one"),
        (("--measure", "no/new.toml"), "its folder does not exist"),
        (
            ("--measure", "new.toml", "--drift"),
            "--measure, --from and --sample: are not valid with --drift, --nodes and --gpus",
        ),
        (("--measure", "new.toml", "--from", "."), "is not a run folder"),
        (("--from", "."), "is valid with --measure only"),
        (("--sample", "3"), "--sample 3: is valid with --measure only"),
    ],
    ids=["a file that exists", "no such folder", "with --drift", "from no run", "--from alone", "--sample alone"],
)
def test_a_measurement_that_cannot_be_written_or_made_is_refused_before_anything_starts(
    tmp_path: Path, arguments: tuple[str, ...], says: str
) -> None:
    (tmp_path / "mine.toml").write_text("steps = 3\n")
    assert_one_clear_error(run_to_end("check", *arguments, cwd=tmp_path), code=2, says=says)
    assert [path.name for path in tmp_path.iterdir()] == ["mine.toml"]
