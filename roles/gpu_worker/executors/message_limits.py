"""What of a model can travel: how large its batches may be for their inputs and outputs to fit a message each.

Known only when the model is: a configuration says neither its inputs nor its outputs.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from fabric.codec import LONG_HEADER_BYTES_MAX
from fabric.frames import ANSWER_BYTES_MAX, PAYLOAD_BYTES_MAX
from fabric.limits import NAME_CHARS_MAX
from fabric.messages import RANK_MAX, TENSORS_MAX, TensorInfo
from fabric.tensors import DTYPES
from roles.gpu_worker.executors.loaders.base import NotAModel

_DESCRIPTION_BYTES: Final = (
    224  # of a tensor in a header, without its name: type, 8 numbers and a place in shared memory
)


@dataclass(slots=True, frozen=True)
class Travelling:
    """The largest batch that fits, and which limit keeps it from being larger; empty: none does."""

    batch_size_max: int
    limit: str


def travelling(
    inputs: Sequence[TensorInfo], outputs: Sequence[TensorInfo], batch_size_max: int
) -> Travelling:
    """How large batches may be. Raises NotAModel where not even one request can have its inputs or its answer."""
    for kind, infos in (("input", inputs), ("output", outputs)):
        for info in infos:
            _check(kind, info)
    request_bytes, answer_bytes = _bytes_of(inputs), _bytes_of(outputs)
    described = sum(len(info.name.encode()) + _DESCRIPTION_BYTES for info in inputs)
    fits = {
        f"it has {len(inputs)} inputs a request, and a message holds {TENSORS_MAX} tensors": (
            TENSORS_MAX // max(len(inputs), 1)
        ),
        f"its inputs take {described} bytes to describe, and a header has {LONG_HEADER_BYTES_MAX}": (
            LONG_HEADER_BYTES_MAX // max(described, 1)
        ),
        f"it has inputs of {request_bytes} bytes a request, and a message holds {PAYLOAD_BYTES_MAX}": (
            PAYLOAD_BYTES_MAX // max(request_bytes, 1)
        ),
        f"it has outputs of {answer_bytes} bytes a request, and a message holds {PAYLOAD_BYTES_MAX}": (
            PAYLOAD_BYTES_MAX // max(answer_bytes, 1)
        ),
    }
    limit, largest = min(fits.items(), key=lambda one: one[1])
    if largest == 0:
        raise NotAModel(limit)
    for kind, size in (("inputs", request_bytes), ("outputs", answer_bytes)):
        if size > ANSWER_BYTES_MAX:
            raise NotAModel(f"its {kind} are {size} bytes a request; at most {ANSWER_BYTES_MAX} can be sent")
    if len(outputs) > TENSORS_MAX:
        raise NotAModel(f"it has {len(outputs)} outputs; at most {TENSORS_MAX} can be sent")
    return Travelling(min(largest, batch_size_max), limit if largest < batch_size_max else "")


def _check(kind: str, info: TensorInfo) -> None:
    rank_max = RANK_MAX - (kind == "output")  # rows of a batch travel as one, on an axis more
    name = f"{info.name!r:.80}"
    if not isinstance(info.name, str) or len(info.name) > NAME_CHARS_MAX:
        raise NotAModel(f"the name of {kind} {name} must be text of at most {NAME_CHARS_MAX} characters")
    if info.dtype not in DTYPES:
        raise NotAModel(
            f"{kind} {name} has dtype {info.dtype}, which cannot be sent: one of {', '.join(DTYPES)}"
        )
    if len(info.shape) > rank_max:
        raise NotAModel(
            f"{kind} {name} has {len(info.shape)} axes; at most {rank_max} can be sent, without the batch"
        )


def _bytes_of(infos: Sequence[TensorInfo]) -> int:
    return sum(math.prod(info.shape) * DTYPES[info.dtype].itemsize for info in infos)
