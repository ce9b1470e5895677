"""What a run does with servers of OpenEnv, made with the package itself."""

from __future__ import annotations

import os
import socket
import subprocess
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

import psutil

from dora.core import events as ev
from dora.journal.deep import read_kept
from dora.journal.run_folder import RunFolder
from tests.e2e.runs import Run, assert_audit_clean, events_of, run_to_end, settings, until

OPENENV: Final = "openenv-core==0.3.0"
HERE: Final = Path(__file__).parent
ROOT: Final = HERE.parents[1]
#: An episode with calls, in the Python that has the package.
CALLS: Final = """
import asyncio, sys
from dora.environments.api import ToolCall, Turn
from dora.environments.openenv import OpenEnv

async def main():
    environment = await asyncio.to_thread(OpenEnv, sys.argv[1])
    await environment.reset({"seed": 0})
    calls = ToolCall("a", "look_up", {"key": "k19"}), ToolCall("b", "nope", {})
    told = await environment.step(Turn("", calls=calls))
    print(*(message["content"] for message in told.messages), sep="\\n")
    end = await environment.step(Turn("v3"))
    print(f"End(reward={end.reward})")
    await environment.close()

asyncio.run(main())
"""
#: Steps, groups of each and siblings: 24 episodes.
STEPS, GROUPS, SIBLINGS = 3, 4, 2
TURNS: Final = 3


def serves_text(python: Path, folder: Path) -> None:
    """Each turn is an action, and the last one has the reward."""
    run = _run(python, folder, kind="text")
    ends = [event for event in events_of(run, ev.CallFinished) if event.ended and not event.truncated]
    assert {event.reward for event in ends} == {float(TURNS)}, ends
    assert all(event.graded for event in ends), ends
    texts = {part.text for kept in read_kept(run.trajectories) for part in kept.parts if part.role == "environment"}
    assert any("heard" in text for text in texts), texts


def serves_tools(python: Path, folder: Path) -> None:
    """The tools of the server are the policy's, and the task grades; then they are called, as the policy may not."""
    run = _run(python, folder, kind="tools", task__rewards='[{kind = "length"}]')
    assert all(event.reward is not None for event in events_of(run, ev.TrajectoryGraded))
    assert all('"name": "look_up"' in kept.prompt for kept in read_kept(run.trajectories))
    with _serving(python, folder, kind="tools") as url:
        command = [str(python), "-c", CALLS, url]
        environment = {**os.environ, "PYTHONPATH": str(ROOT)}
        done = subprocess.run(command, capture_output=True, text=True, timeout=60, env=environment, check=False)
    assert done.stdout.splitlines() == ["v3", "error: Unknown tool: 'nope'", "End(reward=None)"], done.stderr


def outlives_kills(python: Path, folder: Path) -> None:
    """The host, the server and the controller are killed in turn: with replays, every episode goes on."""
    with _serving(python, folder, kind="text") as url:
        values = _values(python, folder, url, run__steps=8, environment__options="{replays = true}")
        with Run(*settings(**values)) as run:
            run.until_trained(1)
            [host] = [one for one in run.children() if _is_host(one)]
            host.kill()
            run.until_trained(2)
            port = int(url.rpartition(":")[2])
            _stop(port)
            with _serving(python, folder, kind="text", port=port):
                run.until_trained(run.status()["steps_trained"] + 2)
                run.process.kill()
                run.process.wait()
                done = run_to_end("run", "--resume", str(run.folder.root), "--set", "status.port=0", timeout_s=900.0)
    assert done.returncode == 0, done.stderr
    assert_audit_clean(run.folder)
    calls = events_of(run.folder, ev.CallFinished)
    assert not [event.failed for event in calls if event.failed]
    assert sum(event.replays for event in calls), "nothing was replayed"
    ended = [event.trajectory for event in calls if event.ended]
    assert len(ended) == len({*ended}), "an episode ended twice"


def _is_host(process: psutil.Process) -> bool:
    command = process.cmdline()
    return "dora.environments.host" in command and "dora.tasks.guard" not in command


def _stop(port: int) -> None:
    """Kill the server that listens there."""
    for one in psutil.Process().children():
        if str(port) in one.cmdline():
            one.kill()
            one.wait()


def _values(python: Path, folder: Path, url: str, **more: Any) -> dict[str, Any]:
    return {
        **{"run__folder": folder / "runs", "run__steps": STEPS, "status__port": 0, "model__path": "seed-tools"},
        **{"rollout__groups_per_step": GROUPS, "rollout__group_size": SIBLINGS, "rollout__max_new_tokens": 256},
        **{"rollout__filter_zero_variance": False, "rollout__max_staleness": 1, "eval__sets": "[]"},
        **{"environment__kind": "openenv", "environment__name": url, "environment__python": python},
        **{"engine__instances": 2, "trainer__ranks": 1, "log__trajectories_per_step": 8, **more},
    }


def _run(python: Path, folder: Path, *, kind: str, **more: Any) -> RunFolder:
    with _serving(python, folder, kind=kind) as url:
        done = run_to_end("run", *settings(**_values(python, folder, url, **more)), timeout_s=900.0)
    assert done.returncode == 0, done.stderr
    [root] = (folder / "runs").iterdir()
    run = RunFolder(root)
    assert_audit_clean(run)
    failed = [event.failed for event in events_of(run, ev.CallFinished) if event.failed]
    assert not failed, failed[0]
    return run


@contextmanager
def _serving(python: Path, folder: Path, *, kind: str, port: int = 0) -> Iterator[str]:
    if not port:
        with socket.create_server(("127.0.0.1", 0)) as listening:
            port = listening.getsockname()[1]
    with (folder / "server.log").open("wb") as log:
        server = subprocess.Popen(
            [str(python), str(HERE / "openenv_server.py"), kind, str(port)], stdout=log, stderr=subprocess.STDOUT
        )
    url = f"http://127.0.0.1:{port}"

    def is_up() -> bool:
        assert server.poll() is None, (folder / "server.log").read_text()[-1000:]
        try:
            with urllib.request.urlopen(f"{url}/health", timeout=5) as reply:
                return bool(reply.status == 200)
        except OSError:
            return False

    try:
        until(is_up, what="the server of OpenEnv", timeout_s=120.0)
        yield url
    finally:
        server.kill()
        server.wait()
