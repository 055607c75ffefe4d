"""Slowdown of slices that share one GPU, behind one small protocol; a model of it is chosen by its name.

- `none`: slices do not disturb each other.
- `igniter`: iGniter's latency model, equations 1 to 11 (scheduling delay, L2 cache, power and frequency).
- `gpulet`: gpulet's linear model over the use of L2 cache and memory.
- `sm`: by SM utilisation, for profiles that know nothing else; option `strength`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from fabric.errors import ProfileError
from fabric.ids import ModelId
from profiles.interference.base import Interference, NoInterference, Running
from profiles.interference.by_sm import SmInterference
from profiles.interference.igniter import IgniterInterference
from profiles.interference.linear import LinearInterference
from profiles.model import ModelProfile

__all__ = [
    "INTERFERENCE_NAMES",
    "Interference",
    "NoInterference",
    "Running",
    "interference_named",
]

Profiles = Mapping[ModelId, ModelProfile]

_MODELS: Mapping[str, Callable[[Profiles, Mapping[str, Any]], Interference]] = {
    "none": lambda _, __: NoInterference(),
    "igniter": lambda profiles, _: IgniterInterference(profiles),
    "gpulet": lambda profiles, _: LinearInterference(profiles),
    "sm": lambda profiles, options: SmInterference(profiles, **options),
}

INTERFERENCE_NAMES = tuple(_MODELS)
"""What a configuration may name (design section 10)."""


def interference_named(
    name: str, profiles: Profiles, gpu_type: str, options: Mapping[str, Any] | None = None
) -> Interference:
    """The interference model of that name for these models on a GPU of that type.

    `options` are checked ones: `strength` of `sm`. Raises ProfileError where there is no such model, never a
    silent `none`; and where a profile lacks what the model needs, naming both.
    """
    build = _MODELS.get(name)
    if build is None:
        raise ProfileError(
            f"there is no interference model {name!r}; available: {', '.join(INTERFERENCE_NAMES)}"
        )
    try:
        return build(profiles, options or {})
    except ProfileError as error:
        raise ProfileError(f"interference model {name} on {gpu_type}: {error}") from error
