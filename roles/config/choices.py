"""Policies written on the command line: names, or names with options as a file has them, as YAML or JSON."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from fabric.errors import ConfigError
from fabric.policy_options import shown
from policies.batching.registry import discipline_options
from roles.config.cluster import ClusterConfig, PolicyChoice, placement_choice
from roles.config.documents import read_value


@dataclass(frozen=True, slots=True)
class NamedChoice:
    """A policy that was asked for, and how it is called in the answer."""

    label: str
    policy: PolicyChoice


def placement_choices(text: str, config: ClusterConfig, where: str) -> tuple[NamedChoice, ...]:
    """``usher,{symphony: {subclusters: 2}}`` as checked choices for `config`; ConfigError where one cannot be.

    The name of the file's own alone stands for it with the file's options.
    """
    gpus = len(config.gpus)
    return _choices(
        text,
        config.placement,
        where,
        lambda name, given: placement_choice(name, given, config.models, gpus, config.shards),
    )


def batching_choices(text: str, own: PolicyChoice, where: str) -> tuple[NamedChoice, ...]:
    """``deferred,{fixed: {batch: 8}}`` as checked choices; `own` is the file's, as in `placement_choices`."""
    return _choices(text, own, where, lambda name, given: PolicyChoice(name, discipline_options(name, given)))


def _choices(
    text: str, own: PolicyChoice, where: str, check: Callable[[str, Mapping[str, Any]], PolicyChoice]
) -> tuple[NamedChoice, ...]:
    """Checked choices; a label is the name, with the options as well where a name comes more than once."""
    written = _written(text, where)
    if not written:
        raise ConfigError(f"{where}: is empty; it must name at least one policy")
    names = Counter(name for name, _ in written)
    choices: list[NamedChoice] = []
    for name, options in written:
        label = name
        if names[name] > 1 and options is not None:
            label = json.dumps({name: options}, default=str)
        if any(label == choice.label for choice in choices):
            raise ConfigError(f"{where}: {label} is there twice")
        is_own = options is None and name == own.name
        choices.append(NamedChoice(label, own if is_own else check(name, options or {})))
    return tuple(choices)


def _written(text: str, where: str) -> list[tuple[str, Mapping[str, Any] | None]]:
    """(name, options) of each; None where no options were written."""
    found: list[tuple[str, Mapping[str, Any] | None]] = []
    for item in read_value(f"[{text}]", where):
        name, options = item, None
        if isinstance(item, dict) and len(item) == 1:
            ((name, options),) = item.items()
        if not isinstance(name, str) or not isinstance(options, dict | None):
            raise ConfigError(
                f"{where}: {shown(item)} is not a policy; write a name, or a name with options: "
                "'{symphony: {subclusters: 2}}'"
            )
        found.append((name, options))
    return found
