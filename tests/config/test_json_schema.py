"""The JSON schema that editors read: it accepts the shipped configurations, and refuses what a run would refuse."""

from __future__ import annotations

import json
import tomllib
from pathlib import Path

import pytest
from jsonschema import Draft202012Validator

from dora.config.json_schema import json_schema
from dora.config.load import dump, load

ROOT = Path(__file__).parents[2]
SCHEMA = json.loads(json.dumps(json_schema()))
VALIDATOR = Draft202012Validator(SCHEMA)


def problems(text: str) -> list[str]:
    return [error.json_path for error in VALIDATOR.iter_errors(tomllib.loads(text))]


def test_it_is_a_schema() -> None:
    Draft202012Validator.check_schema(SCHEMA)


@pytest.mark.parametrize("path", sorted((ROOT / "launch/configs").glob("*.toml")), ids=lambda path: path.name)
def test_the_shipped_configurations_are_valid(path: Path) -> None:
    assert problems(path.read_text()) == []


@pytest.mark.parametrize("kind", ["ppo", "gspo", "cispo", "m2po_per_sequence", "my losses.py:loss"])
def test_every_loss_is_valid(kind: str) -> None:
    assert problems(dump(load(None, [f"objective.loss.kind={kind}"], environ={}))) == []


@pytest.mark.parametrize(
    ("text", "where"),
    [
        ("[rollout]\nmax_stalenes = 1\n", "$.rollout"),
        ("[rollout]\nmax_staleness = -1\n", "$.rollout.max_staleness"),
        ('[rollout]\nstrategy = "dorra"\n', "$.rollout.strategy"),
        ('[run]\nsteps = "many"\n', "$.run.steps"),
        ('[[task.sources]]\nkind = "csv"\n', "$.task.sources[0].kind"),
        ('[objective.loss]\nkind = "pppo"\n', "$.objective.loss"),
        ('[engine]\napi_key = "secret"\n', "$.engine"),
        ("[no_section]\n", "$"),
    ],
)
def test_a_mistake_is_found_where_it_is(text: str, where: str) -> None:
    assert problems(text) == [where]


def test_every_key_says_what_it_means() -> None:
    for name, table in SCHEMA["$defs"].items():
        for key, value in table.get("properties", {}).items():
            assert value.get("description") or "$ref" in value or key == "kind", f"{name}.{key}"
            assert "\n" not in value.get("description", "")
