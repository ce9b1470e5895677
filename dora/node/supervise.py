"""The processes of a run on this host: start, watch and end them, with all their descendants.

Invariant: a child has its own session, so that Ctrl-C in the terminal reaches only the controller; its output is in its
log file; and it never outlives the controller, not even after kill -9: the kernel kills it (Linux), and an open `Node`
holds the lease that the child watches. The owner of a child decides about restarts: `Child` implements
`controller.fleet.KeptServer`, which restarts engines with pauses and a limit; a trainer that ends early ends the run.

Output loop, one per child with a ready line. Consumes: its standard output. Produces: its log, and the URL of the ready
line. Waits for: the next bytes. Unblocked by: any output, and the child's end.
"""

from __future__ import annotations

import asyncio
import errno
import os
import re
import signal
from collections.abc import Awaitable, Callable, Iterable
from contextlib import suppress
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import IO, Self

import psutil
import structlog

from dora.errors import ConfigError, RemoteError
from dora.node.lease import die_with_parent, hold
from dora.node.plan import HOST, ProcessPlan
from dora.node.ports import free_port

log = structlog.get_logger(__name__)

READY_LINE = re.compile(rb"^ready (http://\S+)\r?$", re.MULTILINE)
#: Time from SIGTERM to SIGKILL. An idle engine ends at once; a trainer has written its checkpoint before SIGTERM.
GRACE_S = 3.0
KILL_TIMEOUT_S = 10.0  # exceeded only by a process that is stuck in the kernel
READY_POLL_S = 0.25  # between health checks of a child without a ready line
TAIL_LINES = 4
_TAIL_BYTES = 4096
_CONFIG_ERROR_CODE = 2
#: The host lacks processes, memory or files, perhaps only for now.
_SCARCE = {errno.EAGAIN, errno.ENOMEM, errno.EMFILE, errno.ENFILE}

#: Returns whether the server at a URL passes its health check.
IsWell = Callable[[str], Awaitable[bool]]


class Child:
    """One process, which can be restarted after its end."""

    def __init__(self, plan: ProcessPlan, *, log: Path, host: str = HOST, is_well: IsWell | None = None) -> None:
        """`host`: where it listens. `is_well` is required by a plan with a port."""
        self.plan = plan
        self._host = host
        self.log = log
        self._is_well = is_well
        self._process: asyncio.subprocess.Process | None = None
        self._output: asyncio.Task[None] | None = None
        self._log_begin = 0  # where the output of this process begins

    @property
    def pid(self) -> int | None:
        """The process id while it runs, else None."""
        return self._process.pid if self._process is not None and self._process.returncode is None else None

    async def start(self) -> str:
        """Start the process and wait until it is ready. Return its URL, or "" if the plan has no ready timeout.

        RemoteError if it ends or times out first, or the host lacks resources for it; ConfigError if it ends with a
        configuration error, so that a restart would not help.
        """
        await self.kill()
        port = free_port(self._host)
        with open_log(self.log) as log:
            self._log_begin = log.tell()
            self._process = process = await self._spawn(log, port=port)
        if self.plan.ready_timeout_s is None:
            return ""
        try:
            async with asyncio.timeout(self.plan.ready_timeout_s):
                url = await (self._well_at(process, port=port) if self.plan.has_port else self._ready_line(process))
                url = url or await self._fail_to_start(process)
        except TimeoutError:
            await self.kill()
            waited = f"not ready after {self.plan.ready_timeout_s:g} s"
            raise RemoteError(f"{self.plan.name}: {waited}; {self._end_of_log()}") from None
        return url

    async def ended(self) -> str:
        """Wait for the end of the process. Return the cause and the last lines of its log."""
        assert self._process is not None, "it was started"
        code = await self._process.wait()
        if self._output is not None:
            await asyncio.shield(self._output)  # until the log is complete
        return f"{self.plan.name} ended with {_cause(code)}; {self._end_of_log()}"

    async def kill(self) -> None:
        """Kill the process and its descendants at once."""
        await self._end(signal.SIGKILL, grace_s=KILL_TIMEOUT_S)

    async def stop(self, *, grace_s: float = GRACE_S) -> None:
        """Terminate the process; after `grace_s`, kill it and its descendants."""
        await self._end(signal.SIGTERM, grace_s=grace_s)

    async def finish(self, *, timeout_s: float) -> None:
        """Terminate the process, which must end its own children; after `timeout_s`, kill it and its descendants."""
        if self._process is not None and self._process.returncode is None:
            with suppress(TimeoutError):
                async with asyncio.timeout(timeout_s):
                    self._process.terminate()
                    await self._process.wait()
        await self.kill()

    def signal_kill(self) -> None:
        """Send SIGKILL to the process and its descendants, without waiting."""
        if self.pid is not None:
            _kill_all([*_descendants(self.pid), psutil.Process(self.pid)])

    async def _spawn(self, log: IO[bytes], *, port: int) -> asyncio.subprocess.Process:
        piped = self.plan.ready_timeout_s is not None and not self.plan.has_port
        try:
            return await asyncio.create_subprocess_exec(
                *(word.replace("{port}", str(port)) for word in self.plan.argv),
                env=dict(self.plan.env),
                stdin=asyncio.subprocess.DEVNULL,
                stdout=asyncio.subprocess.PIPE if piped else log,
                stderr=asyncio.subprocess.STDOUT,
                start_new_session=True,
                preexec_fn=partial(_tie_to, os.getpid()),
            )
        except OSError as err:
            message = f"{self.plan.name}: {self.plan.argv[0]} cannot be started ({err.strerror})"
            if err.errno in _SCARCE:
                raise RemoteError(message) from err
            raise ConfigError(f"{self.plan.field}: {message}" if self.plan.field else message) from err

    async def _ready_line(self, process: asyncio.subprocess.Process) -> str:
        """Return the URL that the process prints, or "" if it ends first."""
        ready: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        self._output = asyncio.create_task(self._copy_output(process, ready), name=f"{self.plan.name}-output")
        return await asyncio.shield(ready)

    async def _well_at(self, process: asyncio.subprocess.Process, *, port: int) -> str:
        """Return the URL once its health check succeeds, or "" if the process ends first."""
        assert self._is_well is not None, "a plan with a port requires it"
        url = f"http://{self._host}:{port}"
        while process.returncode is None:
            if await self._is_well(url):
                return url
            await asyncio.sleep(READY_POLL_S)
        return ""

    async def _copy_output(self, process: asyncio.subprocess.Process, ready: asyncio.Future[str]) -> None:
        """Run the output loop; set `ready` to the URL, or to "" if the output ends without one."""
        assert process.stdout is not None
        seen = b""
        try:
            with open_log(self.log) as log:
                while chunk := await process.stdout.read(65_536):
                    with suppress(OSError):  # a full disk drops lines of logs
                        log.write(chunk)
                    if not ready.done():
                        seen += chunk
                        if found := READY_LINE.search(seen):
                            ready.set_result(found[1].decode())
        finally:
            if not ready.done():
                ready.set_result("")

    async def _fail_to_start(self, process: asyncio.subprocess.Process) -> str:
        code = await process.wait()
        message = f"{self.plan.name}: ended with {_cause(code)} before it was ready; {self._end_of_log()}"
        raise ConfigError(message) if code == _CONFIG_ERROR_CODE else RemoteError(message)

    async def _end(self, number: signal.Signals, *, grace_s: float) -> None:
        process = self._process
        if process is None:
            return
        # torchrun starts every rank in its own session, so the process group does not include all descendants.
        descendants = _descendants(process.pid) if process.returncode is None else []
        if process.returncode is None:
            _signal_group(process.pid, number)
        try:
            async with asyncio.timeout(grace_s):
                await process.wait()
        except TimeoutError:
            _signal_group(process.pid, signal.SIGKILL)
        _kill_all(descendants)
        await self._reap(process)

    async def _reap(self, process: asyncio.subprocess.Process) -> None:
        try:
            async with asyncio.timeout(KILL_TIMEOUT_S):
                await process.wait()
                if self._output is not None:
                    await self._output
        except TimeoutError:
            raise RemoteError(f"{self.plan.name}: process {process.pid} does not end after SIGKILL") from None
        self._process = self._output = None

    def _end_of_log(self) -> str:
        if cause := first_line(self.log, self.plan.cause, begin=self._log_begin):
            return f"{cause}; its log: {self.log}"
        lines = tail(self.log)
        return f"its log ({self.log}) ends: {' | '.join(lines)}" if lines else f"its log ({self.log}) is empty"


class Node:
    """All children of a run on this host, as an async context manager that ends them on exit."""

    def __init__(self, *, logs: Path, lease: Path, host: str = HOST) -> None:
        """`host`: the address of this machine at which its servers listen."""
        self._logs = logs
        self._host = host
        self._lease_path = lease
        self._lease: IO[bytes] | None = None
        self.children: dict[str, Child] = {}

    async def __aenter__(self) -> Self:
        self._lease = hold(self._lease_path)
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        assert self._lease is not None
        try:
            await self.stop()
        finally:
            self._lease.close()

    def add(self, plan: ProcessPlan, *, is_well: IsWell | None = None) -> Child:
        """Return a new child, not yet started."""
        log = self._logs / f"{plan.name}.log"
        child = self.children[plan.name] = Child(plan, log=log, host=self._host, is_well=is_well)
        return child

    async def stop(self, *, grace_s: float = GRACE_S) -> None:
        """Stop all children concurrently. One that does not end is left to the kernel, which has its SIGKILL."""

        async def stop(child: Child) -> None:
            try:
                await child.stop(grace_s=grace_s)
            except RemoteError as err:
                log.warning("process_does_not_end", reason=str(err))

        await asyncio.gather(*map(stop, self.children.values()))

    def kill_all(self) -> None:
        """Kill all children without waiting, for the second Ctrl-C."""
        for child in self.children.values():
            child.signal_kill()


def open_log(path: Path) -> IO[bytes]:
    """Open a child's log for appending, unbuffered, so that no failed write is repeated when it is closed."""
    try:
        return path.open("ab", buffering=0)
    except OSError as err:
        raise RemoteError(f"{path}: cannot be written ({err.strerror})") from err


def tail(log: Path) -> list[str]:
    """Return the last lines that are not blank; none if the log was deleted."""
    if not log.exists():
        return []
    with log.open("rb") as file:
        file.seek(max(0, file.seek(0, os.SEEK_END) - _TAIL_BYTES))
        lines = file.read(_TAIL_BYTES).decode(errors="replace").splitlines()
    return [line.strip() for line in lines if line.strip()][-TAIL_LINES:]


def first_line(log: Path, beginning: str, *, begin: int) -> str:
    """Return the first line after position `begin` that starts with `beginning` (not ""); "" if there is none."""
    if not beginning or not log.exists():
        return ""
    with log.open("rb") as file:
        file.seek(begin)
        found = (line for line in file if line.startswith(beginning.encode()))
        return next(found, b"").decode(errors="replace").strip()


def _tie_to(parent: int) -> None:
    """Tie the child to its parent, between fork and exec."""
    die_with_parent()
    if os.getppid() != parent:  # the parent died before the kernel was told
        os._exit(1)


def _cause(code: int) -> str:
    return f"exit code {code}" if code >= 0 else signal.Signals(-code).name


def _signal_group(pid: int, number: signal.Signals) -> None:
    """Signal the child and its process group, which may be gone already."""
    with suppress(ProcessLookupError):
        os.killpg(pid, number)


def _descendants(pid: int) -> list[psutil.Process]:
    try:
        return psutil.Process(pid).children(recursive=True)
    except psutil.NoSuchProcess:
        return []


def _kill_all(processes: Iterable[psutil.Process]) -> None:
    """Kill processes. psutil compares start times, so a reused process id is not hit."""
    for process in processes:
        with suppress(psutil.NoSuchProcess):
            process.kill()
