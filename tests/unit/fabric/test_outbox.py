"""Messages gathered by peer."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from fabric.ids import PeerId
from fabric.link import NamedTensor, Packed
from fabric.messages import PARCELS_MAX, AnyMessage, Ping
from fabric.outbox import GATHERED_BYTES_MAX, Outbox

A, B = PeerId("a/1"), PeerId("b/1")


class Taking:
    """A link that takes what it is given, until it is full."""

    def __init__(self) -> None:
        self.is_full = False
        self.sent: list[tuple[PeerId, list[AnyMessage]]] = []

    def send_packed(self, peer: PeerId, packed: Sequence[Packed]) -> bool:
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


def test_each_message_that_was_not_taken_is_told_of() -> None:
    link, out, refused = outbox()
    link.is_full = True
    out.put(A, Ping(1))
    out.put(A, Ping(2))
    out.flush()
    assert refused == [(A, Ping(1)), (A, Ping(2))]
