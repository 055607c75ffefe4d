"""A whole simulated run as a readable file. Rewritten by `pytest --rewrite-golden`, reviewed as a diff."""

from __future__ import annotations

import json
from pathlib import Path

from roles.config.read_config import parse_config
from roles.simulator.simulation import simulate
from roles.workload.arrivals import workload_of
from roles.workload.outcomes import Window
from tests.conftest import Golden

RUN = {
    "seed": 1,
    "models": [
        {"name": "resnet50", "slo_ms": 25, "rate_rps": 700, "profile": {"alpha_ms": 1.053, "beta_ms": 5.072}},
        {"name": "bert", "slo_ms": 60, "rate_rps": 120, "profile": {"alpha_ms": 2, "beta_ms": 6}},
    ],
    "cluster": {
        "gpus": 2,
        "network": {"control_ms": 0.1, "data_ms_per_item": 0.02, "result_ms": 0.2},
    },
    "batching": "deferred",
}


def test_a_simulated_run_is_as_written_down(golden: Golden) -> None:
    config = parse_config(RUN, Path())
    run = simulate(config, workload_of(config), Window(50.0, 250.0))
    lines = ["sent ms   start ms  end ms    slice         model     size"]
    lines += [
        f"{batch.sent_at_ms:8.3f}  {batch.started_at_ms:8.3f}  {batch.finished_at_ms:8.3f}  "
        f"{batch.slice_id:12s}  {batch.model_id:8s}  {batch.batch_size:4d}"
        for batch in run.batches
    ]
    golden(
        "simulated_run.txt", "\n".join(lines) + "\n\n" + json.dumps(run.outcome.as_json(), indent=1) + "\n"
    )
