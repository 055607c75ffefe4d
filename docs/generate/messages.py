"""docs/reference/messages.md: every message of the wire with its fields, and the values in them."""

from __future__ import annotations

import importlib
import typing
from collections.abc import Iterator

import msgspec
from msgspec import inspect as kinds

from docs.generate.kinds import default_of, in_words
from docs.generate.text import attribute_docstrings, paragraphs, table
from fabric.messages import AnyMessage, Message

HEAD = """# Messages

Every message that processes send each other, by its tag, with the kind and default of each field as the code has them. How they are packed, what limits they have, who
may send which, and what becomes of one that cannot be sent: [the wire](../wire.md).
"""


def messages_page() -> str:
    """The page."""
    messages = sorted(_messages(), key=lambda one: (one.__module__, one.__struct_config__.tag))
    values: dict[str, type[msgspec.Struct]] = {}
    parts = [HEAD]
    for message in messages:
        parts.append(_section(message, f"{message.__struct_config__.tag}: `{message.__name__}`"))
        values |= {found.__name__: found for found in _values(message)}
    parts.append("## Values in messages\n\nArrays without a tag, as fields of messages and of each other.\n")
    parts += [_section(value, f"`{name}`", level=3) for name, value in sorted(values.items())]
    return "\n".join(parts)


def _messages() -> tuple[type[Message], ...]:
    return typing.get_args(AnyMessage)


def _section(struct: type[msgspec.Struct], title: str, level: int = 2) -> str:
    told = attribute_docstrings(importlib.import_module(struct.__module__)).get(struct.__name__, {})
    rows = (
        (
            f"`{field.name}`",
            in_words(
                kinds.type_info(field.type), lambda found: f"[`{found.__name__}`](#{found.__name__.lower()})"
            ),
            _default(field),
            told.get(field.name, ""),
        )
        for field in msgspec.structs.fields(struct)
    )
    return f"{'#' * level} {title}\n\n{paragraphs(struct.__doc__)}\n\n{table(('field', 'kind', 'default', ''), rows)}"


def _default(field: msgspec.structs.FieldInfo) -> str:
    default = default_of(field)
    return "" if default is msgspec.NODEFAULT else f"`{default!r}`"


def _values(struct: type[msgspec.Struct]) -> Iterator[type[msgspec.Struct]]:
    """The structs in a struct's fields, and those in these."""
    for field in msgspec.structs.fields(struct):
        for found in _structs(kinds.type_info(field.type)):
            yield found
            yield from _values(found)


def _structs(kind: kinds.Type) -> Iterator[type[msgspec.Struct]]:
    if isinstance(kind, kinds.StructType):
        yield kind.cls
    elif isinstance(kind, kinds.UnionType):
        for one in kind.types:
            yield from _structs(one)
    elif isinstance(kind, kinds.VarTupleType | kinds.ListType):
        yield from _structs(kind.item_type)
    elif isinstance(kind, kinds.TupleType):
        for one in kind.item_types:
            yield from _structs(one)
    elif isinstance(kind, kinds.DictType):
        yield from _structs(kind.value_type)
    elif isinstance(kind, kinds.Metadata):
        yield from _structs(kind.type)
