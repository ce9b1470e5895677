from __future__ import annotations

import json
import os
import resource
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from dora.seed.policy import path as seed_path
from tests.hub.stub import add

#: Time in which the stub must answer; other work may share the machine.
PATIENCE_S = 60
MODEL = "someone/small"
DATA = "someone/sums"
ROWS = [{"prompt": f"a{i}b2=", "answer": str(i + 2)} for i in range(8)]
CARD = b"""---
configs:
- config_name: main
  data_files:
  - {split: train, path: main/train-*}
  - {split: test, path: main/test-*}
- config_name: other
  data_files:
  - {split: train, path: other/train-*}
---
Sums.
"""


def lines(rows: list[dict[str, str]]) -> bytes:
    return b"".join(json.dumps(row).encode() + b"\n" for row in rows)


def data_files() -> dict[str, bytes]:
    return {
        "README.md": CARD,
        "main/train-0.jsonl": lines(ROWS),
        "main/test-0.jsonl": lines(ROWS[:2]),
        "other/train-0.jsonl": lines(ROWS[:3]),
    }


def model_files() -> dict[str, bytes]:
    """The shipped policy as published, with files that nobody needs."""
    found = {path.name: path.read_bytes() for path in seed_path().iterdir() if path.is_file()}
    unused = ("pytorch_model.bin", "pytorch_model.bin.index.json", "original/consolidated.safetensors", "model.gguf",
              "onnx/model.onnx", "README.md", "model.fp16.safetensors")  # fmt: skip
    return {**found, **dict.fromkeys(unused, b"{}")}


def _limit(largest_file: int) -> None:
    resource.setrlimit(resource.RLIMIT_FSIZE, (largest_file, largest_file))


@dataclass
class HubStub:
    """The stub, and a home with an empty cache."""

    folder: Path
    url: str
    home: Path

    def asked(self) -> list[dict[str, Any]]:
        """Return all requests since the last call."""
        log = self.folder / "log.jsonl"
        found = [json.loads(line) for line in log.read_text().splitlines()] if log.exists() else []
        log.unlink(missing_ok=True)
        return found

    def fail(self, **faults: Any) -> None:
        (self.folder / "faults.json").write_text(json.dumps(faults))

    def environment(self, **more: str) -> dict[str, str]:
        kept = {key: value for key, value in os.environ.items() if not key.startswith(("HF_", "DORA_"))}
        mine = {"HF_HOME": str(self.home), "HF_ENDPOINT": self.url, "HF_HUB_ETAG_TIMEOUT": str(PATIENCE_S)}
        return {**kept, **mine, "COLUMNS": "200", **more}

    def ask(
        self, *cases: dict[str, Any], is_patient: bool = True, largest_file: int = 0, **environment: str
    ) -> list[dict[str, Any]]:
        """Have one process answer the cases. `is_patient`: wait longer than a user does, beside other work.
        `largest_file`: the bytes at which the operating system refuses to write more; 0: none."""
        arguments = [json.dumps(case) for case in cases]
        variables = self.environment(**environment)
        if not is_patient:
            del variables["HF_HUB_ETAG_TIMEOUT"]
        done = subprocess.run(
            [sys.executable, "-m", "tests.hub.child", *arguments],
            env=variables,
            preexec_fn=partial(_limit, largest_file) if largest_file else None,
            capture_output=True,
            text=True,
            timeout=290,
        )
        assert done.returncode == 0, done.stderr
        assert done.stderr == "", "huggingface_hub and datasets print nothing"
        return [json.loads(line) for line in done.stdout.splitlines()]


@contextmanager
def running(tmp_path: Path) -> Iterator[HubStub]:
    folder = tmp_path / "hub"
    folder.mkdir()
    with subprocess.Popen([sys.executable, "-m", "tests.hub.stub", str(folder)], stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        try:
            yield HubStub(folder, process.stdout.readline().decode().strip(), tmp_path / "home")
        finally:
            process.kill()


@pytest.fixture
def stub(tmp_path: Path) -> Iterator[HubStub]:
    with running(tmp_path) as found:
        yield found


@pytest.fixture
def filled(stub: HubStub) -> HubStub:
    """A hub with a model and a data set."""
    add(stub.folder, "model", MODEL, model_files())
    add(stub.folder, "dataset", DATA, data_files())
    return stub
