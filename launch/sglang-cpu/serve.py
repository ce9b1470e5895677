#!/usr/bin/env python3
"""Start N real SGLang servers of one model folder on this machine's CPU, and end them with this process.

Prints `ready http://HOST:PORT` for each server once all are healthy, like `dora serve`. Ends on SIGTERM, on
SIGINT, and when no server is left; a server that ends early is reported, and the others keep running. Builds the
environment first if necessary (build.py). No server outlives this process, however it ends.
"""

from __future__ import annotations

import argparse
import ctypes
import os
import random
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from contextlib import suppress
from pathlib import Path

from build import build

START_LIMIT_S = 300.0
STOP_LIMIT_S = 10.0
#: Flags for a CPU: plain torch in place of kernels, one thread per server, no busy loop when idle.
CPU_FLAGS = [
    *("--device", "cpu", "--attention-backend", "torch_native", "--sampling-backend", "pytorch"),
    *("--disable-overlap-schedule", "--disable-cuda-graph", "--mem-fraction-static", "0.2", "--sleep-on-idle"),
]
#: Flags that DORA requires of every SGLang server.
DORA_FLAGS = ["--skip-tokenizer-init", "--enable-metrics"]
INCREMENTAL_FLAG = "--incremental-streaming-output"  # also required, unless --cumulative is given
#: Environment variable with the servers' API key. The flag is added inside the process, because every user can read a
#: command line.
KEY = "DORA_SERVE_API_KEY"
WITH_KEY = (
    f"import os, runpy, sys; sys.argv += ['--api-key', os.environ.pop('{KEY}')]; "
    "runpy.run_module('sglang.launch_server', run_name='__main__', alter_sys=True)"
)
#: The first and the last port of the ephemeral range (Linux).
EPHEMERAL_PORTS = Path("/proc/sys/net/ipv4/ip_local_port_range")
ENVIRONMENT = {
    "SGLANG_USE_CPU_ENGINE": "1",
    "OMP_NUM_THREADS": "1",
    "HF_HUB_OFFLINE": "1",
    "TOKENIZERS_PARALLELISM": "false",
}


def main() -> None:
    options, more_flags = _options()
    python = build() / "bin" / "python"
    logs = options.logs or Path(tempfile.mkdtemp(prefix="dora-sglang-"))
    logs.mkdir(parents=True, exist_ok=True)
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: sys.exit(0))
    servers: dict[int, subprocess.Popen[bytes]] = {}
    try:
        for port in options.ports or _free_ports(options.servers):
            servers[port] = _start(python, port, logs=logs, options=options, more_flags=more_flags)
        _wait_until_healthy(servers, host=options.host, logs=logs)
        for port in servers:
            sys.stdout.write(f"ready http://{options.host}:{port}\n")
        sys.stdout.flush()
        _watch(servers, logs=logs)
    finally:
        _end(servers)


def _options() -> tuple[argparse.Namespace, list[str]]:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path, help="Hugging Face model folder")
    parser.add_argument("--servers", type=int, default=1, help="number of servers, on free ports (default: 1)")
    parser.add_argument("--ports", type=int, nargs="+", help="start one server on each port instead of --servers")
    parser.add_argument("--host", default="127.0.0.1", help="address on which they listen (default: 127.0.0.1)")
    parser.add_argument("--dtype", default="float32", help="float32 or bfloat16")
    parser.add_argument("--slots", type=int, default=24, help="maximum number of concurrent requests per server")
    parser.add_argument("--kv-tokens", type=int, default=16_384, help="KV capacity per server in tokens")
    parser.add_argument("--weight-version", default="default", help="label of the initial weights")
    parser.add_argument("--cumulative", action="store_true", help="repeat the whole answer in each chunk of a stream")
    parser.add_argument("--logs", type=Path, help="folder for the servers' logs (default: a temporary folder)")
    parser.epilog = "All other flags are passed on to SGLang."
    return parser.parse_known_args()


def _free_ports(count: int) -> list[int]:
    """Return ports that are free now, because SGLang cannot choose its own safely.

    It binds them once the model is loaded. They are therefore below the ephemeral range, from which another process
    could get one meanwhile.
    """
    first_ephemeral = int(EPHEMERAL_PORTS.read_text().split()[0]) if EPHEMERAL_PORTS.exists() else 32_768
    found: list[int] = []
    for port in random.sample(range(10_000, first_ephemeral), k=first_ephemeral - 10_000):
        with suppress(OSError), socket.create_server(("127.0.0.1", port)):
            found.append(port)
        if len(found) == count:
            return found
    sys.exit(f"fewer than {count} ports are free from 10000 to {first_ephemeral - 1}; choose them with --ports")


def _start(
    python: Path, port: int, *, logs: Path, options: argparse.Namespace, more_flags: list[str]
) -> subprocess.Popen[bytes]:
    command = [
        *(str(python), *(("-c", WITH_KEY) if os.environ.get(KEY) else ("-m", "sglang.launch_server"))),
        *("--model-path", str(options.model)),
        *("--host", options.host, "--port", str(port), "--dtype", options.dtype),
        *("--nccl-port", str(_free_ports(1)[0])),  # by default, one of the ephemeral range
        *("--max-running-requests", str(options.slots), "--max-total-tokens", str(options.kv_tokens)),
        *("--weight-version", options.weight_version, *CPU_FLAGS, *DORA_FLAGS),
        *([] if options.cumulative else [INCREMENTAL_FLAG]),
        *more_flags,
    ]
    with _log(logs, port).open("wb") as log:
        return subprocess.Popen(
            command,
            stdout=log,
            stderr=subprocess.STDOUT,
            env={**os.environ, **ENVIRONMENT},
            start_new_session=True,
            preexec_fn=_die_with_parent,
        )


def _die_with_parent() -> None:
    """On Linux, get SIGTERM when the parent ends in any way. SGLang ends its own children."""
    ctypes.CDLL(None).prctl(1, signal.SIGTERM)


def _wait_until_healthy(servers: dict[int, subprocess.Popen[bytes]], *, host: str, logs: Path) -> None:
    deadline = time.monotonic() + START_LIMIT_S
    for port in servers:
        while not _is_healthy(host, port):
            _require_alive(servers, logs=logs)
            if time.monotonic() > deadline:
                sys.exit(f"the server on port {port} is not healthy after {START_LIMIT_S:g} s; see {_log(logs, port)}")
            time.sleep(0.5)


def _is_healthy(host: str, port: int) -> bool:
    try:
        with urllib.request.urlopen(f"http://{host}:{port}/health", timeout=30) as answer:
            return bool(answer.status == 200)
    except (urllib.error.URLError, OSError):
        return False


def _watch(servers: dict[int, subprocess.Popen[bytes]], *, logs: Path) -> None:
    """Report each server that ends; exit when none is left."""
    running = dict(servers)
    while running:
        for port in [port for port, server in running.items() if server.poll() is not None]:
            code = running.pop(port).returncode
            sys.stderr.write(f"the server on port {port} ended with exit code {code}; see {_log(logs, port)}\n")
        time.sleep(0.5)
    sys.exit("no server is left")


def _require_alive(servers: dict[int, subprocess.Popen[bytes]], *, logs: Path) -> None:
    for port, server in servers.items():
        if server.poll() is not None:
            log = _log(logs, port)
            sys.stderr.write(log.read_text(errors="replace")[-2000:])
            sys.exit(f"the server on port {port} ended with exit code {server.returncode}; see {log}")


def _end(servers: dict[int, subprocess.Popen[bytes]]) -> None:
    """Terminate all servers, wait for them to drain, then kill the rest, including their workers."""
    for server in servers.values():
        server.terminate()
    deadline = time.monotonic() + STOP_LIMIT_S
    for server in servers.values():
        with suppress(subprocess.TimeoutExpired):
            server.wait(max(0.0, deadline - time.monotonic()))
        with suppress(ProcessLookupError):
            os.killpg(server.pid, signal.SIGKILL)
        server.wait()


def _log(logs: Path, port: int) -> Path:
    return logs / f"sglang-{port}.log"


if __name__ == "__main__":
    main()
