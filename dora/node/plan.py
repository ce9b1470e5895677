"""The processes that a run needs on one host, as a pure function of the config and a few addresses.

Invariant: no secret is on a command line, which every user of the machine can read. A child's environment is that of
the parent without its DORA_ variables, plus what the child needs.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from dora.config.schema import Config
from dora.engine.engines import ADAPTER_FLAGS, COMMANDS, ROUTING_FLAGS, adapter_needs
from dora.errors import ConfigError

HOST = "127.0.0.1"
#: Environment variable with the API key of a managed server.
SERVE_KEY = "DORA_SERVE_API_KEY"
_LOOPBACK_INTERFACE = "lo" if sys.platform == "linux" else "lo0"
#: Collectives among processes of this host use the loopback interface only.
_COLLECTIVES: Final = {"GLOO_SOCKET_IFNAME": _LOOPBACK_INTERFACE, "NCCL_SOCKET_IFNAME": _LOOPBACK_INTERFACE}


@dataclass(frozen=True, slots=True, kw_only=True)
class ProcessPlan:
    """One process to start."""

    name: str  #: unique in the run; names its log file
    argv: tuple[str, ...]
    env: Mapping[str, str]  #: the whole environment
    ready_timeout_s: float | None  #: time until it is ready; None: the caller does not wait
    #: At each start a free port of HOST replaces `{port}` in argv, and the process is ready when the health check there
    #: succeeds. False: it is ready when it prints `ready <url>`.
    has_port: bool = False
    field: str = ""  #: the setting that the command comes from, if any
    cause: str = ""  #: beginning of the output line that says why the process ends; more output may follow that line


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerPart:
    """What one node has of a server over several."""

    nodes: int  #: over which it extends
    node_rank: int  #: of this host among them
    master: str  #: host:port at which the parts meet
    interface: str  #: of this host, towards the others; "" if unknown


@dataclass(frozen=True, slots=True, kw_only=True)
class RollingNode:
    """A node that has servers."""

    first_instance: int
    host: str  #: its address, at which they listen
    part: ServerPart | None = None  #: what it has of a server over several nodes


def plan_engines(
    config: Config, *, model: Path, lease: Path, environ: Mapping[str, str], node: RollingNode | None = None
) -> list[ProcessPlan]:
    """Return the servers that the run starts on this host, in the order of their instances, which follow the external
    ones, or those of a node.

    Each server gets its API key when it is started.
    """
    engine, part = config.engine, node.part if node is not None else None
    first, host = (node.first_instance, node.host) if node is not None else (len(engine.urls), HOST)
    gpus = (assign_gpus if node is None else assign_node_gpus)(config, environ=environ)
    interfaces = _COLLECTIVES if part is None else _interfaces(part.interface, environ)
    env = interfaces | child_env(environ, lease=lease, threads=engine.threads) | engine.environment
    return [
        _engine(
            config,
            name=f"engine-{first + index}",
            host=host,
            model=model,
            env=env | ({"CUDA_VISIBLE_DEVICES": visible} if visible else {}),
            part=part,
        )
        for index, visible in enumerate(gpus)
    ]


def _engine(
    config: Config, *, name: str, host: str, model: Path, env: Mapping[str, str], part: ServerPart | None
) -> ProcessPlan:
    engine = config.engine
    needs = adapter_needs(config)
    own: list[str] = [] if engine.command else [*COMMANDS[engine.kind]]
    if own and needs is not None:
        own += ADAPTER_FLAGS[engine.kind](needs)
    if own and config.replays_routing:
        own += ROUTING_FLAGS[engine.kind]
    words = [*(own or engine.command), *engine.args]
    values: dict[str, object] = {
        "model": model,
        "host": host,
        "tp": engine.tensor_parallel,
        "slots": config.slots,
        "kv_tokens": config.kv_tokens,
        "dtype": config.trainer.publish_dtype,  # decode in the dtype that is published
        "device": engine.device,
        "threads": engine.threads,
        "min_step_ms": engine.min_step_ms or None,
        "draft_tokens": engine.draft_tokens or None,
        "nodes": part.nodes if part is not None else None,
        "node_rank": part.node_rank if part is not None else None,
        "master": part.master if part is not None else None,
    }
    is_embedded = engine.kind == "embedded" and not engine.command
    if is_embedded:  # `dora serve` finds a free port itself; others get one at each start
        values["port"] = 0
    return ProcessPlan(
        name=name,
        argv=tuple(_fill_in(word, values) for word in _without_unset(words, values)),
        env=env,
        ready_timeout_s=engine.start_timeout_s,
        has_port=not is_embedded and any("{port}" in word for word in words),
        field="engine.command" if engine.command else "",
    )


def _without_unset(words: Sequence[str], values: Mapping[str, object]) -> Iterator[str]:
    """Leave out the words whose value is unset, and the option before a word that is nothing but such a value."""
    unset = {f"{{{name}}}" for name, value in values.items() if value is None}
    for word, following in zip(words, (*words[1:], ""), strict=True):
        if following not in unset and not any(name in word for name in unset):
            yield word


def _fill_in(word: str, values: Mapping[str, object]) -> str:
    for name, value in values.items():
        word = word.replace(f"{{{name}}}", str(value))
    return word


def assign_gpus(config: Config, *, environ: Mapping[str, str]) -> list[str]:
    """Return CUDA_VISIBLE_DEVICES of each managed instance; "" to inherit that of this process."""
    engine, each = config.engine, config.engine.tensor_parallel
    shares_all = engine.kind == "embedded" and not engine.command and not engine.gpus
    if engine.device == "cpu" or shares_all:
        return [""] * config.num_managed
    after = config.num_ranks if config.trainer.device == "cuda" else 0
    gpus = engine.gpus or tuple(range(after, after + config.num_managed * each))
    inherited = [name for name in environ.get("CUDA_VISIBLE_DEVICES", "").split(",") if name]
    if inherited and max(gpus, default=0) >= len(inherited):
        raise ConfigError(
            f"engine.gpus: GPU {max(gpus)} is needed (after the {after} of the trainer), but CUDA_VISIBLE_DEVICES "
            f"lists {len(inherited)}; start fewer instances, or list the GPUs that they should share"
        )
    names = [inherited[gpu] if inherited else str(gpu) for gpu in gpus]
    return [",".join(names[i * each : (i + 1) * each]) for i in range(config.num_managed)]


def assign_node_gpus(config: Config, *, environ: Mapping[str, str]) -> list[str]:
    """Return CUDA_VISIBLE_DEVICES of each server of a node; "" to inherit that of this process."""
    engine, count = config.engine, config.servers_of_node
    each = min(engine.tensor_parallel, config.nodes.gpus)
    if engine.device == "cpu":
        return [""] * count
    inherited = [name for name in environ.get("CUDA_VISIBLE_DEVICES", "").split(",") if name]
    names = inherited or [str(gpu) for gpu in range(config.nodes.gpus)]
    if len(names) < count * each:
        raise ConfigError(
            f"nodes.servers: {count} servers of engine.tensor_parallel = {each} need {count * each} GPUs, but the node "
            f"has {len(names)}; lower one of them"
        )
    return [",".join(names[i * each : (i + 1) * each]) for i in range(count)]


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainingNode:
    """The place of a host among several that train."""

    nodes: int  #: number of these hosts
    index: int  #: of this one
    ranks: int  #: of this one
    master: str  #: address of the first one, whose torchrun listens at `port` on all interfaces
    port: int
    interface: str  #: of this host, towards the others; "" if unknown: gloo and NCCL then choose


def plan_trainer(
    config: Config,
    *,
    controller: str,
    token: str,
    lease: Path,
    store: Path,
    environ: Mapping[str, str],
    incarnation: int = 0,
    node: TrainingNode | None = None,
) -> ProcessPlan:
    """Return the process that starts the ranks of this host (torchrun or `trainer.command`).

    `controller`: the address that the controller has bound. `store`: a file that does not exist yet, through which the
    ranks meet. `incarnation`: number of this start of them. `node`: None if all ranks are on this host. A command finds
    its place among several hosts in PET_NNODES, PET_NODE_RANK, PET_MASTER_ADDR and PET_MASTER_PORT, which a torchrun
    that it starts reads too.
    """
    env = child_env(environ, lease=lease, threads=config.trainer.threads)
    env |= {"DORA_CONTROLLER": controller, "DORA_TOKEN": token, "DORA_INCARNATION": str(incarnation)}
    env.setdefault("TORCH_FR_BUFFER_SIZE", "200")  # collectives in the flight record
    if node is None:
        # Rendezvous over files: torchrun's TCP stores would listen on every interface.
        env |= _COLLECTIVES | {"DORA_STORE": str(store), "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
        meet: tuple[str, ...] = ("--rdzv-backend", "c10d", "--rdzv-conf", "store_type=file", "--local-addr", HOST)
    else:
        env |= _place(node, env)
        meet = ("--rdzv-backend", "static")
    torchrun = (sys.executable, "-m", "torch.distributed.run", *meet)
    ranks = ("--nproc-per-node", str(config.trainer.ranks if node is None else node.ranks))
    argv = config.trainer.command or (*torchrun, *ranks, "-m", "dora", "train")
    field = "trainer.command" if config.trainer.command else ""
    cause = "dora trainer: rank "  # torchrun's own report follows
    return ProcessPlan(name="trainer", argv=argv, env=env, ready_timeout_s=None, field=field, cause=cause)


def _place(node: TrainingNode, env: Mapping[str, str]) -> dict[str, str]:
    """Return what torchrun and the collectives read about a host among several; the container's choice of interfaces
    stays."""
    found = {"NNODES": node.nodes, "NODE_RANK": node.index, "MASTER_ADDR": node.master, "MASTER_PORT": node.port}
    return {f"PET_{name}": str(value) for name, value in found.items()} | _interfaces(node.interface, env)


def _interfaces(interface: str, env: Mapping[str, str]) -> dict[str, str]:
    """Return the interfaces of collectives between hosts: those that the environment names, or else this one."""
    return {name: found for name in _COLLECTIVES if (found := env.get(name, interface))}


def plan_sender(config: Config, *, lease: Path, environ: Mapping[str, str]) -> ProcessPlan:
    """Return the plan of a sender process. All senders of a run share one log and get their orders over pipes."""
    env = child_env(environ, lease=lease, threads=config.trainer.threads)
    argv = (sys.executable, "-m", "dora", "send")
    return ProcessPlan(name="sender", argv=argv, env=env, ready_timeout_s=None)


def plan_tracker(folder: Path, name: str, *, title: str, lease: Path, env: Mapping[str, str]) -> ProcessPlan:
    """Return the plan of the process that logs a run in a tracker. `env`: only variables meant for this tracker."""
    argv = (sys.executable, "-m", "dora", "follow", str(folder), name)
    env = {**env, "DORA_LEASE": str(lease), "PYTHONUNBUFFERED": "1"}
    return ProcessPlan(name=f"tracker-{title}", argv=argv, env=env, ready_timeout_s=None)


def child_env(environ: Mapping[str, str], *, lease: Path, threads: int) -> dict[str, str]:
    """Return the environment of a child, without secrets."""
    inherited = {key: value for key, value in environ.items() if not key.startswith("DORA_")}
    return inherited | {
        "DORA_LEASE": str(lease),
        "OMP_NUM_THREADS": str(threads),
        "PYTHONUNBUFFERED": "1",  # so that the log is complete when a process crashes
        "TOKENIZERS_PARALLELISM": "false",
    }
