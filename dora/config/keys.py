"""Every key of a configuration with its values and its meaning, for completion and for files that DORA writes.

Invariant: what these say is in `dora/config/schema.py`, from which it is read.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, get_args, get_origin

import tomli_w
from pydantic import BaseModel
from pydantic.fields import FieldInfo

from dora.config.docs import kind_of, one_line, section_of
from dora.config.schema import Config
from dora.objectives.table import LOSS_SETTINGS, USER

_SENTENCE = re.compile(r".+?(?<!e\.g)\.(?= [A-Z0-9`{]|$)")


@dataclass(frozen=True, slots=True)
class Setting:
    """A key. An index in it is 0, and stands for any."""

    key: str
    description: str  # in one line
    values: tuple[str, ...] = ()  # if it has no others
    is_path: bool = False

    @property
    def meaning(self) -> str:
        """The first sentence of the description."""
        return first_sentence(self.description)

    def meaning_of(self, value: object) -> str:
        """Return the sentence about a value, if the description has one."""
        found = re.search(rf"(?:^|(?<=\. ))(?:`\w+`, )*`{re.escape(str(value))}`(?:, `\w+`)*: ", self.description)
        return first_sentence(self.description[found.start() :]) if found else self.meaning


def settings() -> Iterator[Setting]:
    """Yield each key, in the order of the schema."""
    yield from _settings(Config, prefix="")


def _settings(model: type[BaseModel], *, prefix: str) -> Iterator[Setting]:
    for name, field in model.model_fields.items():
        key = f"{prefix}{name}"
        inner, is_list = section_of(field)
        if field.exclude:  # a secret, which is read from the environment
            continue
        if key == "objective.loss":
            yield from _loss_settings(key)
        elif inner is None:
            is_path = Path in (field.annotation, *get_args(field.annotation))
            yield Setting(key, _meaning(field), _values(field.annotation), is_path)
        elif is_list:
            yield Setting(key, _meaning(field), ("[]",))
            yield from _settings(inner, prefix=f"{key}.0.")
        else:
            yield from _settings(inner, prefix=f"{key}.")


def _loss_settings(prefix: str) -> Iterator[Setting]:
    yield Setting(f"{prefix}.kind", "Name of the loss.", tuple(kind for kind in LOSS_SETTINGS if kind != USER))
    fields = {name: field for kind in LOSS_SETTINGS.values() for name, field in kind.model_fields.items()}
    for name, field in fields.items():
        if name != "kind":
            yield Setting(f"{prefix}.{name}", _meaning(field), _values(field.annotation))


def _values(annotation: Any) -> tuple[str, ...]:
    if annotation is bool:
        return ("true", "false")
    if get_origin(annotation) is Literal:
        return tuple(map(str, get_args(annotation)))
    return tuple(value for inner in get_args(annotation) for value in _values(inner))


def _meaning(field: FieldInfo) -> str:
    return one_line(field.description) or kind_of(field.annotation)


def first_sentence(text: str | None) -> str:
    """Return the first sentence of a description, as plain text in one line."""
    line = one_line(text)
    found = _SENTENCE.match(line)
    return (found[0] if found else line).replace("`", "")


def commented(values: Mapping[str, Any]) -> str:
    """Return keys with their values as TOML, in their order, with a comment above each that says what it means."""
    known = {setting.key: setting for setting in settings()}
    lines: list[str] = []
    header = ""
    for key, value in values.items():
        section, _, name = key.rpartition(".")
        if section != header:
            header = section
            table = ".".join(part for part in section.split(".") if not part.isdecimal())
            lines += ["", f"[[{table}]]" if section.endswith(".0") else f"[{table}]"]
        lines += [f"# {known[key].meaning_of(value)}", tomli_w.dumps({name: value}).rstrip("\n")]
    return "\n".join(lines[1:]) + "\n"
