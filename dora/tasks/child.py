"""A process that runs code of the user, below its guards (guard.py), which end everything that it starts.

It speaks in frames (dora/pipes.py) on its stdin and stdout. Its stderr is read to the end, so that it never blocks on a
full pipe; the tail is kept to explain its death.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import sys
from collections.abc import Callable, Mapping, Sequence

from dora.errors import ProtocolError
from dora.pipes import HEADER, SURVIVED
from dora.tasks.cgroup import ControlGroup, make_cgroup
from dora.tasks.guard import OVER_MEMORY

#: Timeout for the guards to kill their descendants.
_KILL_TIMEOUT_S = 5.0

#: Time for a process that closed its pipe to exit by itself, so that its own exit status is reported.
_EXIT_GRACE_S = 1.0

#: Bytes kept of stderr.
_STDERR_TAIL_BYTES = 4_096


class GuardedProcess:
    """A `name` ("grader") whose process may be started and killed any number of times.

    `argv` is the guard's COMMAND: empty for a grader, otherwise memory limit, CPU cores and command. `total_mb` limits
    the memory of the process and all its descendants together; 0 is no limit. `max_bytes` bounds the body of a frame
    that the process sends. `on_output` receives what the process writes to stderr. The process inherits no DORA_*
    variable, because these hold the keys of the run.
    """

    def __init__(
        self,
        name: str,
        *,
        max_bytes: int,
        argv: Sequence[str] = (),
        environment: Mapping[str, str] | None = None,
        total_mb: int = 0,
        on_output: Callable[[bytes], None] | None = None,
    ) -> None:
        self.name = name
        self.was_over_memory = False  #: whether its last process was killed because of `total_mb`
        self._total_mb = total_mb
        self._cgroup: ControlGroup | None = None
        self._argv = argv
        self._environment = environment or {}
        self._max_bytes = max_bytes
        self._on_output = on_output
        self._process: asyncio.subprocess.Process | None = None
        self._stderr: asyncio.Task[None] | None = None
        self._stderr_tail = b""

    @property
    def is_running(self) -> bool:
        return self._process is not None and self._process.returncode is None

    async def spawn(self) -> None:
        """Start the process in a session of its own, so that Ctrl-C reaches the controller only."""
        environment = {name: value for name, value in os.environ.items() if not name.startswith("DORA_")}  # no tokens
        self._cgroup = make_cgroup(self._total_mb << 20) if self._total_mb else None
        self._process = await asyncio.create_subprocess_exec(
            sys.executable,
            "-m",
            "dora.tasks.guard",
            str(os.getpid()),
            str(self._total_mb),
            str(self._cgroup.path) if self._cgroup is not None else "",
            *self._argv,
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
            start_new_session=True,
            env={**environment, "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1", **self._environment},
        )
        self._stderr_tail = b""
        self._stderr = asyncio.create_task(self._drain_stderr(self._process), name=f"{self.name}-stderr")

    async def kill(self) -> None:
        """Kill the process and every process it started, even in other sessions."""
        process, self._process = self._process, None
        if process is None or self._stderr is None:
            return
        with contextlib.suppress(ProcessLookupError):  # already gone
            process.terminate()
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGCONT)  # the guards may be stopped; the first one leads their session
        try:
            async with asyncio.timeout(_KILL_TIMEOUT_S):
                await process.wait()
                await self._stderr
        except TimeoutError:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
        finally:
            self._stderr.cancel()
            cgroup, self._cgroup = self._cgroup, None
            self.was_over_memory = process.returncode == OVER_MEMORY or (cgroup is not None and cgroup.was_exceeded())
            if cgroup is not None:
                await cgroup.close()

    def write(self, body: bytes) -> None:
        """Send a frame. The buffer has no limit: wait for `drained`, or bound the number of unanswered requests."""
        self.write_bytes(HEADER.pack(len(body)) + body)

    def write_bytes(self, data: bytes) -> None:
        """Send a part of a frame, or of several, as `write` does."""
        assert self._process is not None
        assert self._process.stdin is not None
        self._process.stdin.write(data)

    async def drained(self) -> None:
        assert self._process is not None
        assert self._process.stdin is not None
        await self._process.stdin.drain()

    async def read(self) -> bytes:
        """Return the next frame. IncompleteReadError or ConnectionError if the process is gone, ProtocolError if the
        frame is too large."""
        assert self._process is not None
        stdout = self._process.stdout  # a kill forgets the process
        assert stdout is not None
        (size,) = HEADER.unpack(await stdout.readexactly(HEADER.size))
        if size > self._max_bytes:
            raise ProtocolError(f"{self.name} announced a reply of {size} bytes")
        return await stdout.readexactly(size)

    async def read_bytes(self, size: int) -> bytes:
        """Return at most `size` bytes of its frames; none if the process is gone."""
        assert self._process is not None
        assert self._process.stdout is not None
        return await self._process.stdout.read(size)

    async def ending(self, err: Exception) -> str:
        """Kill the process after an error of `read` or `write`; return how it ended, with its last line of stderr."""
        process = self._process
        assert process is not None
        if isinstance(err, ProtocolError):
            await self.kill()
            return str(err)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_EXIT_GRACE_S):
                await process.wait()
        code = process.returncode
        await self.kill()
        how = "stdout closed" if code is None else f"exit code {code}" if code >= 0 else signal.Signals(-code).name
        if self.was_over_memory:
            return f"it and all that it started took more than {self._total_mb} MB together"
        tail = self._stderr_tail.decode(errors="replace")
        lines = [line for line in tail.splitlines() if line.strip() and not line.startswith(SURVIVED)]
        return f"{how}: {lines[-1][:200]}" if lines else how

    async def _drain_stderr(self, process: asyncio.subprocess.Process) -> None:
        assert process.stderr is not None
        while chunk := await process.stderr.read(_STDERR_TAIL_BYTES):
            self._stderr_tail = (self._stderr_tail + chunk)[-_STDERR_TAIL_BYTES:]
            if self._on_output is not None:
                self._on_output(chunk)
