"""Messages gathered by peer."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

from fabric import frames
from fabric.ids import BatchId, Epoch, ModelId, PeerId, SliceId
from fabric.link import NamedTensor, Packed
from fabric.messages import PARCELS_MAX, TENSORS_MAX, AnyMessage, Outputs, Ping, Pong
from fabric.outbox import GATHERED_BYTES_MAX, Outbox
from fabric.shared_memory import Arena, Borrowed
from fabric.tensors import share

A, B = PeerId("a/1"), PeerId("b/1")


class Taking:
    """A link that takes what it is given, until it is full."""

    def __init__(self) -> None:
        self.is_full = False
        self.sent: list[tuple[PeerId, list[AnyMessage]]] = []

    def send_packed(self, peer: PeerId, packed: Sequence[Packed]) -> bool:
        parts = frames.join(packed, epoch=Epoch(1), sent_at_ms=1.0)
        # Raises where a receiver would.
        frames.split([bytes(part) for part in parts], borrowed=Borrowed())
        if not self.is_full:
            self.sent.append((peer, [one.parcel.body for one in packed]))
        return not self.is_full


def outbox() -> tuple[Taking, Outbox, list[tuple[PeerId, AnyMessage]]]:
    link, refused = Taking(), list[tuple[PeerId, AnyMessage]]()
    return link, Outbox(link, lambda peer, message: refused.append((peer, message))), refused


def test_a_turns_messages_to_a_peer_travel_as_one_and_in_order() -> None:
    link, out, _ = outbox()
    for number in range(3):
        out.put(A, Ping(number))
    out.put(B, Ping(9))
    assert link.sent == []
    out.flush()
    out.flush()
    assert link.sent == [(A, [Ping(0), Ping(1), Ping(2)]), (B, [Ping(9)])]


def test_what_many_are_told_is_packed_once_a_turn(monkeypatch: pytest.MonkeyPatch) -> None:
    """A directory of a thousand slices takes milliseconds, and goes to a thousand workers."""
    packed: list[AnyMessage] = []

    def pack(message: AnyMessage, *rest: Any, **options: Any) -> Packed:
        packed.append(message)
        return original(message, *rest, **options)

    original = frames.pack
    monkeypatch.setattr(frames, "pack", pack)
    link, out, _ = outbox()
    same, equal = Ping(1), Ping(1)
    for peer in (A, B):
        out.put(peer, same)
    out.put(A, equal)
    out.put(A, same, [NamedTensor("x", np.zeros(2, np.float32))])
    out.put(B, same)
    out.flush()
    out.put(A, same)
    out.flush()
    assert [one is same for one in packed] == [True, False, True, True, True]
    assert link.sent == [(A, [same, equal, same]), (B, [same, same]), (A, [same])]


def test_no_more_than_the_wire_allows_travels_as_one() -> None:
    link, out, _ = outbox()
    for number in range(2 * PARCELS_MAX + 1):
        out.put(A, Ping(number))
    out.flush()
    assert [len(messages) for _, messages in link.sent] == [PARCELS_MAX, PARCELS_MAX, 1]


def test_large_tensors_do_not_wait_for_one_another() -> None:
    link, out, _ = outbox()
    large = NamedTensor("large", np.zeros(GATHERED_BYTES_MAX // 2 + 1, np.uint8))
    for number in range(3):
        out.put(A, Ping(number), [large])
    assert [messages for _, messages in link.sent] == [[Ping(0)], [Ping(1)]]
    out.flush()
    assert len(link.sent) == 3


def test_tensors_in_shared_memory_count_as_those_that_travel() -> None:
    """A receiver's limit is for all of a message's tensors, wherever they lie."""
    link, out, _ = outbox()
    out.is_sharing = True
    arena = Arena(4 * GATHERED_BYTES_MAX)
    for number in range(3):
        large = NamedTensor("large", np.zeros(GATHERED_BYTES_MAX // 2 + 1, np.uint8))
        share(large, arena)
        out.put(A, Ping(number), [large])
    out.flush()
    assert [messages for _, messages in link.sent] == [[Ping(0)], [Ping(1)], [Ping(2)]]
    arena.close()


def test_who_is_told_of_a_refusal_may_say_something_to_the_same_peer() -> None:
    link = Taking()
    link.is_full = True
    refused: list[AnyMessage] = []

    def refuse(peer: PeerId, message: AnyMessage) -> None:
        refused.append(message)
        if message == Ping(0):
            out.put(peer, Pong(0))

    out = Outbox(link, refuse)
    for number in range(PARCELS_MAX + 1):
        out.put(A, Ping(number))
    link.is_full = False
    out.flush()
    assert refused == [Ping(number) for number in range(PARCELS_MAX)]
    assert link.sent == [(A, [Pong(0), Ping(PARCELS_MAX)])]


def test_what_waits_for_who_is_gone_is_told_of_and_sent_no_more() -> None:
    link, out, refused = outbox()
    out.put(A, Ping(1))
    out.put(A, Ping(2))
    out.refuse()
    out.flush()
    assert refused == [(A, Ping(1)), (A, Ping(2))]
    assert not link.sent


def test_each_message_that_was_not_taken_is_told_of() -> None:
    link, out, refused = outbox()
    link.is_full = True
    out.put(A, Ping(1))
    out.put(A, Ping(2))
    out.flush()
    assert refused == [(A, Ping(1)), (A, Ping(2))]


def test_long_headers_do_not_travel_together_until_the_wire_would_refuse_them() -> None:
    link, out, _ = outbox()
    long = Outputs(BatchId(1), SliceId("s"), ModelId("m"), (2**50,) * 1_600, 1, 0.0, 0.0, 0.0)
    longest = Outputs(BatchId(1), SliceId("s"), ModelId("m"), (2**50,) * 65_536, 1, 0.0, 0.0, 0.0)
    for message in (long, long, long, longest, long, longest):
        out.put(A, message)
    out.flush()
    assert [message for _, messages in link.sent for message in messages] == [
        long, long, long, longest, long, longest,
    ]  # fmt: skip
    assert len(link.sent) == 5


def test_no_more_tensors_travel_together_than_the_wire_allows() -> None:
    link, out, _ = outbox()
    shortest = NamedTensor("", np.zeros((), np.int8))
    for number in range(64):
        out.put(A, Ping(number), [shortest] * (TENSORS_MAX // 16))
    out.flush()
    assert max(len(messages) for _, messages in link.sent) < 16
