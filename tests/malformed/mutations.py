"""Bytes that are nearly right: what a mutation fuzzer feeds to decoders and sockets."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Final

EDGES: Final = (
    0,
    1,
    2,
    0x7F,
    0x80,
    0x90,
    0xA0,
    0xC0,
    0xC4,
    0xC6,
    0xCB,
    0xCF,
    0xD9,
    0xDB,
    0xDC,
    0xDD,
    0xDE,
    0xDF,
    0xFF,
)
"""Bytes at which MessagePack, ZMTP and text begin something else."""
SIZE_MAX: Final = 1 << 16


class Mutations:
    """Mutants of good examples, and now and then plain noise; everything from one `random.Random`."""

    def __init__(self, draws: random.Random, examples: Sequence[bytes]) -> None:
        self._draws = draws
        self._examples = examples

    def one(self) -> bytes:
        """The next input."""
        draws = self._draws
        if draws.random() < 0.02:
            return draws.randbytes(draws.randrange(300))
        data = bytearray(draws.choice(self._examples))
        for _ in range(draws.choice((1, 1, 1, 2, 3, 8))):
            self._change(data)
        return bytes(data[:SIZE_MAX])

    def _change(self, data: bytearray) -> None:
        draws = self._draws
        place = draws.randrange(len(data) + 1)
        end = min(len(data), place + draws.choice((1, 1, 2, 4, 8, 32)))
        match draws.randrange(8):
            case 0 if place < len(data):
                data[place] ^= 1 << draws.randrange(8)
            case 1 if place < len(data):
                data[place] = draws.choice(EDGES)
            case 2:
                data[place:place] = draws.randbytes(draws.choice((1, 2, 4, 9)))
            case 3:
                del data[place:end]
            case 4:
                data[place:place] = data[place:end] * draws.choice((1, 2, 100))
            case 5:
                del data[place:]
            case 6:  # a number that is larger than anything
                data[place:end] = draws.choice(
                    (b"\xff" * 8, b"\x7f" + b"\xff" * 7, bytes(8), b"1e999", b"-1")
                )
            case _:  # the end of another one
                other = draws.choice(self._examples)
                data[place:] = other[draws.randrange(len(other) + 1) :]
