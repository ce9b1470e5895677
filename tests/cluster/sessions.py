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
    join = Join(protocol=NODE_PROTOCOL, release=release_of("dora-rl"), name=name, run_id="")
    relay = RelaySource(url=f"http://{name}.invalid:8500", key=name * 8)
    report = replace(ANY, term=-1, serial=-1, relay=relay, versions={}, is_leaving=False)
    try:
        while True:
            await end.send(address, join if report.term < 0 else report)
            for _, message in await end.receive(REPORT_S):
                if isinstance(message, NodeWelcome):
                    report = replace(report, term=message.term)
                elif isinstance(message, NodeOrders):
                    report = replace(report, serial=message.serial, versions=held(report, message))
                elif isinstance(message, Over):
                    return
                assert not isinstance(message, Rejected), message.reason
    finally:
        end.close()


def held(report: Report, orders: NodeOrders) -> dict[int, str]:
    """The versions that it holds once it has followed its orders."""
    return {v: f"/held/{v}" for v, order in orders.versions.items() if order.sources or v in report.versions}


async def main(address: str, token: str, first: int, number: int) -> None:
    async with asyncio.TaskGroup() as group:
        for index in range(first, first + number):
            group.create_task(session(address, token, f"node-{index}"))


if __name__ == "__main__":
    with suppress(KeyboardInterrupt):
        asyncio.run(main(sys.argv[1], sys.argv[2], int(sys.argv[3]), int(sys.argv[4])))
