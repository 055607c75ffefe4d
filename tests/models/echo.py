"""A model that answers what it was asked, bit for bit, and models that misbehave."""

from __future__ import annotations

import time
from collections.abc import Mapping

import torch
from torch import Tensor


class Echo:
    """`image` float32 [3, 224, 224] (0.6 MB) -> `same`, the very same bytes."""

    def load(self, device: str) -> None:
        """Nothing to load."""
        self._device = device

    def infer(self, batch: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """The batch itself."""
        return {"same": batch["image"].clone()}

    def example(self) -> dict[str, Tensor]:
        """One request."""
        return {"image": torch.zeros(3, 224, 224)}


class CannotLoad(Echo):
    """Its loader raises."""

    def load(self, device: str) -> None:
        """Fail, as with a file that is not there."""
        raise FileNotFoundError(f"no weights for {device} at /nowhere/weights.safetensors")


class SlowToLoad(Echo):
    """Takes 2 s to load."""

    def load(self, device: str) -> None:
        """As with large weights on a slow disk."""
        time.sleep(2.0)
        super().load(device)


class Raises(Echo):
    """Runs while it warms up, then raises on the first request that is not all zeros."""

    def infer(self, batch: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Fail on anything but zeros."""
        if bool(batch["image"].any()):
            raise ValueError("this model does not like what it sees")
        return super().infer(batch)
