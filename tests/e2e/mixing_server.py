"""A server with a bug: once an adapter after the first has proved itself, its requests get the first one.

Its arguments are those of `dora serve`.
"""

from __future__ import annotations

from dora.__main__ import main
from dora.embedded.adapters import NamedAdapters
from dora.embedded.generation import LoadedAdapter

find = NamedAdapters.find
found: dict[str, LoadedAdapter] = {}  # by name, the first of them in front


async def mixed_up(adapters: NamedAdapters, name: str) -> LoadedAdapter:
    """Return the right adapter once, and then the wrong one."""
    if name in found:
        return next(iter(found.values()))
    found[name] = await find(adapters, name)
    return found[name]


NamedAdapters.find = mixed_up  # type: ignore[method-assign]
main()
