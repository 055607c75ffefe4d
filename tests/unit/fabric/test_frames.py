from __future__ import annotations

import numpy as np
import pytest

from fabric import frames
from fabric.errors import LocalProtocolError, PayloadTooLarge, RemoteProtocolError
from fabric.ids import Epoch, ModelId, PeerId
from fabric.link import NamedTensor
from fabric.messages import Infer, Ping
from fabric.shared_memory import Arena
from fabric.tensors import share, to_frame

IMAGE = NamedTensor("input", np.zeros((3, 4), np.float32))


def joined(*named: NamedTensor, payload_bytes_max: int = 1_000) -> list[bytes]:
    packed = frames.pack(Ping(1), named, payload_bytes_max=payload_bytes_max)
    return [bytes(part) for part in frames.join((packed,), epoch=Epoch(0), sent_at_ms=0.0)]


def test_a_message_without_tensors_is_one_frame() -> None:
    assert len(joined()) == 1


def test_a_payload_over_the_limit_is_not_sent() -> None:
    with pytest.raises(LocalProtocolError, match="payload of 96 bytes"):
        joined(IMAGE, IMAGE, payload_bytes_max=90)


def test_too_many_tensors_are_not_sent() -> None:
    with pytest.raises(LocalProtocolError, match="4097 tensors"):
        joined(*[IMAGE] * 4_097)


def test_a_payload_over_the_limit_is_the_senders_error() -> None:
    with pytest.raises(RemoteProtocolError, match="payload of 96 bytes"):
        frames.split(joined(IMAGE, IMAGE), payload_bytes_max=90)


@pytest.mark.parametrize("damaged", [[], joined(IMAGE)[:1], [*joined(IMAGE), b""], [b"", *joined(IMAGE)]])
def test_frames_missing_or_too_many_are_the_senders_error(damaged: list[bytes]) -> None:
    with pytest.raises(RemoteProtocolError):
        frames.split(damaged)


def test_endless_frames_are_the_senders_error() -> None:
    with pytest.raises(RemoteProtocolError, match="4099 frames"):
        frames.split([*joined(), *[b""] * 4_098])


def test_small_tensors_share_a_frame_and_large_ones_have_their_own() -> None:
    odd = NamedTensor("odd", np.arange(3, dtype=np.uint8))
    large = NamedTensor("large", np.ones(frames.SMALL_BELOW_BYTES, np.uint8))
    header, small, *own = joined(odd, large, IMAGE, payload_bytes_max=1 << 20)
    assert len(small) == 8 + 48  # each begins at a multiple of 8
    assert [len(frame) for frame in own] == [frames.SMALL_BELOW_BYTES]
    _, [named] = frames.split([header, small, *own])
    assert [tensor.name for tensor in named] == ["odd", "large", "input"]
    assert named[0].array.tolist() == [0, 1, 2]
    assert named[1].array.all()
    assert not named[2].array.flags.writeable


def test_messages_to_one_peer_travel_as_one() -> None:
    packed = [frames.pack(Ping(number), [IMAGE] * (number % 2)) for number in range(5)]
    parts = frames.join(packed, epoch=Epoch(0), sent_at_ms=0.0)
    assert len(parts) == 2
    envelope, named = frames.split([bytes(part) for part in parts])
    assert [parcel.body for parcel in envelope.parcels] == [Ping(number) for number in range(5)]
    assert [len(tensors) for tensors in named] == [0, 1, 0, 1, 0]


@pytest.mark.parametrize("cut", [1, 8, 48])
def test_small_tensors_that_are_cut_short_are_the_senders_error(cut: int) -> None:
    header, small = joined(IMAGE)
    with pytest.raises(RemoteProtocolError):
        frames.split([header, small[:-cut]])
    with pytest.raises(RemoteProtocolError, match="small tensors"):
        frames.split([header, small + bytes(cut)])


def test_a_route_is_the_peers_name() -> None:
    own = PeerId("frontend-0/5f3a9c01")
    assert frames.peer_from(frames.route_of(own, "2.abc")) == (own, "2.abc")
    assert frames.peer_from(own.encode()) == (own, "")


@pytest.mark.parametrize("route", [b"", b"\x00abcd", b"caf\xc3\xa9", b"x" * 256, b"a\nb"])
def test_an_identity_that_is_no_name_is_the_senders_error(route: bytes) -> None:
    with pytest.raises(RemoteProtocolError):
        frames.peer_from(route)


@pytest.mark.parametrize("name", ["", "x" * 256, "café", "a\nb"])
def test_a_name_that_is_no_identity_is_ours(name: str) -> None:
    with pytest.raises(LocalProtocolError):
        frames.route_of(PeerId(name), "1.x")


def test_a_header_that_is_too_long_is_known_before_anything_is_sent() -> None:
    named = [NamedTensor(f"{number:x<500}", np.zeros(1, np.uint8)) for number in range(4_000)]
    with pytest.raises(PayloadTooLarge, match="header of Infer has 20"):
        frames.pack(Infer(1, ModelId("m")), named)
    with pytest.raises(LocalProtocolError, match="header of Ping"):
        frames.pack(Ping(1), named[:1_000])


def test_what_is_kept_for_long_keeps_nothing_much_larger_that_it_is_part_of() -> None:
    """However deep it lies: a row of a tensor that is a view of a message's bytes."""
    batch = NamedTensor("y", np.arange(64 * 70_000, dtype=np.uint8).reshape(64, 70_000))
    came = memoryview(b"".join(frames.join((frames.pack(Ping(1), [batch]),), epoch=Epoch(0), sent_at_ms=0.0)))
    for whole in (
        batch.array,
        np.ndarray(batch.array.shape, np.uint8, buffer=came[-batch.array.nbytes :]),
        np.asarray(batch.array[...]),
    ):
        _, row = to_frame("y", whole[3, ...])
        (own,) = frames.kept_apart([row])
        assert bytes(own) == bytes(row)
        assert isinstance(own, bytes), "it is copied"
    _, alone = to_frame("y", batch.array)
    _, half = to_frame("y", batch.array[:32])
    for part in (alone, half, b"header"):
        assert frames.kept_apart([part])[0] is part


def test_what_lies_in_shared_memory_is_kept_there() -> None:
    tensor = NamedTensor("x", np.zeros(70_000, np.uint8))
    assert share(tensor, Arena(1 << 24))
    _, part = to_frame("x", tensor.array)
    assert frames.kept_apart([part])[0] is part
