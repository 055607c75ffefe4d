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
from fabric.codec import LONG_HEADER_BYTES_MAX
from fabric.frames import ANSWER_BYTES_MAX, PAYLOAD_BYTES_MAX
from fabric.limits import DURATION_MAX_MS, NAME_CHARS_MAX
from fabric.messages import (
    PRIORITY_MAX,
    RANK_MAX,
    TENSORS_MAX,
    Ledger,
    ModelInfo,
    models,
    records,
)
from fabric.tensors import DTYPES
from profiles.model import BATCH_SIZE_LIMIT
from roles.frontend.events import FrontendSettings
from roles.frontend.preprocess import PIXELS_MAX

HEAD = """# The SDK

`from fabric.client import BlockingClient, Client, ClientOptions`. It needs neither torch nor any extra. What a request can end with besides its
outputs: [errors](errors.md#errors-of-a-request). How large a request may be: [limits](#limits). A cluster to try it on: [README](../../README.md#a-cluster-of-your-own).
"""
CONNECTIONS_CALL = {*vars(Owner), "forget"}
"""Calls of a client that are for its own connections and futures."""
ANSWERED: Mapping[type[msgspec.Struct], ModuleType] = {Ledger: records, ModelInfo: models}
"""Values that calls return, and where they are defined."""


LIMITS_HEAD = """## Limits

What a request may have, with this SDK as through the [gateway](../guides/gateway.md#who-gets-in-and-what-they-may-take). What breaks a limit is refused alone and at once, most of it
before it is sent. What passes between processes has [limits of its own](../wire.md#limits).
"""


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
    parts += [LIMITS_HEAD, table(("what", "limit", "beyond it"), _limits())]
    return "\n".join(part for part in parts if part)


def _limits() -> Iterator[tuple[str, str, str]]:
    invalid, too_large, overloaded = "`InvalidInput`", "`TooLarge`", "`Overloaded`"
    settings = {one.name: one.default for one in msgspec.structs.fields(FrontendSettings)}
    yield "inputs of a request together", f"{_mib(settings['request_bytes_max'])}, at the frontend", too_large
    yield "outputs of a request together", _mib(ANSWER_BYTES_MAX), too_large
    yield "inputs of a request", f"{TENSORS_MAX:,}", invalid
    yield "dimensions of an input; of an output", f"{RANK_MAX}; {RANK_MAX - 1}", invalid
    yield "dtypes", ", ".join(f"`{name}`" for name in DTYPES), invalid
    yield "name of an input or an output", f"{NAME_CHARS_MAX} characters", invalid
    yield "names and shapes of all inputs together", _mib(LONG_HEADER_BYTES_MAX), invalid
    yield "`budget_ms`", f"over 0, at most {DURATION_MAX_MS:,.0f}", invalid
    yield "`priority`", f"0 to {PRIORITY_MAX}", invalid
    yield "a picture's file", f"{PIXELS_MAX:,} pixels", invalid
    yield (
        "pending requests of a client",
        f"{client.ClientOptions().pending_max:,} (`pending_max`)",
        overloaded,
    )
    pending = f"{settings['pending_max']:,}, and {_mib(settings['pending_bytes_max'])} of inputs"
    yield "pending requests of a frontend", pending, overloaded
    yield (
        "requests in a batch",
        f"{BATCH_SIZE_LIMIT:,}, and what fits {_mib(PAYLOAD_BYTES_MAX)}",
        "smaller batches",
    )


def _mib(size: int) -> str:
    return f"{size / 2**20:,.0f} MiB"


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
