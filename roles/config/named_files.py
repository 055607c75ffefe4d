"""The files that a model's section names: its profile, its trace, the weights of what it loads."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any


def name_files(model: dict[str, Any], named: Callable[[str, str], str]) -> None:
    """Let a section that was checked name each file by another path: `named(path, where)`, where being such as `profile.ref`."""

    def profile(value: Any) -> None:
        if isinstance(value, dict):
            if str(value.get("ref", "")).endswith(".json"):
                value["ref"] = named(value["ref"], "profile.ref")
            for inner in (value.get("by_type") or {}).values():
                profile(inner)

    profile(model.get("profile"))
    arrival = model.get("arrival") or {}
    if arrival.get("path"):
        arrival["path"] = named(arrival["path"], "arrival.path")
    for loader in loaders_of(model):
        if loader.get("weights"):
            loader["weights"] = named(loader["weights"], "loader.weights")


def loaders_of(model: Mapping[str, Any]) -> list[dict[str, Any]]:
    """The loaders in a model's section: its own, and those of its heads."""
    return [one["loader"] for one in (model, *(model.get("heads") or ())) if one.get("loader")]
