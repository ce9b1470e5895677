"""All engines: the only module outside their folders that names them.

Starting a server or a sender takes a command line but no client, so each function imports what it uses.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Final

from dora.config.schema import Config
from dora.engine.api import AdapterNeeds, InferenceEngine
from dora.engine.sglang import launch
from dora.extras import require_extra

#: Command lines of managed servers by `engine.kind`; `node/plan.py` replaces the names in braces.
COMMANDS: Final[Mapping[str, tuple[str, ...]]] = {"embedded": launch.EMBEDDED, "sglang": launch.SGLANG}
#: The flags that make room for adapters, by `engine.kind`.
ADAPTER_FLAGS: Final[Mapping[str, Callable[[AdapterNeeds], tuple[str, ...]]]] = {
    "embedded": launch.embedded_adapters,
    "sglang": launch.sglang_adapters,
}
#: The flags with which servers return the choice of experts, by `engine.kind`.
ROUTING_FLAGS: Final[Mapping[str, tuple[str, ...]]] = {
    "embedded": launch.EMBEDDED_ROUTING,
    "sglang": launch.SGLANG_ROUTING,
}
_ANY_TOKEN: Final = 2**31  # the vocabulary is unknown


def adapter_needs(config: Config) -> AdapterNeeds | None:
    """Return the adapters that a server has to hold; None if it holds the weights of one version."""
    lora = config.trainer.lora
    return AdapterNeeds(config.rules.num_adapters, lora.rank, lora.targets) if config.engine.adapters else None


def require_engine(config: Config) -> None:
    """ConfigError if the servers that the run starts here are of a kind that is not installed in this environment."""
    engine = config.engine
    if config.num_managed and not config.nodes.expected and not engine.command and engine.kind == "sglang":
        require_extra("sglang", field="engine.kind")


def installed_release(kind: str) -> str:
    """Return the release of the servers of a kind in this environment; "" if they are not installed."""
    try:
        return version("dora-rl" if kind == "embedded" else kind)
    except PackageNotFoundError:
        return ""


@asynccontextmanager
async def open_engine(
    config: Config, *, max_connections: int, vocab_size: int = _ANY_TOKEN
) -> AsyncIterator[InferenceEngine]:
    """The engine of a run, whose servers read versions from folders. `max_connections` bounds the open streams."""
    from dora.engine.sglang.client import EngineClient
    from dora.engine.sglang.engine import SglangEngine
    from dora.engine.sglang.push import Disk

    key = config.engine.api_key
    async with EngineClient(max_connections=max_connections, api_key=key, vocab_size=vocab_size) as client:
        yield SglangEngine(client, Disk(config.engine.path_map), config.engine.path_map)


def run_sender(score_prompt: Callable[[Path, Sequence[int]], list[float]]) -> None:
    """Run a sender process: carry out orders until standard input ends.

    `score_prompt(folder, token_ids)` returns the log-probs of all tokens but the first, under the model in `folder`.
    """
    from dora.engine.sglang.sender import run

    run(score_prompt)
