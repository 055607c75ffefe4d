"""`applications` of the file: what is read, what follows for models, and what is refused."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import yaml

from fabric.errors import ConfigError, ProfileError
from fabric.ids import ModelId
from policies.graphs import GRAPH_DEADLINES, FanOut
from policies.placement.registry import PLACEMENTS
from roles.applications.served import GlueSpec
from roles.config.cluster import ClusterConfig
from roles.config.read_config import config_origins, parse_config
from roles.workload.arrivals import workload_of

HERE = Path("/nowhere")


def model(name: str, **keys: Any) -> dict[str, Any]:
    return {"name": name, "profile": {"alpha_ms": 1.0, "beta_ms": 9.0, "max_batch": 32}, **keys}


TRAFFIC: dict[str, Any] = {
    "name": "traffic",
    "slo_ms": 120,
    "rate_rps": 100,
    "stages": {
        "detect": {"model": "ssd"},
        "cars": {"model": "googlenet", "after": "detect", "fan_out": {"poisson": 1.5}},
        "people": {"model": "vgg16", "after": ["detect"], "fan_out": 2},
    },
}
DOCUMENT: dict[str, Any] = {
    "models": [model("ssd"), model("googlenet"), model("vgg16")],
    "applications": [TRAFFIC],
    "cluster": {"gpus": 4},
}


def changed(path: str, value: Any) -> dict[str, Any]:
    """The document with another value at a path such as ``applications.0.stages.cars.after``."""
    document = copy.deepcopy(DOCUMENT)
    at: Any = document
    *way, last = (int(name) if name.isdecimal() else name for name in path.split("."))
    for name in way:
        at = at[name]
    at[last] = value
    return document


def read(document: dict[str, Any] = DOCUMENT) -> ClusterConfig:
    return parse_config(document, HERE, source="f.yaml")


def test_a_graph_is_read() -> None:
    (application,) = read().applications
    assert (application.name, application.slo_ms, application.rate_steps) == ("traffic", 120, ((0.0, 100.0),))
    assert [(one.name, one.model_id, one.after, one.fan_out) for one in application.plan.graph.stages] == [
        ("detect", "ssd", (), 1.0),
        ("cars", "googlenet", ("detect",), 1.5),
        ("people", "vgg16", ("detect",), 2.0),
    ]
    assert application.fan_outs["cars"] == FanOut("poisson", ((0.0, 1.5),))
    assert read().graph_deadlines == "carried"


def test_glue_is_a_class_alone_or_one_with_a_limit() -> None:
    for written, limit_ms in (("shop:Crops", 100.0), ({"python": "shop:Crops", "limit_ms": 5}, 5.0)):
        (application,) = read(changed("applications.0.stages.cars.glue", written)).applications
        assert application.glue == {"cars": GlueSpec("shop:Crops", limit_ms)}


@pytest.mark.parametrize(
    ("written", "segments"), [("nexus", 500), ({"nexus": None}, 500), ({"nexus": {"segments": 12}}, 12)]
)
def test_a_rule_of_deadlines_is_a_name_or_one_with_options(written: Any, segments: int) -> None:
    config = read({**DOCUMENT, "graph_deadlines": written})
    assert config.graph_deadlines == "nexus"
    (application,) = config.applications
    budgets_ms = application.plan.budgets("nexus")
    for budget_ms in budgets_ms.values():
        assert budget_ms * segments / 120 == pytest.approx(round(budget_ms * segments / 120))
    origins = {path: (value, origin) for path, value, origin in config_origins(config)}
    assert origins["graph_deadlines"] == ("nexus", "f.yaml")
    assert origins["graph_deadlines.nexus.segments"][0] == segments


def sharing(**weights: Any) -> dict[str, Any]:
    """The document with a total of 1,000 requests per second, and a second application."""
    document = copy.deepcopy(DOCUMENT)
    document["rate_rps"] = 1000
    first = document["applications"][0]
    del first["rate_rps"]
    document["applications"].append({"name": "other", "slo_ms": 90, "stages": {"one": {"model": "ssd"}}})
    for section in (*document["models"], *document["applications"]):
        section.update(weights.get(section["name"], {}))
    return document


def test_a_total_is_shared_out_among_models_and_applications() -> None:
    """A model that stages ask needs no part of it, nor an SLO."""
    config = read(sharing(googlenet={"slo_ms": 30, "weight": 1}, traffic={"weight": 3}, other={"weight": 6}))
    assert [one.rate_steps for one in config.models] == [(), ((0.0, 100.0),), ()]
    assert [one.rate_steps for one in config.applications] == [((0.0, 300.0),), ((0.0, 600.0),)]
    assert [one.rate_rps for one in config.models] == [900.0, 100.0 + 450.0, 600.0]
    workload = workload_of(config)
    assert workload.expected(0.0, 1000.0) == pytest.approx(1000.0)


@pytest.mark.parametrize(
    ("weights", "message"),
    [
        ({}, r"rate_rps: a total must be shared out: give every model and application a weight"),
        ({"traffic": {"weight": 1}}, r"applications\[1\].weight: is missing; others have one"),
        (
            {"googlenet": {"weight": 1}, "traffic": {"weight": 1}, "other": {"weight": 1}},
            r"models\[1\].slo_ms: is missing; only a model that stages",
        ),
    ],
)
def test_a_total_that_not_everybody_shares_is_refused(weights: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        read(sharing(**weights))


def test_popularity_shares_out_among_models_alone() -> None:
    with pytest.raises(
        ConfigError, match="popularity: shares the total out among models; beside applications"
    ):
        read({**sharing(), "popularity": {"zipf": 1}})


def test_a_models_slo_is_its_stages_budget_and_its_rate_what_its_stages_ask() -> None:
    config = read({**DOCUMENT, "graph_deadlines": "equal"})
    assert [one.slo_ms for one in config.models] == [60.0, 60.0, 60.0]
    assert [one.rate_rps for one in config.models] == [100.0, 150.0, 200.0]
    assert [one.rate_steps for one in config.models] == [(), (), ()]


def test_a_model_may_have_requests_of_its_own_too() -> None:
    config = read(changed("models.1", model("googlenet", slo_ms=30, rate_rps=40)))
    googlenet = config.model(ModelId("googlenet"))
    assert (googlenet.slo_ms, googlenet.rate_rps) == (30, 190.0)
    workload = workload_of(config)
    assert [source.expected(0.0, 1000.0) for source in workload.sources] == [0.0, 40.0, 0.0]
    assert [source.expected(0.0, 1000.0) for source in workload.applications] == [100.0]


def test_a_fan_out_may_change_in_the_run() -> None:
    config = read(changed("applications.0.stages.cars.fan_out", {"poisson": [[0, 1.2], [30, 2.4]]}))
    fan_out = config.applications[0].fan_outs["cars"]
    assert [fan_out.mean(at_ms) for at_ms in (0.0, 29_999.0, 30_000.0)] == [1.2, 1.2, 2.4]
    assert config.model(ModelId("googlenet")).rate_rps == pytest.approx(240.0), (
        "planned for the step with most"
    )
    assert config.applications[0].plan.graph.demand()["cars"] == 1.2, "a rule begins with the first step"


def test_fan_outs_that_change_count_together_as_they_are_at_each_moment() -> None:
    """Here 64 and 64, then 1 and 64: never 64 and 64 times 64."""
    stages = {
        "a": {"model": "ssd", "fan_out": {"poisson": [[0, 64], [30, 1]]}},
        "b": {"model": "vgg16", "after": "a", "fan_out": {"poisson": [[0, 1], [30, 64]]}},
        "beside": {"model": "googlenet"},
    }
    config = read(changed(STAGES, stages))
    assert config.applications[0].demands == [
        {"a": 64.0, "b": 64.0, "beside": 1.0},
        {"a": 1.0, "b": 64.0, "beside": 1.0},
    ]
    assert [config.model(ModelId(name)).rate_rps for name in ("ssd", "vgg16")] == [6400.0, 6400.0]


@pytest.mark.parametrize("rule", GRAPH_DEADLINES)
def test_an_application_may_ask_nothing_at_first(rule: str) -> None:
    document = changed(f"{STAGES}.detect.fan_out", {"poisson": [[0, 0], [30, 1]]})
    config = read({**document, "graph_deadlines": rule})
    assert config.model(ModelId("ssd")).rate_rps == 100.0
    plan = config.applications[0].plan
    assert all(budget_ms > 0 for budget_ms in plan.budgets(rule).values())
    deadlines, measured = plan.rule(rule)
    for _ in range(10):
        measured.followed("detect", 1)
    assert 0 < deadlines.due_at_ms("detect", 5_120.0, 5_000.0) - 5_000.0 <= 120.0


@pytest.mark.parametrize("name", ["cars.0", "cars.12.x"])
def test_stages_whose_outputs_could_have_the_same_name_are_refused(name: str) -> None:
    """An answer's tensor is named STAGE.PLACE.OUTPUT, and a place is a number or several."""
    stages = {**TRAFFIC["stages"], name: {"model": "vgg16", "after": "detect"}}
    with pytest.raises(ConfigError, match=rf"applications\[0\].stages: {name} begins as .* of cars"):
        read(changed(STAGES, stages))


@pytest.mark.parametrize("name", ["cars.red", "cars-0", "cars.0x", "cars0.1", "0"])
def test_stages_may_have_dots_and_numbers_in_their_names(name: str) -> None:
    read(changed(STAGES, {**TRAFFIC["stages"], name: {"model": "vgg16", "after": "detect"}}))


def test_every_value_has_an_origin() -> None:
    origins = {path: origin for path, _, origin in config_origins(read())}
    assert origins["applications[0].stages.cars.model"] == "f.yaml"
    assert origins["applications[0].stages.detect.fan_out"] == "default"
    assert origins["graph_deadlines"] == "default"


STAGES = "applications.0.stages"


@pytest.mark.parametrize(
    ("path", "value", "message"),
    [
        ("graph_deadlines", "carry", r"graph_deadlines: there is no 'carry'.*carried"),
        (
            "applications.0.name",
            "ssd",
            r"applications\[0\].name: 'ssd' is already the name of a model or an application",
        ),
        ("applications.0.name", "a b", r"applications\[0\].name: is 'a b'; it must be 1 to 128 letters"),
        ("applications.0.slo_ms", 0, r"applications\[0\].slo_ms: is 0; it must be a number, over 0"),
        (
            "applications.0.slo_ms",
            19.9,
            r"applications\[0\].slo_ms: is 19.9; the models on the longest way take 20 ms",
        ),
        ("applications.0.rate_rps", -1, r"applications\[0\].rate_rps: is -1"),
        ("applications.0.budget", 3, r"applications\[0\].budget: unknown key"),
        ("applications.0.arrival", {"process": "gamma"}, r"applications\[0\].arrival.shape: is missing"),
        (STAGES, {}, r"applications\[0\].stages: is empty"),
        (STAGES, {"a b": {"model": "ssd"}}, r"applications\[0\].stages: is 'a b'"),
        (
            f"{STAGES}.cars.model",
            "goglenet",
            r"applications\[0\].stages.cars.model: there is no model 'goglenet'.*googlenet",
        ),
        (
            f"{STAGES}.cars.after",
            "detct",
            r"applications\[0\].stages.cars.after: there is no stage 'detct'.*detect",
        ),
        (f"{STAGES}.cars.after", ["detect", "detect"], r"stages.cars.after: names a stage twice"),
        (f"{STAGES}.cars.after", 3, r"applications\[0\].stages.cars.after: is 3; it must be text or a list"),
        (f"{STAGES}.cars.after", ["detect", 3], r"stages.cars.after\[1\]: is 3; it must be text"),
        (f"{STAGES}.cars.model", 3, r"applications\[0\].stages.cars.model: is 3; it must be text"),
        (f"{STAGES}.cars", {"after": "detect"}, r"applications\[0\].stages.cars.model: is missing"),
        (f"{STAGES}.cars", None, r"applications\[0\].stages.cars: is None; it must be a mapping"),
        (f"{STAGES}.cars.fan_out", {"from": 3}, r"stages.cars.fan_out.from: is 3; it must be text"),
        (f"{STAGES}.cars.glue", {"limit": 3}, r"stages.cars.glue.limit: unknown key; did you mean limit_ms"),
        (
            STAGES,
            {3: {"model": "ssd"}},
            r"applications\[0\].stages: has the key 3; a key must be text: write it in quotes",
        ),
        (
            f"{STAGES}.detect.after",
            "cars",
            r"applications\[0\].stages.\w+.after: is a circle: \w+ after \w+ after \w+;",
        ),
        (
            f"{STAGES}.cars.fan_out",
            0,
            r"applications\[0\].stages.cars.fan_out: is 0; it must be from 1 to 64",
        ),
        (
            f"{STAGES}.cars.fan_out",
            10_000,
            r"applications\[0\].stages.cars.fan_out: is 10000; it must be from 1 to 64",
        ),
        (
            f"{STAGES}.cars.fan_out",
            {"poisson": 65},
            r"fan_out.poisson: is 65; it must be a number, from 0 and at most 64",
        ),
        (
            f"{STAGES}.cars.fan_out",
            {"share": 1.5},
            r"fan_out.share: is 1.5; it must be a number, from 0 and at most 1",
        ),
        (
            f"{STAGES}.detect.fan_out",
            {"poisson": [[0, 0], [30, 0]]},
            r"applications\[0\].stages: one request never comes to a request of any model",
        ),
        (
            STAGES,
            {
                "a": {"model": "ssd", "fan_out": 64},
                "b": {"model": "vgg16", "after": "a", "fan_out": {"poisson": [[0, 1], [30, 64]]}},
            },
            r"applications\[0\].stages: one request comes to 4,160 requests of models",
        ),
        (f"{STAGES}.cars.fan_out", {}, r"fan_out: must be a whole number, or exactly one of"),
        (
            f"{STAGES}.cars.fan_out",
            {"poisson": 1, "share": 1},
            r"fan_out: must be a whole number, or exactly one of",
        ),
        (f"{STAGES}.cars.fan_out", {"poison": 1}, r"poison: unknown key.*poisson"),
        (f"{STAGES}.cars.waits", 1, r"applications\[0\].stages.cars.waits: unknown key"),
        ("models.1", model("googlenet", rate_rps=3), r"models\[1\].slo_ms: is missing"),
        (
            "cluster",
            {"nodes": [{"host": "a"}, {"host": "b"}], "shards": 2},
            r"cluster.shards: applications are played with one",
        ),
        ("rate_rps", 100, r"applications\[0\].rate_rps: the file has a total rate_rps too; use one"),
        ("applications.0.weight", 1, r"applications\[0\].weight: this application has its own rate_rps"),
        (
            "graph_deadlines",
            {"nexus": {"segments": 1}},
            r"graph_deadlines.nexus.segments is 1; it must be a whole number, at least 2 and at most 5000",
        ),
        ("graph_deadlines", {"equal": {"segments": 9}}, r"graph_deadlines.equal.segments: unknown option"),
        (
            "graph_deadlines",
            {"equal": {}, "pard": {}},
            r"graph_deadlines: must be one name, or one name with",
        ),
        (f"{STAGES}.cars.glue", "Crops", r'stages.cars.glue: is \'Crops\'; it must be like "package.module'),
    ],
)
def test_what_cannot_be_is_refused_with_what_would_be_right(path: str, value: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message) as caught:
        read(changed(path, value))
    assert str(caught.value).startswith("f.yaml: ")


def test_what_is_provably_too_late_goes_by_the_fastest_type_of_gpu() -> None:
    by_type = {"v100": {"alpha_ms": 1, "beta_ms": 5}, "t4": {"alpha_ms": 4, "beta_ms": 20}}
    nodes = [{"host": "a", "gpus": 4, "type": "v100"}, {"host": "b", "gpus": 1, "type": "t4"}]
    document = {
        "models": [{"name": "m", "profile": {"by_type": by_type}}],
        "applications": [
            {"name": "app", "slo_ms": 40, "stages": {"a": {"model": "m"}, "b": {"model": "m", "after": "a"}}}
        ],
        "cluster": {"nodes": nodes},
    }
    (application,) = read(document).applications
    assert application.plan.least_ms == {"a": 12.0, "b": 6.0}
    assert application.plan.run_ms["a"][0] == 24.0
    with pytest.raises(ConfigError, match="the models on the longest way take 48 ms"):
        read({**document, "cluster": {"nodes": nodes[1:]}})


@pytest.mark.parametrize(
    ("written", "may_be_none"),
    [
        ({}, False),
        ({"fan_out": 3}, False),
        ({"fan_out": {"poisson": 2}}, True),
        ({"fan_out": {"share": 0.5}}, True),
        ({"fan_out": {"from": "outputs.boxes"}}, True),
        ({"glue": {"python": "shop:Crops"}}, True),
    ],
)
def test_a_stage_may_have_no_request_where_its_data_or_a_draw_decide(
    written: dict[str, Any], may_be_none: bool
) -> None:
    config = read(changed(f"{STAGES}.cars", {"model": "googlenet", "after": "detect", **written}))
    assert config.applications[0].plan.graph.stage("cars").may_be_none is may_be_none


def test_a_model_without_stages_needs_its_slo() -> None:
    with pytest.raises(ConfigError, match=r"models\[3\].slo_ms: is missing"):
        read({**DOCUMENT, "models": [*DOCUMENT["models"], model("other")]})


def test_nexus_program_is_for_trees() -> None:
    document = changed("applications.0.stages.people.after", ["detect", "cars"])
    assert not read(document).applications[0].plan.graph.is_tree
    with pytest.raises(ConfigError, match=r"applications\[0\]: graph_deadlines: nexus divides trees only"):
        read({**document, "graph_deadlines": "nexus"})


def test_an_application_without_a_rate_sends_nothing_that_could_be_played() -> None:
    document = copy.deepcopy(DOCUMENT)
    del document["applications"][0]["rate_rps"]
    with pytest.raises(ConfigError, match="applications: traffic has no rate_rps"):
        workload_of(read(document))


def test_the_page_about_applications_has_a_file_that_can_be_read() -> None:
    page = (Path(__file__).parents[4] / "docs" / "guides" / "applications.md").read_text(encoding="utf-8")
    written = yaml.safe_load(page.split("```yaml\n")[1].split("```")[0])
    config = parse_config(written, HERE)
    assert [one.name for one in config.applications] == ["traffic"]
    assert config.model(ModelId("vgg16")).rate_rps == pytest.approx(20 + 0.8 * 300)


@pytest.mark.parametrize("policy", sorted(set(PLACEMENTS) - {"given"}))
def test_to_a_placement_policy_an_application_is_the_models_that_its_stages_ask(policy: str) -> None:
    """With the SLO and the rate that follow from the graph; and each plan names the stage that limits it."""
    shipped = {
        "ssd": "ssd",
        "googlenet": "resnet50",
        "vgg16": "vgg19",
    }  # of a GPU all policies have figures of
    models = [{"name": name, "profile": {"ref": f"igniter-v100/{ref}"}} for name, ref in shipped.items()]
    cluster = {"gpus": 4, "gpu_type": "v100"}
    document = {"models": models, "applications": [TRAFFIC | {"slo_ms": 300}], "cluster": cluster}
    config = read(document)
    alone = read(
        {
            "models": [
                model | {"slo_ms": one.slo_ms, "rate_rps": one.rate_rps}
                for model, one in zip(models, config.models, strict=True)
            ],
            "cluster": cluster,
        }
    )
    try:
        wanted = alone.place(policy)
    except (ConfigError, ProfileError) as error:  # it needs what these profiles do not have
        with pytest.raises(type(error)):
            config.place(policy)
        return
    placed = config.place(policy)
    assert placed.slices == wanted.slices
    (why,) = [one for one in placed.decisions if one.subject == "application traffic"]
    assert why.chosen.removeprefix("bottleneck: stage ") in ("detect", "cars", "people")


def test_an_application_has_no_limit_where_a_model_of_it_runs_on_a_real_gpu_that_nobody_profiled() -> None:
    line = {"alpha_ms": 1.0, "beta_ms": 9.0, "max_batch": 32}
    ssd = {"name": "ssd", "loader": {"python": "a.b:C"}, "profile": {"by_type": {"a": line}}}
    nodes = [{"host": kind, "gpus": 1, "type": kind, "device": "cuda", "memory_gb": 16} for kind in "ab"]
    application = {"name": "one", "slo_ms": 120, "rate_rps": 10, "stages": {"detect": {"model": "ssd"}}}
    document = {"models": [ssd], "applications": [application], "cluster": {"nodes": nodes}}
    for first, expected in ((0, 0), (1, 1)):
        config = read({**document, "cluster": {"nodes": nodes[: 2 - first]}})
        subjects = [one.subject for one in config.place().decisions]
        assert subjects.count("application one") == expected
