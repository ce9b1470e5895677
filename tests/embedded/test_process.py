"""The engine as a process: its ready line, signals, and how it ends."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from dora.cli.app import app

SERVE = """
import sys
from pathlib import Path
from dora.embedded.server import ServeOptions, run_server
run_server(ServeOptions(model_path=Path(sys.argv[1]), slots=2, kv_tokens=4096, skip_tokenizer_init=True))
"""


@contextmanager
def engine(folder: Path) -> Iterator[tuple[subprocess.Popen[str], str]]:
    command = [sys.executable, "-c", SERVE, str(folder)]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert process.stdout is not None
    try:
        line = process.stdout.readline()
        assert line.startswith("ready http://127.0.0.1:"), process.communicate(timeout=10)
        yield process, line.split()[1]
    finally:
        process.kill()
        process.communicate()


def post(url: str, body: dict[str, Any]) -> Any:
    request = urllib.request.Request(url, json.dumps(body).encode(), {"Content-Type": "application/json"})
    with urllib.request.urlopen(request, timeout=60) as answer:
        return json.loads(answer.read())


def health(url: str) -> int:
    try:
        with urllib.request.urlopen(f"{url}/health", timeout=60) as answer:
            return int(answer.status)
    except urllib.error.HTTPError as answer:
        answer.close()
        return answer.code


def until_draining(url: str) -> None:
    """Poll until the signal has reached the server's loop."""
    while health(url) != 503:
        pass


def test_sigterm_lets_running_calls_finish_and_then_ends(model_a: Path) -> None:
    with engine(model_a) as (process, url):
        answers: list[Any] = []
        body = {"input_ids": [5], "stream": True, "sampling_params": {"max_new_tokens": 600, "ignore_eos": True}}
        request = urllib.request.Request(
            f"{url}/generate", json.dumps(body).encode(), {"Content-Type": "application/json"}
        )
        with urllib.request.urlopen(request, timeout=60) as stream:
            answers.append(stream.readline())
            process.send_signal(signal.SIGTERM)
            until_draining(url)
            answers += stream.read().split(b"\n\n")
        last = json.loads([event for event in answers if event.startswith(b"data: {")][-1][6:])
        assert last["meta_info"]["finish_reason"] == {"type": "length", "length": 600}
        assert b"data: [DONE]" in answers
        out, _ = process.communicate(timeout=30)
        assert (process.returncode, out) == (0, "")


def test_a_checkpoint_of_another_shape_ends_the_process_and_says_why(model_a: Path, model_of_other_shape: Path) -> None:
    with engine(model_a) as (process, url):
        with pytest.raises((ConnectionError, urllib.error.URLError)):
            post(f"{url}/update_weights_from_disk", {"model_path": str(model_of_other_shape)})
        _, errors = process.communicate(timeout=30)
        assert process.returncode == 1
        assert "has shape" in errors


def test_a_seed_that_leaves_no_room_for_the_numbers_of_requests_is_refused() -> None:
    result = CliRunner().invoke(app, ["serve", "--seed", str(2**31)])
    assert result.exit_code == 2
    assert "'--seed': Input should be less than or equal to 2147483647" in result.output


def test_importing_the_server_loads_no_torch() -> None:
    code = "import sys, dora.embedded.server; print('torch' in sys.modules, 'transformers' in sys.modules)"
    seen = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True).stdout
    assert seen == "False False\n"


def test_a_second_signal_ends_a_draining_server_at_once(model_a: Path) -> None:
    with engine(model_a) as (process, url):
        body = {"input_ids": [5], "stream": True, "sampling_params": {"max_new_tokens": 2000, "ignore_eos": True}}
        request = urllib.request.Request(
            f"{url}/generate", json.dumps(body).encode(), {"Content-Type": "application/json"}
        )
        with urllib.request.urlopen(request, timeout=60) as stream:
            assert stream.readline().startswith(b"data: {")
            process.send_signal(signal.SIGINT)
            until_draining(url)
            process.send_signal(signal.SIGINT)
            assert process.wait(timeout=30) == 1
