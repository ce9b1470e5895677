"""From TOML, `--set` and the environment to one frozen `Config`, and back to TOML.

Invariant: whatever is wrong is one `ConfigError` with one line per problem, each naming where it was said (file or
--set), the full dotted key, and what to change. Secrets come from environment variables only, and leave by none of the
functions here. Called by `cli`, before anything starts.
"""

from __future__ import annotations

import json
import re
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from difflib import get_close_matches
from pathlib import Path
from typing import Any, get_args

from pydantic import BaseModel, ValidationError
from pydantic.fields import FieldInfo
from pydantic_core import ErrorDetails

from dora.config.schema import Config
from dora.errors import ConfigError

#: What a user calls a value of each pydantic error type; types not named here keep pydantic's own words.
_WANTED = {
    "int_type": "an integer",
    "int_from_float": "an integer",
    "float_type": "a number",
    "finite_number": "a finite number",
    "string_type": "text",
    "bool_type": "true or false",
    "tuple_type": "a list",
    "dict_type": "a table",
    "model_type": "a table",
    "path_type": "a path",
    "greater_than_equal": "at least {ge:g}",
    "greater_than": "more than {gt:g}",
    "less_than_equal": "at most {le:g}",
    "literal_error": "{expected}",
    "string_pattern_mismatch": "text that matches {pattern}",
}


def load(path: Path | None, overrides: Sequence[str] = (), *, environ: Mapping[str, str]) -> Config:
    """The defaults, overlaid by the file at `path`, then by each `a.b=value`, then by the secrets of `environ`."""
    data = Config().model_dump(mode="json")
    if path is not None:
        _overlay(data, _read(path))
    origins: dict[str, str] = {}  # dotted key -> the --set that gave it
    for override in overrides:
        key = set_key(data, override)
        origins[key] = f"--set {override}"
    _refuse_secrets(data)
    for section, name, field in _secrets():
        value = environ.get(_environment(field))
        if value and isinstance(data[section], dict):
            data[section][name] = value
    try:
        # JSON's strict mode takes lists for tuples and text for paths, but never text for a number.
        return Config.model_validate_json(json.dumps(data, default=str), strict=True)
    except ValidationError as err:
        lines = [line for problem in err.errors() for line in _describe(problem, origins=origins, path=path)]
        raise ConfigError("\n".join(lines)) from None


def dump(config: Config) -> str:
    """The whole config as TOML, secrets left out; `load` of it gives the same config."""
    return "\n".join(_toml_table(config.model_dump(mode="json"), prefix="")).strip() + "\n"


# -- reading ------------------------------------------------------------------------------------------------------


def _read(path: Path) -> dict[str, Any]:
    try:
        return tomllib.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ConfigError(f"{path}: there is no such config file") from None
    except OSError as err:
        raise ConfigError(f"{path}: cannot be read ({err.strerror})") from err
    except UnicodeDecodeError as err:
        raise ConfigError(f"{path}: is not UTF-8 text (byte {err.start})") from err
    except tomllib.TOMLDecodeError as err:
        found = re.search(r"^(.*) \(at line (\d+), column (\d+)\)$", str(err))
        text = f"{path}:{found[2]}:{found[3]}: {found[1]}" if found else f"{path}: {err}"
        raise ConfigError(text) from err


def _overlay(data: dict[str, Any], given: Mapping[str, Any]) -> None:
    """Tables are merged, everything else, lists included, is replaced."""
    for key, value in given.items():
        if isinstance(value, dict) and isinstance(data.get(key), dict):
            _overlay(data[key], value)
        else:
            data[key] = value


def set_key(data: dict[str, Any], override: str) -> str:
    """Carry out one `a.b.0.c=value` of --set, here or in a workload; returns the dotted key."""
    key, equals, text = override.partition("=")
    key = key.strip()
    if not equals or not all(key.split(".")):
        raise ConfigError(f"--set {override}: wants key=value, the key being section.name")
    *parents, last = key.split(".")
    node: Any = data
    for parent in parents:
        node = _step_into(node, parent, override=override)
    if isinstance(node, list):
        _step_into(node, last, override=override)
        node[int(last)] = _value(text.strip())
    elif isinstance(node, dict):
        node[last] = _value(text.strip())
    else:
        raise ConfigError(f"--set {override}: {'.'.join(parents)} is a value and holds no '{last}'")
    return key


def _step_into(node: Any, key: str, *, override: str) -> Any:
    """The child of a table, or of a list by its index; the first index past the end appends."""
    if isinstance(node, dict):
        return node.setdefault(key, {})
    if not isinstance(node, list):
        raise ConfigError(f"--set {override}: '{key}' is looked for in a value that holds no keys")
    if not key.isdecimal() or int(key) > len(node):
        raise ConfigError(f"--set {override}: '{key}' is not an index from 0 to {len(node)}")
    if int(key) == len(node):
        node.append({})
    return node[int(key)]


def _value(text: str) -> Any:
    """A TOML value, else the text itself."""
    try:
        parsed = tomllib.loads(f"value = {text}")
    except tomllib.TOMLDecodeError:
        return text
    return parsed["value"] if len(parsed) == 1 else text


# -- secrets ------------------------------------------------------------------------------------------------------


def _secrets() -> Iterator[tuple[str, str, FieldInfo]]:
    """(section, name, field) of every secret."""
    for section, outer in Config.model_fields.items():
        assert isinstance(outer.annotation, type)
        assert issubclass(outer.annotation, BaseModel)
        for name, field in outer.annotation.model_fields.items():
            if field.exclude:
                yield section, name, field


def _environment(field: FieldInfo) -> str:
    assert isinstance(field.json_schema_extra, dict)
    return str(field.json_schema_extra["environment"])


def _refuse_secrets(data: Mapping[str, Any]) -> None:
    """Files are shared and command lines are visible to every user of a machine."""
    for section, name, field in _secrets():
        if isinstance(data[section], dict) and name in data[section]:
            variable = _environment(field)
            raise ConfigError(f"{section}.{name}: is a secret; give it by the environment variable {variable} only")


# -- problems -----------------------------------------------------------------------------------------------------


def _describe(problem: ErrorDetails, *, origins: Mapping[str, str], path: Path | None) -> list[str]:
    """One pydantic problem as lines fit for a terminal; only rules across sections give more than one."""
    where = f"{path}: " if path is not None else ""
    key = ".".join(map(str, problem["loc"]))
    if not key:
        return [where + line for line in str(problem["ctx"]["error"]).splitlines()]
    for said, override in origins.items():
        if f"{key}.".startswith(f"{said}.") or f"{said}.".startswith(f"{key}."):
            where = f"{override}: "
    if problem["type"] == "extra_forbidden":
        return [f"{where}unknown key {key}; {_nearest(key, loc=problem['loc'])}"]
    wanted = _WANTED.get(problem["type"], problem["msg"]).format(**problem.get("ctx", {}))
    return [f"{where}{key}: got {_shown(problem['input'])}, wants {wanted}"]


def _shown(value: Any) -> str:
    text = json.dumps(value, ensure_ascii=False)
    return text if len(text) <= 60 else f"{text[:57]}..."


def _nearest(key: str, *, loc: tuple[int | str, ...]) -> str:
    """The valid key that was probably meant: alike within its table, else alike in any section."""
    parent, _, name = key.rpartition(".")
    siblings = list(_model_at(loc[:-1]).model_fields)
    if near := get_close_matches(name, siblings, n=1):
        return f"did you mean {parent + '.' if parent else ''}{near[0]}?"
    home = {n: f"{section}.{n}" for section in Config.model_fields for n in _model_at((section,)).model_fields}
    if near := get_close_matches(name, home, n=1):
        return f"did you mean {home[near[0]]}?"
    return f"valid here: {', '.join(siblings)}"


def _model_at(loc: Sequence[int | str]) -> type[BaseModel]:
    """The section that a problem's place lies in."""
    model: type[BaseModel] = Config
    for part in loc:
        if isinstance(part, str):
            annotation = model.model_fields[part].annotation
            inner = next((a for a in get_args(annotation) if isinstance(a, type)), annotation)
            assert isinstance(inner, type)
            assert issubclass(inner, BaseModel)
            model = inner
    return model


# -- writing ------------------------------------------------------------------------------------------------------


def _toml_table(table: Mapping[str, Any], *, prefix: str) -> Iterator[str]:
    """Values first, then one header per table inside; a list of sections is a list of tables."""
    inner: list[tuple[str, Mapping[str, Any], str]] = []
    for key, value in table.items():
        dotted = f"{prefix}{key}"
        if isinstance(value, list) and value and all(isinstance(item, dict) for item in value):
            inner += [(dotted, item, f"[[{dotted}]]") for item in value]
        elif isinstance(value, dict) and value and _is_section(dotted):
            inner.append((dotted, value, f"[{dotted}]"))
        elif value is not None:
            yield f"{key} = {_toml_value(value)}"
    for dotted, value, header in inner:
        yield from ("", header, *_toml_table(value, prefix=f"{dotted}."))


def _is_section(dotted: str) -> bool:
    """Tables of the user's own keys are written inline; everything else is a section."""
    return dotted.rpartition(".")[2] not in ("options", "path_map", "environment")


def _toml_value(value: Any) -> str:
    if isinstance(value, str):
        return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, list):
        return f"[{', '.join(map(_toml_value, value))}]"
    if isinstance(value, dict):
        return f"{{{', '.join(f'{_toml_value(str(k))} = {_toml_value(v)}' for k, v in value.items())}}}"
    return repr(value)
