"""Which connection a router answers."""

from __future__ import annotations

import random

from hypothesis import given
from hypothesis import strategies as st

from fabric import frames
from fabric.ids import PeerId
from fabric.sockets.routes import ENDED_MAX, Routes, new_route

OWN, OTHER = PeerId("frontend-0/5f3a9c01"), PeerId("client/bob/1")


def noted(routes: Routes, identity: bytes, key: str | None = None, at: int | None = None) -> bool:
    peer, mark = frames.peer_from(identity)
    return routes.note(identity, peer, mark, key, at)


def test_no_two_connections_have_one_identity_and_none_can_be_guessed() -> None:
    drawn = {new_route(OWN) for _ in range(1_000)}
    assert len(drawn) == 1_000
    secrets = [frames.peer_from(route)[1].partition(".")[2] for route in drawn]
    assert all(len(secret) == 32 for secret in secrets)
    assert len(set(secrets)) == 1_000
    assert all(len(route) <= 255 for route in drawn)


def test_who_never_spoke_is_not_reached() -> None:
    routes = Routes()
    new_route(OWN)
    assert routes.to(OWN) is None


def test_the_newest_connection_is_answered_and_an_older_one_is_heard_no_more() -> None:
    routes = Routes()
    first, second = new_route(OWN), new_route(OWN)
    assert noted(routes, first)
    assert noted(routes, second)
    assert routes.to(OWN) == second
    assert not noted(routes, first)
    assert noted(routes, second)
    assert routes.to(OWN) == second
    routes.forget(OWN)
    assert noted(routes, first)
    assert routes.to(OWN) == first


def test_nobody_is_reached_by_a_connection_whose_end_has_been_told() -> None:
    """What had been waiting there is heard, until a newer one has spoken."""
    routes = Routes()
    first, second = new_route(OWN), new_route(OWN)
    assert noted(routes, first, at=7)
    assert routes.end_at(7) == [OWN]
    assert noted(routes, first, at=7)
    assert routes.to(OWN) is None
    assert routes.end_at(7) == []
    assert len(routes) == 0
    assert noted(routes, second)
    assert not noted(routes, first)
    assert routes.to(OWN) == second


def test_all_who_spoke_by_a_descriptor_end_with_it_but_who_is_back_by_another() -> None:
    """Two had it one after the other, and nobody knows which is there."""
    routes = Routes()
    third = PeerId("client/carol/1")
    for peer in (OWN, OTHER, third):
        noted(routes, new_route(peer), at=7)
    back = new_route(OTHER)
    noted(routes, back, at=8)
    assert routes.end_at(7) == [OWN, third]
    assert (routes.to(OWN), routes.to(third), routes.to(OTHER)) == (None, None, back)
    assert routes.end_at(8) == [OTHER]
    assert (len(routes), routes._at) == (0, {})


def test_an_identity_that_is_used_again_belongs_to_its_last_connection() -> None:
    """Of a client of another make, which draws none anew."""
    routes = Routes()
    noted(routes, OWN.encode(), at=7)
    assert routes.peer_at(OWN.encode(), 7) == OWN
    assert routes.peer_at(OWN.encode(), 8) is None
    noted(routes, OWN.encode(), at=8)
    assert routes.peer_at(OWN.encode(), 8) == OWN
    assert routes.end_at(7) == []
    assert routes.to(OWN) == OWN.encode()


def test_of_ended_connections_the_newest_are_remembered() -> None:
    routes = Routes()
    drawn = [new_route(OWN) for _ in range(ENDED_MAX + 10)]
    for route in drawn:
        noted(routes, route, at=7)
        routes.end_at(7)
    assert len(routes._ended) == ENDED_MAX
    assert noted(routes, drawn[-1])
    assert routes.to(OWN) is None


def test_a_mark_that_is_none_counts_as_the_oldest() -> None:
    routes = Routes()
    for mark in ("#", "#zz.1", "#-5.a", "#" + "f" * 50 + ".a", ""):
        noted(routes, f"{OWN}{mark}".encode())
    noted(routes, new_route(OWN))
    route = routes.to(OWN)
    assert route is not None
    assert b"." in route
    noted(routes, OWN.encode())
    assert routes.to(OWN) == route


def test_a_key_with_too_many_names_loses_its_own() -> None:
    routes = Routes(names_max=3)
    noted(routes, new_route(OTHER), "bob")
    for number in range(100):
        noted(routes, new_route(PeerId(f"client/alice/{number}")), "alice")
    assert len(routes) == 4
    assert routes.to(OTHER) is not None
    assert routes.to(PeerId("client/alice/0")) is None
    assert routes.to(PeerId("client/alice/99")) is not None


def test_peers_of_revoked_keys_are_named_and_forgotten() -> None:
    routes = Routes()
    noted(routes, new_route(OWN), "old")
    noted(routes, new_route(OTHER), "bob")
    noted(routes, new_route(PeerId("here/1")), None)
    assert routes.forget_keys(lambda key: key == "bob") == [OWN]
    assert routes.to(OWN) is None
    assert routes.to(OTHER) is not None
    assert routes.to(PeerId("here/1")) is not None  # of this host: it needs none


@given(st.integers())
def test_nothing_is_kept_of_what_is_forgotten(seed: int) -> None:
    draw, routes = random.Random(seed), Routes(names_max=4)
    peers = [PeerId(f"client/{number}") for number in range(12)]
    for _ in range(200):
        peer = draw.choice(peers)
        if draw.random() < 0.3:
            routes.forget(peer)
            assert routes.to(peer) is None
        elif draw.random() < 0.05:
            gone = draw.choice(("a", "b"))
            assert all(routes.to(one) is None for one in routes.forget_keys(lambda key: key != gone))  # noqa: B023
        else:
            noted(routes, new_route(peer), draw.choice(("a", "b", None)), draw.choice((1, 2, 3, None)))
            assert routes.to(peer) is not None
            if draw.random() < 0.1:
                assert all(routes.to(one) is None for one in routes.end_at(draw.choice((1, 2, 3))))
        assert len(routes) <= 12
        assert sum(map(len, routes._at.values())) <= len(routes)
        assert sum(len(names) for names in routes._names.values()) == len(routes)
        assert all(len(names) <= 4 for names in routes._names.values())
    for peer in peers:
        routes.forget(peer)
    assert (len(routes), routes._names, routes._at) == (0, {}, {})
