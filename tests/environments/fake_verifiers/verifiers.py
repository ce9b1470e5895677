"""What DORA uses of verifiers 0.4, with rollouts that do what their task says. tests/clients has the package itself.

A task: `turns` to ask for, each with the tokens before it and one more; `reward`; and `how` it goes otherwise.
"""

import asyncio
import importlib
import json
import os
import sys
import threading
import urllib.request
from types import SimpleNamespace

from pydantic import BaseModel, ConfigDict

__path__ = []
_this = sys.modules[__name__]
for _name in ("v1", "v1.serve", "v1.types", "v1.runtimes", "v1.utils", "v1.utils.loaders", "v1.configs"):
    sys.modules[f"verifiers.{_name}"] = _this
sys.modules["verifiers.v1.configs.agent"] = sys.modules["verifiers.v1.configs.client"] = _this
v1 = serve = types = runtimes = utils = loaders = configs = agent = client = _this


class AgentConfig(BaseModel):
    model_config = ConfigDict(extra="allow")


class TrainClientConfig(AgentConfig):
    pass


SamplingConfig = SubprocessConfig = AgentConfig


class TasksetConfig(BaseModel):
    model_config = ConfigDict(extra="forbid")
    id: str
    tasks: int = 20
    largest: float = 1.0


class EnvConfig(BaseModel):
    taskset: TasksetConfig
    agent: AgentConfig = AgentConfig()

    def agent_harnesses(self):
        return {"agent": self.agent.harness}


class TwoAgents(EnvConfig):
    other: AgentConfig = AgentConfig()


class Task:
    NEEDS_CONTAINER = False

    def __init__(self, number, config):
        self.data = AgentConfig(turns=1, reward=config.largest, number=number)


class Taskset:
    bounded = True

    def __init__(self, config):
        self.config = config

    @classmethod
    def task_type(cls):
        return type("Boxed", (), {"NEEDS_CONTAINER": os.environ.get("BOXED") == "1"})

    def __iter__(self):
        sys.stdout.write("a task set may print\n")
        return (Task(number, self.config) for number in range(self.config.tasks))


class _Harness:
    async def setup(self, runtime):
        if os.environ.get("UNINSTALLED") == "1":
            raise RuntimeError("failed to prepare uv script: no network")


class provision_runtime:
    def __init__(self, config):
        self.config = config

    async def __aenter__(self):
        return self

    async def __aexit__(self, *_):
        pass


def import_taskset(name):
    return importlib.import_module(name)


def taskset_class(name):
    if name in ("sums", "duet") or name in sys.stdlib_module_names:
        return Taskset
    try:
        raise ModuleNotFoundError(f"No module named {name!r}", name=name.replace("-", "_"))
    except ModuleNotFoundError as err:
        raise ModuleNotFoundError("taskset not found") from err


def taskset_config_type(name):
    return TasksetConfig


def env_config_type(name):
    return TwoAgents if name == "duet" else EnvConfig


def default_harness_id(name):
    return "bash"


def resolve_env_config(data):
    assert data["agent"]["harness"] == {"id": "null"}
    assert data["agent"]["runtime"] == {"type": "subprocess"}
    return EnvConfig.model_validate(data)


def load_environment(config):
    return SimpleNamespace(config=config, taskset=Taskset(config.taskset))


def load_harness(config):
    return _Harness()


# --- the server, and its client, which has one connection ------------------------------------------------------------


def serve_env(*, max_workers, address, config, death_pipe):
    threading.Thread(target=lambda: (death_pipe.recv(), os._exit(0)), daemon=True).start()
    asyncio.run(_serve(address.removeprefix("ipc://")))


async def _serve(path):
    server = await asyncio.start_unix_server(_read, path)
    await server.serve_forever()


async def _read(reader, writer):
    async with asyncio.TaskGroup() as group:
        while line := await reader.readline():
            group.create_task(_run(json.loads(line), writer))


async def _run(run, writer):
    task, told = run["task"], {"ok": True, "rewards": {}, "errors": []}
    if task.get("how") == "dies":
        os._exit(3)
    tokens = [1, 2]
    for _ in range(task["turns"]):
        tokens += [*await asyncio.to_thread(_ask, run, tokens), 3]
    match task.get("how"):
        case "dies late":
            os._exit(4)
        case "fails":
            told = {"ok": False, "rewards": {}, "errors": [{"type": "TaskError", "message": "no such level"}]}
        case "refused":
            told = {"refused": "ValueError: bad task"}
        case None:
            told["rewards"] = {"right": task["reward"], "unscored": None}
    writer.write(json.dumps({"id": run["id"], **told}).encode() + b"\n")


def _ask(run, tokens):
    body = json.dumps({"token_ids": tokens, "model": run["model"], "sampling_params": {"logprobs": 1}}).encode()
    headers = {"Authorization": f"Bearer {os.environ[run['client']['api_key_var']]}"}
    url = run["client"]["base_url"].removesuffix("/v1") + "/inference/v1/generate"
    with urllib.request.urlopen(urllib.request.Request(url, data=body, headers=headers), timeout=20) as reply:
        return json.loads(reply.read())["choices"][0]["token_ids"]


class EnvClient:
    def __init__(self, address):
        self.path = address.removeprefix("ipc://")
        self.waiting = {}

    async def wait_for_server_startup(self, timeout, interval):
        async with asyncio.timeout(timeout):
            while True:
                try:
                    reader, self.writer = await asyncio.open_unix_connection(self.path)
                except OSError:
                    await asyncio.sleep(interval / 10)
                else:
                    self.receiving = asyncio.create_task(self._receive(reader))
                    return

    async def _receive(self, reader):
        while line := await reader.readline():
            told = json.loads(line)
            self.waiting[told["id"]].set_result(told)  # of rollouts that the server has lost it never hears

    async def run(self, client, model, sampling, task):
        number = len(self.waiting)
        reply = self.waiting[number] = asyncio.get_running_loop().create_future()
        asked = {"id": number, "client": client.model_dump(), "model": model, "task": task}
        self.writer.write(json.dumps(asked).encode() + b"\n")
        told = await reply
        if "refused" in told:
            raise RuntimeError(told["refused"])
        rewards = {
            name: value if value is None else SimpleNamespace(value=value) for name, value in told["rewards"].items()
        }
        errors = [SimpleNamespace(**error) for error in told["errors"]]
        metrics = {"turns": 2.0, "unmeasured": None, "undefined": float("nan")}
        trace = SimpleNamespace(rewards=rewards, metrics=metrics, errors=errors)
        return SimpleNamespace(ok=told["ok"], errors=[], traces=[trace])
