"""The least device time that any schedule needs, on however many devices: a bound for the sum of all its batches.

Only spans are kept of what makes a schedule: a batch of b may be any b requests whose arrivals lie within s(b) = SLO - l(b).
Two batches whose spans overlap can be sorted anew, with their sizes kept: the first requests to one, the last to the other,
unless the larger one lies wholly inside the span of the smaller. So a least schedule is a row of unbroken runs of requests, each
either one batch, or an outer batch with larger ones inside its span. A request given up inside a span can change places
with the batch's first. `_reaches` says how far so many batches get from each request on, `_least` takes the best of them.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

import numpy as np
from numpy.typing import NDArray

from benchmarks.foreseen.asked import Asked

Places = NDArray[np.int64]
PRICES = (1.0, 1 / 2, 1 / 3, 1 / 4, 1 / 6, 1 / 8, 1 / 12, 1 / 16, 1 / 24, 1 / 32)
"""Of a request that is given up, in batches. Each gives a bound; the bound is a concave function of the price."""


def least_ms(asked: Asked) -> float:
    """What all batches of this model take together at the least, if no more are given up than may be."""
    count = asked.arrived_at_ms.size
    if count <= asked.given_up_max:
        return 0.0
    reaches = list(_reaches(asked))
    batches = -math.inf
    for price in PRICES:
        found = _least(reaches, count, price) - price * asked.given_up_max
        if found < batches:
            break
        batches = found
    return asked.alpha_ms * (count - asked.given_up_max) + asked.beta_ms * batches


def runs(asked: Asked) -> Places:
    """For each request the length of the longest unbroken run from it on that may be one batch."""
    at_ms = asked.arrived_at_ms
    length = np.ones(at_ms.size, dtype=np.int64)
    for size in range(2, min(asked.size_max, at_ms.size) + 1):
        fitting = at_ms[size - 1 :] - at_ms[: at_ms.size - size + 1] <= asked.span_ms(size)
        if not fitting.any():
            break
        length[: fitting.size][fitting] = size
    return length


def _reaches(asked: Asked) -> Iterator[tuple[int, Places, Places]]:
    """For c = 1, 2, …: c, requests (places), and up to where c batches get from each of them at the most.

    With c of 2 and more: an outer batch and c - 1 larger ones inside its span, where that is further than c runs.
    """
    places = np.arange(asked.arrived_at_ms.size)
    length = runs(asked)
    after = np.append(places + length, places.size)
    yield 1, places, after[:-1]
    nested: dict[int, Places] = {}
    for size in range(2, int(length.max())):
        if not _nest(asked, size, length, nested):
            break
    chained = after[:-1]
    for batches in range(2, max(nested, default=1) + 1):
        chained = after[chained]
        reach = np.maximum.accumulate(nested[batches])
        (further,) = np.nonzero(reach > chained)
        yield batches, further, reach[further]


def _nest(asked: Asked, size: int, length: Places, nested: dict[int, Places]) -> bool:
    """Note in `nested`, by the number of batches, how far an outer batch of `size` gets with larger ones inside.

    False where no span holds enough requests; none then does for a larger outer batch.
    """
    at_ms = asked.arrived_at_ms
    places = np.arange(at_ms.size)
    end = np.searchsorted(at_ms, at_ms + asked.span_ms(size), side="right")
    (outer,) = np.nonzero(end - places > 2 * size)  # the inner one has more requests than the outer one
    if not outer.size:
        return False
    inner = _largest(length, outer, end[outer])
    inner = np.minimum(inner, end[outer] - outer - size)
    outer, inner = outer[inner > size], inner[inner > size]
    left = end[outer] - outer - size
    batches = 1
    while outer.size:
        reach = nested.setdefault(batches + 1, places + 1)
        np.maximum.at(reach, outer, outer + size + np.minimum(left, batches * inner))
        more = left > batches * inner
        outer, inner, left = outer[more], inner[more], left[more]
        batches += 1
    return True


def _largest(values: Places, first: Places, end: Places) -> Places:
    """The largest of values[first:end] for each of these pairs, none of which is empty."""
    found = np.zeros(first.size, dtype=np.int64)
    width = 1
    while (is_left := end - first >= width).any():
        is_last = is_left & (end - first < 2 * width)
        found[is_last] = np.maximum(values[first[is_last]], values[end[is_last] - width])
        values = np.maximum(values[:-width], values[width:])  # of twice the width from here on
        width *= 2
    return found


def _least(reaches: list[tuple[int, Places, Places]], count: int, price: float) -> float:
    """The fewest batches, with `price` batches for each request that is given up. From the last request backwards."""
    (_, _, alone), *nested = reaches
    reach = alone.tolist()
    further: dict[int, list[tuple[int, int]]] = {}
    for batches, places, ends in nested:
        for place, end in zip(places.tolist(), ends.tolist(), strict=True):
            further.setdefault(place, []).append((batches, end))
    least = [0.0] * (count + 1)
    for place in range(count - 1, -1, -1):
        found, given_up = least[reach[place]] + 1, least[place + 1] + price
        if given_up < found:
            found = given_up
        if place in further:
            found = min(found, *(least[end] + batches for batches, end in further[place]))
        least[place] = found
    return least[0]
