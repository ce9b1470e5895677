"""The configuration in a run folder, which another version of DORA may have written: keys come and go.

Readers of a folder need a few sections of it, and ignore keys that this version does not have. To continue the run,
this version must have all of them.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from dora.config.load import add_secrets, dotted, read_toml, validated
from dora.config.schema import Config, ModelConfig, RolloutConfig, RunConfig, TrackingConfig, TrainerConfig
from dora.section import Section


class RecordedConfig(Section):
    """The sections that readers of a run folder use."""

    run: RunConfig
    model: ModelConfig
    rollout: RolloutConfig
    trainer: TrainerConfig
    tracking: TrackingConfig


def read_recorded(path: Path, *, environ: Mapping[str, str]) -> RecordedConfig:
    """Return what readers need of a folder's configuration, with the secrets in `environ`."""
    tables, data = read_toml(path), dict[str, Any]()
    for name, field in RecordedConfig.model_fields.items():
        assert field.annotation is not None
        known = field.annotation.model_fields
        table = tables.get(name, {})
        data[name] = {k: v for k, v in table.items() if k in known} if isinstance(table, dict) else table
    add_secrets(data, environ)
    return validated(RecordedConfig, data, path=path)


def unknown_keys(path: Path) -> list[str]:
    """Return the keys of a folder's configuration that this version does not have."""
    try:
        Config.model_validate_json(json.dumps(read_toml(path), default=str), strict=True)
    except ValidationError as err:
        return [dotted(problem) for problem in err.errors() if problem["type"] == "extra_forbidden"]
    except (ValueError, RecursionError):
        pass  # `load` says what is wrong
    return []
