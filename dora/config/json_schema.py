"""The JSON schema of a configuration file, for editors (`dora config --schema`)."""

from __future__ import annotations

from typing import Any

from dora.config.docs import one_line
from dora.config.schema import Config


def json_schema() -> dict[str, Any]:
    """Return the schema. It has no secrets, which a file may not have, and not the rules that span several keys."""
    schema = _plain(Config.model_json_schema())
    return {"$schema": "https://json-schema.org/draft/2020-12/schema", **schema, "title": "DORA"}


def _plain(node: Any) -> Any:
    """Return a part of pydantic's schema without secrets, line breaks, and alternatives that exclude each other: the
    losses are told apart by a key with a default."""
    if isinstance(node, list):
        return [_plain(item) for item in node]
    if not isinstance(node, dict):
        return node
    plain = {"anyOf" if key == "oneOf" else key: _plain(value) for key, value in node.items()}
    if isinstance(text := plain.get("description"), str):
        plain["description"] = one_line(text)
    if isinstance(properties := plain.get("properties"), dict):
        plain["properties"] = {
            name: value
            for name, value in properties.items()
            if not (isinstance(value, dict) and "environment" in value)
        }
    return plain
