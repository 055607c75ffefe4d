from __future__ import annotations

import errno

import numpy as np
import pytest

from fabric import tensors
from fabric.arena_sharing import ArenaSharing
from fabric.clock import MonotonicClock
from fabric.errors import LocalProtocolError, RemoteProtocolError
from fabric.link import NamedTensor, Tensor
from fabric.messages import TensorSpec


def test_a_contiguous_array_is_viewed_not_copied() -> None:
    array = np.arange(6, dtype=np.float32).reshape(2, 3)
    spec, frame = tensors.to_frame("x", array)
    assert spec == TensorSpec("x", "float32", (2, 3))
    assert np.shares_memory(np.frombuffer(frame, np.uint8), array)
    array[0, 0] = 9
    assert bytes(frame) == array.tobytes()


@pytest.mark.parametrize(
    "array",
    [
        pytest.param(np.arange(12, dtype=np.int32).reshape(3, 4).T, id="transposed"),
        pytest.param(np.arange(12, dtype=np.int16)[::-2], id="strided"),
        pytest.param(np.arange(5, dtype=">f8"), id="big-endian"),
        pytest.param(np.array(3.5), id="no dimension"),
        pytest.param(np.zeros((2, 0, 3), np.float16), id="empty"),
        pytest.param(np.array([True, False]), id="bool"),
        pytest.param(np.array([1 + 2j]), id="complex"),
    ],
)
def test_any_layout_arrives_as_the_same_values(array: Tensor) -> None:
    spec, frame = tensors.to_frame("x", array)
    there = tensors.from_frame(spec, bytes(frame))
    assert there.dtype.byteorder in "=|<"
    np.testing.assert_array_equal(there, array, strict=False)
    assert there.shape == array.shape


def test_what_came_in_is_a_read_only_view_of_its_frame() -> None:
    frame = bytearray(8)
    there = tensors.from_frame(TensorSpec("x", "int32", (2,)), memoryview(frame))
    assert np.shares_memory(there, np.frombuffer(frame, np.uint8))
    with pytest.raises(ValueError, match="read-only"):
        there[0] = 1


@pytest.mark.parametrize(
    "array",
    [
        np.array([object()]),
        np.array(["text"]),
        np.array(["2026-01-01"], "datetime64[D]"),
        np.zeros((1,) * 9),
        np.zeros(2, [("a", "i4")]),
        np.zeros(1, np.longdouble),
    ],
    ids=lambda array: str(array.dtype),
)
def test_an_array_without_a_raw_form_is_not_sent(array: Tensor) -> None:
    with pytest.raises(LocalProtocolError):
        tensors.to_frame("x", array)


@pytest.mark.parametrize(
    "spec",
    [
        TensorSpec("x", "object", (1,)),
        TensorSpec("x", ">f8", (1,)),
        TensorSpec("x", "float64", (2,)),
        TensorSpec("x", "float32", ()),
        TensorSpec("x", "uint8", (-8, -1)),
        TensorSpec("x", "uint8", (1,) * 8 + (8,)),
        TensorSpec("x", "uint8", (2**53,) * 8),
    ],
    ids=lambda spec: f"{spec.dtype}{list(spec.shape)}",
)
def test_a_frame_that_does_not_fit_its_description_is_the_senders_error(spec: TensorSpec) -> None:
    with pytest.raises(RemoteProtocolError):
        tensors.from_frame(spec, bytes(8))


def test_a_shape_beyond_numpy_is_the_senders_error_even_when_empty() -> None:
    with pytest.raises(RemoteProtocolError):
        tensors.from_frame(TensorSpec("x", "uint8", (2**53, 2**53, 0)), b"")


def test_where_the_system_gives_no_memory_tensors_travel(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(descriptor: int, size: int) -> None:
        raise OSError(errno.EFBIG, "File too large")

    monkeypatch.setattr("os.ftruncate", refuse)
    sharing = ArenaSharing(1 << 20, 16, MonotonicClock())
    tensor = NamedTensor("x", np.ones(16))
    sharing.share([tensor])
    sharing.share([tensor])
    assert tensor.place is None
    sharing.close()


def test_only_large_tensors_are_shared_and_only_once() -> None:
    sharing = ArenaSharing(1 << 20, 64, MonotonicClock())
    large, small = NamedTensor("x", np.ones(8)), NamedTensor("y", np.ones(7))
    sharing.share([large, small])
    place = large.place
    sharing.share([large, small])
    assert place is not None
    assert large.place is place
    assert small.place is None
    assert np.array_equal(large.array, np.ones(8))
    sharing.close()
