from __future__ import annotations

import numpy as np
import pytest

from fabric import frames
from fabric.errors import LocalProtocolError, RemoteProtocolError
from fabric.ids import Epoch, PeerId
from fabric.link import NamedTensor
from fabric.messages import Ping

IMAGE = NamedTensor("input", np.zeros((3, 4), np.float32))


def joined(*named: NamedTensor, payload_bytes_max: int = 1_000) -> list[bytes]:
    parts = frames.join(Ping(1), named, epoch=Epoch(0), sent_at_ms=0.0, payload_bytes_max=payload_bytes_max)
    return [bytes(part) for part in parts]


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
    with pytest.raises(RemoteProtocolError, match="4098 frames"):
        frames.split([*joined(), *[b""] * 4_097])


def test_a_route_is_the_peers_name() -> None:
    assert frames.peer_from(frames.route_to(PeerId("frontend-0/5f3a9c01"))) == "frontend-0/5f3a9c01"


@pytest.mark.parametrize("route", [b"", b"\x00abcd", b"caf\xc3\xa9", b"x" * 256, b"a\nb"])
def test_an_identity_that_is_no_name_is_the_senders_error(route: bytes) -> None:
    with pytest.raises(RemoteProtocolError):
        frames.peer_from(route)


@pytest.mark.parametrize("name", ["", "x" * 256, "café", "a\nb"])
def test_a_name_that_is_no_identity_is_ours(name: str) -> None:
    with pytest.raises(LocalProtocolError):
        frames.route_to(PeerId(name))
