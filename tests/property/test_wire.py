from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fabric import codec, frames
from fabric.clock import MonotonicClock
from fabric.errors import RemoteProtocolError
from fabric.ids import Epoch, PeerId
from fabric.link import NamedTensor
from fabric.loopback import LoopbackNetwork
from fabric.messages import WIRE_VERSION, Envelope, Parcel
from tests.strategies import message_types, messages, structs, tensors


@pytest.mark.parametrize("kind", message_types(), ids=lambda kind: kind.__name__)
@settings(max_examples=25)
@given(data=st.data())
def test_every_message_survives_the_wire(kind: type, data: st.DataObject) -> None:
    envelope = Envelope(WIRE_VERSION, 3, 12.5, (Parcel((), data.draw(structs(kind))),))
    assert codec.decode(codec.encode(envelope)) == envelope


@settings(max_examples=100)
@given(message=messages(), named=st.lists(tensors(), max_size=4), epoch=st.integers(0, 2**40))
def test_what_is_joined_splits_into_the_same(message: Any, named: list[NamedTensor], epoch: int) -> None:
    packed = frames.pack(message, named)
    parts = frames.join((packed,), epoch=Epoch(epoch), sent_at_ms=7.0)
    envelope, [came] = frames.split([bytes(part) for part in parts])
    assert (envelope.parcels[0].body, envelope.epoch, envelope.sent_at_ms) == (message, epoch, 7.0)
    assert [tensor.name for tensor in came] == [tensor.name for tensor in named]
    for there, here in zip(came, named, strict=True):
        assert there.array.dtype == here.array.dtype
        assert there.array.shape == here.array.shape
        assert there.array.tobytes() == here.array.tobytes()


@settings(max_examples=200)
@given(junk=st.lists(st.binary(max_size=200), max_size=5))
def test_random_frames_raise_nothing_but_a_protocol_error(junk: list[bytes]) -> None:
    with pytest.raises(RemoteProtocolError):
        frames.split(junk)


@settings(max_examples=200)
@given(message=messages(), named=st.lists(tensors(), max_size=2), data=st.data())
def test_damaged_messages_raise_nothing_but_a_protocol_error(
    message: Any, named: list[NamedTensor], data: st.DataObject
) -> None:
    packed = frames.pack(message, named)
    parts = [bytes(part) for part in frames.join((packed,), epoch=Epoch(0), sent_at_ms=0.0)]
    header = bytearray(parts[0])
    if data.draw(st.booleans()):
        del header[data.draw(st.integers(0, len(header) - 1)) :]
    else:
        header[data.draw(st.integers(0, len(header) - 1))] = data.draw(st.integers(0, 255))
    try:
        envelope, came = frames.split([bytes(header), *parts[1:]])
    except RemoteProtocolError:
        return
    assert codec.encode(envelope)  # what passed is a message like any other, within the bounds
    assert all(isinstance(tensor.array, np.ndarray) for tensors in came for tensor in tensors)


@settings(max_examples=50)
@given(chosen=st.lists(messages(), max_size=5))
def test_a_loopback_link_carries_every_message_in_order(chosen: list[Any]) -> None:
    network = LoopbackNetwork(MonotonicClock(), random.Random(1))
    left, right = network.link(PeerId("left/1")), network.link(PeerId("right/1"))
    for message in chosen:
        assert left.send(PeerId("right/1"), message)
    assert [received.message for received in right.receive(10)] == chosen
