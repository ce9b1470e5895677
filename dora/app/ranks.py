"""The ranks of the trainer on this host: started, and started again after a loss."""

from __future__ import annotations

import asyncio
import os
from pathlib import Path
from typing import Final

from dora.app.opening import Opened
from dora.config.schema import Config
from dora.node.plan import plan_trainer
from dora.node.supervise import Child, Node


class HostRanks:
    """torchrun with all ranks; implements `controller.trainer_link.Ranks`."""

    are_cut_off: Final = False  #: from this host

    def __init__(
        self, config: Config, node: Node, *, address: str, token: str, lease: Path, opened: Opened | None = None
    ) -> None:
        """`address`: of the controller. `opened`: the run; without one, they are not started again."""
        self._config = config
        self._node = node
        self._address = address
        self._token = token
        self._lease = lease
        self._opened = opened
        self._child: Child | None = None

    async def start(self, incarnation: int = 0) -> None:
        """Start torchrun."""
        plan = plan_trainer(
            self._config,
            controller=self._address,
            token=self._token,
            lease=self._lease,
            store=self._lease.with_name(f"{self._lease.name}-{incarnation}.store"),
            environ=os.environ,
            incarnation=incarnation,
        )
        self._child = self._node.add(plan)
        await self._child.start()

    async def ended(self) -> str:
        assert self._child is not None, "it was started"
        return await self._child.ended()

    async def restart(self, incarnation: int) -> int:
        assert self._opened is not None, "they belong to a run"
        assert self._child is not None, "they were started"
        await self._opened.fence_ranks(incarnation)
        await self._child.kill()
        await asyncio.to_thread(self._opened.store.unstage)
        await self.start(incarnation)
        return self._config.trainer.ranks

    def why_restart(self) -> str:
        return ""
