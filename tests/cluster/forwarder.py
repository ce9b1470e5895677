"""A link with delay and loss between two network namespaces, each of which gets a TAP interface.

    python forwarder.py FOLDER_OF_NAMESPACE INTERFACE FOLDER_OF_NAMESPACE INTERFACE

Each line of standard input, `SECONDS SHARE`, sets the delay and the loss of either direction from now on; at the start
there is neither. The end of standard input ends the process, and with it the link.
"""

from __future__ import annotations

import ctypes
import fcntl
import heapq
import os
import random
import select
import struct
import sys
import time
from contextlib import suppress

CLONE_NEWNET = 0x40000000
TUNSETIFF = 0x400454CA
TAP_WITHOUT_HEADER = 0x1002
MAX_FRAME = 1 << 16


def tap(namespace: str, name: str) -> int:
    """Return the descriptor of a new interface, which does not block."""
    with open(namespace) as entered:
        if ctypes.CDLL(None, use_errno=True).setns(entered.fileno(), CLONE_NEWNET):
            raise OSError(ctypes.get_errno(), f"setns {namespace}")
    descriptor = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK)
    fcntl.ioctl(descriptor, TUNSETIFF, struct.pack("16sH22x", name.encode(), TAP_WITHOUT_HEADER))
    return descriptor


def main(first: tuple[str, str], second: tuple[str, str]) -> None:
    taps = tap(*first), tap(*second)
    other = dict(zip(taps, reversed(taps), strict=True))
    waiting: list[tuple[float, int, int, bytes]] = []  # when it is due, number, to where, frame
    delay_s = loss = 0.0
    number = 0
    print("ready", flush=True)  # noqa: T201
    while True:
        left_s = max(0.0, waiting[0][0] - time.monotonic()) if waiting else None
        ready, _, _ = select.select([0, *taps], [], [], left_s)
        now = time.monotonic()
        if 0 in ready:
            if not (line := os.read(0, MAX_FRAME).split()):
                return
            delay_s, loss = map(float, line[-2:])
        for source in other.keys() & ready:
            frame = os.read(source, MAX_FRAME)
            if random.random() >= loss:
                heapq.heappush(waiting, (now + delay_s, number := number + 1, other[source], frame))
        while waiting and waiting[0][0] <= now:
            with suppress(OSError):  # the interface is down, or its queue is full
                os.write(waiting[0][2], waiting[0][3])
            heapq.heappop(waiting)


if __name__ == "__main__":
    main((sys.argv[1], sys.argv[2]), (sys.argv[3], sys.argv[4]))
