from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from benchmarks.peers.cases import CASES, Case, Inputs, RealCase
from benchmarks.peers.catalog import PEERS, Peer
from roles.config.read_config import load_config
from tests.unit.benchmarks.peers_builders import a_real_case


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
    head, _, body = PEERS["triton"].request(8000, "sleep3", Case(4, 4, 25.0)).partition(b"\r\n\r\n")
    assert head.startswith(b"POST /v2/models/sleep3/infer HTTP/1.1\r\nHost: 127.0.0.1:8000\r\n")
    assert f"Content-Length: {len(body)}".encode() in head
    assert body.endswith(b"\x00\x00\x00\x3f" * 16)  # 0.5 as little-endian floats


def test_the_bound_is_the_largest_batch_all_the_time() -> None:
    # l(16) = 1.053 * 16 + 5.072 = 21.92 ms
    assert Case(4, 1, 25.0).bound_rps == pytest.approx(4 * 16 / 21.92e-3)


def test_a_peer_is_pinned() -> None:
    assert (PEERS["ray"].distribution, PEERS["ray"].version) == ("ray", "2.60.0")


def test_a_real_model_gets_its_tensors_as_they_are() -> None:
    case = a_real_case(
        {"image": np.ones((3, 2, 2), np.float32)}, {"ids": np.arange(4), "mask": np.zeros(4, np.int64)}
    )
    for name in ("mosec", "litserve"):
        head, _, body = PEERS[name].request(8000, "model1", case).partition(b"\r\n\r\n")
        assert b"POST /model1 " in head
        assert b"Content-Type: application/octet-stream" in head
        assert body == np.arange(4).tobytes() + bytes(32)
    _, _, body = PEERS["triton"].request(8000, "model0", case).partition(b"\r\n\r\n")
    about = {
        "name": "image",
        "shape": [1, 3, 2, 2],
        "datatype": "FP32",
        "parameters": {"binary_data_size": 48},
    }
    assert json.JSONDecoder().raw_decode(body.decode("latin1"))[0]["inputs"] == [about]
    assert body.endswith(np.ones(12, np.float32).tobytes())


def test_real_models_are_run_by_peers_that_can_each_model_in_a_server_or_process_of_its_own() -> None:
    case = a_real_case({"image": np.zeros(1, np.float32)})
    assert not PEERS["triton"].settings(case)
    assert len({str(setting) for setting in PEERS["mosec"].settings(case)}) >= 4
    assert case.devices_each == a_real_case(*[{"image": np.zeros(1, np.float32)}] * 5).devices_each == 1


def test_a_peer_is_told_batches_of_which_a_request_can_wait_for_one_and_be_in_another() -> None:
    # l(b) = 2 + b at peers: of one model 2 * (2 + 10) <= 25, of two 3 * (2 + 6) <= 25
    one = a_real_case({"image": np.zeros(1, np.float32)})
    assert one.batch_sizes == (10, 5, 2)
    assert a_real_case(*[one.inputs["model0"]] * 2).batch_sizes == (6, 3, 1)
    assert replace(one, slo_ms=1.0).batch_sizes == (1,)  # it can't be kept: the peer is tried all the same


@pytest.mark.parametrize("name", ["mosec", "litserve"])
def test_the_first_settings_differ_in_the_batch_size_then_one_model_has_two_workers(name: str) -> None:
    image: Inputs = {"image": np.zeros(1, np.float32)}
    first = [
        (one.max_batch, one.wait_ms, one.extra.get("workers", 1), one.extra.get("fast_queue", False))
        for one in PEERS[name].settings(a_real_case(image))[:6]
    ]
    assert first == [
        (10, 5, 1, False),
        (5, 5, 1, False),
        (10, 5, 2, False),
        (5, 5, 2, False),
        (2, 5, 1, False),
        (10, 2, 1, False),
    ]
    for case in (a_real_case(image, image), *CASES):
        assert not any("workers" in one.extra for one in PEERS[name].settings(case))


def test_real_models_that_take_turns_serve_less_than_each_alone() -> None:
    case = a_real_case(*[{"image": np.zeros(1, np.float32)}] * 2)
    assert case.bare_rps == pytest.approx(2 / (1 / 800 + 1 / 800))
    assert case.bound_rps > case.bare_rps


def test_the_search_goes_up_to_more_than_either_the_bare_loop_or_our_worker_at_its_best_serves() -> None:
    case = a_real_case({"image": np.zeros(1, np.float32)})
    (served,) = case.served
    assert case.bound_rps == pytest.approx(1.25 * 16_000 / 17)  # our worker's batches of 16
    best_at_two = replace(served, exec_ms={**served.exec_ms, 2: 1.0})
    assert replace(case, served=(best_at_two,)).bound_rps == pytest.approx(1.25 * 2_000)
    assert replace(case, served=(replace(served, bare_rps=3_000.0),)).bound_rps == pytest.approx(1.25 * 3_000)


def test_our_configuration_of_real_models_is_one_that_we_read(tmp_path: Path) -> None:
    case: RealCase = a_real_case({"image": np.zeros(1, np.float32)})
    file = tmp_path / "cluster.json"
    file.write_text(json.dumps({**case.document(), "batching": "tenuto"}), encoding="utf-8")
    (model,) = load_config(file).models
    assert model.loader is not None
    assert (model.loader.arch, model.slo_ms) == ("resnet18", 25.0)
