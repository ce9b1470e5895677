"""What `dora check` says about the time of a checkpoint, and when it refuses one."""

from __future__ import annotations

from pathlib import Path

import pytest

from dora.app.checkpoint_time import WriteRate, interval_s, measure_rate, time_of_checkpoint
from dora.app.estimate import Shapes
from dora.config.load import load
from dora.config.schema import Config
from dora.errors import ConfigError

GB = 2**30
#: A 32B of 64 layers.
LARGE = Shapes(parameters=32_000_000_000, experts=0, chosen=1.0, layers=64, kv_width=1024, kv_heads=8)
ON_GPUS = (
    "engine.kind=sglang",
    "engine.device=cuda",
    "trainer.device=cuda",
    "run.steps=100",
    "rollout.max_staleness=1",
)


def config(*overrides: str) -> Config:
    return load(None, overrides, environ={})


def says(num_bytes: int, *overrides: str, rate: float | None, interval: float | None) -> str:
    made = WriteRate(rate, "measured") if rate is not None else None
    return time_of_checkpoint(config(*overrides), num_bytes, rate=made, interval=interval)


def test_seconds_are_printed_with_size_and_rate() -> None:
    assert says(384 * GB, rate=2 * GB, interval=None) == (
        "192.0 s for 384.0 GB, at 2.0 GB per second (measured); one every 10 steps"
    )


def test_a_checkpoint_that_takes_longer_than_the_interval_is_refused_with_what_to_set() -> None:
    assert "every 193 s or more" in says(384 * GB, rate=2 * GB, interval=193.0)
    with pytest.raises(ConfigError, match=r"trainer.checkpoint_every: .* 192.0 s .* raise it to at least 20, or use "):
        says(384 * GB, rate=2 * GB, interval=100.0)


def test_without_a_measurement_the_rate_that_is_needed_is_printed() -> None:
    assert says(384 * GB, rate=None, interval=192.0) == (
        "384.0 GB, one every 10 steps, that is, every 192 s or more; 2.0 GB per second are needed; not measured here"
    )


def test_the_interval_is_known_where_the_step_time_is_and_there_are_several_checkpoints() -> None:
    found = interval_s(config(*ON_GPUS), LARGE)
    assert found is not None
    assert interval_s(config(*ON_GPUS, "trainer.checkpoint_every=20"), LARGE) == pytest.approx(2 * found)
    assert interval_s(config(*ON_GPUS, "trainer.checkpoint_every=100"), LARGE) is None, (
        "the last step's is the only one"
    )
    assert interval_s(config(), LARGE) is None


def test_the_rate_is_measured_where_the_run_folder_will_be_and_nothing_is_left(tmp_path: Path) -> None:
    rate = measure_rate(config(f"run.folder={tmp_path / 'runs' / 'later'}"), 10_000)
    assert rate is not None
    assert (rate.source, rate.bytes_per_s > 0) == (f"measured in {tmp_path}", True)
    assert [*tmp_path.iterdir()] == []


def test_a_folder_that_only_the_nodes_see_is_not_measured(tmp_path: Path) -> None:
    made = load(None, ["nodes.expected=3", f"nodes.checkpoints={tmp_path}"], environ={"DORA_TOKEN": "t" * 16})
    assert measure_rate(made, 10_000) is not None
    elsewhere = load(
        None, ["nodes.expected=3", f"nodes.checkpoints={tmp_path / 'no'}"], environ={"DORA_TOKEN": "t" * 16}
    )
    assert measure_rate(elsewhere, 10_000) is None
