from __future__ import annotations

import json
import sys

import numpy as np
import pytest
import torch

from benchmarks.peers.__main__ import main
from benchmarks.peers.bare_model import BareModel
from benchmarks.peers.cases import Inputs
from benchmarks.peers.catalog import raw
from benchmarks.peers.measure import Effort, Measured, our_contenders
from benchmarks.peers.real import real_cases
from benchmarks.peers.run import as_json
from benchmarks.peers.sender import Verdict
from benchmarks.peers.simulated import Simulated, simulated
from fabric.messages import LoaderSpec
from roles.gpu_worker.executors.loaders.registry import load_model
from tests.unit.benchmarks.peers_builders import a_real_case

IMAGE: Inputs = {"image": np.zeros(1, np.float32)}
EFFORT = Effort(0.5, 2.0, 0.05, (1,))


def measured(contender: str, rate_rps: float) -> Measured:
    stages_ms = {"network_ms": 0.3, "transfer_ms": 0.4, "return_ms": 0.2}
    verdict = Verdict(
        rate_rps, 0.0, 100, 100, 10.0, 20.0, 0.1, 0.2, is_cut=False, errors={}, stages_ms=stages_ms
    )
    return Measured(contender, "1", a_real_case(IMAGE), "as it comes", (rate_rps,), (verdict,), (), (), 0.0)


def test_a_model_is_met_beforehand_and_what_a_bare_loop_serves_bounds_the_search() -> None:
    (case,) = real_cases(["squeezenet1_1"], "cpu", [60_000.0], 2)
    (served,) = case.served
    assert (served.loader["arch"], sorted(served.exec_ms)) == ("squeezenet1_1", [1, 2])
    assert served.inputs["image"].shape == (3, 224, 224)
    assert case.bound_rps > served.bare_rps > 0
    assert sorted(served.peer_ms) == [1, 2]
    assert 0 < served.peer_ms[1] <= served.peer_ms[2]


def test_a_peer_has_met_every_batch_size_before_the_first_request(monkeypatch: pytest.MonkeyPatch) -> None:
    sizes: list[int] = []
    monkeypatch.setattr(BareModel, "run", lambda _, rows: sizes.append(len(rows)))
    BareModel({"zoo": "torchvision", "arch": "squeezenet1_1"}, "cpu", 5)
    assert sizes == [1, 2, 3, 4, 5]


def test_cpu_is_not_measured_with_real_models(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["--models", "squeezenet1_1", "--cpu", "300", "--peers", "mosec"]
    monkeypatch.setattr(sys, "argv", ["benchmarks.peers", *words])
    with pytest.raises(SystemExit):
        main()
    assert "leave --models out" in capsys.readouterr().err


@pytest.mark.parametrize("count", [1, 3])
def test_a_peer_answers_what_our_loader_s_model_says_row_by_row(count: int) -> None:
    loader = {"zoo": "torchvision", "arch": "squeezenet1_1"}
    loaded = load_model(LoaderSpec(zoo="torchvision", arch="squeezenet1_1"), torch.device("cpu"))
    images = np.random.default_rng(1).standard_normal((count, 3, 224, 224)).astype(np.float32)
    bare = BareModel(loader, "cpu", 4)
    answers = bare.run([bare.decode(raw({"image": image})) for image in images])
    with torch.inference_mode():
        wanted = loaded.model.infer({"image": torch.from_numpy(images)})["logits"].numpy()
    found = np.stack([np.frombuffer(answer, np.float32) for answer in answers])
    np.testing.assert_allclose(found, wanted, rtol=1e-5, atol=1e-5)


def test_the_simulator_is_asked_with_the_run_times_and_the_way_that_were_measured() -> None:
    live = measured("ours (tenuto)", 500.0)
    assert isinstance(live.case, type(a_real_case(IMAGE)))
    found = simulated(live, live.case, EFFORT)
    assert found.network == {"control_ms": 0.2, "result_ms": 0.5}
    # batches of 16 take 17 ms: under 16 / 17 ms, and within 25 ms not all of it
    assert 0 < found.simulated_rps < found.without_network_rps < 941
    assert found.live_rps == 500.0


def test_how_far_live_and_simulated_are_apart_is_a_part_of_the_simulated() -> None:
    assert Simulated("case", 96.0, 100.0, 110.0, {}).apart == pytest.approx(0.04)
    assert "held" in str(Simulated("case", 96.0, 100.0, 110.0, {}))
    assert "MISSED" in str(Simulated("case", 94.0, 100.0, 110.0, {}))
    assert "MISSED" in str(Simulated("case", 94.0, 0.0, 0.0, {}))


def test_results_have_the_machine_and_our_part_of_the_best_peer_s_goodput() -> None:
    found = [measured("ours (tenuto)", 600.0), measured("mosec", 400.0), measured("litserve", 300.0)]
    results = json.loads(as_json(found, EFFORT, {"device": "H200"}))
    assert results["machine"] == {"device": "H200"}
    assert results["ours_of_best_peer"] == {found[0].case.name: 1.5}
    assert results["results"][0]["case"]["served"][0]["inputs"] == {"image": "float32 (1,)"}
    alone = json.loads(as_json(found[:1], EFFORT, {}))
    assert alone["ours_of_best_peer"] == {found[0].case.name: None}


def test_a_row_without_graphs_is_of_devices_that_have_them() -> None:
    (row,) = [one for one in our_contenders() if "no graphs" in one.name]
    assert not row.settings(a_real_case(IMAGE))
