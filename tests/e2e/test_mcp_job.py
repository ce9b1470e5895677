"""The job with a tool, whose tool is that of an MCP server with the official SDK, which all episodes share.

It samples what the environment of the same job samples, and goes on after kills of the controller and of the server.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from dora.core import events as ev
from dora.journal.run_folder import RunFolder
from tests.e2e.runs import Run, assert_audit_clean, events_of, run_to_end, settings, until, until_gone
from tests.e2e.test_agent_job import answers_of_version_0, resumed_after_a_kill

pytestmark = [pytest.mark.deep, pytest.mark.timeout(600)]

ROOT = Path(__file__).parents[2]
SERVER = str(ROOT / "launch" / "agents" / "lookup_mcp.py")
SMALL: dict[str, object] = {
    **{"status__port": 0, "run__steps": 4, "rollout__groups_per_step": 4, "eval__sets": "[]"},
    **{"rollout__filter_zero_variance": False, "engine__instances": 2, "rollout__max_staleness": 1},
    "task__sources": f'[{{kind = "function", name = "{SERVER}:rows", options = {{first = 0, count = 256}}}}]',
}


def job(folder: Path, **values: object) -> list[str]:
    server = f'[{{command = {json.dumps([sys.executable, SERVER])}, arguments = {{seed = "{{seed}}"}}}}]'
    return [
        "launch/configs/mcp-cpu.toml",
        *settings(**{**SMALL, "run__folder": folder, "environment__mcp": server, **values}),
    ]


def kill_the_server(run: Run) -> None:
    def found() -> list[object]:
        return [one for one in run.children() if one.is_running() and SERVER in one.cmdline()]

    [server] = until(found, what="a server")
    server.kill()
    until_gone([server])


def test_it_samples_what_the_environment_of_the_same_job_does_and_outlives_its_controller(tmp_path: Path) -> None:
    folder = resumed_after_a_kill(*job(tmp_path / "mcp"))
    values = settings(**{**SMALL, "run__folder": tmp_path / "tools", "run__steps": 1})
    assert run_to_end("run", "launch/configs/tools-cpu.toml", *values, cwd=ROOT).returncode == 0
    [root] = (tmp_path / "tools").iterdir()
    expected, found = answers_of_version_0(RunFolder(root)), answers_of_version_0(folder)
    assert len(expected) == 4 * 8
    assert found == expected


@pytest.mark.parametrize("replays", ["true", "false"])
def test_a_killed_server_costs_its_callers_at_most(tmp_path: Path, replays: str) -> None:
    options = f"{{replays = {replays}}}"
    with Run(*job(tmp_path, run__steps=8, environment__options=options), cwd=ROOT) as run:
        for step in (1, 2, 4):
            run.until_trained(step)
            kill_the_server(run)
        assert run.end() == 0, run.told()
    folder = run.folder
    assert_audit_clean(folder)
    failed = [event.failed for event in events_of(folder, ev.CallFinished) if event.failed]
    assert all(reason.startswith("host: environment.mcp.0 ") for reason in failed), failed
    assert replays == "false" or not failed
    deep = run_to_end("audit", str(folder.root), "--deep")
    assert deep.returncode == 0, deep.stdout
