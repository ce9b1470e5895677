"""`dora check --nodes` beside two nodes on this host: what it reports, and that nothing is left of it."""

from __future__ import annotations

import re
import subprocess
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path

import pytest

from tests.e2e.runs import command, environment, settings

pytestmark = pytest.mark.deep

NODES = {"nodes__expected": 2, "nodes__servers": 2, "nodes__address": "tcp://127.0.0.1:0", "rollout__max_staleness": 1}


def checked(
    folder: Path, env_of: Callable[[str], dict[str, str]] = lambda name: environment(), **changes: object
) -> tuple[int, str]:
    """The exit code and the output of the check, with both nodes there. `env_of`: the variables of each process."""
    token = {"DORA_TOKEN": "token"}
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    with ExitStack() as stack:
        words = command("check", "--nodes", *settings(run__folder=folder / "runs", **NODES, **changes))
        check = stack.enter_context(subprocess.Popen(words, env=env_of("check") | token, **pipes))
        stack.callback(check.kill)
        assert check.stdout is not None
        lines = iter(check.stdout.readline, "")
        found = next(filter(None, (re.search(r"waiting for nodes at tcp://(\S+)", line) for line in lines)), None)
        assert found is not None, "it ended"
        for name in ("a", "b"):
            words = command("node", "--name", name, "--folder", str(folder / name))
            variables = env_of(name) | token | {"DORA_CONTROLLER": found[1]}
            node = stack.enter_context(subprocess.Popen(words, env=variables))
            stack.callback(node.kill)
        told, _ = check.communicate(timeout=60)
    return check.returncode, told


def test_what_the_nodes_have_and_how_fast_versions_and_checkpoints_travel(tmp_path: Path) -> None:
    code, told = checked(tmp_path)
    assert code == 0, told
    for line in (
        r"node 0 +a, ranks, 0 GPUs, \d+ GB of memory, [\d.]+ GB for versions \(enough\), embedded \S+, "
        r"at http://127.0.0.1:\d+, port \d+ is free for ranks or a server over several nodes to meet",
        r"node 1 +b, 2 servers, .*",
        r"version +a: [\d.]+ MB after [\d.]+ s \([\d.,]+ MB per second\)",
        r"version +b: .*",
        r"checkpoint +[\d.]+ s for [\d.]+ MB, at [\d.,]+ MB per second \(measured from here to a\); one every .* steps",
        r"all nodes are ready; nothing was changed",
    ):
        assert re.search(rf"^{line}$", told, re.MULTILINE), (line, told)
    assert not (tmp_path / "runs").exists()
