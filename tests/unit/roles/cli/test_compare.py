from __future__ import annotations

import io
import json
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result
from rich.console import Console

from fabric.errors import ConfigError
from fabric.ids import ModelId
from roles.cli.compare import _summary, compare
from roles.cli.plan import plan
from roles.lab.compare import Compared
from roles.workload.outcomes import GpuUse, ModelOutcome, Outcome

FILE: dict[str, Any] = {
    "seed": 3,
    "models": [
        {"name": "a", "slo_ms": 40, "rate_rps": 300, "profile": {"alpha_ms": 1, "beta_ms": 5}},
        {"name": "b", "slo_ms": 50, "rate_rps": 100, "profile": {"alpha_ms": 1, "beta_ms": 5}},
        {"name": "hopeless", "slo_ms": 3, "rate_rps": 10, "profile": {"alpha_ms": 1, "beta_ms": 5}},
    ],
    "cluster": {"nodes": [{"host": "x", "gpus": 2, "price_per_hour": 2.5}]},
    "placement": {
        "given": {
            "slices": [
                {"gpu": 0, "share_percent": 50, "models": [{"model": "a", "batch": 8}]},
                {"gpu": 0, "share_percent": 50, "models": [{"model": "b", "batch": 4}]},
            ]
        }
    },
}
COLUMNS = {
    "placement",
    "batching",
    "offered_rps",
    "goodput_rps",
    "goodput_by_model_rps",
    "gpus_by_model",
    "worst_served_fraction",
    "gpus_used",
    "cost_per_hour",
    "expected_goodput_rps",
    "unplaced",
    "violations",
    "error",
}


def run_compare(folder: Path, *options: str, document: dict[str, Any] = FILE) -> Result:
    path = folder / "workload.yaml"
    path.write_text(json.dumps(document), encoding="utf-8")
    short = ["--duration", "2", "--warmup", "0.5", "--workers", "1"]
    return CliRunner().invoke(compare, [str(path), *short, *options])


def test_every_combination_plays_the_same_requests_and_is_a_row(tmp_path: Path) -> None:
    options = ["--placements", "given,exclusive,symphony", "--batching", "fixed,deferred", "--json"]
    result = run_compare(tmp_path, *options)
    assert result.exit_code == 0, result.output
    rows = json.loads(result.stdout)
    assert [(row["placement"], row["batching"]) for row in rows] == [
        (placement, batching)
        for placement in ("given", "exclusive", "symphony")
        for batching in ("fixed", "deferred")
    ]
    assert all(set(row) == COLUMNS for row in rows)
    unplayed = [row for row in rows if row["error"]]
    assert [(row["placement"], row["batching"]) for row in unplayed] == [("symphony", "fixed")]
    assert "no batch size for a" in unplayed[0]["error"]
    assert unplayed[0]["goodput_rps"] is None
    played = [row for row in rows if not row["error"]]
    assert len({row["offered_rps"] for row in played}) == 1
    for row in played:
        assert row["goodput_rps"] == pytest.approx(sum(row["goodput_by_model_rps"].values()))
        assert row["goodput_by_model_rps"]["hopeless"] == 0
        assert row["gpus_by_model"]["a"] > row["gpus_by_model"]["hopeless"] == 0
        assert row["worst_served_fraction"] == 0, "a model without a place is dropped, the others are played"
        # The router collects exclusive's 15 requests for 50 ms at 300 r/s, longer than the SLO allows.
        assert row["goodput_by_model_rps"]["a"] > (250 if row["batching"] == "deferred" else 0)
        assert [one["model"] for one in row["unplaced"]] == ["hopeless"]
    assert [row["gpus_used"] for row in played] == [1, 1, 2, 2, 2]
    assert [row["cost_per_hour"] for row in played] == [2.5, 2.5, 5, 5, 5]


def test_a_discipline_that_would_run_a_model_twice_is_a_row_with_the_reason(tmp_path: Path) -> None:
    models = [{**FILE["models"][0], "idempotent": False}, FILE["models"][1]]
    options = ["--placements", "symphony", "--batching", "shepherd,eager", "--json"]
    result = run_compare(tmp_path, *options, document={**FILE, "models": models, "placement": "symphony"})
    assert result.exit_code == 0, result.output
    shepherd, eager = json.loads(result.stdout)
    assert shepherd["error"].startswith("models[0].idempotent: is false, but batching: shepherd")
    assert shepherd["goodput_rps"] is None
    assert eager["error"] is None


def test_a_row_is_what_simulate_says_of_that_combination(tmp_path: Path) -> None:
    from roles.cli.simulate import simulate

    result = run_compare(tmp_path, "--placements", "exclusive", "--batching", "deferred", "--json")
    [row] = json.loads(result.stdout)
    path = tmp_path / "same.yaml"
    path.write_text(json.dumps({**FILE, "placement": "exclusive", "batching": "deferred"}), encoding="utf-8")
    same = CliRunner().invoke(simulate, [str(path), "--duration", "2", "--warmup", "0.5", "--json"])
    assert json.loads(same.stdout)["goodput_rps"] == row["goodput_rps"]


def test_two_versions_of_one_policy_are_told_apart(tmp_path: Path) -> None:
    document = {**FILE, "models": FILE["models"][:2], "batching": "eager"}
    options = ["--placements", "symphony,{symphony: {subclusters: 2}}", "--json"]
    rows = json.loads(run_compare(tmp_path, *options, document=document).stdout)
    assert [row["placement"] for row in rows] == ["symphony", '{"symphony": {"subclusters": 2}}']
    assert {row["batching"] for row in rows} == {"eager"}, "the file's own"


def test_another_seed_is_another_comparison(tmp_path: Path) -> None:
    options = ["--placements", "exclusive", "--batching", "eager", "--json", "--seed"]
    same, again, other = (run_compare(tmp_path, *options, seed).stdout for seed in ("4", "4", "5"))
    assert same == again != other


def test_people_get_a_table_a_model_a_row(tmp_path: Path) -> None:
    text = run_compare(tmp_path, "--placements", "given,symphony", "--batching", "fixed").stdout
    for word in (
        "given",
        "good %",
        "hopeless",
        "symphony with fixed: batching.fixed",
        "given: unplaced",
    ):
        assert word in text


def test_no_word_is_broken_at_80_columns() -> None:
    outcome = Outcome(
        1.0, {ModelId("a"): ModelOutcome(100_000, 12_345, 0, 0, None, None, None, None)}, GpuUse(())
    )
    row = Compared("exclusive", "clockwork", cost_per_hour=12.34, outcome=outcome)
    console = Console(width=80, file=io.StringIO(), record=True)
    console.print(_summary([row]))
    words = console.export_text().split()
    assert {"placement", "batching", "exclusive", "clockwork"} <= {*words}


def test_a_picture_is_drawn(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    path = tmp_path / "compared.png"
    result = run_compare(
        tmp_path, "--placements", "given,symphony", "--batching", "fixed", "--plot", str(path)
    )
    assert result.exit_code == 0, result.output
    assert path.read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize(
    ("options", "complaint"),
    [
        (["--placements", "symfony"], "did you mean symphony"),
        (["--placements", "symphony", "--batching", "defered"], "did you mean deferred"),
        (["--placements", "symphony,symphony"], "there twice"),
        (["--placements", "symphony", "--batching", "{fixed: {batch: 0}}"], "batching.fixed.batch is 0"),
    ],
)
def test_what_cannot_be_asked_is_refused_before_anything_is_played(
    tmp_path: Path, options: list[str], complaint: str
) -> None:
    result = run_compare(tmp_path, *options)
    assert isinstance(result.exception, ConfigError)
    assert complaint in str(result.exception)


def test_placements_must_be_named(tmp_path: Path) -> None:
    assert run_compare(tmp_path).exit_code == 2


def test_a_plan_is_the_one_that_plan_makes_of_the_same_file(tmp_path: Path) -> None:
    names = ("lenet1", "googlenet", "resnet50", "vgg16", "bert", "densenet161")
    slos = (5, 66, 108, 142, 22, 202)
    models = [
        {"name": name, "slo_ms": slo_ms, "rate_rps": 275, "profile": {"ref": f"gpulet-2080ti/{name}"}}
        for name, slo_ms in zip(names, slos, strict=True)
    ]
    document = {**FILE, "models": models, "cluster": {"gpus": 8, "gpu_type": "2080ti"}, "placement": "gpulet"}
    compared = run_compare(tmp_path, "--placements", "gpulet", "--json", document=document)
    assert compared.exit_code == 0, compared.output
    planned = CliRunner().invoke(plan, [str(tmp_path / "workload.yaml"), "--json"])
    assert json.loads(compared.stdout)[0]["gpus_used"] == json.loads(planned.stdout)["gpu_count"]


def test_a_row_is_planned_for_its_own_batching_as_if_the_file_said_so(tmp_path: Path) -> None:
    options = ["--placements", "tenuto", "--batching", "fixed,deferred", "--json"]
    result = run_compare(tmp_path, *options)
    assert result.exit_code == 0, result.output
    rows = json.loads(result.stdout)
    assert [row["error"] for row in rows] == [None, None]
    written = {**FILE, "placement": "tenuto", "batching": "fixed"}
    alone = run_compare(tmp_path, "--placements", "tenuto", "--json", document=written)
    assert json.loads(alone.stdout) == rows[:1]
