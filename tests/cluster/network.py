"""Machines in miniature: hosts made of Linux namespaces, joined by a switch, with faults on their links.

A host has an interface, a hostname, process ids, a /dev/shm of a given size, and a working folder, also its home. Every
host sees its own folder at the same path, so that no path leads to that of another host; the rest of the file system,
with the interpreter, is shared. Hosts find each other by name.

Invariant: namespaces have no names outside, and last as long as the process that holds them, which ends with the
process that made it, however that ends. Interfaces, mounts and processes in them last no longer.
"""

from __future__ import annotations

import ctypes
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from functools import cache, cached_property
from pathlib import Path
from typing import IO, Final, TypeVar

import psutil

from tests.cluster import forwarder
from tests.e2e.runs import environment, until

T = TypeVar("T")

INTERFACE: Final = "eth0"
TOOLS: Final = ("ip", "tc", "nft", "nsenter", "unshare", "mount")
#: What a limited link may send at once, bytes, and how long a frame may wait in its queue.
BURST_BYTES: Final = 16_384
QUEUE_MS: Final = 400

#: The first process in its namespaces: it adopts what loses its parent, and its end ends all others.
_HOLDER: Final = """
import json, signal, socket, subprocess, sys
socket.sethostname(sys.argv[1])
for line in json.loads(sys.argv[2]):
    subprocess.run(line, check=True)
signal.signal(signal.SIGINT, signal.SIG_IGN)
signal.signal(signal.SIGCHLD, signal.SIG_IGN)
print("ready", flush=True)
sys.stdin.read()
"""


@cache
def missing() -> str:
    """What hosts need and this machine lacks; empty if they can be made."""
    if lacking := [tool for tool in TOOLS if shutil.which(tool) is None]:
        return f"{' and '.join(lacking)} (apt install iproute2 nftables)"
    tried = subprocess.run(["unshare", "--net", "--mount", "--pid", "--fork", "true"], capture_output=True, check=False)
    if tried.returncode:
        return f"namespaces, which need root (unshare: {tried.stderr.decode().strip()})"
    return "" if Path("/dev/net/tun").exists() else "/dev/net/tun"


@cache
def clock_library() -> Path | None:
    """The library that shifts the wall clock (apt install faketime)."""
    return next(Path("/usr/lib").glob("*/faketime/libfaketimeMT.so.1"), None)


class _Holder:
    """A process that holds namespaces of its own, with what the lines have set up in them."""

    def __init__(self, name: str, lines: Sequence[Sequence[str]]) -> None:
        python = (sys.executable, "-I", "-S", "-c", _HOLDER, name, json.dumps(lines))
        kinds = ("--net", "--uts", "--ipc", "--mount-proc", "--pid", "--fork", "--kill-child")
        self._outer, self._input = _start_bound([_which("unshare"), *kinds, *python])
        self.pid = psutil.Process(self._outer.pid).children()[0].pid

    def namespace(self, kind: str) -> str:
        return f"/proc/{self.pid}/ns/{kind}"

    def enter(self) -> list[str]:
        return [_which("nsenter"), "--all", f"--target={self.pid}", "--"]

    def run(self, *argv: str, stdin: str = "") -> None:
        """Run a command in the network alone."""
        line = [_which("nsenter"), f"--net={self.namespace('net')}", "--", *argv]
        done = subprocess.run(line, input=stdin, capture_output=True, text=True, check=False)
        assert done.returncode == 0, f"{' '.join(argv)}: {done.stderr}{stdin}"

    def has_link(self, name: str) -> bool:
        """Return whether an interface is there; it stays for a moment after the namespace of its other end."""
        line = [_which("nsenter"), f"--net={self.namespace('net')}", "--", _which("ip"), "link", "show", "dev", name]
        return subprocess.run(line, capture_output=True, check=False).returncode == 0

    def close(self) -> None:
        """End all processes in these namespaces."""
        self._input.close()
        self._outer.wait()


def _start_bound(argv: Sequence[str]) -> tuple[subprocess.Popen[str], IO[str]]:
    """Start a process that ends when its standard input does, and so with this process; wait until it is ready."""
    process = subprocess.Popen(argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, start_new_session=True)
    assert process.stdin is not None
    assert process.stdout is not None
    with process.stdout:
        assert process.stdout.readline() == "ready\n", f"{argv} failed"
    return process, process.stdin


def _which(tool: str) -> str:
    found = shutil.which(tool)
    assert found is not None, tool
    return found


class HostProcess:
    """A process in a host; its output goes into a file."""

    def __init__(self, line: Sequence[str], *, log: Path) -> None:
        self.log = log
        with log.open("ab") as output:
            self._entered = subprocess.Popen(
                line, stdin=subprocess.DEVNULL, stdout=output, stderr=output, env=environment(), start_new_session=True
            )

    @cached_property
    def process(self) -> psutil.Process:
        return inner_process(self._entered)

    def poll(self) -> int | None:
        return self._entered.poll()

    def wait(self, timeout_s: float = 60.0) -> int:
        try:
            return self._entered.wait(timeout_s)
        except subprocess.TimeoutExpired:
            raise AssertionError(f"it did not end within {timeout_s:g} s:\n{self.told()}") from None

    def told(self) -> str:
        return self.log.read_text(errors="replace")


def inner_process(entered: subprocess.Popen[str] | subprocess.Popen[bytes]) -> psutil.Process:
    """The process that `nsenter` has started; signals go to it, and its exit code is that of nsenter."""

    def ask() -> psutil.Process | None:
        assert entered.poll() is None, "it has ended"
        return next(iter(psutil.Process(entered.pid).children()), None)

    return until(ask, what="a process in a host")


@dataclass(slots=True)
class _Faults:
    """The faults of one link in the switch."""

    is_cut: bool = False
    cut_from: set[str] = field(default_factory=set)  #: names of hosts
    loss: float = 0.0  #: share of the frames in each direction


@dataclass(eq=False, repr=False)
class Host:
    """One machine."""

    network: Network
    name: str
    address: str
    clock_offset_s: float  # of its wall clock, not of the monotonic one
    _holder: _Holder
    _slow: IO[str] | None  # the input of the forwarder that its link passes through
    _started: list[HostProcess]

    @property
    def folder(self) -> Path:
        """Its folder as the tests see it; inside, it is at `Network.base`."""
        return self.network.base / self.name

    # -- processes ----------------------------------------------------------------------------------------------------

    def prefix(self, **variables: str) -> list[str]:
        """What to put before a command line to run it here, in the host's folder."""
        base = str(self.network.base)
        values = {"HOME": base, "TMPDIR": f"{base}/tmp", **self._clock(), **variables}
        return [*self._holder.enter(), _which("env"), f"--chdir={base}", *(f"{k}={v}" for k, v in values.items())]

    def _clock(self) -> dict[str, str]:
        if not self.clock_offset_s:
            return {}
        offset = f"{self.clock_offset_s:+g}"
        return {"LD_PRELOAD": str(clock_library()), "FAKETIME": offset, "FAKETIME_DONT_FAKE_MONOTONIC": "1"}

    def start(self, *argv: str, **variables: str) -> HostProcess:
        log = self.folder / f"{Path(argv[0]).name}-{len(self._started)}.log"
        self._started.append(HostProcess([*self.prefix(**variables), *argv], log=log))
        return self._started[-1]

    def processes(self, *words: str) -> list[psutil.Process]:
        """All processes of the host whose command line has each of these words, the oldest first."""
        found = []
        for process in psutil.process_iter():
            with suppress(psutil.Error, OSError):
                if self._is_mine(process.pid) and set(words) <= set(process.cmdline()):
                    found.append(process)
        return sorted(found, key=lambda each: each.create_time())

    def _is_mine(self, pid: int) -> bool:
        ours = os.readlink(self._holder.namespace("pid"))
        return pid != self._holder.pid and os.readlink(f"/proc/{pid}/ns/pid") == ours

    def inside(self, call: Callable[[], T]) -> T:
        """Call a function in a thread of this host's network; sockets that it opens stay in it."""

        def enter() -> T:
            with open(self._holder.namespace("net")) as entered:
                if ctypes.CDLL(None, use_errno=True).setns(entered.fileno(), forwarder.CLONE_NEWNET):
                    raise OSError(ctypes.get_errno(), "setns")
            return call()

        with ThreadPoolExecutor(1) as thread:
            return thread.submit(enter).result()

    def outside(self, path: Path) -> Path:
        """The path for the tests of a path within the host's folder."""
        return self.folder / path.relative_to(self.network.base)

    def crash(self) -> None:
        """End the host as if its power failed: nobody hears of it, and its folder and memory are gone."""
        self.cut()
        self.network.forget(self)
        shutil.rmtree(self.folder)

    # -- its link -----------------------------------------------------------------------------------------------------

    def counted(self) -> tuple[int, int]:
        """Bytes that have come from the network, and those that went there, with the headers of their frames."""
        lines = Path(f"/proc/{self._holder.pid}/net/dev").read_text().splitlines()
        [line] = [line for line in lines if line.strip().startswith(f"{INTERFACE}:")]
        words = line.split(":")[1].split()
        return int(words[0]), int(words[8])

    def cut(self, *others: Host) -> None:
        """Lose everything to and from these hosts, or all; nobody is told."""
        faults = self.network.faults[self.name]
        faults.cut_from |= {other.name for other in others}
        faults.is_cut |= not others
        self.network.apply()

    def restore(self) -> None:
        """End what `cut` and `lose` did."""
        self.network.faults[self.name] = _Faults()
        self.network.apply()

    def lose(self, share: float) -> None:
        """Lose a share of the frames in each direction."""
        self.network.faults[self.name].loss = share
        self.network.apply()

    def limit(self, bytes_per_s: int | None) -> None:
        """Limit the rate of each direction, or lift the limit."""
        self.network.limit(self._holder, INTERFACE, bytes_per_s)
        self.network.limit(self.network.switch, self.name, bytes_per_s)

    def delay(self, seconds: float, *, loss: float = 0.0) -> None:
        """Delay every frame in each direction, and lose a share; for a host that was made with a slow link."""
        assert self._slow is not None, "made without a slow link"
        self._slow.write(f"{seconds} {loss}\n")
        self._slow.flush()


class Network:
    """A switch, and the hosts on it."""

    def __init__(self, base: Path) -> None:
        """`base`: an empty folder, in which each host gets one."""
        self.base = base
        self.hosts: dict[str, Host] = {}
        self.faults: dict[str, _Faults] = {}
        self._undo = ExitStack()
        self._undo_of: dict[str, ExitStack] = {}
        self._names = base / "hosts"
        self._names.write_text("127.0.0.1 localhost\n")
        self._number = 0

    def __enter__(self) -> Network:
        bridge = ("ip", "link", "add", "switch", "type", "bridge", "forward_delay", "0")
        self.switch = _Holder("switch", [bridge, ("ip", "link", "set", "switch", "up")])
        self._undo.callback(self.switch.close)
        return self

    def __exit__(self, *_: object) -> None:
        for undo in self._undo_of.values():
            undo.close()
        self._undo.close()

    def host(self, name: str, *, shm_mb: int = 64, slow: bool = False, clock_offset_s: float = 0.0) -> Host:
        """Add a machine. `slow`: its link passes through a forwarder, which can delay. Names that ended may return."""
        self._number += 1
        address = f"10.77.0.{self._number}"
        folder = self.base / name
        (folder / "tmp").mkdir(parents=True)
        undo = self._undo_of[name] = ExitStack()
        mounts = [
            ("mount", "-t", "tmpfs", "-o", f"size={shm_mb}m", "tmpfs", "/dev/shm"),
            ("mount", "--bind", str(self._names), "/etc/hosts"),
            ("mount", "--bind", str(folder), str(self.base)),
        ]
        started: list[HostProcess] = []
        undo.callback(lambda: [process.wait() for process in started])
        holder = _Holder(name, mounts)
        undo.callback(holder.close)
        link = self._connect(holder, name, undo=undo, slow=slow)
        up = f"address add {address}/16 dev {INTERFACE}\nlink set {INTERFACE} up\nlink set lo up\n"
        holder.run("ip", "-batch", "-", stdin=up)
        self.switch.run("ip", "-batch", "-", stdin=f"link set dev {name} master switch\nlink set dev {name} up\n")
        found = Host(self, name, address, clock_offset_s, holder, link, started)
        self.hosts[name], self.faults[name] = found, _Faults()
        self.name_host(name, found)
        return found

    def _connect(self, holder: _Holder, name: str, *, undo: ExitStack, slow: bool) -> IO[str] | None:
        until(lambda: not self.switch.has_link(name), what=f"the end of the earlier {name}'s link")
        if not slow:
            peer = ("peer", "name", INTERFACE, "netns", str(holder.pid))
            self.switch.run("ip", "link", "add", "name", name, "type", "veth", *peer)
            return None
        ends = (self.switch.namespace("net"), name, holder.namespace("net"), INTERFACE)
        process, link = _start_bound([sys.executable, "-I", "-S", forwarder.__file__, *ends])
        undo.callback(process.wait)
        undo.callback(link.close)
        return link

    def forget(self, host: Host) -> None:
        """End all processes of a host, and remove it; its folder stays."""
        del self.hosts[host.name], self.faults[host.name]
        self._undo_of.pop(host.name).close()
        self.apply()

    def name_host(self, name: str, host: Host) -> None:
        """Let a name lead to a host, for all hosts, from now on."""
        kept = [line for line in self._names.read_text().splitlines() if line.split()[1] != name]
        self._names.write_text("".join(f"{line}\n" for line in [*kept, f"{host.address} {name}"]))

    def apply(self) -> None:
        """Give the switch the rules of all faults."""
        rules = "\n".join(self._rules())
        chain = f"chain forward {{\ntype filter hook forward priority 0\n{rules}\n}}\n"
        table = f"table bridge faults {{}}\ndelete table bridge faults\ntable bridge faults {{\n{chain}}}\n"
        self.switch.run("nft", "-f", "-", stdin=table)

    def _rules(self) -> Iterator[str]:
        for name, faults in self.faults.items():
            for way, back in (("iifname", "oifname"), ("oifname", "iifname")):
                if faults.is_cut:
                    yield f'{way} "{name}" drop'
                for other in sorted(faults.cut_from):
                    yield f'{way} "{name}" {back} "{other}" drop'
                if faults.loss:
                    yield f'{way} "{name}" numgen random mod 10000 < {round(faults.loss * 10_000)} drop'

    @staticmethod
    def limit(end: _Holder, interface: str, bytes_per_s: int | None) -> None:
        """Limit what an end of a link sends."""
        if bytes_per_s is None:
            end.run("tc", "qdisc", "delete", "dev", interface, "root")
            return
        bucket = ("tbf", "rate", f"{8 * bytes_per_s}bit", "burst", str(BURST_BYTES), "latency", f"{QUEUE_MS}ms")
        end.run("tc", "qdisc", "replace", "dev", interface, "root", *bucket)


@contextmanager
def network_at(base: Path) -> Iterator[Network]:
    base.mkdir(parents=True, exist_ok=True)
    with Network(base) as network:
        yield network
