"""In which order the models of a configuration are placed, and on which GPU each replica goes.

All of it for many configurations at once: arrays have a row per configuration and a column per model of the
group or per GPU. Requirements and free space are whole units (`demands.py`), so results are exact.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from policies.placement.common.demands import WHOLE_UNITS

Units = npt.NDArray[np.int64]

# Heavy is a ratio of 1.2 at least (thesis section 5.2.1), here 6 : 5 in whole numbers.
_HEAVY, _LIGHT = 6, 5
_NEUTRAL_KEY = 1_000_000
_SECOND_TIER, _THIRD_TIER = 4 * WHOLE_UNITS, 8 * WHOLE_UNITS
_NOWHERE = 16 * WHOLE_UNITS


@dataclass(frozen=True, slots=True)
class Rows:
    """Configurations: per row and model the degree, Creq and Mreq."""

    degrees: Units
    compute: Units
    memory: Units


@dataclass(frozen=True, slots=True)
class Room:
    """What former groups have left on each GPU of the class. A GPU without any model is not used."""

    compute: Units
    memory: Units
    is_used: npt.NDArray[np.bool_]

    @classmethod
    def empty(cls, gpu_count: int) -> Room:
        """That many GPUs nobody uses."""
        whole = np.full(gpu_count, WHOLE_UNITS, dtype=np.int64)
        return cls(whole, whole.copy(), np.zeros(gpu_count, dtype=np.bool_))


@dataclass(frozen=True, slots=True)
class Placed:
    """What a placement came to: replicas placed per row and model, and where, per row, model and GPU."""

    replicas: Units
    hosts: npt.NDArray[np.bool_]


def placing_order(rows: Rows) -> Units:
    """Columns of the models in the order they are placed: C1, M1, C2, M2, …, neutral ones last.

    Compute-heavy, memory-heavy and neutral models each by Creq + Mreq descending; equals in the group's order.
    """
    compute, memory = rows.compute, rows.memory
    total = compute + memory
    kind = np.where(
        _LIGHT * compute >= _HEAVY * memory, 0, np.where(_LIGHT * memory >= _HEAVY * compute, 1, 2)
    )
    rank = np.zeros_like(total)
    models = total.shape[1]
    for i in range(models):
        for j in range(models):
            if i != j:
                is_before = total[:, j] >= total[:, i] if j < i else total[:, j] > total[:, i]
                rank[:, i] += (kind[:, j] == kind[:, i]) & is_before
    key = np.where(kind == 2, _NEUTRAL_KEY + rank, 2 * rank + kind)
    return np.argsort(key, axis=1, kind="stable").astype(np.int64)


def place_rows(rows: Rows, room: Room) -> Placed:
    """Place each row on its own copy of `room`, replica by replica.

    A replica goes to a GPU of its own group, else to one of another group, both with the least space left in
    Creq plus Mreq, else to the first unused one. It fits where both sums stay within 100 % and no other
    replica of its model is; one that fits nowhere is dropped.
    """
    count, models = rows.degrees.shape
    order = placing_order(rows)
    every = np.arange(count)
    free_compute = np.tile(room.compute, (count, 1))
    free_memory = np.tile(room.memory, (count, 1))
    tier = np.tile(np.where(room.is_used, _SECOND_TIER, _THIRD_TIER), (count, 1))
    hosts = np.zeros((count, models, len(room.compute)), dtype=np.bool_)
    for place in range(models):
        column = order[:, place]
        degree = rows.degrees[every, column]
        compute = rows.compute[every, column]
        memory = rows.memory[every, column]
        going = every
        for replica in range(int(degree.max(initial=0))):
            going = going[degree[going] > replica]
            needed_compute, needed_memory = compute[going], memory[going]
            space_compute, space_memory = free_compute[going], free_memory[going]
            fits = (space_compute >= needed_compute[:, None]) & (space_memory >= needed_memory[:, None])
            fits &= ~hosts[going, column[going]]
            key = np.where(fits, tier[going] + space_compute + space_memory, _NOWHERE)
            gpu = key.argmin(axis=1)
            is_placed = key[np.arange(len(going)), gpu] < _NOWHERE
            going, gpu = going[is_placed], gpu[is_placed]
            if not len(going):
                break
            free_compute[going, gpu] -= needed_compute[is_placed]
            free_memory[going, gpu] -= needed_memory[is_placed]
            tier[going, gpu] = 0
            hosts[going, column[going], gpu] = True
    return Placed(hosts.sum(axis=2, dtype=np.int64), hosts)
