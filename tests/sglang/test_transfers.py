"""Weights over a process group, as the controller moves them: two servers of each kind, real senders, gloo between.

The model has 69 M parameters in float32, 274 MB: few layers, wide ones, so that a token stays cheap.
"""

from __future__ import annotations

import asyncio
import subprocess
import sys
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import ExitStack, asynccontextmanager, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil
import pytest

from dora.engine.errors import PushFailed, RequestRefused, ServerGone
from dora.engine.names import UNCONFIRMED
from dora.engine.sglang import protocol
from dora.engine.sglang.client import EngineClient
from dora.engine.sglang.distributed import Distributed
from dora.engine.sglang.push import Disk, push
from dora.engine.sglang.senders import Senders
from dora.engine.sglang.target import PushTarget
from dora.errors import RemoteError
from tests.embedded.conftest import Reference, qwen3, save
from tests.engine import pushing
from tests.sglang.conftest import DIALECT, LAUNCH, START_LABEL, Kind

pytestmark = [
    pytest.mark.timeout(300, func_only=True),  # starting two servers has a limit of its own
    pytest.mark.asyncio(loop_scope="module"),
    pytest.mark.deep,
]

PROMPT = [5, 600, 7000, 15999, 9, 10]
VERSION_BYTES = 256 * 2**20
BUCKET_BYTES = 64 * 2**20
PUSH_S = 120.0
HUNG_S = 6.0
#: Long enough for a server to enter a broadcast that then cannot end.
ENTER_S = 1.0


def large(folder: Path, *, seed: int, hidden: int = 512) -> Path:
    config = qwen3(hidden=hidden)
    config.update({"vocab_size": 16_384, "intermediate_size": 16_384, "head_dim": 64, "tie_word_embeddings": False})
    return save(folder, config, seed=seed, scale=1.0)


@dataclass(frozen=True)
class Version:
    folder: Path
    logprobs: list[float]  # of PROMPT, in transformers' hands


@pytest.fixture(scope="module")
def version(tmp_path_factory: pytest.TempPathFactory) -> Callable[[int], Version]:
    """Versions 1 and 2."""
    made = {}
    for seed in (1, 2):
        folder = large(tmp_path_factory.mktemp("versions") / f"v{seed}", seed=seed)
        assert sum(path.stat().st_size for path in folder.glob("*.safetensors")) >= VERSION_BYTES
        made[seed] = Version(folder, Reference(folder).logprobs(PROMPT))
    return made.__getitem__


@contextmanager
def serving(command: Sequence[str], *, count: int) -> Iterator[list[str]]:
    """The URLs of the servers that one process starts."""
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as launcher:
        assert launcher.stdout is not None
        try:
            lines = [launcher.stdout.readline() for _ in range(count)]  # the launcher has a limit of its own
            assert all(line.startswith("ready http://127.0.0.1:") for line in lines), launcher.communicate(timeout=30)
            yield [line.split()[1] for line in lines]
        finally:
            launcher.terminate()
            launcher.communicate(timeout=60)


@pytest.fixture(scope="module")
def urls(
    kind: Kind, version: Callable[[int], Version], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[list[str]]:
    """Two servers that hold version 1."""
    shared = ["--slots", "2", "--kv-tokens", "2048", "--weight-version", START_LABEL]
    model = str(version(1).folder)
    with ExitStack() as stack:
        if kind == "sglang":
            logs = str(tmp_path_factory.mktemp("logs"))
            command = [sys.executable, str(LAUNCH / "serve.py"), model, "--servers", "2", "--logs", logs, *shared]
            yield stack.enter_context(serving(command, count=2))
            return
        serve = [
            sys.executable,
            "-m",
            "dora",
            "serve",
            "--model",
            model,
            "--port",
            "0",
            "--skip-tokenizer-init",
            *shared,
        ]
        yield [url for _ in range(2) for url in stack.enter_context(serving(serve, count=1))]


senders, client = pushing.senders, pushing.client


@pytest.fixture
def transfer(senders: Senders) -> Distributed:
    return Distributed(senders, otherwise=Disk(), dtype="float32", use_nccl=False, bucket_bytes=BUCKET_BYTES)


def holds(version: Version) -> Any:
    return pytest.approx(version.logprobs, abs=1e-3)


@dataclass(frozen=True)
class Watched(PushTarget):
    """A server whose reported label is recorded after each bucket; `before` is called before each one."""

    labels: list[str] = field(default_factory=list)
    before: Callable[[int], object] = lambda number: None

    async def receive(self, group: str, **bucket: Any) -> None:
        self.before(len(self.labels))
        await super().receive(group, **bucket)
        self.labels.append(await self.weight_version())


def sender_processes() -> list[psutil.Process]:
    return [child for child in psutil.Process().children() if child.cmdline()[-2:] == ["dora", "send"]]


def model_process(url: str) -> psutil.Process:
    """The one that holds the weights of the server at `url`."""
    port = int(url.rpartition(":")[2])
    [main] = {one.pid for one in psutil.net_connections("tcp4") if one.laddr.port == port and one.status == "LISTEN"}
    children = psutil.Process(main).children()
    return next((one for one in children if "scheduler" in " ".join(one.cmdline())), psutil.Process(main))


async def push_to(client: EngineClient, url: str, version: Version, *, label: str, transfer: Distributed) -> None:
    server = PushTarget(client, url)
    await push(server, folder=version.folder, label=label, timeout_s=PUSH_S, transfer=transfer)


@asynccontextmanager
async def stuck_push(
    client: EngineClient, url: str, version: Version, *, label: str, transfer: Distributed, timeout_s: float
) -> AsyncIterator[asyncio.Task[None]]:
    """A push whose server waits for a bucket that its sender, which is stopped, will never finish."""
    stopped = asyncio.Event()

    def stop(number: int) -> None:
        if number == 1:
            for sender in sender_processes():
                sender.suspend()
            stopped.set()

    server = Watched(client, url, before=stop)
    pushing = asyncio.create_task(
        push(server, folder=version.folder, label=label, timeout_s=timeout_s, transfer=transfer)
    )
    async with asyncio.timeout(PUSH_S):
        await stopped.wait()
    await asyncio.wait({pushing}, timeout=ENTER_S)
    assert not pushing.done()
    yield pushing


async def test_a_version_of_256_mb_moves_into_two_servers_and_their_log_probs_prove_it(
    client: EngineClient, transfer: Distributed, urls: list[str], version: Callable[[int], Version]
) -> None:
    new = version(2)
    for url in urls:
        assert await client.prompt_logprobs(url, PROMPT, timeout_s=60) == holds(version(1))
    watched = [Watched(client, url) for url in urls]
    async with asyncio.TaskGroup() as pushes:
        for server in watched:
            pushes.create_task(push(server, folder=new.folder, label="run/2", timeout_s=PUSH_S, transfer=transfer))
    for server in watched:
        assert await client.prompt_logprobs(server.url, PROMPT, timeout_s=60) == holds(new)
        assert await client.weight_version(server.url) == "run/2"
        assert len(server.labels) > 3
        assert set(server.labels) == {UNCONFIRMED}  # until the weights are verified


async def test_any_live_version_goes_to_any_server(
    client: EngineClient, transfer: Distributed, urls: list[str], version: Callable[[int], Version]
) -> None:
    older, newer = urls
    await push_to(client, older, version(1), label="run/1", transfer=transfer)
    await push_to(client, newer, version(2), label="run/2", transfer=transfer)
    assert await client.prompt_logprobs(older, PROMPT, timeout_s=60) == holds(version(1))
    assert await client.prompt_logprobs(newer, PROMPT, timeout_s=60) == holds(version(2))


async def test_a_sender_killed_in_mid_bucket_fails_its_push_and_the_next_one_works(
    client: EngineClient, transfer: Distributed, urls: list[str], version: Callable[[int], Version]
) -> None:
    async with stuck_push(client, urls[0], version(1), label="run/1", transfer=transfer, timeout_s=PUSH_S) as pushing:
        killed = sender_processes()
        for sender in killed:
            sender.kill()
        with pytest.raises(PushFailed, match="the sender has ended") as failed:
            await pushing
    async with asyncio.timeout(PUSH_S):
        # Idle ones were killed, too, and their end is not noticed at once.
        while any(psutil.pid_exists(sender.pid) for sender in killed):  # noqa: ASYNC110 - other processes
            await asyncio.sleep(0.05)
    assert (failed.value.stage, failed.value.doubtful) == ("update", True)
    await push_to(client, urls[0], version(1), label="run/1", transfer=transfer)
    assert await client.prompt_logprobs(urls[0], PROMPT, timeout_s=60) == holds(version(1))


async def test_a_hung_sender_is_killed_at_the_deadline_and_the_next_push_works(
    client: EngineClient, transfer: Distributed, urls: list[str], version: Callable[[int], Version]
) -> None:
    async with stuck_push(client, urls[0], version(2), label="run/2", transfer=transfer, timeout_s=HUNG_S) as pushing:
        hung = [process for process in sender_processes() if process.status() == psutil.STATUS_STOPPED]
        with pytest.raises(PushFailed, match=f"did not end within {HUNG_S:g} s") as failed:
            await pushing
    assert (failed.value.stage, failed.value.doubtful) == ("update", True)
    assert hung
    _, alive = psutil.wait_procs(hung, timeout=30)  # it was killed
    assert not alive
    await push_to(client, urls[0], version(2), label="run/2", transfer=transfer)
    assert await client.prompt_logprobs(urls[0], PROMPT, timeout_s=60) == holds(version(2))


async def test_weights_of_another_shape_are_refused_and_the_server_takes_the_right_ones(
    client: EngineClient,
    transfer: Distributed,
    urls: list[str],
    version: Callable[[int], Version],
    tmp_path: Path,
) -> None:
    narrow = large(tmp_path / "narrow", seed=3, hidden=64)
    with pytest.raises(PushFailed, match=r"(?i)failed to update.*discard the whole weights") as failed:
        await push(PushTarget(client, urls[0]), folder=narrow, label="run/3", timeout_s=PUSH_S, transfer=transfer)
    assert (failed.value.stage, failed.value.doubtful) == ("update", True)
    await push_to(client, urls[0], version(1), label="run/1", transfer=transfer)
    assert await client.prompt_logprobs(urls[0], PROMPT, timeout_s=60) == holds(version(1))


async def test_an_unknown_group_cannot_be_destroyed(client: EngineClient, urls: list[str]) -> None:
    with pytest.raises(RequestRefused, match="The group to be destroyed does not exist"):
        await PushTarget(client, urls[0]).leave_group("unknown")


async def test_a_server_killed_in_mid_bucket_fails_its_push_and_no_other(
    client: EngineClient, transfer: Distributed, urls: list[str], version: Callable[[int], Version]
) -> None:
    """One of the two is gone afterwards."""
    dying, other = urls
    server = Watched(client, dying, before=lambda number: model_process(dying).kill() if number == 1 else None)
    new = version(2)
    dead, fine = await asyncio.gather(
        push(server, folder=new.folder, label="run/4", timeout_s=PUSH_S, transfer=transfer),
        push_to(client, other, new, label="run/4", transfer=transfer),
        return_exceptions=True,
    )
    assert fine is None
    assert await client.prompt_logprobs(other, PROMPT, timeout_s=60) == holds(new)
    assert isinstance(dead, PushFailed)
    assert (dead.stage, dead.doubtful) == ("update", True)


async def test_a_server_told_to_receive_from_a_group_it_never_joined_dies(
    client: EngineClient, kind: Kind, urls: list[str]
) -> None:
    """This is why the client refuses to send that. A release with a gate around updates refuses it itself; the embedded
    engine speaks the default dialect here."""
    _, last = urls
    refuses = kind == "sglang" and DIALECT.has_update_gate
    bucket: dict[str, Any] = {"names": ["x"], "dtypes": ["float32"], "shapes": [[1]]}
    with pytest.raises(RemoteError, match="has not joined group 'unknown'"):
        await PushTarget(client, last).receive("unknown", **bucket, timeout_s=60)
    assert (await client.loads(last)).is_empty
    with pytest.raises(RequestRefused if refuses else ServerGone):
        await client.update(
            last, protocol.UPDATE_WEIGHTS_FROM_DISTRIBUTED, {**bucket, "group_name": "unknown"}, timeout_s=60
        )
