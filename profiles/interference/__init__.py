"""Slowdown of slices that share one GPU, behind one small protocol; a law of it is chosen by its name.

- `none`: slices do not disturb each other.
- `igniter`: iGniter's latency model, equations 1 to 11 (scheduling delay, L2 cache, power and frequency).
- `gpulet`: gpulet's linear model over the use of L2 cache and memory.
- `sm`: by SM utilisation, for profiles that know nothing else; option `strength`.

A law is one file: it has the law's options and what the law needs of a profile. Here it is registered.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from fabric.errors import ConfigError, ProfileError
from fabric.ids import ModelId
from fabric.policy_options import checked_options, shown, suggestion
from profiles.interference import by_sm, igniter, linear
from profiles.interference.base import NO_LAW, Interference, InterferenceLaw, NoInterference, Running
from profiles.model import ModelProfile

__all__ = [
    "INTERFERENCE_NAMES",
    "Interference",
    "NoInterference",
    "Running",
    "interference_named",
    "interference_options",
]

INTERFERENCE_LAWS: Mapping[str, InterferenceLaw[Any]] = {
    "none": NO_LAW,
    "igniter": igniter.LAW,
    "gpulet": linear.LAW,
    "sm": by_sm.LAW,
}
"""By the names that a configuration may say."""

INTERFERENCE_NAMES = tuple(INTERFERENCE_LAWS)
"""What a configuration may name (design section 10)."""


def interference_options(name: str, given: Mapping[str, Any], where: str) -> dict[str, Any]:
    """The options of a law with the defaults filled in; ConfigError where name or options are wrong."""
    law = INTERFERENCE_LAWS.get(name)
    if law is None:
        raise ConfigError(f"{where}: there is no {shown(name)}{suggestion(name, INTERFERENCE_NAMES)}")
    return checked_options(law.options, given, f"{where}.{name}")


def interference_named(
    name: str,
    profiles: Mapping[ModelId, ModelProfile],
    gpu_type: str,
    options: Mapping[str, Any] | None = None,
) -> Interference:
    """The interference law of that name for these models on a GPU of that type.

    Raises ProfileError where there is no such law, never a silent `none`; where an option cannot be; and where a
    profile lacks what the law needs, naming both.
    """
    law = INTERFERENCE_LAWS.get(name)
    if law is None:
        raise ProfileError(
            f"there is no interference model {name!r}; available: {', '.join(INTERFERENCE_NAMES)}"
        )
    try:
        return law.over(profiles, checked_options(law.options, options or {}, name))
    except (ConfigError, ProfileError) as error:
        raise ProfileError(f"interference model {name} on {gpu_type}: {error}") from error
