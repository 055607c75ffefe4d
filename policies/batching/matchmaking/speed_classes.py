"""Speed classes: run-time tables of one model that are alike within 5 % share one candidate.

Slices differ a little (measured corrections, neighbours) or a lot (GPU types, shares). A candidate per slice would
cost a scan per event, so tables are rounded up: a class is a reference table times a power of 1.05, at least as
slow as every table in it. A table far from every reference becomes one, exactly as it is. The batch is sized again
with the slice's own table when it is granted.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from fabric.ids import ModelId
from policies.batching.batch_moments import Table, exec_table

STEP = 1.05
STEPS = 3  # so far around a reference; beyond it rounding up would waste time that another reference saves
_LOG_STEP = math.log(STEP)
_FURTHEST = STEP ** (STEPS + 1)  # tables may be apart by more than a float can say


class SpeedClass:
    """One model at one speed. `table` bounds the run times of every slice in the class from above."""

    __slots__ = ("model_id", "pools", "reference", "step", "table")

    def __init__(self, model_id: ModelId, reference: Table, step: int) -> None:
        self.model_id = model_id
        self.reference = reference
        self.step = step
        self.pools = 0  # how many pools are of this class; at 0 the class is forgotten
        scale = STEP**step * (1 + 1e-9)  # an upper bound in floats too
        self.table = reference if step == 0 else [run_ms * scale for run_ms in reference]


class SpeedClasses:
    """The classes of one model that some pool has."""

    __slots__ = ("_classes", "_model_id")

    def __init__(self, model_id: ModelId) -> None:
        self._model_id = model_id
        self._classes: list[SpeedClass] = []

    def classify(self, exec_ms: Sequence[float], going: SpeedClass | None = None) -> tuple[SpeedClass, Table]:
        """The class of a table, and the table padded; the class's own list where the two are equal.

        `going`: not this one, its last slice is what is classified.
        """
        table = exec_table(exec_ms)
        known: list[Table] = []
        for class_ in self._classes:
            reference = class_.reference
            if class_ is going or any(reference is other for other in known):
                continue
            known.append(reference)
            step = _step(table, reference)
            if step is not None and abs(step) <= STEPS:
                found = self._class(reference, step)
                return found, found.table if found.table == table else table
        return self._class(table, 0), table

    def keep(self, class_: SpeedClass) -> None:
        """A pool of this class has come."""
        if class_.pools == 0:
            self._classes.append(class_)
        class_.pools += 1

    def release(self, class_: SpeedClass) -> bool:
        """A pool of this class is gone; True if it was the last."""
        class_.pools -= 1
        if class_.pools == 0:
            self._classes.remove(class_)
        return class_.pools == 0

    def _class(self, reference: Table, step: int) -> SpeedClass:
        for class_ in self._classes:
            if class_.reference is reference and class_.step == step:
                return class_
        return SpeedClass(self._model_id, reference, step)


def _step(table: Table, reference: Table) -> int | None:
    """How many 5 % steps up cover `table`; None if its shape is another one."""
    if len(table) != len(reference):
        return None
    if table == reference:
        return 0
    if min(reference[1:]) <= 0:
        return None
    ratios = [run_ms / other_ms for run_ms, other_ms in zip(table[1:-1], reference[1:-1], strict=True)]
    highest = max(ratios)
    if min(ratios) * STEP < highest or not _FURTHEST**-1 < highest < _FURTHEST:
        return None
    return math.ceil(math.log(highest) / _LOG_STEP - 1e-9)
