from __future__ import annotations

import pytest

from benchmarks.peers.catalog import CASES, PEERS, Case, Peer


@pytest.mark.parametrize("peer", PEERS.values(), ids=lambda peer: peer.name)
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_every_peer_has_several_settings_in_every_case_and_each_has_its_own_name(
    peer: Peer, case: Case
) -> None:
    names = [str(setting) for setting in peer.settings(case)]
    assert len(names) >= 4
    assert len(set(names)) == len(names)


def test_one_device_is_one_server_and_several_are_tried_both_ways() -> None:
    mosec = PEERS["mosec"]
    assert {setting.is_together for setting in mosec.settings(Case(1, 1, 25.0))} == {True}
    assert {setting.is_together for setting in mosec.settings(Case(4, 1, 25.0))} == {True, False}


def test_a_request_says_its_length_and_its_model() -> None:
    head, _, body = PEERS["triton"].request(8000, "sleep3").partition(b"\r\n\r\n")
    assert head.startswith(b"POST /v2/models/sleep3/infer HTTP/1.1\r\nHost: 127.0.0.1:8000\r\n")
    assert f"Content-Length: {len(body)}".encode() in head
    assert body.endswith(b"\x00\x00\x00\x3f" * 16)  # 0.5 as little-endian floats


def test_the_bound_is_the_largest_batch_all_the_time() -> None:
    # l(16) = 1.053 * 16 + 5.072 = 21.92 ms
    assert Case(4, 1, 25.0).bound_rps == pytest.approx(4 * 16 / 21.92e-3)


def test_a_peer_is_pinned() -> None:
    assert (PEERS["ray"].distribution, PEERS["ray"].version) == ("ray", "2.60.0")
