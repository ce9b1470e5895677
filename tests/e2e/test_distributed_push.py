"""A whole run whose versions come to the servers by sender processes, which are killed on the way."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import msgspec
import psutil
import pytest

from dora.core import events as ev
from dora.node.plan import SERVE_KEY
from tests.e2e.runs import Run, assert_audit_clean, events_of, get, small, until, until_gone

pytestmark = [pytest.mark.deep, pytest.mark.timeout(600)]


def senders(run: Run) -> list[psutil.Process]:
    return [child for child in run.children() if child.cmdline()[-2:] == ["dora", "send"]]


def test_a_run_outlives_its_senders_and_its_servers_never_read_the_store(tmp_path: Path) -> None:
    changes = {"run.steps": 6, "rollout.max_staleness": 1, "engine.instances": 2, "weights.transfer": "distributed"}
    with Run(*small(tmp_path, **changes)) as run:
        run.until_trained(1)
        first = until(lambda: senders(run), what="a sender")
        for sender in first:
            sender.kill()
        until_gone(first)
        run.until_trained(3)
        folder = run.folder
        log = (folder.logs / "engine-0.log").read_text()
        [url] = re.findall(r"^ready (http://\S+)$", log, re.MULTILINE)
        key = run.engine(0).environ()[SERVE_KEY]

        def between_pushes() -> dict[str, Any] | None:
            info = msgspec.json.decode(get(f"{url}/model_info", Authorization=f"Bearer {key}")[2])
            return info if info["weight_version"].startswith(folder.run_id) else None

        info = until(between_pushes, what="a version of this run")
        assert folder.run_id not in info["model_path"]  # an update from disk would show the store's folder
        second = senders(run)
        assert second
        assert not {sender.pid for sender in first} & {sender.pid for sender in second}
        assert run.end() == 0, run.told()
    until_gone(second)
    pushed = {event.version for event in events_of(folder, ev.WeightPushFinished)}
    assert len(pushed) >= 4
    assert_audit_clean(folder)
