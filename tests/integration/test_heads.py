"""Models on one backbone in a living cluster: real processes, sockets and torch; each answers as it does alone."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from click.testing import CliRunner

from fabric.client import Client, InferResult
from fabric.errors import RequestError
from fabric.messages import LoaderSpec
from roles.benchmark.temporary_cluster import temporary_cluster
from roles.cli.group import tenuto
from roles.gpu_worker.executors.loaders.registry import load_model
from tests.models.heads import LAYERS, RUNS_FILE, WIDTH

pytestmark = pytest.mark.timeout(300)

CLASSES = {
    "two": "Tuned",
    "three": "Three",
    "seven": "Seven",
    "stranger": "Stranger",
    "graph-two": "Tuned",
    "graph-seven": "Seven",
    "graph-late": "LateTuned",
    "launched": "Launched",
    "launched-too": "LaunchedToo",
}
REQUESTS = 300

HEADS = """
models:
 - name: family
   slo_ms: 2000
   rate_rps: 60
   heads:
    - {name: two, loader: {python: "tests.models.heads:Tuned"}}
    - {name: three, slo_ms: 4000, loader: {python: "tests.models.heads:Three"}}
    - {name: seven, loader: {python: "tests.models.heads:Seven"}}
 - name: mixed
   slo_ms: 2000
   rate_rps: 30
   heads:
    - {name: stranger, loader: {python: "tests.models.heads:Stranger"}}
    - {name: relative, loader: {python: "tests.models.heads:Tuned"}}
 - name: graph
   slo_ms: 2000
   rate_rps: 30
   merge: operators
   heads:
    - {name: graph-two, loader: {python: "tests.models.heads:Tuned"}}
    - {name: graph-seven, loader: {python: "tests.models.heads:Seven"}}
    - {name: graph-late, loader: {python: "tests.models.heads:LateTuned"}}
 - name: stack
   slo_ms: 2000
   rate_rps: 30
   merge: stacked
   heads:
    - {name: launched, loader: {python: "tests.models.heads:Launched"}}
    - {name: launched-too, loader: {python: "tests.models.heads:LaunchedToo"}}
cluster: {nodes: [{host: one, gpus: 1, device: cpu}]}
batching: {timeout: {timeout_ms: 100}}
"""


def expected(name: str, rows: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    model = load_model(LoaderSpec(python=f"tests.models.heads:{CLASSES[name]}"), torch.device("cpu")).model
    with torch.inference_mode():
        answer: np.ndarray[Any, Any] = model.infer({"x": torch.from_numpy(rows)})["y"].numpy()
    return answer


def assert_close(result: InferResult, wanted: np.ndarray[Any, Any]) -> None:
    assert result.outputs["y"].shape == wanted.shape
    assert np.allclose(result.outputs["y"], wanted, rtol=1e-5, atol=1e-5)


def bytes_of(file: Path) -> int:
    return file.stat().st_size


async def one_batch(client: Client, heads: Sequence[str], row: np.ndarray[Any, Any], runs: Path) -> int:
    """Ask all of them at once; how often layers of backbones ran for that."""
    before = bytes_of(runs)
    results = await asyncio.gather(*(client.infer(name, {"x": row}) for name in heads))
    assert {one.ledger.batch_size for one in results} == {len(heads)}
    return bytes_of(runs) - before


def test_heads_answer_in_joint_batches_as_they_do_alone_and_are_seen_as_one_model(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    runs = tmp_path / "layer_runs"
    monkeypatch.setenv(RUNS_FILE, str(runs))
    rows = np.random.default_rng(1).normal(size=(REQUESTS, WIDTH)).astype(np.float32)
    answers = {name: expected(name, rows) for name in CLASSES}
    names = [list(CLASSES)[place % len(CLASSES)] for place in range(REQUESTS)]

    async def scenario(endpoint: str) -> None:
        async with Client(endpoint) as client:
            listed = {str(model.model_id): model for model in await client.models()}
            assert set(listed) == {*CLASSES, "relative"}
            assert (listed["three"].slo_ms, listed["seven"].slo_ms) == (4000.0, 2000.0)
            assert [info.shape for info in listed["seven"].outputs] == [(7,)]
            with pytest.raises(RequestError, match="is asked by its heads: two, three, seven"):
                await client.infer("family", {"x": rows[0]})
            asked = [
                client.infer(name, {"x": row}, budget_ms=1_500 + 10 * (place % 7))
                for place, (name, row) in enumerate(zip(names, rows, strict=True))
            ]
            fates = await asyncio.gather(*asked, return_exceptions=True)
            for place, (name, fate) in enumerate(zip(names, fates, strict=True)):
                assert isinstance(fate, InferResult | RequestError)
                if isinstance(fate, InferResult):
                    assert_close(fate, answers[name][place])
            assert sum(isinstance(fate, InferResult) for fate in fates) > REQUESTS / 2

            # One batch with a request for each head: the layers that all have run once, those of strangers once for each.
            assert await one_batch(client, ("two", "three", "seven"), rows[0], runs) == LAYERS
            assert await one_batch(client, ("stranger", "relative"), rows[0], runs) == 2 * LAYERS
            # Of what is traced no code of the layers runs; two of three heads in a batch run in the graph of all.
            assert await one_batch(client, ("graph-two", "graph-seven", "graph-late"), rows[0], runs) == 0
            assert await one_batch(client, ("graph-two", "graph-late"), rows[0], runs) == 0
            assert await one_batch(client, ("launched", "launched-too"), rows[0], runs) == 0

    path = tmp_path / "cluster.yaml"
    path.write_text(HEADS, encoding="utf-8")
    with temporary_cluster(path) as cluster:
        asyncio.run(scenario(cluster.endpoints["client"][0]))
        run = ["--run-dir", str(cluster.run_dir)]
        shown = CliRunner().invoke(tenuto, ["status", "--json", *run], catch_exceptions=False)
        status = json.loads(shown.stdout)
        told = {model["model_id"]: model for model in status["models"]}
        assert [head["model_id"] for head in told["family"]["heads"]] == ["two", "three", "seven"]
        assert [one["reason"] for one in status["warnings"] if one["model_id"] == "mixed"] == [
            "its heads run one after the other, because their first layers differ already: nothing could be run for all of them"
        ]
        assert [one["model_id"] for one in status["warnings"]] == ["mixed"]
        target = ["--target", cluster.endpoints["client"][0]]
        bench = [sys.executable, "-m", "roles.cli", "bench", str(path), "--duration", "3", "--json", *target]
        done = subprocess.run(bench, capture_output=True, check=False, timeout=120)
        assert done.stdout, done.stderr.decode()
        outcome = json.loads(done.stdout)
        assert set(outcome["models"]) == {"family", "mixed", "graph", "stack"}
        assert outcome["models"]["family"]["good"] > 0
        assert set(outcome["errors"]) <= {"Overloaded", "DeadlineExceeded"}, (
            "of a loaded host, and nothing else"
        )
