"""`dora check` and `--help`: what can be asked without starting a run."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from tests.e2e.runs import assert_one_clear_error, environment, run_to_end, settings

pytestmark = pytest.mark.e2e


def files_below(folder: Path) -> set[Path]:
    return set(folder.rglob("*"))


@pytest.mark.slow
@pytest.mark.timeout(200)
def test_check_prints_the_plan_and_changes_nothing(tmp_path: Path) -> None:
    before = {p.pid for p in psutil.process_iter() if _is_ours(p)}
    result = run_to_end("check", *settings(status__port=0, run__steps=7, run__folder=tmp_path / "runs"), cwd=tmp_path)
    assert (result.returncode, result.stderr) == (0, "")
    heads = [line[:11].strip() for line in result.stdout.splitlines()]
    for wanted in ("inputs", "server", "log-probs", "strategy", "job", "rollout", "trainer", "weights", "status"):
        assert wanted in heads, result.stdout
    assert "dora, K = 2 in force" in result.stdout
    assert "7 steps of " in result.stdout
    assert "server and trainer agree" in result.stdout
    assert result.stdout.endswith("everything is in order; nothing was changed\n")
    assert files_below(tmp_path) == set()
    assert {p.pid for p in psutil.process_iter() if _is_ours(p)} <= before


def _is_ours(process: psutil.Process) -> bool:
    try:
        return process.ppid() == psutil.Process().pid
    except psutil.NoSuchProcess:
        return False


def test_check_refuses_what_a_run_refuses(tmp_path: Path) -> None:
    result = run_to_end("check", "--set", "rollout.max_staleness=7", cwd=tmp_path)
    assert_one_clear_error(result, code=2, says="K = 7 keeps up to 8 versions alive")


def test_help_lists_the_commands_and_loads_no_torch() -> None:
    """What a user waits for before the first line: no heavy library may be imported for it."""
    code = (
        "import sys\n"
        "sys.argv = ['dora', '--help']\n"
        "from dora.cli.app import main\n"
        "try:\n"
        "    main()\n"
        "except SystemExit:\n"
        "    pass\n"
        "heavy = {'torch', 'transformers', 'aiohttp', 'zmq', 'numpy', 'pydantic'} & sys.modules.keys()\n"
        "sys.exit(f'loaded: {heavy}' if heavy else 0)\n"
    )
    result = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=False, timeout=60, env=environment()
    )
    assert result.returncode == 0, result.stderr
    for name in ("run", "check", "status", "audit", "export", "serve"):
        assert f"\n  {name} " in result.stdout
    assert "\n  train " not in result.stdout
