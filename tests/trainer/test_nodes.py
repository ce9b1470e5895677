"""Two training nodes as processes of this host: torchrun's static rendezvous, folders of their own, a real controller
end; both killed, one of them without its disk, and resumed bit for bit."""

from __future__ import annotations

import asyncio
import os
import secrets
import shutil
import signal
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import psutil
import pytest
from conftest import SETTINGS, START_S, Answer, Job, chain_of, make_groups

from dora.config.load import load
from dora.node.lease import hold
from dora.node.plan import TrainingNode, plan_trainer
from dora.node.ports import free_port, interface_of
from dora.transport.controller_end import ControllerEnd
from dora.transport.messages import CheckpointWritten, Configure, DeleteCheckpoint, RankReady, Stop
from dora.weights.checkpoints import checkpoints_in
from dora.weights.fence import raise_fence
from dora.weights.store import VersionStore, checksum_of

NODES = 2
CONFIG = load(None, [f"trainer.ranks={NODES}"], environ={})


class Nodes(Job):
    """A job whose ranks are on nodes of their own."""

    def __init__(self, end: ControllerEnd, processes: Sequence[asyncio.subprocess.Process], root: Path) -> None:
        super().__init__(end, processes[0], NODES)
        self.processes = processes
        self.root = root

    async def ready(self) -> set[int]:
        await self.until(RankReady, count=NODES)
        return {report.next_step for report in self.reports if isinstance(report, RankReady)}

    async def checkpoint(self) -> dict[str, CheckpointWritten]:
        """The report of each node."""
        await self.save_checkpoint()
        await self.until(CheckpointWritten)
        found = [report for report in self.reports if isinstance(report, CheckpointWritten)][-NODES:]
        return {Path(report.folder).parent.parent.name: report for report in found}

    async def kill(self) -> None:
        """Kill torchrun and its rank on both nodes, without notice."""
        for process in self.processes:
            os.killpg(process.pid, signal.SIGKILL)
            await process.wait()

    async def exit_codes(self) -> list[int]:
        return [await self.exit_code(), await self.processes[1].wait()]

    def version(self, number: int) -> dict[str, str]:
        store = VersionStore(memory_root=self.root / "node-0" / "memory", durable_root=self.root / "node-0" / "durable")
        folder = store.folder(number)
        return {path.name: checksum_of(path) for path in folder.glob("*.safetensors")}


def order_of(node: Path, model_path: Path, *, rank: int, resume_from: Sequence[str]) -> Configure:
    return Configure(
        run_id="test",
        model_path=str(model_path),
        settings=SETTINGS,
        memory_root=str(node / "memory"),
        durable_root=str(node / "durable"),
        checkpoints=str(node / "checkpoints"),
        resume_from=tuple(str(node / "checkpoints" / name) for name in resume_from),
        ranks_here=(rank,),
        owns_checkpoints=True,
        may_start_over=False,
        chain=chain_of(0),
        epoch=0,
        fence=str(node / "epoch"),
    )


@asynccontextmanager
async def start_nodes(
    root: Path, model_path: Path, *, resume_from: Sequence[str] = (), environ: Mapping[str, str] = os.environ
) -> AsyncIterator[Nodes]:
    """Ranks that are configured, each started by the torchrun of a node in `root`."""
    token = secrets.token_hex(8)
    end = ControllerEnd(address="tcp://127.0.0.1:0", token=token, world_size=NODES, now=time.monotonic)
    address, port = await end.start(), free_port()
    processes: list[asyncio.subprocess.Process] = []
    async with AsyncExitStack() as stack:
        stack.push_async_callback(end.close)
        for index in range(NODES):
            node = root / f"node-{index}"
            await asyncio.to_thread(node.mkdir, exist_ok=True)
            await asyncio.to_thread(raise_fence, node / "epoch", epoch=0)
            lease = node / f"lease-{secrets.token_hex(4)}"
            stack.callback(hold(lease).close)
            place = TrainingNode(
                nodes=NODES, index=index, ranks=1, master="127.0.0.1", port=port, interface=interface_of("127.0.0.1")
            )
            plan = plan_trainer(
                CONFIG, controller=address, token=token, lease=lease, store=node / "store", environ=environ, node=place
            )
            processes.append(await asyncio.create_subprocess_exec(*plan.argv, env=plan.env, start_new_session=True))
            stack.push_async_callback(end_process, processes[-1])
        await end.wait_ready(START_S)
        for rank in range(NODES):
            await end.send(rank, order_of(root / f"node-{rank}", model_path, rank=rank, resume_from=resume_from))
        yield Nodes(end, processes, root)


async def end_process(process: asyncio.subprocess.Process) -> None:
    if process.returncode is None:
        os.killpg(process.pid, signal.SIGTERM)
        await process.wait()


def waves(step: int) -> list[list[list[Answer]]]:
    answers = make_groups(2, version=step, seed=step)
    return [[answers[: len(answers) // 2], answers[len(answers) // 2 :]]]


@pytest.mark.deep
@pytest.mark.timeout(600)
async def test_a_node_without_its_disk_resumes_bit_for_bit_from_the_files_that_were_reported(
    tmp_path: Path, model_path: Path
) -> None:
    root, copy = tmp_path / "nodes", tmp_path / "copy"
    root.mkdir()
    async with start_nodes(root, model_path) as job:
        assert await job.ready() == {0}
        listening = open_ports(job)
        await job.step(0, waves(0))
        await job.checkpoint()
        await job.step(1, waves(1))
        reports = await job.checkpoint()
        for name, report in reports.items():
            assert Path(report.folder).is_relative_to(root / name)
            (copy / Path(report.folder).name).mkdir(parents=True, exist_ok=True)
            for file, checksum in report.files.items():
                kept = shutil.copy(Path(report.folder) / file, copy / Path(report.folder).name / file)
                assert checksum_of(Path(kept)) == checksum
        await job.step(2, waves(2))
        expected = job.version(3)
        await job.kill()
    assert listening == {0: 1, 1: 0}, "only the first torchrun listens, and no rank"
    older, newest = [path.name for path in checkpoints_in(root / "node-0" / "checkpoints")]
    shutil.rmtree(root / "node-1")
    shutil.rmtree(root / "node-0" / "memory")
    shutil.copytree(copy, root / "node-1" / "checkpoints")
    async with start_nodes(root, model_path, resume_from=[newest]) as job:
        assert await job.ready() == {2}
        folders = [root / f"node-{index}" / "checkpoints" for index in range(NODES)]
        assert [[path.name for path in checkpoints_in(folder)] for folder in folders] == [[newest]] * NODES
        await job.step(2, waves(2))
        assert job.version(3) == expected
        [written] = {Path(report.folder).name for report in (await job.checkpoint()).values()}
        await job.broadcast(DeleteCheckpoint(name=newest))
        await job.broadcast(DeleteCheckpoint(name=".."))
        await job.broadcast(Stop(reason="the test is over"))
        assert await job.exit_codes() == [0, 0]
    assert [[path.name for path in checkpoints_in(folder)] for folder in folders] == [[written]] * NODES
    assert older not in (newest, written)


def open_ports(job: Nodes) -> dict[int, int]:
    """Number of listening sockets of each node's processes."""
    found: dict[int, Any] = {}
    for index, process in enumerate(job.processes):
        family = [psutil.Process(process.pid), *psutil.Process(process.pid).children(recursive=True)]
        connections = [one for member in family for one in member.net_connections("inet")]
        found[index] = len({one.laddr.port for one in connections if one.status == psutil.CONN_LISTEN})
    return found
