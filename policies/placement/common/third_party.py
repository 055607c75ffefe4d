"""Placement policies of other distributions: the entry-point group `tenuto.placement` (design section 6).

    [project.entry-points."tenuto.placement"]
    nearest = "their_package.nearest:Nearest"

The entry point may name a function `place(models, gpus, profiles, current)`, an object with such a method, or a
class of such objects, whose constructor then takes the options of the configuration by name. What comes back is
checked: a plan for a GPU or a model that does not exist must not reach a cluster. What it raises, whatever that is,
is a ConfigError that says whose fault it is and where: this is the one door to somebody else's code.
"""

from __future__ import annotations

import inspect
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fabric.errors import ConfigError, ProfileError
from policies.placement.common.base import GpuSlot, PlacedModelInput, Placement, PlacementPolicy, Profiles

if TYPE_CHECKING:
    from importlib.metadata import EntryPoint, EntryPoints

GROUP = "tenuto.placement"
WORDS_MAX = 500

Place = Callable[
    [Sequence[PlacedModelInput], Sequence[GpuSlot], Profiles, Placement | None],
    Placement,
]


def _offered() -> EntryPoints:
    from importlib.metadata import entry_points  # noqa: PLC0415  17 ms, and most policies are ours

    return entry_points(group=GROUP)


def third_party_names() -> tuple[str, ...]:
    """The names that installed distributions offer."""
    return tuple(sorted({point.name for point in _offered()}))


def third_party_policy(name: str, options: Mapping[str, Any]) -> PlacementPolicy | None:
    """The policy of that name, None where no distribution offers it.

    Raises ConfigError where two do, where it cannot be imported, or where it does not take these options.
    """
    found = list(_offered().select(name=name))
    if not found:
        return None
    if len({point.value for point in found}) > 1:
        sources = " and ".join(_source(point) for point in found)
        raise ConfigError(f"placement: {name!r} is offered twice, by {sources}")
    offered = _loaded(found[0])
    if inspect.isclass(offered):
        try:
            inspect.signature(offered).bind(**options)
        except (TypeError, ValueError) as error:
            raise ConfigError(
                f"placement.{name}: {_source(found[0])} does not take these options: {error}"
            ) from error
        with _theirs(found[0]):
            offered = offered(**options)
    elif options:
        raise ConfigError(f"placement.{name}: takes no options, and was given {', '.join(options)}")
    place = getattr(offered, "place", offered)
    if not callable(place):
        raise ConfigError(f"placement.{name}: {_source(found[0])} is neither a policy nor a function")
    return _ThirdParty(found[0], place)


class _ThirdParty:
    """Somebody else's policy, whose plan is looked at before anyone believes it."""

    def __init__(self, point: EntryPoint, place: Place) -> None:
        self._point = point
        self._name = point.name
        self._place = place

    def place(
        self,
        models: Sequence[PlacedModelInput],
        gpus: Sequence[GpuSlot],
        profiles: Profiles,
        current: Placement | None = None,
    ) -> Placement:
        """Place; ConfigError where the policy raises, or its plan is none, or speaks of what is not there."""
        with _theirs(self._point):
            placed = self._place(models, gpus, profiles, current)
            self._check(placed, models, gpus)
        return placed

    def _check(self, placed: Placement, models: Sequence[PlacedModelInput], gpus: Sequence[GpuSlot]) -> None:
        if not isinstance(placed, Placement):
            raise ConfigError(f"placement.{self._name}: returned {type(placed).__name__}, not a Placement")
        known_gpus = {gpu.index for gpu in gpus}
        known_models = {model.model_id for model in models}
        for planned in placed.slices:
            unknown = [gpu for gpu in planned.gpus if gpu not in known_gpus]
            if unknown:
                raise ConfigError(f"placement.{self._name}: planned for GPU {unknown[0]}, which is not there")
            for model in planned.models:
                if model.model_id not in known_models:
                    raise ConfigError(
                        f"placement.{self._name}: placed {model.model_id!r}, which is not a model here"
                    )


def _loaded(point: EntryPoint) -> Any:
    with _theirs(point):
        return point.load()


@contextmanager
def _theirs(point: EntryPoint) -> Iterator[None]:
    """Around somebody else's code; what it says in our own words stays as it is."""
    try:
        yield
    except (ConfigError, ProfileError):
        raise
    except Exception as error:
        last = traceback.extract_tb(error.__traceback__)[-1]
        raise ConfigError(
            f"placement.{point.name}: {_source(point)} raised {type(error).__name__}: {str(error)[:WORDS_MAX]} "
            f"({Path(last.filename).name}, line {last.lineno})"
        ) from error


def _source(point: EntryPoint) -> str:
    """The entry point and whose it is, for people."""
    return f"{point.value} of {point.dist.name if point.dist else 'an unnamed distribution'}"
