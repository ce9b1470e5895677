"""SGLang gets its key and no other user sees it, tested with a fake package that prints its arguments."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

#: Starts a worker as SGLang does, and prints what both processes see.
LAUNCH_SERVER = """
import json, multiprocessing, os, sys

def facts():
    with open("/proc/self/cmdline", "rb") as file:
        command = file.read().decode().split("\\0")
    return {"argv": sys.argv[1:], "command": command, "environment": dict(os.environ)}

if __name__ == "__main__":
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        print(json.dumps([facts(), pool.apply(facts)]))
"""


@pytest.mark.skipif(sys.platform != "linux", reason="a command line is read from /proc")
def test_sglang_has_its_key_from_the_environment_and_neither_it_nor_its_workers_show_it(tmp_path: Path) -> None:
    package = tmp_path / "sglang"
    package.mkdir()
    (package / "__init__.py").touch()
    (package / "launch_server.py").write_text(LAUNCH_SERVER)
    path = os.pathsep.join([str(tmp_path), *filter(None, [os.environ.get("PYTHONPATH")])])
    done = subprocess.run(
        [sys.executable, "-m", "dora.engine.sglang.serve", "--model-path", "m"],
        env={**os.environ, "PYTHONPATH": path, "DORA_SERVE_API_KEY": "sesame"},
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    server, worker = json.loads(done.stdout)
    assert server["argv"] == ["--model-path", "m", "--api-key", "sesame"]
    for process in (server, worker):
        assert "sesame" not in " ".join(process["command"])
        assert "sesame" not in process["environment"].values()
    assert "dora.engine.sglang.serve" in server["command"]
