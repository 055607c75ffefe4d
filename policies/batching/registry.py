"""The batching disciplines by their names, with the options that each one knows (design section 10)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from fabric.errors import ConfigError
from fabric.policy_options import checked_options, shown, suggestion
from policies.batching.base import Discipline
from policies.registry import Registry

DEFAULT = "tenuto"

DISCIPLINES: Registry[Discipline] = Registry(
    {
        name: f"policies.batching.disciplines.{name}:REGISTERED"
        for name in ("tenuto", "deferred", "eager", "timeout", "fixed", "nexus", "clockwork", "shepherd")
    }
)


def discipline_options(name: str, given: Mapping[str, Any]) -> dict[str, Any]:
    """The options of a discipline with the defaults filled in; ConfigError where name or options are wrong."""
    registered = DISCIPLINES.get(name)
    if registered is None:
        raise ConfigError(f"batching: there is no discipline {shown(name)}{suggestion(name, DISCIPLINES)}")
    options = checked_options(registered.options, given, f"batching.{name}")
    if name == "timeout" and len(options) != 1:
        raise ConfigError("batching.timeout: must have exactly one of timeout_ms and slo_percent")
    return options


def make_discipline(name: str, options: Mapping[str, Any] | None = None) -> Discipline:
    """A fresh discipline of that name; ConfigError where name or options are wrong."""
    checked = discipline_options(name, options or {})
    return DISCIPLINES[name].build(checked)
