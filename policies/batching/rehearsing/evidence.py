"""Which variant is better, beyond chance: losses in the same blocks of arrivals, compared in pairs.

A burst hits all variants in the same block, so the difference of two varies much less than either. Its mean over its standard error
says whether the blocks seen so far can tell the two apart (a paired t statistic); where losses come in a few bursts the error is
large, and nothing is concluded. Older blocks count less.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

MEMORY = 0.9  # of older blocks, at each rehearsal: ten of them, as it were
SURE = 2.0  # standard errors: one of 40 comparisons would be that far off by chance
HOPELESS = -4.0
BLOCKS_MIN = 8.0  # fewer say nothing
_NO_VARIANCE = 1e-9


@dataclass(slots=True)
class _Difference:
    blocks: float = 0.0
    total: float = 0.0
    squares: float = 0.0

    @property
    def t(self) -> float:
        """In standard errors."""
        if self.blocks < BLOCKS_MIN:
            return 0.0
        mean = self.total / self.blocks
        variance = max(_NO_VARIANCE, self.squares / self.blocks - mean * mean)
        return mean / math.sqrt(variance / self.blocks)


class Evidence:
    """What rehearsals have shown of `count` variants."""

    def __init__(self, count: int) -> None:
        self._differences = {
            (one, other): _Difference() for one in range(count) for other in range(count) if one != other
        }

    def add(self, variants: Sequence[int], lost: Sequence[Sequence[int]]) -> None:
        """The new blocks of one rehearsal of these variants."""
        for one, of_one in zip(variants, lost, strict=True):
            for other, of_other in zip(variants, lost, strict=True):
                if one == other:
                    continue
                difference = self._differences[one, other]
                difference.blocks *= MEMORY
                difference.total *= MEMORY
                difference.squares *= MEMORY
                for here, there in zip(of_one, of_other, strict=True):
                    difference.blocks += 1.0
                    difference.total += there - here
                    difference.squares += (there - here) ** 2

    def better_than(self, current: int, variants: Sequence[int]) -> int:
        """The one that is surely better than the current one, by the most; the current one if none is."""
        found, t_found = current, SURE
        for one in variants:
            if one != current and (t := self._differences[one, current].t) > t_found:
                found, t_found = one, t
        return found

    def is_hopeless(self, one: int, current: int) -> bool:
        """Whether it has been so much worse that it need not be tried each time."""
        return one != current and self._differences[one, current].t < HOPELESS
