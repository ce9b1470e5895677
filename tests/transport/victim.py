"""A controller in a process of its own, to be measured and stopped; it echoes the messages of its ranks: `victim
RANKS`."""

from __future__ import annotations

import asyncio
import sys
import time

from dora.log import configure_logging
from dora.transport.controller_end import ControllerEnd
from dora.transport.messages import MicroBatchDone, Stop
from tests.transport.peers import TOKEN, WAIT_S


async def main() -> None:
    configure_logging(None, level="info", run="run", role="controller")
    end = ControllerEnd(address="tcp://127.0.0.1:0", token=TOKEN, world_size=int(sys.argv[1]), now=time.monotonic)
    print(await end.start(), flush=True)  # noqa: T201
    await end.wait_ready(WAIT_S)
    while True:
        rank, message = await end.receive()
        assert isinstance(message, MicroBatchDone)
        await end.send(rank, Stop(reason=str(message.index)))


if __name__ == "__main__":
    asyncio.run(main())
