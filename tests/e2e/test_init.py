"""`dora init` as a user types it: questions at a terminal, options, and a file that `dora check` accepts."""

from __future__ import annotations

import json
import os
import pty
import select
import subprocess
import time
from pathlib import Path

import pytest

from tests.e2e.runs import assert_one_clear_error, command, environment, run_to_end, settings

GIVEN = ("init", "--model", "seed", "--data", "rows.jsonl")


@pytest.fixture(autouse=True)
def _home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    rows = [{"question": f"a{n}b7=?", "answer": str(n + 7), "note": "\x1b[2J"} for n in range(9)]
    Path("rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


def answer(*answers: str) -> tuple[int, str]:
    """Run `dora init` at a terminal; type each answer once the question before it has been asked."""
    controller, terminal = pty.openpty()
    process = subprocess.Popen(command("init"), stdin=terminal, stdout=terminal, stderr=terminal, env=environment())
    os.close(terminal)
    shown, left, deadline = "", [*answers], time.monotonic() + 100
    while process.poll() is None or select.select([controller], [], [], 0)[0]:
        assert time.monotonic() < deadline, shown
        if not select.select([controller], [], [], 1.0)[0]:
            continue
        try:
            shown += os.read(controller, 4096).decode()
        except OSError:  # the other end is closed
            break
        if left and shown.endswith(": "):
            os.write(controller, left.pop(0).encode())
    os.close(controller)
    return process.wait(), shown


def test_five_questions_make_a_configuration() -> None:
    code, shown = answer("seed\n", "rows.jsonl\n", "\n", "\n", "exact\n")
    assert code == 0, shown
    assert "columns question, answer, note, 9 rows" in shown
    assert "question: a0b7=?" in shown
    assert "\x1b[2J" not in shown
    assert "Column of the prompt [question]: " in shown
    text = Path("job.toml").read_text()
    assert 'kind = "exact"' in text
    assert 'prompt = "question"' in text


def test_a_wrong_answer_is_said_and_asked_for_again() -> None:
    code, shown = answer(
        "nothing\n", "seed\n", "rows.csv\n", "rows.jsonl\n", "quesiton\n", "\n", "-\n", "maths\n", "math\n"
    )
    assert code == 0, shown
    assert "nothing has no config.json" in shown
    assert "rows.csv: is not a file that can be read" in shown
    assert "has no column 'quesiton'; it has question, answer, note" in shown
    assert "did you mean math?" in shown
    assert 'answer = ""' in Path("job.toml").read_text()


def test_the_end_of_the_input_is_no_answer_and_writes_nothing() -> None:
    code, shown = answer("seed\n", "\x04")
    assert code == 2
    assert "dora: --data: no answer was given" in shown
    assert not Path("job.toml").exists()


@pytest.mark.deep
def test_what_it_writes_passes_the_check_and_trains() -> None:
    assert run_to_end(*GIVEN, "--yes").returncode == 0
    checked = run_to_end("check", "job.toml", *settings(status__port=0))
    assert checked.returncode == 0, checked.stderr
    small = settings(run__steps=1, rollout__max_new_tokens=8, rollout__filter_zero_variance="false", status__port=0)
    trained = run_to_end("run", "job.toml", *small)
    assert trained.returncode == 0, trained.stderr


@pytest.mark.deep
@pytest.mark.parametrize(("preset", "gpus"), [("1-gpu", "1x80GB"), ("8-gpu", "8x80GB"), ("many", "16x80GB")])
def test_a_preset_for_gpus_fits_on_them(preset: str, gpus: str) -> None:
    assert run_to_end(*GIVEN, "--yes", "--preset", preset).returncode == 0
    planned = run_to_end("check", "job.toml", "--gpus", gpus)
    assert planned.returncode == 0, planned.stdout + planned.stderr


def test_a_file_is_replaced_only_by_force() -> None:
    Path("job.toml").write_text("mine")
    assert_one_clear_error(run_to_end(*GIVEN, "--yes"), code=2, says="job.toml: exists; --force replaces it")
    assert Path("job.toml").read_text() == "mine"
    assert run_to_end(*GIVEN, "--yes", "--force").returncode == 0
    assert "[model]" in Path("job.toml").read_text()


@pytest.mark.parametrize(
    ("options", "says"),
    [
        (("--preset", "gpu"), "--preset gpu: expected laptop, 1-gpu, 8-gpu, many"),
        (("--reward", "none.py:score"), "--reward: none.py: no such file"),
        (("--answer", ""), "--reward: is needed where no question can be asked"),
        (("nowhere/job.toml",), "nowhere/job.toml: cannot be written"),
    ],
)
def test_what_cannot_be_written_is_one_line(options: tuple[str, ...], says: str) -> None:
    assert_one_clear_error(run_to_end(*GIVEN, "--yes", *options), code=2, says=says)
    assert not Path("job.toml").exists()


def test_the_schema_and_the_script_of_a_shell_are_printed_as_they_are() -> None:
    assert json.loads(run_to_end("config", "--schema").stdout)["title"] == "DORA"
    assert run_to_end("completion", "bash").stdout.endswith("complete -F _dora dora\n")
    assert_one_clear_error(run_to_end("completion", "csh"), code=2, says="expected bash, zsh, fish")
    assert_one_clear_error(run_to_end("config"), code=2, says="give --schema")
