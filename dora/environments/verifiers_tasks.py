"""Episodes of a task set of verifiers, in a host whose Python has both (`environment.kind = "verifiers"`).

    this host                                the server of the task set (verifiers_peer.py)
    --------------------------------         -----------------------------------------------------
    an episode opens a session
    EnvClient.run(task, model = session) --> a rollout: its harness asks for turns, verifiers renders
    SessionServer                        <-- POST /shared/inference/v1/generate, with token ids
    the rollout's trace is its end       <-- rewards, or what went wrong

Invariant: an episode is one rollout, which ends with it; what is no complete trace fails the episode, and is never a
reward. A host and its server end together. Waits: for the server at most START_S; the host limits each call.
"""

from __future__ import annotations

import asyncio
import json
import math
import os
import shutil
import sys
import tempfile
from collections.abc import Mapping
from typing import Any, Final

from dora.environments.agent import AgentFailed, SelfDriven, kill_group, next_line, session_server, started
from dora.environments.api import End
from dora.environments.bootstrap import command_of
from dora.environments.sessions import Session
from dora.environments.verifiers_peer import KEY, environment_of

#: Seconds in which the server must answer: it imports verifiers, and starts the tool servers that rollouts share.
START_S: Final = 60.0


class VerifiersTask(SelfDriven):
    """One rollout of a task.

    `task_set`: id of the task set, or its file; `options`: its configuration. `model`: folder of the tokenizer;
    `renderer`: the family's settings, as DORA's own renderer has them, so that both make the same tokens. `limit_s`: of
    setting up a rollout, and of scoring it.
    """

    def __init__(
        self, task_set: str, options: dict[str, Any], model: str, renderer: dict[str, Any], limit_s: float
    ) -> None:
        super().__init__()
        self._served = {"name": task_set, "options": options, "limit_s": limit_s}
        self._model, self._renderer = model, renderer
        if "checked" not in _shared:  # when the host starts, and not in its loop
            asyncio.run(_prepare(task_set, options, limit_s))
            _shared["checked"] = True

    async def play(self, session: Session, row: Mapping[str, Any]) -> End:
        """Have the server run the rollout; its rewards are those of the episode."""
        from verifiers.v1.configs.client import TrainClientConfig

        sessions = await session_server()
        client = TrainClientConfig.model_validate(
            {
                "base_url": f"{sessions.shared[0]}/v1",
                "api_key_var": KEY,
                "renderer": self._renderer,
                "renderer_model_name": self._model,
            }
        )
        server = _server(self._served, key=sessions.shared[1])
        return _end_of(await server.run(client, session.model, row))


async def _prepare(task_set: str, options: dict[str, Any], limit_s: float) -> None:
    """Check the task set, and install what its harness needs, which may be downloaded the first time."""
    config = environment_of(task_set, options, limit_s=limit_s).config
    from verifiers.v1.runtimes import SubprocessConfig, provision_runtime
    from verifiers.v1.utils.loaders import load_harness

    for harness in config.agent_harnesses().values():
        async with provision_runtime(SubprocessConfig()) as runtime:
            await load_harness(harness).setup(runtime)


def _end_of(episode: Any) -> End:
    """Return the rewards of a rollout; AgentFailed if it did not complete."""
    errors = [*episode.errors, *(error for trace in episode.traces for error in trace.errors)]
    if not episode.ok or len(episode.traces) != 1:
        why = f"{errors[-1].type}: {errors[-1].message}" if errors else "it did not complete, and does not say why"
        raise AgentFailed(f"the rollout failed: {why}"[:1000])
    [trace] = episode.traces
    rewards = {name: reward.value for name, reward in trace.rewards.items() if reward is not None}
    metrics = {name: value for name, value in trace.metrics.items() if value is not None and math.isfinite(value)}
    return End(sum(rewards.values()) if rewards else None, terms=rewards, metrics=metrics)


class _RolloutServer:
    """The server of the task set, and the client of all rollouts of this host. The host ends with it."""

    def __init__(self, served: Mapping[str, Any], *, key: str) -> None:
        from verifiers.v1.serve import EnvClient

        self._folder = tempfile.mkdtemp(prefix="dora-verifiers-")  # of this user alone
        self._settings = {**served, "address": f"ipc://{self._folder}/server"}
        self._environment = {**os.environ, KEY: key}
        self._client = EnvClient(self._settings["address"])
        self._life = asyncio.create_task(self._live(), name="server of verifiers")
        self._is_up = asyncio.create_task(self._until_up(), name="start of the server of verifiers")

    async def run(self, client: Any, model: str, task: Mapping[str, Any]) -> Any:
        """Run a rollout, and return its episode; AgentFailed if the server refuses it."""
        from verifiers.v1.types import SamplingConfig

        await asyncio.shield(self._is_up)
        try:
            return await self._client.run(client, model, SamplingConfig(), dict(task))
        except RuntimeError as err:  # so the client reports what went wrong at the server
            raise AgentFailed(f"verifiers refused the rollout: {err}"[:1000]) from err

    async def _until_up(self) -> None:
        try:
            await self._client.wait_for_server_startup(timeout=START_S, interval=0.2)
        except TimeoutError:
            self._end_host(f"did not answer within {START_S:g} s")
        shutil.rmtree(self._folder, ignore_errors=True)  # the client is connected, and does not connect again

    async def _live(self) -> None:
        """Run its process to its end."""
        command = [*command_of(sys.executable, "dora.environments.verifiers_peer"), "serve", json.dumps(self._settings)]
        process, output = await started(command, self._environment)
        while line := await next_line(output.lines):
            sys.stderr.write(f"| {line.decode(errors='replace').rstrip()[:1000]}\n")
        kill_group(process.pid)  # it has closed its output, so it has ended, or is of no use
        code = await process.wait()
        self._end_host(f"ended with {f'signal {-code}' if code < 0 else f'exit code {code}'}")

    def _end_host(self, why: str) -> None:
        """End this process, as the client never hears of rollouts that the server has lost."""
        shutil.rmtree(self._folder, ignore_errors=True)
        sys.stderr.write(f"the server of verifiers {why}\n")
        sys.stderr.flush()
        os._exit(1)


_shared: dict[str, Any] = {}  # what this process has checked, and its server


def _server(served: Mapping[str, Any], *, key: str) -> _RolloutServer:
    """Return the server of this host, which is started by its first episode."""
    if "server" not in _shared:
        _shared["server"] = _RolloutServer(served, key=key)
    server = _shared["server"]
    assert isinstance(server, _RolloutServer)
    return server
