"""The glue between the stages of `tests/models/graphs.py`, and glue that does what it should not."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

SIDE, CROP, BOXES = 32, 8, 6
CARS, PEOPLE = 0.0, 1.0

Arrays = Mapping[str, NDArray[np.generic]]


class _Crops:
    KIND = CARS

    def split(self, outputs: Arrays, request: Arrays) -> list[Arrays]:
        picture = request["picture"]
        starts = [
            int(box)
            for box, kind in zip(outputs["boxes"], outputs["kinds"], strict=True)
            if kind == self.KIND
        ]
        return [{"crop": picture[:, at : at + CROP, at : at + CROP]} for at in starts]


class Cars(_Crops):
    """Of the cars."""


class People(_Crops):
    """Of the people."""

    KIND = PEOPLE


class Raises:
    def split(self, outputs: Arrays, request: Arrays) -> list[Arrays]:
        del outputs, request
        raise KeyError("no such box")


class Hangs:
    def split(self, outputs: Arrays, request: Arrays) -> list[Arrays]:
        del outputs, request
        threading.Event().wait()
        return []


class Dies:
    def split(self, outputs: Arrays, request: Arrays) -> list[Arrays]:
        del outputs, request
        os.kill(os.getpid(), signal.SIGKILL)
        return []


class Nonsense:
    def split(self, outputs: Arrays, request: Arrays) -> Sequence[object]:
        del outputs, request
        return ["a car"]


class TooMany:
    def split(self, outputs: Arrays, request: Arrays) -> list[Arrays]:
        del outputs
        return [{"crop": request["picture"][:, :CROP, :CROP]}] * 10_000


class WrongShape:
    def split(self, outputs: Arrays, request: Arrays) -> list[Arrays]:
        del outputs, request
        return [{"crop": np.zeros((1, 3, 3), np.float32)}]


class Huge:
    def split(self, outputs: Arrays, request: Arrays) -> list[Arrays]:
        del outputs, request
        return [{"crop": np.zeros((1 << 27,), np.float32)}]
