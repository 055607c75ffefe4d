"""Models whose requests are dropped: what was learned of them may be what prevents that anything better is learned.

A device that stood still once for two seconds teaches that a batch takes many times as long as it does. If no budget lasts for that, no
batch runs, and the model would be refused for ever. So while requests are dropped, what no batch has confirmed for
`FORGET_EVERY_MS` counts for half. A slice that really is so slow is found out by its first batch, and tried less often from then on.
"""

from __future__ import annotations

from typing import Final

from fabric.ids import ModelId
from policies.batching.base import NEVER_MS

FORGET_EVERY_MS: Final = 500.0


class Untried:
    """`due_at_ms`: when to believe less; inf: nothing was dropped."""

    def __init__(self) -> None:
        self.due_at_ms = NEVER_MS
        self._models: set[ModelId] = set()

    def dropped(self, model_id: ModelId, now_ms: float) -> None:
        """A request of that model was dropped, for whatever reason: with the slices that are not used there might have been room."""
        self._models.add(model_id)
        if self.due_at_ms == NEVER_MS:
            self.due_at_ms = now_ms + FORGET_EVERY_MS

    def take(self) -> set[ModelId]:
        """The models of which something was dropped since the last call."""
        models, self._models = self._models, set()
        self.due_at_ms = NEVER_MS
        return models
