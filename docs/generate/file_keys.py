"""docs/reference/file.md: every key of the file, from its sections and from the options that policies register."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import msgspec
from msgspec import inspect as kinds

from docs.generate.kinds import default_of, in_words
from docs.generate.text import attribute_docstrings, paragraphs, table
from fabric.policy_options import Choice, Flag, Number, Option, Schema
from policies.batching.registry import DISCIPLINES
from policies.graphs import GRAPH_DEADLINES
from policies.placement.registry import PLACEMENTS
from profiles.interference import INTERFERENCE_LAWS
from roles.config import sections
from roles.config.sections import Document, Section

EXAMPLE = Path(__file__).resolve().parents[2] / "examples" / "cluster.yaml"
HEAD = """# The file

Every key that a file may have. `tenuto up`, `plan`, `simulate`, `goodput`, `compare`, `bench`, `deploy` and the roles read the same file,
as YAML or as JSON (`.json`). An unknown key is an error that names the closest known one. `tenuto config show FILE` lists
every value and where it comes from. [All of it in one file](#all-of-it-in-one-file) is at the end.

Times are in ms where a name ends in `_ms`, and in s where it ends in `_s`. *Required* means that the key must be there where its
section is. `-`: nothing is set, and the meaning says what holds then.
"""


def file_page() -> str:
    """The page."""
    parts = [HEAD]
    for path, section in _all_sections():
        parts += [f"## {_title(path)}\n", _about(section), _rows(section)]
    parts.append("## Options of batching\n\nWhich one to take: [disciplines](../results/disciplines.md).\n")
    parts.append(_options({name: one.options for name, one in DISCIPLINES.items()}))
    parts.append("## Options of placement\n\nWhich one to take: [placement](../guides/placement.md).\n")
    parts.append(_options({name: one.options for name, one in PLACEMENTS.items()}))
    parts.append(
        "## Options of interference\n\nWhat each law needs: [profiles](../guides/profiles.md#interference).\n"
    )
    parts.append(_options({name: law.options for name, law in INTERFERENCE_LAWS.items()}))
    parts.append(
        "## Options of graph_deadlines\n\nWhat each rule does: [applications](../guides/applications.md).\n"
    )
    parts.append(_options(GRAPH_DEADLINES))
    parts.append(
        f"## All of it in one file\n\nThis is examples/cluster.yaml.\n\n```yaml\n{EXAMPLE.read_text(encoding='utf-8')}```\n"
    )
    return "\n".join(part for part in parts if part)


def key_docstrings(section: type[Section]) -> Mapping[str, str]:
    """What each key of a section means."""
    return attribute_docstrings(sections)[section.__name__]


def _all_sections() -> Iterator[tuple[str, type[Section]]]:
    """(path, section), each section once, in the order of the file."""
    seen: set[type] = set()

    def walk(path: str, section: type[Section]) -> Iterator[tuple[str, type[Section]]]:
        if section in seen:
            return
        seen.add(section)
        yield path, section
        for field in msgspec.structs.fields(section):
            for ending, inner in _inner(kinds.type_info(field.type)):
                yield from walk(f"{path}.{field.encode_name}{ending}".lstrip("."), inner)

    yield from walk("", Document)


def _inner(kind: kinds.Type) -> Iterator[tuple[str, type[Section]]]:
    if isinstance(kind, kinds.StructType):
        assert issubclass(kind.cls, Section), "nothing else is in a file"
        yield "", kind.cls
    elif isinstance(kind, kinds.UnionType):
        for one in kind.types:
            yield from _inner(one)
    elif isinstance(kind, kinds.VarTupleType):
        yield from (("[]" + ending, found) for ending, found in _inner(kind.item_type))
    elif isinstance(kind, kinds.DictType):
        yield from ((".NAME" + ending, found) for ending, found in _inner(kind.value_type))


def _title(path: str) -> str:
    return f"`{path}`" if path else "The whole file"


def _about(section: type[Section]) -> str:
    text = paragraphs(section.__doc__)
    _, colon, rest = text.partition(": ")
    return f"{rest[0].upper()}{rest[1:]}\n" if colon else ""


def _rows(section: type[Section]) -> str:
    told = key_docstrings(section)
    names = {found: path for path, found in _all_sections()}
    return table(
        ("key", "kind", "default", "meaning"),
        (
            (
                f"`{field.encode_name}`",
                in_words(kinds.type_info(field.type), lambda found: _link(names[found])),
                _default(field),
                told[field.name],
            )
            for field in msgspec.structs.fields(section)
        ),
    )


def _link(path: str) -> str:
    anchor = path.lower().replace(".", "").replace("[]", "")
    return f"[`{path}`](#{anchor})"


def _default(field: msgspec.structs.FieldInfo) -> str:
    default = default_of(field)
    if default is msgspec.NODEFAULT:
        return "*required*"
    if default is None or default in ((), {}):
        return "-"
    return "as below" if isinstance(default, Section) else f"`{json.dumps(default)}`"


def _options(registered: Mapping[str, Schema]) -> str:
    return table(
        ("name", "option", "values", "default"),
        (
            row
            for name, schema in registered.items()
            for row in (
                [
                    (f"`{name}`", f"`{option}`", _values(kind), _option_default(kind.default))
                    for option, kind in schema.items()
                ]
                or [(f"`{name}`", "", "", "")]
            )
        ),
    )


def _values(option: Option) -> str:
    if isinstance(option, Choice):
        return ", ".join(f"`{name}`" for name in option.names)
    if isinstance(option, Flag):
        return "`true`, `false`"
    if isinstance(option, Number):
        bound = "from" if option.is_minimum_allowed else "over"
        kind = "whole number" if option.is_whole else "number"
        return f"{kind} {bound} {option.minimum:g} to {option.maximum:g}"
    return "see the policy's page"


def _option_default(default: Any) -> str:
    return "-" if default is None else f"`{json.dumps(default)}`"
