"""Which models belong together because some slice hosts both: the connected components of models and slices."""

from __future__ import annotations

from collections.abc import Collection, Iterable

from fabric.ids import ModelId


def components(hosted: Iterable[Collection[ModelId]]) -> list[frozenset[ModelId]]:
    """The models that slices connect, by the first slice that hosts any of them; `hosted`: those of each slice."""
    number_of: dict[ModelId, int] = {}
    found: dict[int, set[ModelId]] = {}
    for number, models in enumerate({frozenset(models): None for models in hosted}):
        touched = sorted({number_of[model_id] for model_id in models if model_id in number_of})
        first = touched[0] if touched else number
        joined = models.union(*(found.pop(other) for other in touched[1:]))
        found.setdefault(first, set()).update(joined)
        number_of.update(dict.fromkeys(joined, first))
    return [frozenset(component) for component in found.values() if component]
