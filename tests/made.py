"""Values of any struct type, made from its fields alone, so that a test covers fields that are added later."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import msgspec
from msgspec import inspect as ms


def made(kind: Any, *, text: str, number: int = 1) -> Any:
    """A value of a type in which every text is `text`, every number is `number`, and every collection has one entry."""
    return msgspec.convert(plain(kind, text=text, number=number), kind)


def plain(kind: Any, *, text: str, number: int = 1) -> Any:
    """The same as it is sent."""
    return _plain(ms.type_info(kind), text=text, number=number)


def poisoned(value: Any, text: str) -> Iterator[Any]:
    """Copies of what is sent, each with `text` in place of one text in it: a value, a tag, the first name of a map."""
    if isinstance(value, str):
        yield text
    elif isinstance(value, dict):
        for at, (key, item) in enumerate(value.items()):
            if at == 0:
                yield {text if other == key else other: each for other, each in value.items()}
            yield from ({**value, key: bad} for bad in poisoned(item, text))
    elif isinstance(value, list):
        for at, item in enumerate(value):
            yield from ([*value[:at], bad, *value[at + 1 :]] for bad in poisoned(item, text))


def _plain(info: ms.Type, *, text: str, number: int) -> Any:
    def inner(of: ms.Type) -> Any:
        return _plain(of, text=text, number=number)

    match info:
        case ms.StrType():
            return text
        case ms.IntType():
            return number
        case ms.FloatType():
            return float(number)
        case ms.BoolType():
            return True
        case ms.NoneType():
            return None
        case ms.LiteralType():
            return info.values[0]
        case ms.EnumType():
            return next(iter(info.cls)).value
        case ms.UnionType():
            return inner(next(one for one in info.types if not isinstance(one, ms.NoneType)))
        case ms.TupleType():
            return [inner(one) for one in info.item_types]
        case ms.VarTupleType() | ms.ListType() | ms.SetType() | ms.FrozenSetType():
            return [inner(info.item_type)]
        case ms.DictType():
            return {inner(info.key_type): inner(info.value_type)}
        case ms.StructType():
            tag = {info.tag_field: info.tag} if info.tag_field else {}
            return tag | {field.encode_name: inner(field.type) for field in info.fields}
        case ms.DataclassType() | ms.TypedDictType():
            return {field.encode_name: inner(field.type) for field in info.fields}
        case ms.NamedTupleType():
            return [inner(field.type) for field in info.fields]
        case ms.CustomType() | ms.AnyType() | ms.RawType():
            return text
    raise AssertionError(f"no rule for {info}")
