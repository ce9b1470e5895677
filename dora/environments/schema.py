"""From a typed Python function to a tool that a model may call: its schema, and the check of arguments.

The types are pydantic's: str, int, float, bool, list, dict, Literal, `X | None`, enums, dates, models, and
`Annotated[int, Field(ge=1, description="...")]`. Arguments are converted as pydantic does, so that the text "3" is an
integer where one is wanted.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass, fields, make_dataclass
from functools import lru_cache
from typing import Any, get_type_hints

from pydantic import ConfigDict, Field, PydanticUserError, TypeAdapter, ValidationError
from pydantic.json_schema import GenerateJsonSchema
from pydantic_core import PydanticSerializationError, PydanticUndefined, to_json


class InvalidArguments(ValueError):
    """The arguments of a call do not fit the tool. The message is for the model."""


@dataclass(frozen=True, slots=True)
class ToolSchema:
    """What a model is told about a function, and the check of its arguments."""

    name: str
    description: str
    parameters: dict[str, Any]  # JSON Schema of an object
    _arguments: TypeAdapter[Any]

    def as_openai(self) -> dict[str, Any]:
        """Return {"type": "function", "function": {name, description, parameters}}."""
        about = {"name": self.name, "description": self.description, "parameters": self.parameters}
        return {"type": "function", "function": about}

    def check(self, arguments: dict[str, Any]) -> dict[str, Any]:
        """Return the arguments converted to the types of the function, with its defaults; or raise InvalidArguments."""
        try:
            checked = self._arguments.validate_python(arguments)
        except ValidationError as err:
            problems = [f"{'.'.join(map(str, one['loc']))}: {one['msg']}" for one in err.errors()]
            raise InvalidArguments("; ".join(problems)) from None
        return {field.name: getattr(checked, field.name) for field in fields(checked)}


class _Untitled(GenerateJsonSchema):
    """A schema without "title", which would repeat the name of each parameter in the prompt of every episode."""

    def field_title_should_be_set(self, schema: Any) -> bool:
        return False


@lru_cache(maxsize=1024)
def tool_schema(function: Callable[..., Any], *, is_method: bool = False) -> ToolSchema:
    """Return the schema of a function from its type hints and docstring; of a method, without `self`.

    TypeError names a parameter that has no type or cannot be given by name, or a type that has no schema.
    """
    name = function.__name__
    parameters = list(inspect.signature(function).parameters.values())[is_method:]
    hints = get_type_hints(function, include_extras=True)
    for each in parameters:
        if each.kind not in (each.POSITIONAL_OR_KEYWORD, each.KEYWORD_ONLY):
            raise TypeError(f"tool {name}: parameter {each} cannot be given by name")
        if each.name not in hints:
            raise TypeError(f"tool {name}: parameter '{each.name}' has no type")
    holder = make_dataclass(
        "Arguments",
        [(each.name, hints[each.name], Field(default=_default(each))) for each in parameters],
        kw_only=True,
        namespace={"__pydantic_config__": ConfigDict(extra="forbid")},
    )
    try:
        adapter: TypeAdapter[Any] = TypeAdapter(holder)
        schema = adapter.json_schema(schema_generator=_Untitled)
    except PydanticUserError as err:
        raise TypeError(f"tool {name}: {str(err).splitlines()[0]}") from err
    schema.pop("title", None)
    return ToolSchema(name, inspect.getdoc(function) or "", schema, adapter)


def _default(parameter: inspect.Parameter) -> Any:
    return PydanticUndefined if parameter.default is parameter.empty else parameter.default


def as_text(result: object) -> str:
    """Return what a tool returned, as the model sees it: text unchanged, everything else as JSON."""
    if isinstance(result, str):
        return result
    try:
        return to_json(result).decode()
    except PydanticSerializationError as err:
        raise TypeError(f"a tool must return text or JSON ({err})") from err
