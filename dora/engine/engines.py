"""The engines that there are: the one module that names them from outside their folders.

Whoever starts a server or a sender needs a command line and not the client, so each function imports what it uses.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Final

from dora.config.schema import Config
from dora.engine.api import InferenceEngine
from dora.engine.sglang import launch

#: How a server of our own is started, by `engine.kind`; what stands in braces is filled in by `node/plan.py`.
COMMANDS: Final[Mapping[str, tuple[str, ...]]] = {"embedded": launch.EMBEDDED, "sglang": launch.SGLANG}
#: For tokens that no vocabulary is known for.
_ANY_TOKEN: Final = 2**31


@asynccontextmanager
async def open_engine(
    config: Config, *, max_connections: int, vocab_size: int = _ANY_TOKEN
) -> AsyncIterator[InferenceEngine]:
    """The engine of a run; its servers read versions from their folders. `max_connections` bounds its open streams."""
    from dora.engine.sglang.client import EngineClient
    from dora.engine.sglang.engine import SglangEngine
    from dora.engine.sglang.push import Disk

    key = config.engine.api_key
    async with EngineClient(max_connections=max_connections, api_key=key, vocab_size=vocab_size) as client:
        yield SglangEngine(client, Disk(config.engine.path_map))


def run_sender(score_prompt: Callable[[Path, Sequence[int]], list[float]]) -> None:
    """The main function of a process that sends weights: carry out orders until standard input ends.

    `score_prompt` gives the log-probs of a prompt's tokens after the first, under the model in a folder.
    """
    from dora.engine.sglang.sender import run

    run(score_prompt)
