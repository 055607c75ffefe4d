"""A network of two layers that several ranks compute together, each with its part of the hidden units; and some that misbehave in one rank."""

from __future__ import annotations

import time
from collections.abc import Mapping

import torch
import torch.distributed
from torch import Tensor, nn

WIDTH, HIDDEN = 16, 64
BAD, HANG, SLOW = 1e6, 2e6, 3e6
"""What a first input over that makes of `Fragile`."""


class Parallel:
    """`x` float32 [16] -> `y` float32 [16]. Without ranks it is whole."""

    def __init__(self, rank: int = 0, world_size: int = 1) -> None:
        self.rank, self.world_size = rank, world_size

    def load(self, device: str) -> None:
        """The same whole network in every rank, by the loader's seed; each keeps its part."""
        up, down = nn.Linear(WIDTH, HIDDEN), nn.Linear(HIDDEN, WIDTH)
        part = slice(self.rank * HIDDEN // self.world_size, (self.rank + 1) * HIDDEN // self.world_size)
        self.up, self.up_bias = up.weight[part].detach().to(device), up.bias[part].detach().to(device)
        self.down, self.down_bias = down.weight[:, part].detach().to(device), down.bias.detach().to(device)

    def infer(self, batch: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """The sum of the parts."""
        hidden = torch.tanh(batch["x"] @ self.up.T + self.up_bias)
        partial = hidden @ self.down.T
        if self.world_size > 1:
            torch.distributed.all_reduce(partial)
        return {"y": partial + self.down_bias}

    def example(self) -> dict[str, Tensor]:
        """One request."""
        return {"x": torch.zeros(WIDTH)}


class Alone(Parallel):
    """Takes no ranks."""

    def __init__(self) -> None:
        super().__init__()


class Around(Parallel):
    """Wants something done before."""

    def pre(self, batch: dict[str, Tensor]) -> dict[str, Tensor]:
        """Nothing."""
        return batch


class Unloadable(Parallel):
    """Raises in one rank, while the other waits for its weights."""

    def load(self, device: str) -> None:
        """As a file that only one rank lacks."""
        if self.rank == 1:
            raise FileNotFoundError("part-1.safetensors is missing")
        super().load(device)
        torch.distributed.broadcast(self.up, src=0)
        torch.distributed.barrier()


class Fragile(Parallel):
    """By its input it raises in all ranks, in the second one alone, or hangs there."""

    def infer(self, batch: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """See above."""
        first = float(batch["x"].max())
        if first >= SLOW and self.rank == 1:
            raise ValueError("only here")
        if HANG <= first < SLOW and self.rank == 1:
            time.sleep(1_000.0)
        if BAD <= first < HANG:
            raise ValueError("a bad input")
        return super().infer(batch)
