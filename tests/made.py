"""Values of any struct type, made from its fields alone, so that a test covers fields that are added later."""

from __future__ import annotations

from typing import Any

import msgspec
from msgspec import inspect as ms


def made(kind: Any, *, text: str, number: int = 1) -> Any:
    """A value of a type in which every text is `text`, every number is `number`, and every collection has one entry."""
    return msgspec.convert(_plain(ms.type_info(kind), text=text, number=number), kind)


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
        case ms.CustomType() | ms.AnyType():
            return text
    raise AssertionError(f"no rule for {info}")
