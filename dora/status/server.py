"""The HTTP endpoint of a run in progress: what `page_server.py` serves, and what users ask of the run.

Invariant: a GET is answered from a new snapshot and changes nothing; a POST to /instances/add, drain and remove, or to
/run/evaluate and stop, needs the run's bearer token. The server runs in the controller's event loop, so that an answer
also shows that the loop is running.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Annotated, Final, Protocol

import msgspec
from aiohttp import web

from dora.core.events import RequestTag
from dora.errors import DoraError, one_line
from dora.guard import knows
from dora.journal.run_folder import RunFolder
from dora.observe.groups import GroupRow
from dora.observe.snapshot import Snapshot
from dora.status.data import RunData
from dora.status.page_server import MAX_BODY_BYTES, PageServer, reply
from dora.status.records import Records

#: Maximum length of what users call themselves, and of an id.
MAX_NAME: Final = 64
_Short = Annotated[str, msgspec.Meta(max_length=MAX_NAME)]
_Address = Annotated[str, msgspec.Meta(max_length=1_000)]


_NO_TOKEN = "the token is missing or wrong"


class Requests(Protocol):
    """Requests to a run; `which` is the number or address of an instance.

    They return a sentence, or raise ConfigError if a request is refused.
    """

    async def add(self, which: str, request: RequestTag) -> str: ...

    async def drain(self, which: str, request: RequestTag) -> str: ...

    async def remove(self, which: str, request: RequestTag) -> str: ...

    async def evaluate(self, request: RequestTag) -> str: ...

    async def stop(self, request: RequestTag) -> str: ...


class RunRequest(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Body of a POST."""

    id: _Short = ""  #: under which it is done once; "": as often as it is sent
    by: _Short = ""  #: who asks, as they call themselves


class InstanceRequest(RunRequest, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Body of a POST about an instance."""

    instance: _Address  #: its number or address


class StatusServer(PageServer):
    """Serves what `snapshot` returns, and takes requests."""

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
            takes_requests=True,
        )
        super().__init__(data, host=host, port=port, token=token, setting="status.port")
        self._of_instances = {"add": requests.add, "drain": requests.drain, "remove": requests.remove}
        self._of_run = {"evaluate": requests.evaluate, "stop": requests.stop}
        self.app.router.add_post("/instances/{verb:add|drain|remove}", self._request)
        self.app.router.add_post("/run/{verb:evaluate|stop}", self._request)
        self.app.router.add_get("/run/token", self._token)

    async def _token(self, request: web.Request) -> web.Response:
        """Say whether the token is right, before anything is asked for."""
        return reply(200, "the token is right") if knows(self.token, request.headers) else reply(401, _NO_TOKEN)

    async def _request(self, request: web.Request) -> web.Response:
        """Answer 401 without the token, 400 if the body is not a request, 413 if too long, 409 if the run refuses."""
        if not knows(self.token, request.headers):
            return reply(401, _NO_TOKEN)
        verb = request.match_info["verb"]
        try:
            body = await request.read()
            asked: RunRequest = msgspec.json.decode(
                body, type=InstanceRequest if verb in self._of_instances else RunRequest
            )
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as err:
            return reply(400, f"not a request: {err}")
        except web.HTTPRequestEntityTooLarge:
            return reply(413, f"not a request: longer than {MAX_BODY_BYTES} bytes")
        try:
            own = RequestTag(id=one_line(asked.id), by=_by(asked.by, request.remote))
            if isinstance(asked, InstanceRequest):
                return reply(200, await self._of_instances[verb](asked.instance, own))
            return reply(200, await self._of_run[verb](own))
        except DoraError as err:
            return reply(409, str(err))


def _by(name: str, address: str | None) -> str:
    """Return who asks: the name that they gave, and the address that they sent it from."""
    where = one_line(address or "an unknown address")[:64]
    return f"{name} ({where})" if (name := one_line(name).strip()) else where
