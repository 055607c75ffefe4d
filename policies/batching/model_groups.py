"""Models that share slices, and what is counted of them between two plans: made for `tenuto` (ADR 0030)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from fabric.ids import ModelId
from policies.batching.matchmaking.model_state import Candidate, ModelState
from policies.batching.matchmaking.pools import Pool
from policies.batching.overload_shares import Gate, Sharing
from policies.connected_models import components

_NOTHING_MS = 1e-9  # a count that is forgotten
# Of what was expected: whoever gathers twenty times as many as that is not held anyway
_OPENING_RATIO_MIN = 0.05


@dataclass(slots=True)
class WaitLosses:
    """The part of the requests that lost by waiting for a slice: counted, and forgotten exponentially."""

    share: float = 0.0
    requests: int = 0
    lost: float = 0.0

    def roll(self, memory: float) -> None:
        """Take over what was counted since the last time."""
        if self.requests:
            self.share += memory * (self.lost / self.requests - self.share)
            self.requests, self.lost = 0, 0.0


@dataclass(slots=True)
class ModelCounts:
    """What one model lost, and what opening its batches cost beside what its plan expects.

    Counted over the batches that found a slice at once, the reserve aside: who waits gathers more, however requests arrive. What such a batch leaves
    behind goes at once too, and counts, so where slices are short the openings fall behind what is expected under Poisson arrivals as well.
    """

    losses: WaitLosses = field(default_factory=WaitLosses)
    gate: Gate = field(default_factory=Gate)
    opening_ms: float = 0.0  # of one batch: beta
    expected_ms_per_request: float = 0.0
    openings_ms: float = 0.0
    expected_ms: float = 0.0
    is_over_share: bool = False
    """In a rehearsal: more was asked than its share, and what is played is what was taken on. Else its `gate` says so."""

    def roll(self, memory: float) -> None:
        """Take over the losses counted since the last time, and forget a part of what is known."""
        self.losses.roll(memory)
        self.openings_ms *= 1.0 - memory
        self.expected_ms *= 1.0 - memory
        if self.expected_ms < _NOTHING_MS:
            self.openings_ms = self.expected_ms = 0.0


@dataclass(slots=True)
class Group:
    """Models that share slices, directly or through others.

    `slices`: batches that they run at a time; a pipeline counts as several. `sharing`: of each of the models, for `share_out`.
    """

    model_ids: list[ModelId]
    pools: list[Pool[Candidate]]
    slices: float
    sharing: list[Sharing]
    wait_losses: WaitLosses

    def roll(self, counts_of: Sequence[ModelCounts], memory: float) -> float:
        """Take over what its models counted since the last time. Returns what opening batches really costs, over what is expected.

        A group is made anew whenever a model or a slice changes, a model's counts are not: so they are added up here.
        """
        self.wait_losses.requests = sum(counts.losses.requests for counts in counts_of)
        self.wait_losses.lost = sum(counts.losses.lost for counts in counts_of)
        self.wait_losses.roll(memory)
        openings_ms = sum(counts.openings_ms for counts in counts_of)
        expected_ms = sum(counts.expected_ms for counts in counts_of)
        for counts in counts_of:
            counts.roll(memory)
        return min(1.0, max(_OPENING_RATIO_MIN, openings_ms / expected_ms)) if expected_ms else 1.0


def groups_of(
    states: Mapping[ModelId, ModelState], counts: Mapping[ModelId, ModelCounts], before: Sequence[Group]
) -> list[Group]:
    """The groups of these models; those that nobody hosts are in none. What the groups `before` lost is not forgotten."""
    pools: dict[int, Pool[Candidate]] = {}
    at_once: dict[ModelId, float] = {}
    for model_id, state in states.items():
        own = [pool for candidate in state.candidates for pool in candidate.pools]
        pools.update((id(pool), pool) for pool in own)
        at_once[model_id] = sum(pool.at_once for pool in own)
    hosted = [frozenset(class_.model_id for class_ in pool.classes) for pool in pools.values()]
    share_before = {model_id: group.wait_losses.share for group in before for model_id in group.model_ids}
    found = components(hosted)
    number_of = {model_id: number for number, component in enumerate(found) for model_id in component}
    pools_of: list[list[Pool[Candidate]]] = [[] for _ in found]
    for pool in pools.values():
        pools_of[number_of[pool.classes[0].model_id]].append(pool)
    groups = []
    for component, group_pools in zip(found, pools_of, strict=True):
        model_ids = sorted(component & states.keys())
        sharing = [
            Sharing(
                counts[model_id].gate,
                states[model_id].alone_ms,
                at_once[model_id],
                states[model_id].model.slo_ms,
            )
            for model_id in model_ids
        ]
        share = max((share_before.get(model_id, 0.0) for model_id in model_ids), default=0.0)
        slices = sum(pool.at_once for pool in group_pools)
        groups.append(Group(model_ids, group_pools, slices, sharing, WaitLosses(share)))
    return groups
