"""The HTTP endpoint of a run in progress: what `page_server.py` serves, and /instances/.

Invariant: a GET is answered from a new snapshot and changes nothing; POST /instances/add, drain and remove need the
run's bearer token. The server runs in the controller's event loop, so that an answer also shows that the loop is
running.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

import msgspec
from aiohttp import web

from dora.errors import DoraError
from dora.guard import knows
from dora.journal.run_folder import RunFolder
from dora.observe.groups import GroupRow
from dora.observe.snapshot import Snapshot
from dora.status.data import RunData
from dora.status.page_server import MAX_BODY_BYTES, PageServer, reply
from dora.status.records import Records


class Requests(Protocol):
    """Requests about an instance, given by its number or address. They return a sentence, or raise ConfigError if the
    request is refused."""

    async def add(self, which: str) -> str: ...

    async def drain(self, which: str) -> str: ...

    async def remove(self, which: str) -> str: ...


class InstanceRequest(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Body of a POST."""

    instance: str  #: its number or address


class StatusServer(PageServer):
    """Serves what `snapshot` returns, and takes requests about instances."""

    def __init__(
        self,
        snapshot: Callable[[], Snapshot],
        *,
        host: str,
        port: int,
        requests: Requests,
        token: str,
        groups: Callable[[], Sequence[GroupRow]] = tuple,
        folder: RunFolder | None = None,
    ) -> None:
        """`groups`: the step being formed. `folder`: whose files are shown; None: there are none."""

        async def now() -> Snapshot:
            return snapshot()

        async def forming() -> Sequence[GroupRow]:
            return groups()

        data = RunData(
            snapshot=now,
            groups=forming,
            records=Records(folder) if folder is not None else None,
            folder=folder.root if folder is not None else None,
        )
        super().__init__(data, host=host, port=port, token=token, setting="status.port")
        self._verbs = {"add": requests.add, "drain": requests.drain, "remove": requests.remove}
        self.app.router.add_post("/instances/{verb:add|drain|remove}", self._request)

    async def _request(self, request: web.Request) -> web.Response:
        """Answer 401 without the token, 400 if the body is not a request, 413 if too long, 409 if the run refuses."""
        if not knows(self.token, request.headers):
            return reply(401, "the token is missing or wrong")
        try:
            body = msgspec.json.decode(await request.read(), type=InstanceRequest)
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as err:
            return reply(400, f"not a request: {err}")
        except web.HTTPRequestEntityTooLarge:
            return reply(413, f"not a request: longer than {MAX_BODY_BYTES} bytes")
        try:
            return reply(200, await self._verbs[request.match_info["verb"]](body.instance))
        except DoraError as err:
            return reply(409, str(err))
