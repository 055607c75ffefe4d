"""Where each value of a configuration came from: the file, or a default. For `tenuto config show`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from roles.config.checks import named
from roles.config.cluster import PolicyChoice, Setting
from roles.config.sections import Section


def section_settings(section: Section, written: Any, path: str, source: str) -> list[Setting]:
    """Every value below a section, and whether the file says it."""
    found: list[Setting] = []
    for name, field in zip(section.__struct_fields__, section.__struct_encode_fields__, strict=True):
        if named(path, field) in ("batching", "placement", "graph_deadlines", "cluster.interference"):
            continue  # named with their options' defaults by `policy_settings`
        value = getattr(section, name)
        here = named(path, field)
        is_written = isinstance(written, Mapping) and field in written
        inner = written[field] if is_written else None
        if isinstance(value, Section):
            found += section_settings(value, inner, here, source)
        elif isinstance(value, tuple) and value and isinstance(value[0], Section):
            for place, item in enumerate(value):
                found += section_settings(item, inner[place] if inner else None, f"{here}[{place}]", source)
        elif isinstance(value, dict) and any(isinstance(item, Section) for item in value.values()):
            for key, item in value.items():
                found += section_settings(item, inner[key] if inner else None, named(here, key), source)
        elif value is not None or is_written:
            found.append(Setting(here, value, source if is_written else "default"))
    return found


def policy_settings(
    path: str, choice: PolicyChoice, given: Mapping[str, Any], source: str, *, is_named: bool
) -> list[Setting]:
    """A policy's name and options; `given` are those that the file says."""
    found = [Setting(path, choice.name, source if is_named else "default")]
    found += [
        Setting(f"{path}.{choice.name}.{key}", value, source if key in given else "default")
        for key, value in choice.options.items()
    ]
    return found
