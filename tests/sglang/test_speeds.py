"""Speeds of a real server, and of the embedded engine, as `dora check --measure` finds them."""

from __future__ import annotations

from pathlib import Path

import pytest

from dora.app import speed_check
from dora.app.speed_check import MeasuredServer, measure_speeds
from dora.app.trial_push import Held
from dora.config.load import load
from dora.engine.engines import open_engine
from tests.embedded.conftest import VOCAB
from tests.sglang.conftest import KV_TOKENS, SLOTS, START_LABEL, Kind, Server, Wire


async def test_a_server_is_measured_and_left_as_it_was(
    kind: Kind, server: Server, wire: Wire, model_a: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(speed_check, "DECODE_S", 0.5 if kind == "sglang" else 0.1)
    monkeypatch.setattr(speed_check, "REPEATS", 1)
    changes = [
        "task.max_prompt_tokens=100",
        "rollout.max_new_tokens=400",
        "rollout.max_staleness=0",
        f'engine.urls=["{server.url}"]',
        f"run.folder={tmp_path / 'runs'}",
        f"weights.memory_folder={tmp_path / 'none'}",
    ]
    config = load(None, changes, environ={})
    held = Held(server.url, "engine.urls", START_LABEL, is_model=True)
    async with open_engine(config, max_connections=64) as engine:
        speeds = await measure_speeds(
            config,
            model=model_a,
            vocab_size=VOCAB,
            engine=engine,
            servers=[MeasuredServer(held, slots=SLOTS, kv_tokens=KV_TOKENS)],
            show=str,
        )
    assert [point.batch for point in speeds.points] == [1, 2, 4] * 2
    assert all(0 < point.step_s < 1 for point in speeds.points)
    assert speeds.prefill_s_per_token >= 0
    assert speeds.pushes.bytes_s > 0
    assert await wire.weight_version() == START_LABEL
    assert (await wire.load())["num_running_reqs"] == 0
