"""Small numbers for names, so that a model has the same colour in every panel for as long as it is served."""

from __future__ import annotations

from collections.abc import Iterable, Mapping


class Numbers:
    """Each name has the lowest number that was free when it came; one that goes gives its number back."""

    def __init__(self) -> None:
        self._numbers: dict[str, int] = {}

    def keep(self, names: Iterable[str]) -> Mapping[str, int]:
        """These are the names now."""
        wanted = list(dict.fromkeys(names))
        present = set(wanted)
        self._numbers = {name: number for name, number in self._numbers.items() if name in present}
        taken = set(self._numbers.values())
        number = 0
        for name in wanted:
            if name not in self._numbers:
                while number in taken:
                    number += 1
                self._numbers[name] = number
                taken.add(number)
        return self._numbers

    def get(self, name: str) -> int | None:
        """None: it is not known."""
        return self._numbers.get(name)
