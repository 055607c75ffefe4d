"""Which models belong together because some slice hosts both: the connected components of models and slices."""

from __future__ import annotations

from collections.abc import Collection, Iterable

from fabric.ids import ModelId


def components(hosted: Iterable[Collection[ModelId]]) -> list[frozenset[ModelId]]:
    """The models that slices connect, by the first slice that hosts any of them; `hosted`: those of each slice."""
    found: list[set[ModelId]] = []
    for models in {frozenset(models): None for models in hosted}:
        touched = [component for component in found if not component.isdisjoint(models)]
        if not touched:
            found.append(set(models))
            continue
        for other in touched[1:]:
            found.remove(other)
            touched[0] |= other
        touched[0] |= models
    return [frozenset(component) for component in found if component]
