"""What of a model can travel is known when it is warm, and said."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fabric import frames
from fabric.errors import LocalProtocolError
from fabric.ids import BatchId, FrontendId, Incarnation, ModelId, SliceId
from fabric.link import NamedTensor
from fabric.messages import Inputs, TensorInfo
from roles.gpu_worker.executors.loaders.base import NotAModel
from roles.gpu_worker.executors.message_limits import travelling

ONE = (TensorInfo("x", "float32", (3,)),)
MB = 1 << 20


def test_a_modest_model_is_not_limited() -> None:
    found = travelling(ONE, ONE, 512)
    assert (found.batch_size_max, found.limit) == (512, "")


@pytest.mark.parametrize(
    ("inputs", "outputs", "batch_size_max", "reason"),
    [
        (tuple(TensorInfo(f"x{i}", "float32", (1,)) for i in range(130)), ONE, 31, "130 inputs a request"),
        ((TensorInfo("x", "uint8", (100 * MB,)),), ONE, 10, "inputs of 104857600 bytes"),
        (ONE, (TensorInfo("y", "uint8", (200 * MB,)),), 5, "outputs of 209715200 bytes"),
        (tuple(TensorInfo(f"{i:x<500}", "bool", ()) for i in range(100)), ONE, 14, "inputs take 72400 bytes"),
    ],
)
def test_batches_that_could_not_be_sent_are_not_offered(
    inputs: tuple[TensorInfo, ...], outputs: tuple[TensorInfo, ...], batch_size_max: int, reason: str
) -> None:
    found = travelling(inputs, outputs, 32)
    assert found.batch_size_max == batch_size_max
    assert reason in found.limit


@pytest.mark.parametrize(
    ("inputs", "outputs", "reason"),
    [
        (tuple(TensorInfo(f"x{i}", "bool", ()) for i in range(4_097)), ONE, "4097 inputs a request"),
        (ONE, tuple(TensorInfo(f"x{i}", "bool", ()) for i in range(4_097)), "4097 outputs"),
        (ONE, (TensorInfo("y", "float32", (1,) * 8),), "output 'y' has 8 axes; at most 7"),
        ((TensorInfo("y", "float32", (1,) * 9),), ONE, "input 'y' has 9 axes; at most 8"),
        (ONE, (TensorInfo("y", "uint8", (257 * MB,)),), "outputs are 269484032 bytes a request"),
        (ONE, (TensorInfo("y" * 513, "uint8", ()),), "must be text of at most 512 characters"),
        (ONE, (TensorInfo("y", "quint8", ()),), "dtype quint8, which cannot be sent"),
    ],
)
def test_a_model_that_can_answer_nobody_does_not_load(
    inputs: tuple[TensorInfo, ...], outputs: tuple[TensorInfo, ...], reason: str
) -> None:
    with pytest.raises(NotAModel, match=reason):
        travelling(inputs, outputs, 32)


@given(
    count=st.integers(1, 300),
    chars=st.integers(1, 512),
    rank=st.integers(0, 8),
    batch_size_max=st.sampled_from([1, 7, 32, 512]),
)
def test_what_is_offered_can_be_sent(count: int, chars: int, rank: int, batch_size_max: int) -> None:
    """The largest batch of any model passes `frames.pack`, whatever its seqs are, and fits a header."""
    array = np.zeros((1,) * rank, np.float32)
    names = [f"{number:€<{chars}}"[:chars] for number in range(count)]
    inputs = tuple(TensorInfo(name, "float32", array.shape) for name in names)
    try:
        found = travelling(inputs, ONE, batch_size_max)
    except NotAModel:
        return
    size = found.batch_size_max
    message = Inputs(
        BatchId(1 << 53), SliceId("s" * 512), Incarnation("i" * 512), ModelId("m" * 512), FrontendId("f" * 512),
        0, tuple(range(1 << 40, (1 << 40) + size)),
    )  # fmt: skip
    named = [NamedTensor(name, array) for name in names] * size
    try:
        frames.pack(message, named)
    except LocalProtocolError as error:
        raise AssertionError(f"{size} of {batch_size_max}") from error
