"""A run over several hosts: its controller, its nodes, what they say, and what they leave.

Everything is observed from outside: processes, the status endpoint, files.
"""

from __future__ import annotations

import shutil
import signal
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import psutil

from dora.journal.run_folder import RunFolder
from tests.chaos.checker import check
from tests.chaos.recorded import Follower
from tests.cluster.network import Host, HostProcess, Network, inner_process
from tests.e2e.runs import Run, assert_audit_clean, command, settings

TOKEN: Final = "the token of the cluster"
NODES_PORT: Final = 8423
RANKS_PORT: Final = 8422

#: Limit of each wait. A cluster starts ten processes, which import torch, on the cores that all tests share.
PATIENCE_S: Final = 300.0

#: A job as small as its rules allow: a rank on the first node by name, and a server on each of two others. It has more
#: steps than any test waits for.
SMALL: Final[Mapping[str, object]] = {
    "run__steps": 10_000,
    "rollout__groups_per_step": 4,
    "rollout__group_size": 4,
    "rollout__max_staleness": 1,
    "rollout__max_new_tokens": 48,
    "rollout__filter_zero_variance": False,
    "rollout__watchdog_s": 10.0,
    "engine__start_timeout_s": 300.0,
    "trainer__ranks": 1,
    "trainer__checkpoint_every": 2,
    "nodes__expected": 3,
    "nodes__train": 1,
    "nodes__servers": 1,
    "nodes__lease_s": 60.0,
    "eval__sets": "[]",
}


class HostedRun(Run):
    """`dora run` on a host. Its folder is given as the tests see it."""

    def __init__(self, host: Host, *arguments: str, folder: RunFolder | None = None) -> None:
        """`folder`: of a run that is resumed."""
        self.host = host
        self._folder = folder
        super().__init__(*arguments, prefix=host.prefix(DORA_TOKEN=TOKEN), patience_s=PATIENCE_S)
        self.controller = inner_process(self.process)

    def __exit__(self, *_: object) -> None:
        self.kill()

    @property
    def folder(self) -> RunFolder:
        if self._folder is None:
            self._folder = RunFolder(self.host.outside(super().folder.root))
        return self._folder

    def status(self) -> dict[str, Any]:
        return self.host.inside(super().status)

    def children(self) -> list[psutil.Process]:
        return self.controller.children(recursive=True)

    def interrupt(self) -> None:
        self.controller.send_signal(signal.SIGINT)

    def kill(self) -> None:
        """End it by SIGKILL, if it is alive; its children follow."""
        with suppress(psutil.NoSuchProcess):
            self.controller.kill()
        self.end()

    def until_more(self, steps: int) -> dict[str, Any]:
        """Wait until it has trained so many more steps."""
        return self.until_trained(self.status()["steps_trained"] + steps)


@dataclass
class Cluster:
    """The hosts of one run."""

    network: Network
    changes: Mapping[str, object]  # of the configuration
    controllers: str = f"controller:{NODES_PORT}"  # DORA_CONTROLLER of its nodes
    nodes: dict[str, HostProcess] = field(default_factory=dict)  # by their hosts

    def run(self, host: Host, *, config: Path | None = None) -> HostedRun:
        """Start the controller on a host, which is named `controller` from now on."""
        self.network.name_host("controller", host)
        places: dict[str, object] = {
            "run__folder": self.network.base / "runs",
            "trainer__address": f"tcp://0.0.0.0:{RANKS_PORT}",
            "nodes__address": f"tcp://0.0.0.0:{NODES_PORT}",
            "status__port": 0,
        }
        given = [str(config)] if config is not None else []
        return HostedRun(host, *given, *settings(**(places | dict(self.changes))))

    def resume(self, host: Host, folder: RunFolder) -> HostedRun:
        """Resume the run in a folder of this host, given as the tests see it."""
        inside = self.network.base / folder.root.relative_to(host.folder)
        return HostedRun(host, "--resume", str(inside), *settings(status__port=0), folder=folder)

    def node(self, host: Host, **variables: str) -> HostProcess:
        """Start a node."""
        given = {"DORA_CONTROLLER": self.controllers, "DORA_TOKEN": TOKEN, **variables}
        self.nodes[host.name] = node = host.start(*command("node"), **given)
        return node

    def told(self) -> str:
        """What all nodes have said."""
        return "\n".join(f"-- {name}:\n{node.told()}" for name, node in self.nodes.items())


class Confirmed:
    """The version that each instance confirmed last, since it came up, by the journal of a run under way."""

    def __init__(self, run: HostedRun) -> None:
        self._run = run
        self._follower = Follower(run.folder.journal)
        self._versions: dict[int, int] = {}  # by instance

    def on(self, host: Host) -> int | None:
        """Return that of the instance on a host with one server; None if none is up, or it has confirmed none yet."""
        for record in self._follower.poll():
            event = record.get("event", {"type": record["type"]})
            if event["type"] in ("InstanceUp", "InstanceLost"):
                self._versions.pop(event["instance"], None)
            elif event["type"] == "WeightPushFinished":
                self._versions[event["instance"]] = event["version"]
        rows = self._run.status()["instances"]
        here = (row["instance"] for row in rows if f"//{host.address}:" in row["url"])
        return self._versions.get(next(here, -1))


def servers(host: Host) -> list[psutil.Process]:
    return host.processes("serve")


def assert_run_is_right(folder: RunFolder) -> None:
    """What all runs must satisfy, by the run's own audit and by a checker that shares no code with it."""
    verdict = check(folder.root)
    assert not verdict.violations, "\n".join(map(str, verdict.violations))
    assert verdict.lost == 0, verdict
    assert verdict.twice == 0, verdict
    assert_audit_clean(folder)


def copied(folder: RunFolder, *, host: Host) -> RunFolder:
    """Copy a run folder to another host; return the copy."""
    return RunFolder(Path(shutil.copytree(folder.root, host.folder / "runs" / folder.root.name)))
