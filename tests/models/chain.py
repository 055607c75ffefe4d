"""A model of five blocks, to be cut over several devices; and one that cannot be."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor, nn

WIDTH = 16
BLOCKS = 5


class Chain:
    """`x` float32 [16] -> `y` float32 [16]."""

    def load(self, device: str) -> None:
        """Random weights, which the loader's seed decides."""
        blocks = [nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(BLOCKS)]
        self.net = nn.Sequential(*blocks).eval().to(device)

    def infer(self, batch: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """All blocks."""
        return {"y": self.net(batch["x"])}

    def example(self) -> dict[str, Tensor]:
        """One request."""
        return {"x": torch.zeros(WIDTH)}


class Restless(Chain):
    """Its weights are others each time that it is loaded, whatever the seed."""

    def load(self, device: str) -> None:
        """As with a user's class that trains a little."""
        torch.seed()
        super().load(device)


class Moody(Chain):
    """Never answers the same."""

    def infer(self, batch: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """With noise."""
        return {"y": self.net(batch["x"]) + torch.randn_like(batch["x"])}
