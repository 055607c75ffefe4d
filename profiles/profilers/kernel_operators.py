"""The operators of kernel records as torch runs them: one call on inputs of the record's sizes, in float32."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Final

import torch
from torch import Tensor
from torch.nn import functional

from profiles.estimator.work import Work

_ELEMENTWISE: Final[Mapping[str, Callable[..., Tensor]]] = {
    "add": torch.add,
    "mul": torch.mul,
    "div": torch.div,
    "pow": torch.pow,
    "relu": torch.relu,
    "gelu": functional.gelu,
    "tanh": torch.tanh,
}


def operator_of(work: Work, device: torch.device) -> Callable[[], Tensor]:
    """Ready to run again and again; its inputs are on the device and live as long as it does."""
    sizes = work.dims
    given = partial(torch.rand, device=device)
    match work.op:
        case "linear":
            _, rows, columns, inner = sizes
            return partial(functional.linear, given(rows, inner), given(columns, inner), given(columns))
        case "bmm":
            batch, rows, columns, inner = sizes
            return partial(torch.bmm, given(batch, rows, inner), given(batch, inner, columns))
        case "conv":
            batch, channels_in, channels_out, side = sizes
            image, weights = given(batch, channels_in, side, side), given(channels_out, channels_in, 3, 3)
            return partial(functional.conv2d, image, weights, padding=1)
        case "ln":
            weights, biases = given(sizes[1]), given(sizes[1])
            return partial(functional.layer_norm, given(*sizes[:2]), (sizes[1],), weights, biases)
        case "softmax":
            return partial(torch.softmax, given(*sizes[:2]), -1)
        case _:
            operands = work.input_elements // work.output_elements
            return partial(_ELEMENTWISE[work.op], *(given(*sizes[:2]) for _ in range(operands)))
