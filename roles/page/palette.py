"""Small numbers for names: a model has one colour in every panel, and a batch that a page keeps is of whom it was."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from typing import Final

COLOURS: Final = 16
"""As the page has them: a number's colour is its rest (`dom.js`, `timeline.js`)."""
GONE_MAX: Final = 1_024


class Numbers:
    """A number is one name's for good, as pages keep a minute of batches by it; a name that comes back has its own again.

    It is of the colour that fewest of those have that are there when the name comes.
    """

    def __init__(self) -> None:
        self._numbers: dict[str, int] = {}
        self._gone: dict[str, int] = {}
        """The newest last."""
        self._next = [*range(COLOURS)]
        """Of each colour, the lowest number that nobody has had."""

    def keep(self, names: Iterable[str]) -> Mapping[str, int]:
        """These are the names now."""
        wanted = dict.fromkeys(names)
        former, self._numbers = self._numbers, {}
        for name, number in former.items():
            (self._numbers if name in wanted else self._gone)[name] = number
        for name in wanted.keys() & self._gone.keys():
            self._numbers[name] = self._gone.pop(name)
        while len(self._gone) > GONE_MAX:
            del self._gone[next(iter(self._gone))]
        taken = Counter(number % COLOURS for number in self._numbers.values())
        for name in wanted:
            if name not in self._numbers:
                colour = min(range(COLOURS), key=lambda one: (taken[one], one))
                taken[colour] += 1
                self._numbers[name] = self._next[colour]
                self._next[colour] += COLOURS
        return self._numbers

    def get(self, name: str) -> int | None:
        """None: it is not known."""
        return self._numbers.get(name)
