"""Many sessions of the node protocol in one process: each joins, follows its orders at once, and reports.

    python -m tests.cluster.sessions HOST:PORT TOKEN FIRST NUMBER

A session holds a version as soon as one of its sources is named, receives nothing, and starts no process. The process
ends with the controller's word that the run is over.
"""

from __future__ import annotations

import asyncio
import sys
from contextlib import suppress
from functools import cache
from importlib.metadata import version as release_of

from msgspec.structs import replace

from dora.transport import curve
from dora.transport.node_ends import NodeEnd
from dora.transport.node_messages import (
    NODE_PROTOCOL,
    Join,
    NodeOrders,
    NodeWelcome,
    Over,
    Rejected,
    RelaySource,
    Report,
)
from tests.made import made

REPORT_S = 2.0
# Deriving the key takes 30 ms by design; each node does it once, on a machine of its own.
curve._controller_key = cache(curve._controller_key)
ANY: Report = replace(made(Report, text="what a node says of itself"), servers={}, ranks=None, fetching=(), problem="")


async def session(address: str, token: str, name: str) -> None:
    end = NodeEnd((address,), token=token)
    term, orders, leaves = -1, None, False
    try:
        while not leaves:
            if term < 0:
                await end.send(
                    address, Join(protocol=NODE_PROTOCOL, release=release_of("dora-rl"), name=name, run_id="")
                )
            else:
                await end.send(address, report(name, term, orders))
            for _, message in await end.receive(REPORT_S):
                if isinstance(message, NodeWelcome):
                    term = message.term
                elif isinstance(message, NodeOrders):
                    orders = message
                elif isinstance(message, Over | Rejected):
                    assert isinstance(message, Over), message.reason
                    leaves = True
    finally:
        end.close()


def report(name: str, term: int, orders: NodeOrders | None) -> Report:
    held = (
        {version: f"/held/{version}" for version, order in orders.versions.items() if order.sources} if orders else {}
    )
    serial = orders.serial if orders is not None else -1
    relay = RelaySource(url=f"http://{name}.invalid:8500", key=name * 8)
    return replace(ANY, term=term, serial=serial, relay=relay, versions=held, is_leaving=False)


async def main(address: str, token: str, first: int, number: int) -> None:
    async with asyncio.TaskGroup() as group:
        for index in range(first, first + number):
            group.create_task(session(address, token, f"node-{index}"))


if __name__ == "__main__":
    with suppress(KeyboardInterrupt):
        asyncio.run(main(sys.argv[1], sys.argv[2], int(sys.argv[3]), int(sys.argv[4])))
