from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from fabric.errors import ConfigError
from policies.placement.registry import PLACEMENTS
from roles.cli.plan import plan
from roles.config.read_config import load_config
from roles.scheduler.settings import settings_from

LINE = {"alpha_ms": 1, "beta_ms": 5, "max_batch": 32}
GIVEN = {
    "given": {
        "slices": [
            {"gpu": 2, "share_percent": 40, "models": [{"model": "a", "batch": 8, "rate_rps": 60}]},
            {"gpu": 0, "models": [{"model": "b"}]},
            {"gpu": 2, "share_percent": 60, "models": [{"model": "b", "batch": 4}]},
        ]
    }
}
FILE: dict[str, Any] = {
    "models": [
        {"name": "a", "slo_ms": 25, "rate_rps": 100, "profile": LINE},
        {"name": "b", "slo_ms": 50, "rate_rps": 50, "profile": LINE},
    ],
    "cluster": {
        "nodes": [
            {"host": "x", "gpus": 2, "type": "v100", "price_per_hour": 3.06},
            {"host": "y", "gpus": 1, "type": "t4", "price_per_hour": 0.526},
        ]
    },
    "placement": GIVEN,
}


def run_plan(folder: Path, document: object, *options: str) -> Result:
    path = folder / "cluster.yaml"
    path.write_text(json.dumps(document), encoding="utf-8")
    return CliRunner().invoke(plan, [str(path), *options])


def planned(folder: Path, document: object, *options: str) -> dict[str, Any]:
    result = run_plan(folder, document, "--json", *options)
    assert result.exit_code == 0, result.output
    answer: dict[str, Any] = json.loads(result.stdout)
    return answer


def complaint_of(result: Result) -> str:
    assert isinstance(result.exception, ConfigError)
    return str(result.exception)


def test_the_json_is_the_contract(tmp_path: Path) -> None:
    # l(b) = b + 5: 13 ms at 8, 9 ms at 4. GPUs 0 (v100) and 2 (t4) are in use: 3.06 + 0.526 an hour.
    unsaid = dict.fromkeys(("batch", "batch_max", "rate_rps", "duty_ms", "predicted_ms"))
    by_b = {"model": "b", **unsaid}
    assert planned(tmp_path, FILE) == {
        "policy": "given",
        "gpu_count": 2,
        "gpus": [
            {"gpu": 0, "type": "v100", "slices": [{"share_percent": None, "models": [by_b]}]},
            {"gpu": 1, "type": "v100", "slices": []},
            {
                "gpu": 2,
                "type": "t4",
                "slices": [
                    {
                        "share_percent": 40,
                        "models": [{**unsaid, "model": "a", "batch": 8, "rate_rps": 60, "predicted_ms": 13}],
                    },
                    {
                        "share_percent": 60,
                        "models": [{**by_b, "batch": 4, "predicted_ms": 9}],
                    },
                ],
            },
        ],
        "expected_goodput_rps": None,
        "cost_per_hour": 3.586,
        "unplaced": [],
        "short_rps": {},
        "violations": [],
        "applications": {},
    }


@pytest.mark.parametrize(
    ("rule", "budgets_ms"),
    [
        ("equal", {"first": 60, "second": 60, "beside": 120}),
        ("carried", dict.fromkeys(("first", "second", "beside"))),
        ("pard", dict.fromkeys(("first", "second", "beside"))),
    ],
)
def test_the_json_has_the_budget_and_the_gpus_of_each_stage(
    tmp_path: Path, rule: str, budgets_ms: dict[str, float | None]
) -> None:
    stages = {"first": {"model": "a"}, "second": {"model": "b", "after": "first"}, "beside": {"model": "b"}}
    application = {"name": "shop", "slo_ms": 120, "rate_rps": 10, "stages": stages}
    answer = planned(tmp_path, {**FILE, "applications": [application], "graph_deadlines": rule})
    gpus = {"first": [2], "second": [0, 2], "beside": [0, 2]}
    assert answer["applications"] == {
        "shop": {"stages": {name: {"budget_ms": budgets_ms[name], "gpus": gpus[name]} for name in stages}}
    }


def test_the_cost_is_null_where_nothing_in_use_has_a_price(tmp_path: Path) -> None:
    nodes = [{"host": "x", "gpus": 2}, {"host": "y", "price_per_hour": 2}]
    document = {**FILE, "cluster": {"nodes": nodes}}
    assert planned(tmp_path, document, "--placement", "symphony")["cost_per_hour"] == 2
    slices = [{"gpu": 0, "models": [{"model": "a"}]}]
    assert (
        planned(tmp_path, {**document, "placement": {"given": {"slices": slices}}})["cost_per_hour"] is None
    )


def test_another_policy_may_be_named_with_its_options(tmp_path: Path) -> None:
    answer = planned(tmp_path, FILE, "--placement", "{symphony: {subclusters: 2}}")
    assert answer["policy"] == "symphony"
    assert {len(gpu["slices"][0]["models"]) for gpu in answer["gpus"]} == {1}
    assert planned(tmp_path, FILE, "--placement", "exclusive")["gpu_count"] == 2
    assert planned(tmp_path, FILE, "--placement", "given") == planned(tmp_path, FILE), (
        "with the file's options"
    )


def test_a_plan_needs_no_batch_even_where_batching_would(tmp_path: Path) -> None:
    assert planned(tmp_path, {**FILE, "batching": "fixed", "placement": "symphony"})["gpu_count"] == 3


def test_what_found_no_place_is_in_the_answer_and_exit_4_only_when_checked(tmp_path: Path) -> None:
    models = [*FILE["models"], {"name": "c", "slo_ms": 2, "rate_rps": 7, "profile": LINE}]
    document = {**FILE, "models": models, "placement": "symphony"}
    [left] = planned(tmp_path, document)["unplaced"]
    assert (left["model"], left["rate_rps"]) == ("c", 7)
    assert "SLO of 2 ms" in left["reason"]
    assert run_plan(tmp_path, document).exit_code == 0
    checked = run_plan(tmp_path, document, "--check", "--json")
    assert checked.exit_code == 4
    assert json.loads(checked.stdout)["unplaced"]
    assert run_plan(tmp_path, FILE, "--check").exit_code == 0


def test_an_expected_latency_over_the_slo_fails_the_check(tmp_path: Path) -> None:
    # l(32) = 37 ms against an SLO of 25 ms.
    slices = [
        {"gpu": 0, "models": [{"model": "a", "batch": 32}]},
        {"gpu": 1, "models": [{"model": "b", "batch": 32}]},
    ]
    result = run_plan(tmp_path, {**FILE, "placement": {"given": {"slices": slices}}}, "--check")
    assert result.exit_code == 4
    assert "over its SLO: a on GPU 0: 37.00 ms expected, SLO 25 ms" in result.stderr
    assert "b on GPU 1" not in result.stderr


def test_a_forecast_below_the_rates_fails_the_check_and_names_the_models(tmp_path: Path) -> None:
    # Symphony's bound: with 1 + 1/N of a batch's time within the SLO each model carries so much alone, and a half of it beside the other.
    cluster = {"gpus": 1}
    models = [
        {"name": "a", "slo_ms": 22, "rate_rps": 545.454545, "profile": LINE},  # l(6) = 11 ms: 545.5 r/s
        {"name": "b", "slo_ms": 22, "rate_rps": 545.454545, "profile": LINE},
        {"name": "idle", "slo_ms": 22, "rate_rps": 0, "profile": LINE},
    ]
    document = {"models": models, "cluster": cluster, "placement": "symphony"}
    answer = planned(tmp_path, document)
    assert answer["short_rps"] == pytest.approx({"a": 272.727, "b": 272.727}, rel=1e-4)
    result = run_plan(tmp_path, document, "--check")
    assert result.exit_code == 4
    assert "expected goodput 545.5 of 1090.9 r/s" in result.stdout
    assert result.stderr.splitlines() == [
        f"too few GPUs: {name}: 272.7 of its 545.5 r/s expected within its SLO" for name in ("a", "b")
    ]
    assert run_plan(tmp_path, document).exit_code == 0
    enough = run_plan(tmp_path, {**document, "cluster": {"gpus": 3}}, "--check")
    assert (enough.exit_code, enough.stderr) == (0, "")
    silent = {**document, "models": models[2:]}
    assert run_plan(tmp_path, silent, "--check").exit_code == 0, "of nothing nothing is lost"


def test_people_get_a_table(tmp_path: Path) -> None:
    text = run_plan(tmp_path, FILE, "--why").stdout
    for word in ("2 t4", "40", "13.00", "GPUs used: 2 of 3", "3.59 per hour", "why: "):
        assert word in text


def test_why_is_in_the_json_when_asked(tmp_path: Path) -> None:
    profile = {"ref": "thesis-v100/resnet50"}
    document = {
        "models": [{**model, "slo_ms": 200, "profile": profile} for model in FILE["models"]],
        "cluster": {"gpus": 2, "gpu_type": "v100"},
        "placement": "wsm-usher",
    }
    assert "why" not in planned(tmp_path, document)
    why = planned(tmp_path, document, "--why")["why"]
    assert {key for decision in why for key in decision} == {"subject", "chosen", "metrics", "rejected"}
    rejected = [one for decision in why for one in decision["rejected"]]
    assert all(set(one) == {"option", "reason", "metrics"} for one in rejected)
    text = run_plan(tmp_path, document, "--why").stdout
    assert why[0]["subject"] in text
    assert planned(tmp_path, FILE, "--why")["why"] == [], "what is written in the file needs no reasons"


@pytest.mark.parametrize("policy", [{"exclusive": None}, GIVEN, "symphony"])
def test_a_picture_is_drawn(tmp_path: Path, policy: object) -> None:
    pytest.importorskip("matplotlib")
    models = [{**FILE["models"][0], "name": f"m{number}"} for number in range(9)]
    path = tmp_path / "plan.png"
    document = {**FILE, "models": [*FILE["models"], *models], "placement": policy}
    result = run_plan(tmp_path, document, "--plot", str(path))
    assert result.exit_code == 0, result.output
    assert path.read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize(
    ("written", "complaint"),
    [
        ("symfony", "did you mean symphony"),
        ("{symphony: {subcluster: 2}}", "subcluster: unknown option; did you mean subclusters"),
        ("{symphony: {subclusters: 2}, exclusive: {}}", "is not a policy"),
        ("7", "is not a policy"),
        ("{symphony: 7}", "is not a policy"),
        ("{symphony", "cannot be parsed"),
        ("", "is empty"),
        ("given, given", "there twice"),
    ],
)
def test_a_policy_that_cannot_be_is_refused_in_words(tmp_path: Path, written: str, complaint: str) -> None:
    assert complaint in complaint_of(run_plan(tmp_path, FILE, "--placement", written))


def test_one_plan_has_one_policy(tmp_path: Path) -> None:
    assert run_plan(tmp_path, FILE, "--placement", "given,symphony").exit_code == 2


@pytest.mark.parametrize(
    ("changes", "complaint"),
    [
        ({"profile": {"ref": "thesis-v100/resnet5"}}, "did you mean thesis-v100/resnet50"),
        ({"profile": {"ref": "nowhere/resnet50"}}, "no shipped profile 'nowhere/resnet50'"),
        ({"slo_ms": 0}, "slo_ms"),
        ({"rate_rps": -1}, "rate_rps"),
    ],
)
def test_a_file_that_cannot_be_names_what_is_wrong(
    tmp_path: Path, changes: dict[str, Any], complaint: str
) -> None:
    models = [{**FILE["models"][0], **changes}, FILE["models"][1]]
    assert complaint in complaint_of(run_plan(tmp_path, {**FILE, "models": models}))


def test_a_cluster_without_gpus_is_refused(tmp_path: Path) -> None:
    assert "no GPU" in complaint_of(run_plan(tmp_path, {**FILE, "cluster": {"gpus": 0}}))


# What a policy of ours needs to be asked at all; the others need nothing.
OPTIONS = {"given": GIVEN["given"]}
REF = {"ref": "thesis-v100/resnet50"}


@pytest.mark.parametrize("name", sorted(PLACEMENTS))
@pytest.mark.parametrize(
    "changes",
    [
        {"slo_ms": 1},
        {"rate_rps": 0},
        {"rate_rps": None},
        {"profile": {"by_type": {"v100": REF}}},
        {"profile": {"by_type": {"a100": REF}}},
        {"memory_mb": 100_000},
        {"rate_rps": 1e7},
    ],
    ids=lambda changes: "-".join(f"{key}" for key in changes),
)
def test_every_policy_answers_odd_input_with_a_reason_and_keeps_the_rest(
    tmp_path: Path, name: str, changes: dict[str, Any]
) -> None:
    """Exit 0 with a plan; a model that is nowhere in it is listed as unplaced."""
    models = [{**FILE["models"][0], "profile": REF, **changes}, {**FILE["models"][1], "profile": REF}]
    answer = planned(tmp_path, {**FILE, "models": models, "placement": {name: OPTIONS.get(name, {})}})
    hosted = {model["model"] for gpu in answer["gpus"] for part in gpu["slices"] for model in part["models"]}
    left = {one["model"]: one["reason"] for one in answer["unplaced"]}
    assert {"a", "b"} <= hosted | set(left)
    assert all(left.values())


@pytest.mark.parametrize("name", ["usher", "igniter"])
def test_a_price_that_is_missing_where_types_are_compared_names_the_type(tmp_path: Path, name: str) -> None:
    nodes = [
        {"host": "x", "gpus": 2, "type": "v100", "price_per_hour": 3.06},
        {"host": "y", "gpus": 1, "type": "t4"},
    ]
    profile = {"by_type": {key: {"ref": "thesis-v100-estimate/resnet50"} for key in ("v100", "t4")}}
    models = [{**FILE["models"][0], "profile": profile}]
    document = {"models": models, "cluster": {"nodes": nodes}, "placement": name}
    assert "GPU type t4 has no price_per_hour" in complaint_of(run_plan(tmp_path, document))


def test_a_plan_written_into_the_file_is_the_same_plan(tmp_path: Path) -> None:
    """What `plan --json` prints of a slice, `given` takes, with all that binds the runtime."""
    fast = {**FILE, "cluster": {"gpus": 1, "interference": "sm"}, "placement": "tenuto"}
    fast["models"] = [
        {"name": name, "slo_ms": 200, "rate_rps": 200, "profile": {"ref": f"thesis-v100/{name}"}}
        for name in ("alexnet", "resnet50")
    ]
    first = planned(tmp_path, fast)
    slices = [
        {
            "gpu": gpu["gpu"],
            "share_percent": one["share_percent"],
            "models": [
                {key: entry[key] for key in ("model", "batch", "batch_max", "rate_rps")}
                for entry in one["models"]
            ],
        }
        for gpu in first["gpus"]
        for one in gpu["slices"]
    ]
    again = planned(tmp_path, {**fast, "placement": {"given": {"slices": slices}}})
    kept = ("model", "batch", "batch_max", "rate_rps")
    shapes = [
        [
            [(one["share_percent"], [[entry[key] for key in kept] for entry in one["models"]])]
            for gpu in answer["gpus"]
            for one in gpu["slices"]
        ]
        for answer in (first, again)
    ]
    assert shapes[0] == shapes[1]
    bounds = [entry["batch_max"] for gpu in again["gpus"] for one in gpu["slices"] for entry in one["models"]]
    assert any(bound is not None for bound in bounds)
    config = load_config(tmp_path / "cluster.yaml")
    sizes = {spec.batch_size_max for _, of in settings_from(config).slices for spec in of.models}
    assert sizes <= set(bounds) | {128}


def test_dashes_of_the_table_are_explained(tmp_path: Path) -> None:
    models = [{key: value for key, value in model.items() if key != "rate_rps"} for model in FILE["models"]]
    shown = " ".join(run_plan(tmp_path, {"models": models, "cluster": {"gpus": 1}}).output.split())
    assert (
        "-: symphony plans no batch, r/s, duty ms, expected ms; tenuto batching forms batches as requests come;"
        " no model has a rate_rps to plan for"
    ) in shown
    models[0] = FILE["models"][0]
    shown = " ".join(run_plan(tmp_path, {"models": models, "cluster": {"gpus": 1}}).output.split())
    assert "; b without a rate_rps to plan for" in shown


def test_a_model_with_heads_is_said_to_take_its_memory_once(tmp_path: Path) -> None:
    model = {
        "name": "vision",
        "slo_ms": 50,
        "rate_rps": 10,
        "profile": LINE,
        "heads": [{"name": "cats"}, {"name": "dogs"}],
    }
    path = tmp_path / "cluster.yaml"
    path.write_text(json.dumps({"models": [model], "cluster": {"gpus": 1}}), encoding="utf-8")
    told = " ".join(CliRunner().invoke(plan, [str(path)], catch_exceptions=False).output.split())
    assert "vision: one model with 2 heads (cats, dogs), memory counted once" in told


def loaded(name: str, class_: str, **more: Any) -> dict[str, Any]:
    python = f"tests.models.heads:{class_}"
    return {"name": name, "slo_ms": 50, "rate_rps": 1, "profile": LINE, "loader": {"python": python, **more}}


def test_what_could_be_heads_is_found_by_loading_it_and_the_rest_has_reasons(tmp_path: Path) -> None:
    joint = {
        "name": "joint",
        "slo_ms": 50,
        "rate_rps": 1,
        "profile": LINE,
        "heads": [{"name": "x"}, {"name": "y"}],
    }
    models = [
        loaded("two", "Tuned"),
        loaded("other", "Stranger"),
        loaded("late", "LateTuned"),
        loaded("seven", "Seven"),
        loaded("nobody", "Nobody"),
        loaded("ranks", "Three", ranks=2),
        loaded("stage", "Three"),
        {"name": "plain", "slo_ms": 50, "rate_rps": 1, "profile": LINE},
        joint,
    ]
    stages = {"see": {"model": "stage"}}
    document = {
        "models": models,
        "applications": [{"name": "app", "slo_ms": 100, "rate_rps": 1, "stages": stages}],
        "cluster": {"gpus": 2},
    }
    path = tmp_path / "cluster.yaml"
    path.write_text(json.dumps(document), encoding="utf-8")
    asked = [str(path), "--heads"]
    possible = json.loads(CliRunner().invoke(plan, [*asked, "--json"], catch_exceptions=False).stdout)[
        "heads"
    ]
    layer = 4 * (16 * 16 + 16)
    backbone, heads = 4 * layer, [4 * 17 * classes for classes in (2, 2, 7)]
    assert possible["groups"] == [
        {
            "models": ["two", "late", "seven"],
            "equal_leading_layers": 1,
            "apart_bytes": 3 * backbone + sum(heads),
            "together_bytes": backbone + layer + heads[0] + heads[2],
        }
    ]
    assert possible["left_out"] == {
        "nobody": "module 'tests.models.heads' has no class 'Nobody'",
        "ranks": "it is cut, or runs in ranks",
        "stage": "stages of applications ask it",
        "plain": "it has no loader",
        "joint": "it has heads already",
    }
    told = " ".join(CliRunner().invoke(plan, asked, catch_exceptions=False).output.split())
    assert (
        "two, late, seven could be heads of one model: 1 leading layers are equal; their weights would take"
        in told
    )
    assert "plain cannot be a head: it has no loader" in told
