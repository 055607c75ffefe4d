"""`tenuto explain`, `why` and `trace` of a real cluster."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import numpy as np
from click.testing import CliRunner, Result

from fabric.client import Client
from fabric.errors import RequestError
from roles.benchmark.temporary_cluster import temporary_cluster
from roles.cli.group import tenuto
from tests.integration.proc import until

CLUSTER = """
models:
 - {name: fast, slo_ms: 8000, rate_rps: 20, profile: {alpha_ms: 0.5, beta_ms: 2, max_batch: 32}}
 - {name: slow, slo_ms: 400, rate_rps: 2, profile: {alpha_ms: 300, beta_ms: 1, max_batch: 4}}
cluster: {gpus: 1}
batching: eager
"""


def run(*arguments: str) -> Result:
    return CliRunner().invoke(tenuto, arguments, catch_exceptions=False)


def printed(*arguments: str) -> Any:
    ended = run(*arguments, "--json")
    assert ended.exit_code == 0, ended.output
    return json.loads(ended.stdout)


async def asked(endpoint: str) -> tuple[str, int]:
    """Some that are served, and more of the slow model than can be: the id of the first answer, and how many were refused."""
    inputs = {"input": np.zeros(4, np.float32)}
    async with Client(endpoint) as client:
        first = await client.infer("fast", inputs)
        await asyncio.gather(*(client.infer("fast", inputs) for _ in range(20)))
        fates = await asyncio.gather(
            *(client.infer("slow", inputs) for _ in range(12)), return_exceptions=True
        )
    return first.ledger.request_id, sum(isinstance(fate, RequestError) for fate in fates)


def test_a_running_cluster_explains_itself(tmp_path: Path) -> None:
    path = tmp_path / "cluster.yaml"
    path.write_text(CLUSTER, encoding="utf-8")
    with temporary_cluster(path) as cluster:
        request_id, refused = asyncio.run(asked(cluster.endpoints["client"][0]))
        assert refused >= 5
        at = ("--run-dir", str(cluster.run_dir))
        one = printed("explain", request_id, *at)
        assert (one["request"]["request_id"], one["request"]["outcome"]) == (request_id, "good")
        assert one["sentences"][0].startswith(f"Request {request_id} of fast was answered in time: after ")
        late = printed("explain", "--last-late", "slow", *at)
        assert late["request"]["outcome"] in {"DeadlineExceeded", "Overloaded", "late"}
        assert late["request"]["model_id"] == "slow"
        assert late["alone_ms"] is None or late["alone_ms"] > 300, (
            "None where the host let no batch of it run"
        )
        # It counts whole seconds: on a fast host the one in which these were asked is not over yet.
        until(lambda: printed("why", "slow", *at)["offered"] > 0)
        told = printed("why", "slow", *at)
        # What is late on its way is the client's to see, or refused before it is taken on.
        assert 1 <= told["bad"] <= told["offered"] <= 12
        assert told["findings"], told
        assert run("why", "fast", *at).stdout.startswith("fast keeps its SLO of 8 s: 0 of 21 ")
        picture = tmp_path / "trace.json"
        wrote = printed("trace", "--output", str(picture), "--last", "600", *at)
        events = json.loads(picture.read_text(encoding="utf-8"))["traceEvents"]
        assert sum(event["ph"] == "X" for event in events) == wrote["batches"] > 0
        assert sum(event["ph"] == "b" for event in events) == wrote["requests"] > 0
        begun = [event["ts"] for event in events if "ts" in event]
        assert min(begun) == 0
        unknown = CliRunner().invoke(tenuto, ["explain", "nothing", *at])
        assert "no frontend remembers a request 'nothing'" in str(unknown.exception)
        nobody = CliRunner().invoke(tenuto, ["why", "nobody", *at])
        assert "no model 'nobody' is served; there is fast, slow" in str(nobody.exception)
