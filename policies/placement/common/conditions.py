"""What a placement will run under: interference, batching, network. Handed in by whoever knows the cluster.

`PlacementPolicy.place` is told of models and GPUs only, which is all that the papers' policies ask for. One
that plans for queueing and neighbours says so by having `under`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Protocol, runtime_checkable

from msgspec import Struct, field

from fabric.ids import ModelId
from policies.placement.common.base import PlacementPolicy
from profiles.interference import Interference

MAX_WAIT_MS = 100.0


class Conditions(Struct, frozen=True):
    """`interference` by GPU type; a type that is absent has none that is known.

    `has_fixed_batches`: the runtime keeps to the plan's batch sizes and waits `max_wait_ms` at most to fill one
    (thesis section 4.3.3); else it defers (Symphony). Delays are one way. `gaps`: from one
    request of a model to the next, in mean gaps, without end and the same at each call; None: nobody can say.
    """

    interference: Mapping[str, Interference] = field(default_factory=dict)
    has_fixed_batches: bool = False
    max_wait_ms: float = MAX_WAIT_MS
    control_ms: float = 0.0
    data_ms_per_item: float = 0.0
    result_ms: float = 0.0
    gaps: Callable[[ModelId], Iterator[float]] | None = None

    def delay_ms(self, batch_size: int) -> float:
        """What of a request's SLO the way takes: announced, granted, sent in, sent out."""
        return 2 * self.control_ms + self.data_ms_per_item * batch_size + self.result_ms


@runtime_checkable
class ConditionedPolicy(Protocol):
    """A policy whose plan depends on what it will run under."""

    def under(self, conditions: Conditions) -> PlacementPolicy:
        """The policy for these conditions."""
        ...
