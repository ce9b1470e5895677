"""Reads TOML, `--set` and the environment into one frozen `Config`, and writes it back as TOML.

Invariant: all problems are reported in one `ConfigError`, one line each, with the origin (file or --set), the dotted
key, and what to change. Secrets are read from environment variables only and are never dumped.
"""

from __future__ import annotations

import json
import re
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from copy import deepcopy
from difflib import get_close_matches
from pathlib import Path
from typing import Any, Final, TypeVar, get_args

import tomli_w
from pydantic import BaseModel, ValidationError
from pydantic.fields import FieldInfo
from pydantic_core import ErrorDetails

from dora.adapter_files import UNSUPPORTED
from dora.config.schema import Config
from dora.errors import ConfigError
from dora.objectives.presets import PRESETS
from dora.objectives.table import LOSS_SETTINGS

_Model = TypeVar("_Model", bound=BaseModel)

#: Pydantic error type -> the expected value, in words. Other types keep pydantic's own message.
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
    "too_long": "at most {max_length} items",
    "path_type": "a path",
    "greater_than_equal": "at least {ge:g}",
    "greater_than": "more than {gt:g}",
    "less_than_equal": "at most {le:g}",
    "less_than": "less than {lt:g}",
    "literal_error": "{expected}",
    "string_pattern_mismatch": "text that matches {pattern}",
    "union_tag_invalid": "{expected_tags}",
}

#: Types of errors about a value that is none of several choices.
_ONE_OF = ("literal_error", "union_tag_invalid")

#: Settings of peft that an adapter cannot have here, and why.
_NOT_OF_LORA = {f"trainer.lora.{name}": why for name, why in UNSUPPORTED.items()} | {
    "trainer.lora.dropout": "servers drop nothing, so their log-probs would differ from those of the trainer",
}

#: Maximum size of a file with a secret.
MAX_SECRET_BYTES = 4_096

#: Similarity (0 to 1) from which a key of another section is suggested; high, because short words are often similar.
_MIN_SIMILARITY = 0.85

#: tomllib takes time quadratic in the number of parts of a key.
_PART = r"""(?:[\w-]++|"[^"\n]*+"|'[^'\n]*+')"""
_LONG_KEY = re.compile(rf"(?<![\w.-]){_PART}(?:[ \t]*+\.[ \t]*+{_PART}){{100}}")


def load(
    source: Path | Mapping[str, Any] | None, overrides: Sequence[str] = (), *, environ: Mapping[str, str]
) -> Config:
    """Return the defaults, overlaid in turn by a file or its tables, each `a.b=value`, and the secrets in `environ`."""
    if bad := [override for override in overrides if "=" not in override]:
        raise ConfigError(f"--set {bad[0]}: expected SECTION.NAME=VALUE")
    path = source if isinstance(source, Path) else None
    data = Config().model_dump(mode="json")
    data["objective"] = {}  # the defaults of its keys depend on the keys that are given
    rewards = data["task"].pop("rewards")  # so does this default, which is for the built-in arithmetic
    if source is not None:
        _overlay(data, read_toml(source) if isinstance(source, Path) else source)
    if isinstance(data["task"], dict) and any(override.strip().startswith("task.rewards.") for override in overrides):
        data["task"].setdefault("rewards", rewards)
    _default_to_own_rows(data, overrides)
    given = deepcopy(data["objective"])
    origins: dict[str, str] = {}  # dotted key -> the --set that gave it
    for override in overrides:
        if override.partition("=")[0].strip() == "objective.loss.kind":
            _replace_loss(data["objective"], override)
        key = set_key(data, override)
        origins[key] = f"--set {override}"
    match data:
        case {"environment": {"name": str(name)}, "task": dict(task)} if name:
            task.setdefault("rewards", [])  # the default is for tasks without an environment
    _refuse_hidden_preset(given, data["objective"], origins=origins, path=path)
    _refuse_secrets(data)
    add_secrets(data, environ)
    return validated(Config, data, path=path, origins=origins)


#: By the kind of environment, the rows that take the place of the built-in tasks: sources and held-out sets.
_OWN_ROWS: Final[Mapping[str, tuple[list[Any], list[Any]]]] = {
    "verifiers": ([{"kind": "verifiers"}], [{"source": {"kind": "verifiers", "split": "eval"}}]),
    "openenv": ([{"kind": "seeds"}], [{"source": {"kind": "seeds"}}]),
}


def _default_to_own_rows(data: dict[str, Any], overrides: Sequence[str]) -> None:
    """With an environment that has tasks, these take the place of the built-in ones, before the overrides."""
    pairs = [override.partition("=") for override in overrides]
    kinds = [value.strip(" \"'") for key, _, value in pairs if key.strip() == "environment.kind"]
    match data:
        case {"environment": dict(environment), "task": dict(task), "eval": dict(evaluation)}:
            kind = str([environment.get("kind"), *kinds][-1])
            if kind not in _OWN_ROWS:
                return
            default, (sources, sets) = Config().model_dump(mode="json"), deepcopy(_OWN_ROWS[kind])
            if task.get("sources") == default["task"]["sources"]:
                task["sources"] = sources
            if evaluation.get("sets") == default["eval"]["sets"]:
                evaluation["sets"] = sets


def validated(
    model: type[_Model],
    data: Mapping[str, Any],
    *,
    path: Path | None,
    origins: Mapping[str, str] | None = None,
) -> _Model:
    """Return the tables as a model; ConfigError has all problems."""
    try:
        # Strict JSON mode accepts lists for tuples and text for paths, but not text for numbers.
        text = json.dumps(data, default=str)
        if large := [_where(key, origins=origins or {}, path=path) + key for key in _large_integers(data)]:
            raise ConfigError(*(f"{line}: an integer has at most 64 bits" for line in large))
        return model.model_validate_json(text, strict=True)
    except ValidationError as err:
        lines = [line for problem in err.errors() for line in _describe(problem, origins=origins or {}, path=path)]
        raise ConfigError(*lines) from None
    except (ValueError, RecursionError):
        raise ConfigError(f"{path or '--set'}: a number has too many digits, or tables are nested too deeply") from None


def _large_integers(value: Any, key: str = "") -> Iterator[str]:
    """Yield the keys of integers that neither TOML nor the messages to ranks can hold."""
    if isinstance(value, Mapping | list):
        items = value.items() if isinstance(value, Mapping) else enumerate(value)
        for name, inner in items:
            yield from _large_integers(inner, f"{key}.{name}" if key else str(name))
    elif isinstance(value, int) and not -(1 << 63) <= value < 1 << 63:
        yield key


def parse(text: str) -> Config:
    """Parse the output of `dump`."""
    return Config.model_validate_json(json.dumps(tomllib.loads(text)), strict=True)


def dump(config: Config) -> str:
    """Return the whole config as TOML, without secrets; `parse` of it gives the same config."""
    return tomli_w.dumps(without_unset(config.model_dump(mode="json")))


# -- reading ------------------------------------------------------------------------------------------------------


def read_toml(path: Path) -> dict[str, Any]:
    """Read a TOML file; ConfigError names the line that is invalid."""
    try:
        return _parse(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        hint = "; a setting is given as --set KEY=VALUE" if "=" in path.name else ""
        raise ConfigError(f"{path}: no such file{hint}") from None
    except IsADirectoryError:
        raise ConfigError(f"{path}: is a folder, not a TOML file; dora run --resume continues the run in one") from None
    except OSError as err:
        raise ConfigError(f"{path}: cannot be read ({err.strerror})") from err
    except UnicodeDecodeError as err:
        raise ConfigError(f"{path}: not UTF-8 text (byte {err.start})") from err
    except tomllib.TOMLDecodeError as err:
        found = re.search(r"^(.*) \(at line (\d+), column (\d+)\)$", str(err))
        text = f"{path}:{found[2]}:{found[3]}: {found[1]}" if found else f"{path}: {err}"
        hint = "; a configuration is TOML" if path.suffix in (".yaml", ".yml", ".json") else ""
        if path.suffix in (".jsonl", ".ndjson", ".parquet", ".csv"):
            hint = "; a configuration is TOML, and data is given as --data FILE"
        raise ConfigError(f"{text}{hint}") from err
    except (ValueError, RecursionError) as err:  # a number with thousands of digits; deeply nested lists
        raise ConfigError(f"{path}: {err}") from err


def _parse(text: str) -> dict[str, Any]:
    if _LONG_KEY.search(text):
        raise tomllib.TOMLDecodeError("a key of more than 100 parts")
    return tomllib.loads(text)


def _overlay(data: dict[str, Any], given: Mapping[str, Any]) -> None:
    """Merge `given` into `data`: tables are merged, everything else is replaced, lists included."""
    for key, value in given.items():
        if isinstance(value, dict) and isinstance(data.get(key), dict):
            _overlay(data[key], value)
        else:
            data[key] = value


def _replace_loss(objective: Any, override: str) -> None:
    """Remove the options of the file's loss before --set names another loss, whose options differ."""
    loss = objective.get("loss") if isinstance(objective, dict) else None
    kind = _value(override.partition("=")[2].strip())
    if isinstance(loss, dict) and loss.get("kind", kind) != kind:
        objective["loss"] = {}


def _refuse_hidden_preset(given: Any, objective: Any, *, origins: Mapping[str, str], path: Path | None) -> None:
    """Refuse a --set of a preset if the file sets the preset's keys to other values: the --set would have no effect,
    because keys take precedence over the preset.

    A file that spells everything out, like the configuration of a run, is such a file.
    """
    name = objective.get("preset") if isinstance(objective, dict) else None
    if "objective.preset" not in origins or not isinstance(given, dict) or name == given.get("preset"):
        return
    preset = _flat(PRESETS.get(name, {}) if isinstance(name, str) else {})
    file, now = _flat(given), _flat(objective)
    hidden = [key for key, value in preset.items() if file.get(key, value) == now.get(key, value) != value]
    if hidden:
        keys = ", ".join(f"objective.{key}" for key in hidden)
        raise ConfigError(
            f"{origins['objective.preset']}: {path or 'the configuration'} gives {keys}, which would take precedence "
            "over those of the preset; remove them there, or set them too"
        )


def _flat(table: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Return the values of nested tables by dotted key."""
    flat: dict[str, Any] = {}
    for key, value in table.items():
        flat |= _flat(value, f"{prefix}{key}.") if isinstance(value, dict) else {f"{prefix}{key}": value}
    return flat


def set_key(data: dict[str, Any], override: str) -> str:
    """Apply one `a.b.0.c=value` of --set to the tables of a config or a workload; return the dotted key."""
    key, equals, text = override.partition("=")
    key = key.strip()
    if any("\ud800" <= character <= "\udfff" for character in override):
        raise ConfigError(f"--set {override}: not UTF-8 text")
    if not equals or not all(key.split(".")):
        raise ConfigError(f"--set {override}: expected SECTION.NAME=VALUE")
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
        raise ConfigError(f"--set {override}: {'.'.join(parents)} is a value, not a table, and has no key '{last}'")
    return key


def _step_into(node: Any, key: str, *, override: str) -> Any:
    """Return the child of a table, or of a list by its index; the first index past the end appends."""
    if isinstance(node, dict):
        if node.get(key) is None:  # a section that is absent
            node[key] = {}
        return node[key]
    if not isinstance(node, list):
        raise ConfigError(f"--set {override}: the value that should contain '{key}' is not a table or a list")
    if not key.isdecimal() or int(key) > len(node):
        raise ConfigError(f"--set {override}: '{key}' is not an index from 0 to {len(node)}")
    if int(key) == len(node):
        node.append({})
    return node[int(key)]


def _value(text: str) -> Any:
    """Parse `text` as a TOML value; return it unchanged if it is not one."""
    try:
        parsed = _parse(f"value = {text}")
    except (ValueError, RecursionError):
        return text
    return parsed["value"] if len(parsed) == 1 else text


# -- secrets ------------------------------------------------------------------------------------------------------


def _secrets() -> Iterator[tuple[str, str, FieldInfo]]:
    """Yield (section, name, field) for every secret."""
    for section, outer in Config.model_fields.items():
        assert isinstance(outer.annotation, type)
        assert issubclass(outer.annotation, BaseModel)
        for name, field in outer.annotation.model_fields.items():
            if field.exclude:
                yield section, name, field


def add_secrets(data: dict[str, Any], environ: Mapping[str, str]) -> None:
    """Add the secrets in `environ`, or in the files that it names, to the sections that `data` has."""
    for section, name, field in _secrets():
        value = read_secret(_environment(field), environ)
        if value and isinstance(data.get(section), dict):
            data[section][name] = value


def read_secret(variable: str, environ: Mapping[str, str]) -> str | None:
    """Return a variable, or the text of the file that `<variable>_FILE` names, without surrounding space; ConfigError
    if it is not a line of text."""
    if value := environ.get(variable, "").strip():
        return _line(value, source=variable)
    if not (file := environ.get(f"{variable}_FILE")):
        return None
    try:
        with open(file, encoding="utf-8") as secret:
            text = secret.read(MAX_SECRET_BYTES).strip()
    except (OSError, UnicodeDecodeError) as err:
        reason = err.strerror if isinstance(err, OSError) else "not UTF-8 text"
        raise ConfigError(f"{variable}_FILE: {file} cannot be read ({reason})") from err
    return _line(text, source=f"{variable}_FILE: {file}") or None


def _line(secret: str, *, source: str) -> str:
    if not secret.isprintable():  # no header can hold it
        raise ConfigError(f"{source}: a secret is one line, without control characters")
    return secret


def _environment(field: FieldInfo) -> str:
    assert isinstance(field.json_schema_extra, dict)
    return str(field.json_schema_extra["environment"])


def _refuse_secrets(data: Mapping[str, Any]) -> None:
    """Refuse secrets in files and options: files are shared, and all users of a machine can see its command lines."""
    for section, name, field in _secrets():
        if isinstance(data[section], dict) and name in data[section]:
            variable = _environment(field)
            raise ConfigError(f"{section}.{name}: is a secret; set it only in the environment variable {variable}")


def state_folder(environ: Mapping[str, str]) -> Path:
    """Return the folder for what DORA keeps for this user, outside of all runs."""
    base = Path(environ.get("XDG_STATE_HOME", ""))
    return (base if base.is_absolute() else Path(environ.get("HOME") or "/", ".local", "state")) / "dora"


# -- problems -----------------------------------------------------------------------------------------------------


def _describe(problem: ErrorDetails, *, origins: Mapping[str, str], path: Path | None) -> list[str]:
    """Describe a pydantic error, in one line unless it comes from the checks across sections."""
    loc = _without_tag(problem["loc"])
    value = problem["input"]
    kind = problem["type"]
    if kind == "union_tag_invalid" and not isinstance(value, dict):
        kind = "model_type"
    elif kind == "union_tag_invalid":
        loc, value = (*loc, "kind"), value.get("kind")
    key = ".".join(map(str, loc))
    if not key:
        return [_where("", origins={}, path=path) + line for line in str(problem["ctx"]["error"]).splitlines()]
    where = _where(key, origins=origins, path=path)
    if kind == "extra_forbidden" and key in _NOT_OF_LORA:
        return [f"{where}{key}: not supported, because {_NOT_OF_LORA[key]}; remove it"]
    if kind == "extra_forbidden" and "." in (name := str(loc[-1])):
        return [f'{where}unknown key "{name}": a name has no dots; nest the tables, as in {_nested(name)}']
    if kind == "extra_forbidden":
        return [f"{where}unknown key {key}; {_nearest(key, loc=problem['loc'])}"]
    if kind == "missing":
        return [f"{where}{key}: is missing"]
    if kind == "value_error":
        return [f"{where}{key}: {problem['ctx']['error']}"]
    wanted = _WANTED.get(kind, problem["msg"]).format(**problem.get("ctx", {}))
    meant = _meant(value, choices=wanted) if kind in _ONE_OF else ""
    return [f"{where}{key}: got {_shown(value)}, expected {wanted}{meant}"]


def _where(key: str, *, origins: Mapping[str, str], path: Path | None) -> str:
    """Return the beginning of a line about a key: the last --set that gave it or a part of it, or else the file."""
    given = [f"{override}: " for overridden, override in origins.items() if _overlap(overridden, key)]
    return given[-1] if given else f"{path}: " if path is not None else ""


def _overlap(one: str, other: str) -> bool:
    return f"{one}.".startswith(f"{other}.") or f"{other}.".startswith(f"{one}.")


def _nested(name: str) -> str:
    *tables, last = name.split(".")
    return f"{' = { '.join((*tables, last))} = ...{' }' * len(tables)}"


def dotted(problem: ErrorDetails) -> str:
    """Return the key that a pydantic error is about."""
    return ".".join(map(str, _without_tag(problem["loc"])))


def _without_tag(loc: tuple[int | str, ...]) -> tuple[int | str, ...]:
    """Return the location without the kind of loss that pydantic inserts."""
    return loc[:2] + loc[3:] if loc[:2] == ("objective", "loss") else loc


def _shown(value: Any) -> str:
    text = json.dumps(value, ensure_ascii=False)
    return text if len(text) <= 60 else f"{text[:57]}..."


def _meant(value: Any, *, choices: str) -> str:
    """Suggest the choice that is similar to a misspelt value; "" if none is. `choices` are in single quotes."""
    near = get_close_matches(str(value).lower(), re.findall(r"'([^']+)'", choices), n=1)
    return f'; did you mean "{near[0]}"?' if near else ""


def _nearest(key: str, *, loc: tuple[int | str, ...]) -> str:
    """Suggest a valid key: a similar one in the same table, else a very similar one in another section."""
    parent, _, name = key.rpartition(".")
    siblings = _keys(_model_at(loc[:-1]))
    initials = [key for key in siblings if "".join(word[0] for word in key.split("_")) == name]
    if near := initials or get_close_matches(name, siblings, n=1):
        return f"did you mean {parent + '.' if parent else ''}{near[0]}?"
    home = {n: f"{section}.{n}" for section in Config.model_fields for n in _keys(_model_at((section,)))}
    if near := get_close_matches(name, home, n=1, cutoff=_MIN_SIMILARITY):
        return f"did you mean {home[near[0]]}?"
    return f"valid here: {', '.join(siblings)}"


def _keys(model: type[BaseModel]) -> list[str]:
    """Return the keys that a file may set: all but secrets."""
    return [name for name, field in model.model_fields.items() if not field.exclude]


def _model_at(loc: Sequence[int | str]) -> type[BaseModel]:
    """Return the section at the location of a problem."""
    if loc[:2] == ("objective", "loss") and len(loc) > 2:
        return LOSS_SETTINGS[str(loc[2])]
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


def as_toml(value: Any) -> str:
    """Return a plain value as TOML in one line."""
    match value:
        case bool():
            return str(value).lower()
        case str():
            return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")
        case dict():
            return f"{{{', '.join(f'{as_toml(key)} = {as_toml(inner)}' for key, inner in value.items())}}}"
        case list() | tuple():
            return f"[{', '.join(map(as_toml, value))}]"
    return repr(value)


def without_unset(value: Any) -> Any:
    """Return tables without unset keys, because TOML has no null."""
    if isinstance(value, dict):
        return {key: without_unset(item) for key, item in value.items() if item is not None}
    return [without_unset(item) for item in value] if isinstance(value, list) else value
