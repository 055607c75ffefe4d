"""Classifiers that were tuned from one backbone: equal layers, a head of their own each; and one that is no relative."""

from __future__ import annotations

import os
import time
from collections.abc import Mapping
from pathlib import Path

import torch
from torch import Tensor, nn

WIDTH = 16
LAYERS = 4
RUNS_FILE = "HEADS_TEST_LAYER_RUNS"
"""In the environment: a file that gets a byte for each run of a backbone's layer, in whichever process."""


class Layer(nn.Linear):
    """A layer that counts, and that may take long to launch."""

    def __init__(self, width: int, outputs: int, launch_s: float = 0.0) -> None:
        """Seconds that pass before each run of it."""
        super().__init__(width, outputs)
        self.launch_s = launch_s

    def forward(self, rows: Tensor) -> Tensor:
        """Rows [n, 16]."""
        time.sleep(self.launch_s)
        if RUNS_FILE in os.environ:
            with Path(os.environ[RUNS_FILE]).open("ab") as file:
                file.write(b".")
        return super().forward(rows).tanh()


class Tuned:
    """`x` float32 [16] -> `y` float32 [`CLASSES`]."""

    CLASSES = 2
    BODY_SEED = 1
    LAUNCH_S = 0.0

    def load(self, device: str) -> None:
        """The same layers for all of one body's seed."""
        torch.manual_seed(self.BODY_SEED)
        body = [Layer(WIDTH, WIDTH, self.LAUNCH_S) for _ in range(LAYERS)]
        torch.manual_seed(self.CLASSES)
        self.net = nn.Sequential(*body, nn.Linear(WIDTH, self.CLASSES)).eval().to(device)

    def infer(self, batch: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """The last layer is the head."""
        return {"y": self.net(batch["x"])}

    def example(self) -> dict[str, Tensor]:
        """One request."""
        return {"x": torch.zeros(WIDTH)}


class Three(Tuned):
    """With three classes."""

    CLASSES = 3


class Seven(Tuned):
    """With seven."""

    CLASSES = 7


class Stranger(Tuned):
    """Of another backbone."""

    CLASSES = 3
    BODY_SEED = 2


class LateTuned(Tuned):
    """With its own second layer: the ones behind it are equal to the others' all the same."""

    def load(self, device: str) -> None:
        """The same backbone but for one layer."""
        super().load(device)
        torch.manual_seed(3)
        self.net.get_submodule("1").load_state_dict(Layer(WIDTH, WIDTH).state_dict())


class Launched(Tuned):
    """With layers that take longer to launch than to run."""

    CLASSES = 3
    LAUNCH_S = 0.002


class LaunchedToo(Launched):
    """Of another backbone, and of the same architecture."""

    BODY_SEED = 4
