"""Lists of tensors as a frontend's shell needs them: described, in a model's order, cut to one request, named for an answer."""

from __future__ import annotations

from collections.abc import Sequence

from fabric.frames import SMALL_BELOW_BYTES
from fabric.link import NamedTensor
from fabric.messages import StageResult, TensorSpec
from fabric.tensors import dtype_name


def described(tensors: Sequence[NamedTensor]) -> tuple[tuple[TensorSpec, ...], int]:
    """What they are, and their bytes."""
    specs = tuple([TensorSpec(one.name, dtype_name(one.array.dtype), one.array.shape) for one in tensors])
    return specs, sum([one.array.nbytes for one in tensors])


def in_order(tensors: Sequence[NamedTensor], names: Sequence[str]) -> Sequence[NamedTensor]:
    """As the model declares its inputs: clients may name them in any order, workers go by place."""
    by_name = {tensor.name: tensor for tensor in tensors}
    return [by_name[name] for name in names] if set(names) == set(by_name) else tensors


def kept_row(tensors: Sequence[NamedTensor], row: int) -> Sequence[NamedTensor]:
    """One request's outputs. They are copied where they would hold a batch of several in memory, or are small."""
    rows = [NamedTensor(one.name, one.array[row, ...]) for one in tensors]
    for one, batch in zip(rows, tensors, strict=True):
        if len(batch.array) > 1 or one.array.nbytes < SMALL_BELOW_BYTES:
            one.array = one.array.copy()
            one.array.flags.writeable = False
    return rows


def named_results(results: Sequence[StageResult], kept: Sequence[Sequence[NamedTensor]]) -> list[NamedTensor]:
    """The tensors of an answer, each named after its stage and place."""
    return [
        NamedTensor(f"{result.stage}.{'.'.join(map(str, result.place))}.{tensor.name}", tensor.array)
        for result, tensors in zip(results, kept, strict=True)
        for tensor in tensors
    ]
