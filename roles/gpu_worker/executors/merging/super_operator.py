"""One operator that several models run together: the block that their weights have in common, once for all their rows.

Let A be that block, rows [r, r + h) and columns [c, c + w) of a member's weight W. Of its inputs x the member gives the columns
[c, c + w), and Z = A·x[c:c+w] of all members is one product. Then Y = W'·x, and Z is added in the rows [r, r + h), where W' is W with the
block as zeros. It is computed without such a copy of W, by views of what is around the block.

The paper (section 3.4) multiplies the block padded with zeros, at its place in the first model, by all inputs, and moves only the
second one's *outputs* to its own rows. That multiplies the second one's wrong columns unless c is the same in both.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional


@dataclass(frozen=True, slots=True)
class Place:
    """Where the block is in a member's weight, and what else that operator has. A weight that is the block is None."""

    weight: Tensor | None
    bias: Tensor | None
    row: int = 0
    column: int = 0


class SuperOperator(nn.Module):
    """`settings` of a convolution, in the order of `torch.conv2d` behind the bias; None: it is a linear layer."""

    def __init__(self, block: Tensor, places: Sequence[Place], settings: Sequence[Any] | None) -> None:
        super().__init__()
        self._block, self._places, self._settings = block, tuple(places), settings

    def forward(self, *inputs: Tensor) -> list[Tensor]:
        """An output for each member's input; their numbers of rows may differ, and be 0."""
        if self._settings is not None:
            return self._convolved(inputs)
        rows = [one.reshape(-1, one.shape[-1]) for one in inputs]
        width = self._block.shape[1]
        parts = [
            one[:, place.column : place.column + width] for one, place in zip(rows, self._places, strict=True)
        ]
        products = torch.split(functional.linear(_joined(parts), self._block), [len(one) for one in parts])
        outputs = []
        for given, own, product, place in zip(inputs, rows, products, self._places, strict=True):
            whole = product if place.weight is None else self._around(own, product, place.weight, place)
            biased = whole if place.bias is None else whole + place.bias
            outputs.append(biased.view(*given.shape[:-1], biased.shape[1]))
        return outputs

    def _around(self, rows: Tensor, product: Tensor, weight: Tensor, place: Place) -> Tensor:
        height, width = self._block.shape
        beside, above, below = (
            weight[place.row : place.row + height],
            weight[: place.row],
            weight[place.row + height :],
        )
        end = place.column + width
        middle = product + functional.linear(rows[:, : place.column], beside[:, : place.column])
        middle = middle + functional.linear(rows[:, end:], beside[:, end:])
        return torch.cat([functional.linear(rows, above), middle, functional.linear(rows, below)], dim=1)

    def _convolved(self, pictures: Sequence[Tensor]) -> list[Tensor]:
        """Only whole output channels are a block of a convolution."""
        assert self._settings is not None, "it is a convolution"
        product = torch.conv2d(_joined(pictures), self._block, None, *self._settings)
        products = torch.split(product, [len(one) for one in pictures])
        outputs = []
        for given, own, place in zip(pictures, products, self._places, strict=True):
            whole = own
            if place.weight is not None:
                end = place.row + len(self._block)
                above, below = (
                    [torch.conv2d(given, one, None, *self._settings)] if len(one) else []
                    for one in (place.weight[: place.row], place.weight[end:])
                )
                whole = torch.cat([*above, own, *below], dim=1)
            outputs.append(whole if place.bias is None else whole + place.bias[:, None, None])
        return outputs


def _joined(parts: Sequence[Tensor]) -> Tensor:
    """Along the rows; a member without any brings nothing that would have to be copied."""
    full = [one for one in parts if len(one)] or list(parts[:1])
    return full[0] if len(full) == 1 else torch.cat(full)
