"""gpulet's interference: linear in both sides' use of the L2 cache and of memory (gpulet section 4.2).

    factor = max(1, c1 l2_self + c2 l2_other + c3 dram_self + c4 dram_other + c5)

Utilisations are fractions; those that were measured on the whole GPU count times their own gpulet's share. Beside
several models the factor is the largest that any one of them causes: a gpulet runs one model at a time.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from fabric.errors import ProfileError
from fabric.ids import ModelId
from profiles.interference.base import InterferenceLaw, Running
from profiles.requirements import BandwidthTable


class LinearInterference:
    """Bandwidths by model, all measured in the same way: ProfileError where they are not."""

    covers_unlimited_slices = False

    def __init__(self, tables: Mapping[ModelId, BandwidthTable]) -> None:
        first = next(iter(tables.values()), None)
        for model_id, table in tables.items():
            if first is not None and table.linear != first.linear:
                raise ProfileError(
                    f"model {model_id} has bandwidths of another measurement than its neighbours"
                )
        self._tables = tables

    def slowdown(self, running: Running, neighbours: Sequence[Running]) -> float:
        """The largest factor that any one neighbour causes; 1 without neighbours."""
        return max((self._factor(running, neighbour) for neighbour in neighbours), default=1.0)

    def _factor(self, running: Running, neighbour: Running) -> float:
        c = self._tables[running.model_id].linear
        l2_self, dram_self = self._fractions(running)
        l2_other, dram_other = self._fractions(neighbour)
        return max(
            1.0,
            c.l2_self * l2_self
            + c.l2_other * l2_other
            + c.dram_self * dram_self
            + c.dram_other * dram_other
            + c.constant,
        )

    def _fractions(self, running: Running) -> tuple[float, float]:
        table, share = self._tables[running.model_id], running.share_or_whole
        used = table.at(running.batch_size, share)
        scale = share / 100 if table.linear.is_scaled_by_share else 1.0
        return used.l2_percent / 100 * scale, used.dram_percent / 100 * scale


LAW = InterferenceLaw(
    need="L2 and DRAM bandwidths",
    families=("gpulet-2080ti", "gpulet-v100"),
    read=lambda profile: profile.usage.bandwidths,
    build=lambda tables, _: LinearInterference(tables),
)
