"""Who goes to which shard where the file does not say: by names, so that a host or a model more or less moves few others.

Rendezvous hashing (Thaler and Ravishankar 1998): each name draws its own order of preference over the shards from a hash of both,
in proportion to their weights. Alone that is uneven, so loads are bounded (Mirrokni, Thorup and Zadimoghaddam 2018): a name goes to the
first of its preferences that has room, which is a little more than its part of everything; the largest choose first. So what all readers
of a file find depends on nothing but the file, and little of it on any one line.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Collection, Mapping, Sequence
from typing import Final

ROOM: Final = 1.25
"""How much more than its part a shard may have: less is evener, and moves more when something changes."""


def deal(
    sizes: Mapping[str, Sequence[float]],
    weights: Sequence[float],
    said: Mapping[str, int] | None = None,
    fit: Mapping[str, Collection[int]] | None = None,
) -> dict[str, int]:
    """A shard for each name. None gets nothing while another one has two that are not `said` and fit there.

    `sizes`: of each, one or more kinds of load that add up. `weights`: of the shards, which parts follow. `said`: who
    is where already. `fit`: the shards that can have a name at all; those without an entry fit everywhere.
    """
    shards = range(len(weights))
    totals = [sum(column) or 1.0 for column in zip(*sizes.values(), strict=True)]
    parts = {
        name: [one / total for one, total in zip(size, totals, strict=True)] for name, size in sizes.items()
    }
    shares = [weight / sum(weights) for weight in weights]
    used = [[0.0] * len(totals) for _ in shards]
    dealt: dict[str, int] = {}
    empty = set(shards)

    def put(name: str, shard: int) -> None:
        dealt[name] = shard
        empty.discard(shard)
        used[shard] = [have + more for have, more in zip(used[shard], parts[name], strict=True)]

    def fullness(name: str, shard: int) -> float:
        """Of the fullest of its loads with half of that name, as a part of what it should have."""
        return (
            max(have + more / 2 for have, more in zip(used[shard], parts[name], strict=True)) / shares[shard]
        )

    for name, shard in (said or {}).items():
        put(name, shard)
    left = sorted((name for name in sizes if name not in dealt), key=lambda name: (-max(parts[name]), name))
    for place, name in enumerate(left):
        able = list(shards) if fit is None else sorted(fit.get(name, shards))
        if len(left) - place <= len(empty):
            able = sorted(empty.intersection(able)) or able
        ranked = sorted(able, key=lambda shard: -_preference(name, shard, shares[shard]))
        roomy = (shard for shard in ranked if fullness(name, shard) <= ROOM)
        put(name, next(roomy, min(ranked, key=lambda shard: fullness(name, shard))))
    return dealt


def _preference(name: str, shard: int, weight: float) -> float:
    """How much that name wants to that shard: the highest one wins, in proportion to the weights."""
    digest = hashlib.blake2b(f"{name}/{shard}".encode(), digest_size=8).digest()
    drawn = (
        int.from_bytes(digest, "big") >> 12
    )  # what a float holds: else the highest ones are 1.0, whose logarithm is 0
    return -weight / math.log((drawn + 0.5) / 2.0**52)
