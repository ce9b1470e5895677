"""Files generated from the schema are up to date, and every example configuration loads."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from dora.config.docs import render
from dora.config.load import load
from dora.config.schema import Config

#: Maximum number of documented keys, ten of them about nodes. A new key takes the place of one that nobody sets.
MAX_KEYS = 192
ROOT = Path(__file__).parents[2]
EXAMPLES = sorted((ROOT / "launch" / "configs").glob("*.toml"))


@pytest.mark.parametrize("path", sorted(render()))
def test_a_generated_file_is_up_to_date(path: str):
    assert (ROOT / path).read_text() == render()[path], "run: python -m dora.config.docs"


def documented() -> list[str]:
    """Return the dotted keys of docs/CONFIG.md, one for each row of its tables. A section that occurs twice has one
    table, and a key of several kinds of loss has one row."""
    found, section = [], ""
    for line in render()["docs/CONFIG.md"].splitlines():
        if heading := re.match(r"## `\[+([\w.]+)\]+`", line):
            section = heading[1]
        elif row := re.match(r"\| `(\w+)` \|", line):
            found.append(f"{section}.{row[1]}")
    return found


def test_there_are_few_settings():
    keys = documented()
    assert len(set(keys)) == len(keys) <= MAX_KEYS


def test_every_setting_is_documented():
    text = render()["docs/CONFIG.md"]
    for section, field in Config.model_fields.items():
        assert f"## `[{section}]`" in text
        for key in field.annotation.model_fields:  # type: ignore[union-attr]
            assert f"| `{key}` |" in text or f"[{section}.{key}]" in text


def test_no_setting_is_without_a_meaning():
    assert "|  |" not in render()["docs/CONFIG.md"]


def test_the_default_job_spelled_out_is_the_default_job():
    assert load(ROOT / "launch" / "configs" / "arithmetic-cpu.toml", environ={}) == load(None, environ={})


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.name)
def test_an_example_loads_and_says_what_hardware_and_time_it_takes(path: Path):
    load(path, environ={"DORA_TOKEN": "a token"})
    head = path.read_text().partition("\n[")[0]
    assert "# Hardware: " in head
    assert "Time: " in head


def test_there_are_examples():
    assert {"arithmetic-cpu.toml", "jsonl.toml", "reasoning-gym.toml"} <= {path.name for path in EXAMPLES}
