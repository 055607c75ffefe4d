"""Placement policies of other distributions: the entry-point group `tenuto.placement` (design section 6).

    [project.entry-points."tenuto.placement"]
    nearest = "their_package.nearest:Nearest"

The entry point may name a function `place(models, gpus, profiles, current)`, an object with such a method, or a
class of such objects, whose constructor then takes the options of the configuration by name. What comes back is
checked: a plan for a GPU or a model that does not exist must not reach a cluster.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from importlib.metadata import EntryPoint, entry_points
from typing import Any

from fabric.errors import ConfigError
from policies.placement.base import GpuSlot, PlacedModelInput, Placement, PlacementPolicy, Profiles

GROUP = "tenuto.placement"

Place = Callable[
    [Sequence[PlacedModelInput], Sequence[GpuSlot], Profiles, Placement | None],
    Placement,
]


def third_party_names() -> tuple[str, ...]:
    """The names that installed distributions offer."""
    return tuple(sorted({point.name for point in entry_points(group=GROUP)}))


def third_party_policy(name: str, options: Mapping[str, Any]) -> PlacementPolicy | None:
    """The policy of that name, None where no distribution offers it.

    Raises ConfigError where two do, where it cannot be imported, or where it does not take these options.
    """
    found = list(entry_points(group=GROUP, name=name))
    if not found:
        return None
    if len({point.value for point in found}) > 1:
        sources = " and ".join(_source(point) for point in found)
        raise ConfigError(f"placement: {name!r} is offered twice, by {sources}")
    offered = _loaded(found[0])
    if inspect.isclass(offered):
        try:
            offered = offered(**options)
        except TypeError as error:
            raise ConfigError(
                f"placement.{name}: {_source(found[0])} does not take these options: {error}"
            ) from error
    elif options:
        raise ConfigError(f"placement.{name}: takes no options, and was given {', '.join(options)}")
    place = getattr(offered, "place", offered)
    if not callable(place):
        raise ConfigError(f"placement.{name}: {_source(found[0])} is neither a policy nor a function")
    return _ThirdParty(name, place)


class _ThirdParty:
    """Somebody else's policy, whose plan is looked at before anyone believes it."""

    def __init__(self, name: str, place: Place) -> None:
        self._name = name
        self._place = place

    def place(
        self,
        models: Sequence[PlacedModelInput],
        gpus: Sequence[GpuSlot],
        profiles: Profiles,
        current: Placement | None = None,
    ) -> Placement:
        """Place; ConfigError where the plan is none, or speaks of what is not there."""
        placed = self._place(models, gpus, profiles, current)
        if not isinstance(placed, Placement):
            raise ConfigError(f"placement.{self._name}: returned {type(placed).__name__}, not a Placement")
        known_gpus = {gpu.index for gpu in gpus}
        known_models = {model.model_id for model in models}
        for planned in placed.slices:
            if planned.gpu not in known_gpus:
                raise ConfigError(
                    f"placement.{self._name}: planned for GPU {planned.gpu}, which is not there"
                )
            for model in planned.models:
                if model.model_id not in known_models:
                    raise ConfigError(
                        f"placement.{self._name}: placed {model.model_id!r}, which is not a model here"
                    )
        return placed


def _loaded(point: EntryPoint) -> Any:
    try:
        return point.load()
    except (ImportError, AttributeError) as error:
        raise ConfigError(f"placement.{point.name}: {_source(point)} cannot be imported: {error}") from error


def _source(point: EntryPoint) -> str:
    """The entry point and whose it is, for people."""
    return f"{point.value} of {point.dist.name if point.dist else 'an unnamed distribution'}"
