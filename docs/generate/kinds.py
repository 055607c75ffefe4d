"""The kind of a struct's field in words, and its default."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import msgspec
from msgspec import inspect as kinds

WORDS: dict[type[kinds.Type], str] = {
    kinds.StrType: "text",
    kinds.IntType: "whole number",
    kinds.FloatType: "number",
    kinds.BoolType: "`true` or `false`",
    kinds.AnyType: "anything",
}


def in_words(kind: kinds.Type, named: Callable[[type], str]) -> str:
    """A kind as a reader says it; `named` is how a struct is called. None, which stands for "not written", is left out."""
    word = WORDS.get(type(kind))
    if word is not None:
        return word
    if isinstance(kind, kinds.Metadata):
        return in_words(kind.type, named)
    if isinstance(kind, kinds.UnionType):
        inner = [in_words(one, named) for one in kind.types if not isinstance(one, kinds.NoneType)]
        return " or ".join(dict.fromkeys(inner))
    if isinstance(kind, kinds.StructType):
        return named(kind.cls)
    if isinstance(kind, kinds.EnumType):
        return "one of " + ", ".join(f"`{one.name}`" for one in kind.cls)
    if isinstance(kind, kinds.TupleType):
        return f"[{', '.join(in_words(one, named) for one in kind.item_types)}]"
    if isinstance(kind, kinds.VarTupleType | kinds.ListType):
        item = in_words(kind.item_type, named)
        return "steps" if item == "[number, number]" else f"list of {item}"
    assert isinstance(kind, kinds.DictType), f"{kind} has no words yet"
    value = in_words(kind.value_type, named)
    return "`{NAME: {OPTION: …}}`" if value == "mapping of anything" else f"mapping of {value}"


def default_of(field: msgspec.structs.FieldInfo) -> Any:
    """What holds where nothing is written; `msgspec.NODEFAULT` where something must be."""
    if field.default_factory is not msgspec.NODEFAULT:
        return field.default_factory()
    return field.default
