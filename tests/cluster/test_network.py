"""The hosts and faults that the tests of many machines are made of."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil
import pytest

from tests.cluster.network import Host, Network, clock_library, missing
from tests.e2e.runs import until

MB = 1_000_000


@contextmanager
def connected(sender: Host, receiver: Host) -> Iterator[tuple[socket.socket, socket.socket]]:
    """Both ends of a connection."""
    with receiver.inside(lambda: socket.create_server((receiver.address, 0))) as server:
        server.settimeout(20)
        address = server.getsockname()
        with sender.inside(lambda: socket.create_connection(address, timeout=20)) as one, server.accept()[0] as other:
            other.settimeout(20)
            yield one, other


def receive(end: socket.socket, num_bytes: int) -> None:
    while num_bytes:
        part = end.recv(min(num_bytes, 1 << 16))
        assert part
        num_bytes -= len(part)


def send(end: socket.socket, num_bytes: int) -> threading.Thread:
    thread = threading.Thread(target=end.sendall, args=(bytes(num_bytes),))
    thread.start()
    return thread


@contextmanager
def datagrams(sender: Host, receiver: Host) -> Iterator[tuple[socket.socket, socket.socket]]:
    """A socket that sends to the other, which never blocks."""

    def made() -> socket.socket:
        return socket.socket(socket.AF_INET, socket.SOCK_DGRAM)

    with sender.inside(made) as one, receiver.inside(made) as other:
        other.bind((receiver.address, 0))
        other.settimeout(20)
        one.connect(other.getsockname())
        one.settimeout(20)
        yield one, other


def test_hosts_find_each_other_by_name_and_share_neither_folder_nor_memory_nor_processes(network: Network) -> None:
    a, b = network.host("a"), network.host("b", shm_mb=8)
    (a.folder / "mine").touch()
    look = "hostname; ls; ls /dev/shm; df --output=size -BM /dev/shm | tail -1; getent hosts a; pgrep -c ."
    a.start("touch", "/dev/shm/of-a").wait()
    seen = []
    for host in (a, b):
        looking = host.start("sh", "-c", look)
        assert looking.wait() == 0, looking.told()
        seen.append(looking.told().split())
    assert seen[0][0] == "a"
    assert {"mine", "of-a", "64M"} <= set(seen[0])
    assert seen[1][:1] + seen[1][-4:] == ["b", "8M", a.address, "a", "2"]
    assert not {"mine", "of-a"} & set(seen[1])


def test_bytes_are_counted_on_both_interfaces(network: Network) -> None:
    a, b = network.host("a"), network.host("b")
    before = a.counted(), b.counted()
    with connected(a, b) as (one, other):
        sending = send(one, 5 * MB)
        receive(other, 5 * MB)
        sending.join()
    sent, received = a.counted()[1] - before[0][1], b.counted()[0] - before[1][0]
    assert 5 * MB < sent < 5.5 * MB
    assert 5 * MB < received < 5.5 * MB
    assert b.counted()[1] - before[1][1] < MB / 2  # acknowledgements


def test_a_limited_link_has_the_rate_that_was_set(network: Network) -> None:
    a, b = network.host("a"), network.host("b")
    a.limit(2 * MB)
    with connected(a, b) as (one, other):
        sending = send(one, 3 * MB)
        receive(other, MB // 2)
        began = time.monotonic()
        receive(other, 2 * MB)
        took = time.monotonic() - began
        a.limit(None)
        receive(other, MB // 2)
        sending.join()
    assert took == pytest.approx(1.0, rel=0.2)


def test_a_lossy_link_loses_the_share_that_was_set(network: Network) -> None:
    a, b = network.host("a"), network.host("b")
    with datagrams(a, b) as (one, other):
        one.send(b"the address of b is now known")
        assert other.recv(100)
        other.setblocking(False)
        a.lose(0.2)
        received = 0
        for _ in range(4_000):
            one.send(b"x")
            received += arrived(other)
        a.restore()
        other.settimeout(20)
        one.send(b"last")
        while other.recv(100) != b"last":
            received += 1
    assert 1 - received / 4_000 == pytest.approx(0.2, rel=0.2)


def arrived(end: socket.socket) -> int:
    try:
        return len(end.recv(100))
    except BlockingIOError:
        return 0


def test_a_slow_link_delays_both_directions_and_can_lose_too(network: Network) -> None:
    a, b = network.host("a", slow=True), network.host("b")

    def round_trip_s(one: socket.socket, other: socket.socket) -> float:
        began = time.monotonic()
        one.send(b"ping")
        data, address = other.recvfrom(100)
        other.sendto(data, address)
        one.recv(100)
        return time.monotonic() - began

    with datagrams(a, b) as ends:
        round_trip_s(*ends)
        assert min(round_trip_s(*ends) for _ in range(3)) < 0.02
        a.delay(0.1)
        assert min(round_trip_s(*ends) for _ in range(3)) == pytest.approx(0.2, rel=0.2)
        a.delay(0.0, loss=1.0)
        ends[0].settimeout(0.2)
        with pytest.raises(TimeoutError):
            round_trip_s_of_one_way(*ends)
        a.delay(0.0)
        ends[0].settimeout(20)
        round_trip_s(*ends)


def round_trip_s_of_one_way(one: socket.socket, other: socket.socket) -> None:
    one.send(b"lost")
    one.recv(100)


def test_a_cut_link_blocks_silently_and_heals(network: Network) -> None:
    a, b, c = network.host("a"), network.host("b"), network.host("c")
    with connected(a, b) as (one, other), connected(a, c) as (bystander, third):
        a.cut(b)
        one.sendall(b"held")
        other.settimeout(0.3)
        with pytest.raises(TimeoutError):
            other.recv(4)
        bystander.sendall(b"here")
        receive(third, 4)
        a.cut()
        bystander.sendall(b"held")
        third.settimeout(0.3)
        with pytest.raises(TimeoutError):
            third.recv(4)
        a.restore()
        for end in (other, third):
            end.settimeout(20)
            receive(end, 4)


def test_a_shifted_host_has_another_wall_clock_and_the_same_monotonic_one(network: Network) -> None:
    if clock_library() is None:
        pytest.skip("needs libfaketime (apt install faketime)")
    host = network.host("a", clock_offset_s=3600)
    look = "import time; print(time.time(), time.monotonic())"
    wall, monotonic = time.time(), time.monotonic()
    looking = host.start(sys.executable, "-c", look)
    assert looking.wait() == 0, looking.told()
    seen = [float(word) for word in looking.told().split()]
    assert seen[0] - wall == pytest.approx(3600, abs=30)
    assert seen[1] - monotonic == pytest.approx(0, abs=30)


def test_a_host_that_crashes_is_silent_and_its_name_can_return_elsewhere(network: Network) -> None:
    a, b = network.host("a"), network.host("b")
    with connected(b, a) as (one, other):
        sleeping = a.start("sleep", "1000")
        (a.folder / "mine").touch()
        a.crash()
        assert sleeping.wait() != 0
        assert not a.folder.exists()
        one.settimeout(0.3)
        with pytest.raises(TimeoutError):  # no reset, no end
            one.recv(1)
        del other
    again = network.host("a")
    with connected(b, again) as (one, other):
        one.sendall(b"here")
        receive(other, 4)
    assert again.address != a.address


def users_of(namespaces: set[str]) -> list[int]:
    """Processes in any of these network namespaces."""
    found = []
    for pid in psutil.pids():
        try:
            namespace = os.readlink(f"/proc/{pid}/ns/net")
        except OSError:
            continue
        if namespace in namespaces:
            found.append(pid)
    return found


TEST_THAT_IS_KILLED = """
import os, sys
from pathlib import Path
from tests.cluster.network import network_at
with network_at(Path(sys.argv[1])) as network:
    hosts = [network.host("a"), network.host("b", slow=True)]
    for host in hosts:
        host.start("sh", "-c", "trap '' TERM INT HUP; setsid sleep 1000 & sleep 1000")
    held = [host._holder for host in hosts] + [network.switch]
    print(*(os.readlink(holder.namespace("net")) for holder in held), flush=True)
    sys.stdin.read()
"""


@pytest.mark.parametrize("end", ["in order", "killed"])
def test_no_process_and_no_namespace_outlives_the_test(tmp_path: Path, end: str) -> None:
    if lacking := missing():
        pytest.skip(f"needs {lacking}")
    pipe = subprocess.PIPE
    line = [sys.executable, "-c", TEST_THAT_IS_KILLED, str(tmp_path / "net")]
    with subprocess.Popen(line, stdin=pipe, stdout=pipe, text=True) as test:
        assert test.stdin is not None
        assert test.stdout is not None
        namespaces = set(test.stdout.readline().split())
        assert len(namespaces) == 3
        assert len(users_of(namespaces)) > 6
        if end == "killed":
            test.send_signal(signal.SIGKILL)
        test.stdin.close()
    until(lambda: not users_of(namespaces), what="the end of all processes", timeout_s=20)
