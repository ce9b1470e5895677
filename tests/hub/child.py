"""A process that asks the hub as `dora run` and `dora check` do, and says what came of it.

Each argument is a case, as JSON: {"do": "fetch" | "look" | "rows" | "models" | "small", "set": [...]}. One line of JSON
answers each.
"""

from __future__ import annotations

import asyncio
import json
import sys
import time
from typing import Any

import huggingface_hub

from dora.app.fetch import fetch, fetch_models, fetch_small, look
from dora.config.load import load
from dora.errors import DoraError
from dora.tasks.sources import open_source


def _answer(case: dict[str, Any], told: list[str]) -> dict[str, Any]:
    config = load(None, case["set"], environ={})
    if case["do"] == "look":
        config, needed = asyncio.run(look(config))
        return {"needed": [str(one) for one in needed], "revision": config.model.revision}
    if case["do"] == "models":
        found = asyncio.run(fetch_models(config, tell=told.append))
        return {"folders": [str(found.model), str(found.reference)]}
    if case["do"] == "small":
        return {"revision": fetch_small(config).model.revision}
    config = asyncio.run(fetch(config, tell=told.append))
    source = config.task.sources[0]
    if case["do"] == "rows":
        opened = open_source(source, field="task.sources.0", seed=0, split="train")
        rows = [dict(opened.row(index)) for index in range(opened.num_rows or 0)]
        return {"rows": rows, "revision": source.revision, "model": config.model.revision}
    return {"revision": config.model.revision, "data": source.revision}


def main() -> None:
    huggingface_hub.HfApi()  # whose import takes a second
    for argument in sys.argv[1:]:
        told: list[str] = []
        wall, busy = time.monotonic(), time.process_time()
        try:
            found = _answer(json.loads(argument), told)
        except DoraError as err:
            found = {"error": str(err)}
        spent = {"wall_s": time.monotonic() - wall, "busy_s": time.process_time() - busy}
        sys.stdout.write(json.dumps({**found, **spent, "told": told}) + "\n")
        sys.stdout.flush()


if __name__ == "__main__":
    main()
