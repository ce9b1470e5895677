"""The base class of typed settings; docs/CONFIG.md is generated from the docstrings below their fields."""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict


class Section(BaseModel):
    """Frozen settings that refuse unknown keys."""

    model_config = ConfigDict(
        frozen=True,
        extra="forbid",
        allow_inf_nan=False,
        use_attribute_docstrings=True,
        ser_json_inf_nan="constants",  # options of a source may be infinite
    )
