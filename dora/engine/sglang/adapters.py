"""What a server must be to serve several adapters at once, as read from its arguments before the first load.

0.5.23 is the first release whose adapters were read and tried; others may count requests or unload differently.
"""

from __future__ import annotations

import re
from collections.abc import Collection
from typing import Final

from dora.engine.sglang.answers import AdapterInfo, read_server_info
from dora.engine.sglang.client import EngineClient
from dora.errors import ConfigError

FIRST_RELEASE: Final = (0, 5, 23)


async def require_adapters(client: EngineClient, url: str, *, count: int, rank: int, targets: Collection[str]) -> None:
    """Raise ConfigError, one line for each problem, unless `count` adapters of `rank` that change `targets` can run in
    one batch with requests that have none, and the server unloads none of them by itself."""
    info = read_server_info(await client.server_info(url), AdapterInfo, url=url)
    if (release := _release(info.version)) is not None and release < FIRST_RELEASE:
        first = ".".join(map(str, FIRST_RELEASE))
        raise ConfigError(f"{url}: adapters need SGLang {first} or newer; this is {info.version}")
    if not info.enable_lora:
        raise ConfigError(f"{url}: serves no adapters; start it with {_flags(count, rank, targets)}")
    problems = []
    if info.dp_size != 1:
        problems.append(f"{url}: adapters can be loaded only with --dp-size 1, this server has {info.dp_size}")
    if info.max_loaded_loras is not None:
        problems.append(f"{url}: would unload adapters by itself; start it without --max-loaded-loras")
    if not info.lora_strict_loading:
        problems.append(f"{url}: would serve a part of an adapter; start it with --lora-strict-loading")
    if (
        info.max_loras_per_batch <= count
        or (info.max_lora_rank or 0) < rank
        or not {*targets} <= {*(info.lora_target_modules or ())}
    ):
        problems.append(f"{url}: has no room for these adapters; start it with {_flags(count, rank, targets)}")
    if problems:
        raise ConfigError(*problems)


def _flags(count: int, rank: int, targets: Collection[str]) -> str:
    """One adapter more: requests without an adapter count as one."""
    return (
        f"--enable-lora --max-loras-per-batch {count + 1} --max-lora-rank {rank} "
        f"--lora-target-modules {' '.join(sorted(targets))}"
    )


def _release(version: str) -> tuple[int, ...] | None:
    """Return the numbers of a release; None if the version is not one, as of a build from source."""
    found = re.match(r"(\d+)\.(\d+)\.(\d+)", version)
    return tuple(map(int, found.groups())) if found else None
