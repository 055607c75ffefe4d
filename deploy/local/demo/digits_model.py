"""A small convolutional recogniser of scanned digits, written the way a user writes a model for a worker.

The weights beside this file come from `examples/train_digits.py`, which trains on the UCI optical digits
(8 x 8 pixels) and holds a fifth of them back; `digits_test.npz` is that fifth.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Final

import torch
from safetensors.torch import load_file
from torch import Tensor, nn

WEIGHTS: Final = Path(__file__).with_name("digits.safetensors")
HELD_OUT: Final = Path(__file__).with_name("digits_test.npz")


class DigitsNet(nn.Module):
    """Three 3 x 3 convolutions and two dense layers, 40 k weights: [n, 1, 8, 8] in 0..1 -> logits [n, 10]."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.Conv2d(1, 16, 3, padding=1),
            nn.ReLU(),
            nn.Conv2d(16, 32, 3, padding=1),
            nn.ReLU(),
            nn.MaxPool2d(2),
            nn.Conv2d(32, 64, 3, padding=1),
            nn.ReLU(),
            nn.MaxPool2d(2),
            nn.Flatten(),
            nn.Linear(256, 64),
            nn.ReLU(),
            nn.Linear(64, 10),
        )

    def forward(self, images: Tensor) -> Tensor:
        """Logits [n, 10]."""
        logits: Tensor = self.layers(images)
        return logits


class Digits:
    """The served model: `image` float32 [1, 8, 8] in 0..1 -> `digit` int64 [] and `scores` float32 [10]."""

    def load(self, device: str) -> None:
        """Read the committed weights on to `device`."""
        net = DigitsNet()
        net.load_state_dict(load_file(WEIGHTS))
        self._net = net.eval().to(device)

    def infer(self, batch: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """A batch, first axis the requests, to outputs with the same first axis."""
        scores = self._net(batch["image"]).softmax(dim=1)
        return {"digit": scores.argmax(dim=1), "scores": scores}

    def example(self) -> dict[str, Tensor]:
        """One request's inputs, without a batch axis."""
        return {"image": torch.zeros(1, 8, 8)}
