"""The tools of MCP servers in a host: which server has which tool, and the tools of one episode.

Invariant: a tool has one name, one server and one schema as long as the host lives. A server that is lost fails the
episodes with calls under way (`EnvironmentLost`), and those that begin while it cannot be reached; calls of other
servers go on. It is started again when it is next needed; START_ATTEMPTS failures in a row end the host.
"""

from __future__ import annotations

import asyncio
import json
import os
import re
import sys
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

from dora.environments.api import Environment, EnvironmentLost, ToolEnvironment
from dora.errors import ConfigError
from dora.extras import require_extra

if TYPE_CHECKING:
    from dora.environments.mcp_connection import Connection, Losses

#: Starts of a server that may fail in a row, and the wait before the second one, which doubles with each. Of those that
#: are made at the same time, one counts.
START_ATTEMPTS: Final = 6
BACKOFF_S: Final = 1.0
_NAME: Final = re.compile(r"[A-Za-z0-9_-]{1,64}")
_COLUMN: Final = re.compile(r"\{([A-Za-z_]\w*)\}")


class McpTools(ToolEnvironment):
    """The tools of the servers, and no others (`environment.mcp` without `environment.name`).

    `replays`: equal calls always lead to equal results, and a call may be repeated; then episodes go on after a server,
    a host or the controller was lost.
    """

    def __init__(self, replays: bool = False) -> None:
        super().__init__()
        self.can_replay = replays  # type: ignore[misc]  # here an option, and not of the class


@dataclass(frozen=True, slots=True)
class McpToolSchema:
    """What the model is told about a tool. The server checks the arguments."""

    name: str
    description: str
    parameters: dict[str, Any]  # JSON Schema of an object

    def as_openai(self) -> dict[str, Any]:
        """Return {"type": "function", "function": {name, description, parameters}}."""
        about = {"name": self.name, "description": self.description, "parameters": self.parameters}
        return {"type": "function", "function": about}

    def check(self, arguments: dict[str, Any]) -> dict[str, Any]:
        """Return the arguments as they are."""
        return arguments


class McpServers:
    """The servers that `settings` list (`environment.mcp`); errors name the key `field`."""

    def __init__(self, settings: Sequence[Mapping[str, Any]], *, field: str, timeout_s: float) -> None:
        self._field = field
        self._servers = [
            _Server(one, field=f"{field}.{number}", timeout_s=timeout_s) for number, one in enumerate(settings)
        ]

    async def connect(self, one: Environment) -> None:
        """Connect all servers. ConfigError if one cannot be used, or by an environment like `one`."""
        if not isinstance(one, ToolEnvironment):
            raise ConfigError(
                f"{self._field}: {type(one).__name__} is not a ToolEnvironment, so it cannot have the tools of servers"
            )
        require_extra("mcp", field=self._field)
        try:
            import dora.environments.mcp_connection  # noqa: F401
        except ImportError as err:
            needed = f"needs mcp 2.3 or later ({err}); run pip install 'dora-rl[mcp]'"
            raise ConfigError(f"{self._field}: {needed}") from err
        await asyncio.gather(*(server.connect() for server in self._servers))
        owners = {schema["function"]["name"]: "the environment" for schema in one.schemas()}
        for server in self._servers:
            for name in server.schemas:
                if name in owners:
                    clash = f"the tool '{name}' is also one of {owners[name]}; leave it out by tools = [...]"
                    raise ConfigError(f"{server.field}: {clash}")
                owners[name] = server.field

    def for_episode(self, row: Mapping[str, Any]) -> EpisodeTools:
        """Return the tools of an episode with this row, which are then to be opened."""
        return EpisodeTools(self._servers, row)


class EpisodeTools:
    """The tools of one episode, and the connections that are its own."""

    def __init__(self, servers: Sequence[_Server], row: Mapping[str, Any]) -> None:
        self._servers = servers
        self._row = row
        self._own: dict[_Server, Connection] = {}

    async def open(self) -> list[Callable[..., Any]]:
        """Return the tools as functions. EnvironmentLost if a server cannot be used."""
        async with asyncio.TaskGroup() as group:
            for server in self._servers:
                group.create_task(self._enter(server))
        return [
            _function(schema, self._caller(server, name))
            for server in self._servers
            for name, schema in server.schemas.items()
        ]

    async def close(self) -> None:
        """Close the connections that are its own."""
        await asyncio.gather(*(connection.close() for connection in self._own.values()))

    async def _enter(self, server: _Server) -> None:
        if server.is_per_episode:
            connection = self._own[server] = server.connection()
            await server.open(connection)
        else:
            await server.shared()

    def _caller(self, server: _Server, name: str) -> Callable[[dict[str, Any]], Awaitable[str]]:
        bound = server.bound(name, self._row)

        async def call(arguments: dict[str, Any]) -> str:
            connection = self._own.get(server) or await server.shared()
            return await connection.call(name, {**arguments, **bound})

        return call


class _Server:
    """One entry of `environment.mcp`."""

    def __init__(self, settings: Mapping[str, Any], *, field: str, timeout_s: float) -> None:
        self.field = field
        self.is_per_episode: bool = settings["per_episode"]
        self.schemas: dict[str, McpToolSchema] = {}
        self._settings = settings
        self._timeout_s = timeout_s
        self._parameters: dict[str, set[str]] = {}  # of each tool, that the model does not choose
        self._shared: Connection | None = None
        self._starting: asyncio.Task[Connection] | None = None
        self._num_failed = 0  # starts in a row
        self._next_at = 0.0  # when the next one may be tried
        self._losses: Losses | None = None

    async def connect(self) -> None:
        """Connect for the first time, and learn the tools. ConfigError if that fails."""
        from dora.environments.mcp_connection import Losses, ServerFailed, require_variables

        self._losses = Losses()
        require_variables(self._settings, field=self.field)
        connection = self.connection()
        try:
            self._learn(await connection.open(timeout_s=self._timeout_s))
        except ServerFailed as err:
            raise ConfigError(f"{self.field}: {self._address}: {err}") from None
        if self.is_per_episode:
            await connection.close()
        else:
            self._shared = connection

    def connection(self) -> Connection:
        """Return a new connection, which is not open."""
        from dora.environments.mcp_connection import Connection, Losses

        assert self._losses is not None
        is_own = self.is_per_episode and not self._settings["url"]  # a process
        return Connection(self._settings, name=self.field, losses=Losses() if is_own else self._losses)

    async def open(self, connection: Connection) -> None:
        """Open a connection, after a while if that has just failed. EnvironmentLost if it fails."""
        from dora.environments.mcp_connection import ServerFailed

        assert self._losses is not None
        now = asyncio.get_running_loop().time
        await asyncio.sleep(self._next_at - now())
        num_before = self._num_failed
        try:
            listed = await connection.open(timeout_s=self._timeout_s)
            if self._selected(listed) != self.schemas:
                await connection.close()
                raise ServerFailed("it now has other tools than before")
        except ServerFailed as err:
            reason = f"{self.field} cannot be started again: {err}"
            if self._num_failed == num_before:
                self._num_failed += 1
                self._next_at = now() + BACKOFF_S * 2 ** (self._num_failed - 1)
            if self._num_failed >= START_ATTEMPTS:
                sys.stderr.write(f"{reason} ({START_ATTEMPTS} attempts)\n")
                sys.stderr.flush()
                os._exit(1)  # the host is replaced, and says at its start what is wrong
            raise EnvironmentLost(reason, loss=self._losses.number()) from None
        self._num_failed = 0
        self._losses.end()

    async def shared(self) -> Connection:
        """Return the connection that episodes share, a new one if it is lost. EnvironmentLost if there is none."""
        if self._shared is None or self._shared.lost:
            if self._starting is None or self._starting.done():
                self._starting = asyncio.create_task(self._start(), name=f"start of {self.field}")
                self._starting.add_done_callback(_look)
            return await asyncio.shield(self._starting)
        return self._shared

    def bound(self, tool: str, row: Mapping[str, Any]) -> dict[str, Any]:
        """Return the arguments of a tool that the model does not choose."""
        return {name: _filled(self._settings["arguments"][name], row) for name in self._parameters[tool]}

    @property
    def _address(self) -> str:
        return str(self._settings["url"] or self._settings["command"][0])

    async def _start(self) -> Connection:
        if self._shared is not None:
            await self._shared.close()
        connection = self.connection()
        await self.open(connection)
        self._shared = connection
        return connection

    def _learn(self, listed: Sequence[Any]) -> None:
        """Take the tools that are wanted. ConfigError if one cannot be offered."""
        names = [tool.name for tool in listed]
        if unknown := [name for name in self._settings["tools"] if name not in names]:
            raise ConfigError(f"{self.field}.tools: there is no '{unknown[0]}'; there are {_list(names)}")
        if not names:
            raise ConfigError(f"{self.field}: {self._address}: it has no tools")
        self.schemas = self._selected(listed)
        bound: set[str] = set().union(*self._parameters.values())
        if unused := [name for name in self._settings["arguments"] if name not in bound]:
            raise ConfigError(f"{self.field}.arguments: no tool has a parameter '{unused[0]}'")

    def _selected(self, listed: Sequence[Any]) -> dict[str, McpToolSchema]:
        from dora.environments.mcp_connection import MAX_TOOL_BYTES, ServerFailed

        schemas: dict[str, McpToolSchema] = {}
        for tool in listed:
            if self._settings["tools"] and tool.name not in self._settings["tools"]:
                continue
            problem = ""
            if not _NAME.fullmatch(tool.name):
                problem = "is no name that models may call (up to 64 letters, digits, _ and -)"
            elif tool.name in schemas:
                problem = "is there twice"
            elif len(json.dumps([tool.description, tool.input_schema])) > MAX_TOOL_BYTES:
                problem = f"has a description of more than {MAX_TOOL_BYTES >> 10} KiB"
            if problem:
                raise ServerFailed(f"the tool '{tool.name[:80]}' {problem}; leave it out by tools = [...]")
            parameters = _in_order(tool.input_schema)
            hidden = {name for name in self._settings["arguments"] if name in parameters.get("properties", {})}
            self._parameters[tool.name] = hidden
            for name in hidden:
                del parameters["properties"][name]
            if hidden and "required" in parameters:
                parameters["required"] = [name for name in parameters["required"] if name not in hidden]
            schemas[tool.name] = McpToolSchema(tool.name, tool.description or tool.title or "", parameters)
        return schemas


def _function(schema: McpToolSchema, call: Callable[[dict[str, Any]], Awaitable[str]]) -> Callable[..., Any]:
    async def tool(**arguments: Any) -> str:
        return await call(arguments)

    tool.__name__ = schema.name
    tool.tool_schema = schema  # type: ignore[attr-defined]
    return tool


def _in_order(schema: Any, *, of: str = "") -> Any:
    """Return a schema with its keywords in order, as those of Python functions are: equal schemas make equal prompts,
    whatever SDK a server has. Parameters stay in theirs.

    >>> _in_order({"type": "object", "properties": {"b": {"type": "string", "enum": ["x"]}, "a": {}}})
    {'properties': {'b': {'enum': ['x'], 'type': 'string'}, 'a': {}}, 'type': 'object'}
    """
    if isinstance(schema, list):
        return [_in_order(one) for one in schema]
    if not isinstance(schema, dict):
        return schema
    names = list(schema) if of in ("properties", "default") else sorted(schema)
    return {name: _in_order(schema[name], of="" if of == "properties" else name) for name in names}


def _filled(value: Any, row: Mapping[str, Any]) -> Any:
    """Return a value with the columns of a row in place of their names; a name alone becomes the column as it is.

    >>> _filled("{seed}", {"seed": 7}), _filled("/data/{name}", {"name": "a"}), _filled(3, {})
    (7, '/data/a', 3)
    """
    if not isinstance(value, str):
        return value
    if missing := [name for name in _COLUMN.findall(value) if name not in row]:
        raise ValueError(f"the row has no column '{missing[0]}', which environment.mcp names; it has {_list([*row])}")
    if whole := _COLUMN.fullmatch(value):
        return row[whole[1]]
    return _COLUMN.sub(lambda found: str(row[found[1]]), value)


def _list(names: Sequence[str]) -> str:
    return ", ".join(sorted(names)[:20]) or "none"


def _look(task: asyncio.Task[Any]) -> None:
    """Retrieve the exception of a task that may have no waiter left."""
    if not task.cancelled():
        task.exception()
