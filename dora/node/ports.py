"""Ports to listen on: check that the configured ones are free (0 always is), and find a free one."""

from __future__ import annotations

import random
import re
import socket
from contextlib import suppress
from pathlib import Path

import psutil

from dora.config.schema import Config
from dora.errors import ConfigError
from dora.node.plan import HOST

#: Above the ports of well-known services.
_FIRST_PORT = 10_000
#: The first and the last port of the ephemeral range (Linux).
_EPHEMERAL_PORTS = Path("/proc/sys/net/ipv4/ip_local_port_range")
#: ZeroMQ also accepts names of interfaces, which only it can resolve and check.
_NUMERIC_ADDRESS = re.compile(r"tcp://([\d.]+):(\d+)")


def require_free_ports(config: Config) -> None:
    """ConfigError, naming the field and the port, if a port of this run is in use."""
    status = config.status
    _require_free(status.host, status.port, field="status.port", host_field="status.host", who="the status endpoint")
    if found := _NUMERIC_ADDRESS.fullmatch(config.trainer.address):
        _require_free(found[1], int(found[2]), field="trainer.address", who="the controller")


def free_port(host: str = HOST) -> int:
    """Return a port of this host that is free now, for a server that cannot choose its own.

    The server may bind the port minutes later, once its model is loaded. By then another process could have got a port
    of the ephemeral range. So the port is below that range, unless 100 ports chosen at random there are in use.
    """
    first_ephemeral = int(_EPHEMERAL_PORTS.read_text().split()[0]) if _EPHEMERAL_PORTS.exists() else 0
    others = range(_FIRST_PORT, first_ephemeral)
    for port in (*random.sample(others, k=min(100, len(others))), 0):
        with suppress(OSError), socket.create_server((host, port)) as probe:
            return int(probe.getsockname()[1])
    raise ConfigError(f"{host} has no free port")


def interface_of(host: str) -> str:
    """Return the network interface of this host that has the address, or one of the addresses of the name, `host`; ""
    if none has."""
    try:
        wanted = {found[4][0] for found in socket.getaddrinfo(host, None)}
    except socket.gaierror:
        return ""
    found = (name for name, addresses in psutil.net_if_addrs().items() if wanted & {one.address for one in addresses})
    return next(found, "")


def _require_free(host: str, port: int, *, field: str, who: str, host_field: str = "") -> None:
    try:
        family, kind, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        with socket.socket(family, kind) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # as servers do; ignores TIME_WAIT
            probe.bind(address)
    except socket.gaierror as err:
        raise ConfigError(f"{host_field or field}: {host} is not an address ({err.strerror})") from err
    except OSError as err:
        raise ConfigError(
            f"{field}: {who} cannot listen on {host}:{port} ({err.strerror}); choose another, or 0 for any free port"
        ) from err
