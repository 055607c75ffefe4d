"""docs/reference/sdk.md: the client's classes and calls, from their signatures and docstrings."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Iterator, Mapping
from dataclasses import MISSING, Field, fields, is_dataclass
from types import ModuleType
from typing import Any

import msgspec

from docs.generate.kinds import default_of
from docs.generate.text import attribute_docstrings, paragraphs, table
from fabric import client
from fabric.client.connection import Owner
from fabric.messages import Ledger, ModelInfo, models, records

HEAD = """# The SDK

`from fabric.client import Client, BlockingClient`. It needs neither torch nor any extra. What a request can end with besides its
outputs: [errors](errors.md#errors-of-a-request). A cluster to try it on: [README](../../README.md#a-cluster-of-your-own).
"""
CONNECTIONS_CALL = {*vars(Owner), "forget"}
"""Calls of a client that are for its own connections and futures."""
ANSWERED: Mapping[type[msgspec.Struct], ModuleType] = {Ledger: records, ModelInfo: models}
"""Values that calls return, and where they are defined."""


def sdk_page() -> str:
    """The page."""
    parts = [HEAD]
    for name in client.__all__:
        found = getattr(client, name)
        if inspect.isclass(found):
            parts += _class(name, found)
        elif inspect.isfunction(found):
            parts += [f"## `{name}`\n", f"`{name}{_signature(found)}`\n", f"{paragraphs(found.__doc__)}\n"]
    for value, module in ANSWERED.items():
        told = attribute_docstrings(module)[value.__name__]
        parts += [f"## `{value.__name__}`\n", f"{paragraphs(value.__doc__)}\n"]
        parts.append(
            table(
                ("field", "default", "meaning"),
                (
                    (f"`{one.name}`", _shown(default_of(one)), told.get(one.name, ""))
                    for one in msgspec.structs.fields(value)
                ),
            )
        )
    return "\n".join(part for part in parts if part)


def _class(name: str, found: type) -> Iterator[str]:
    yield f"## `{name}`\n"
    yield f"{paragraphs(found.__doc__)}\n"
    if is_dataclass(found):
        told = attribute_docstrings(sys.modules[found.__module__])[name]
        yield table(
            ("field", "default", "meaning"),
            ((f"`{one.name}`", _field_default(one), told.get(one.name, "")) for one in fields(found)),
        )
        return
    yield f"`{name}{_signature(found)}`\n"
    for call, function in vars(found).items():
        if call.startswith("_") or call in CONNECTIONS_CALL:
            continue
        yield f"### `{name}.{call}`\n"
        if isinstance(function, property):
            yield f"{paragraphs(function.__doc__)}\n"
            continue
        prefix = "await " if inspect.iscoroutinefunction(function) else ""
        yield f"`{prefix}{call}{_signature(function)}`\n"
        yield f"{paragraphs(function.__doc__)}\n"


def _signature(function: Any) -> str:
    found = inspect.signature(function)
    own = [one for one in found.parameters.values() if one.name != "self"]
    text = str(found.replace(parameters=own)).replace("'", "")
    return text.removesuffix(" -> None")


def _field_default(field: Field[Any]) -> str:
    if field.default is not MISSING:
        return _shown(field.default)
    return "" if field.default_factory is MISSING else f"`{type(field.default_factory()).__name__}`"


def _shown(value: Any) -> str:
    return "" if value is msgspec.NODEFAULT else f"`{value!r}`"
