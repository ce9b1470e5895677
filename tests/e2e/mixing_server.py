"""A server with a bug: once the adapter of version 2 has proved itself, its requests get another one.

Its arguments are those of `dora serve`.
"""

from __future__ import annotations

from dora.__main__ import main
from dora.embedded.adapters import NamedAdapters
from dora.embedded.generation import LoadedAdapter

find = NamedAdapters.find
asked: set[str] = set()


async def mixed_up(adapters: NamedAdapters, name: str) -> LoadedAdapter:
    """Return the wrong adapter for all requests but the first."""
    others = [one for one in adapters.paths if one != name]
    if name.endswith("-v2") and name in asked and others:
        return await find(adapters, others[-1])
    asked.add(name)
    return await find(adapters, name)


NamedAdapters.find = mixed_up  # type: ignore[method-assign]
main()
