"""Flag before environment before file before default, for any value of the file."""

from __future__ import annotations

import contextlib
import json
from pathlib import Path
from typing import Any

import pytest
import yaml
from click.testing import CliRunner, Result
from hypothesis import given
from hypothesis import strategies as st

from fabric.errors import ConfigError
from roles.cli.group import tenuto
from roles.config.overrides import Override, of_environment, overridden, read_override
from roles.config.read_config import config_origins, load_config, parse_config

DOCUMENT: dict[str, Any] = {
    "models": [
        {
            "name": "a",
            "slo_ms": 25,
            "rate_rps": 100,
            "profile": {"alpha_ms": 1, "beta_ms": 5, "max_batch": 64},
        },
        {"name": "a.b", "slo_ms": 50, "rate_rps": 300, "profile": {"alpha_ms": 1, "beta_ms": 5}},
    ],
    "cluster": {"gpus": 1},
}


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "c.json"
    path.write_text(json.dumps(DOCUMENT), encoding="utf-8")
    return path


def run(*arguments: object) -> Result:
    return CliRunner().invoke(tenuto, list(map(str, arguments)), catch_exceptions=False)


def shown(file: Path, *options: str) -> dict[str, tuple[Any, str]]:
    done = run("config", "show", file, "--json", *options)
    assert done.exit_code == 0, done.output
    return {one["path"]: (one["value"], one["origin"]) for one in json.loads(done.stdout)}


@pytest.mark.parametrize(
    ("path", "canonical"),
    [
        ("cluster.gpus", "cluster.gpus"),
        ("models[1].slo_ms", "models[1].slo_ms"),
        ("models.a.slo_ms", "models[0].slo_ms"),
        ("models.a.b.slo_ms", "models[1].slo_ms"),
        ("models.a.profile.alpha_ms", "models[0].profile.alpha_ms"),
        ("cluster.network.control_ms", "cluster.network.control_ms"),
        ("batching.deferred.drop", "batching.deferred.drop"),
    ],
)
def test_a_value_is_set_where_its_path_leads(path: str, canonical: str) -> None:
    changed, origins = overridden(DOCUMENT, [Override(path, 7, "--set")])
    assert origins == {canonical: "--set"}
    assert changed != DOCUMENT
    again, _ = overridden(DOCUMENT, [Override(canonical, 7, "--set")])
    assert again == changed


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("models.c.slo_ms=1", "models has no c; there is a, a.b"),
        ("models[9].slo_ms=1", "models has 2 elements"),
        ("seed.x.y=1", None),
        (".=1", "is no path"),
        ("cluster", "must be PATH=VALUE"),
        ("cluster.gpus=[", "cannot be parsed"),
    ],
)
def test_what_leads_nowhere_is_told(text: str, told: str | None) -> None:
    if told is None:
        with pytest.raises(ConfigError, match="seed"):
            parse_config(overridden(DOCUMENT, [read_override(text, "--set")])[0], Path())
        return
    with pytest.raises(ConfigError) as caught:
        overridden(DOCUMENT, [read_override(text, "--set")])
    assert told in str(caught.value)
    assert "--set" in str(caught.value)


@given(st.text(max_size=30))
def test_no_text_does_more_than_set_a_value_or_be_refused(text: str) -> None:
    with contextlib.suppress(ConfigError):
        overridden(DOCUMENT, [read_override(text, "--set")])


def test_flag_before_environment_before_file_before_default(
    file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = str(file)
    assert shown(file)["models[0].slo_ms"] == (25.0, source)
    assert shown(file)["seed"] == (1, "default")
    monkeypatch.setenv("TENUTO_SET", "models.a.slo_ms=30; seed=5\n")
    found = shown(file)
    assert (found["models[0].slo_ms"], found["seed"]) == ((30.0, "$TENUTO_SET"), (5, "$TENUTO_SET"))
    found = shown(file, "--set", "seed=6", "--slo", "a=31", "--gpus", "3")
    assert found["seed"] == (6, "--set")
    assert found["models[0].slo_ms"] == (31.0, "--slo")
    assert found["models[1].slo_ms"] == (50.0, source)
    assert found["cluster.gpus"] == (3, "--gpus")
    assert load_config(file).seed == 5, "every command reads the environment"


def test_options_of_a_policy_have_the_origin_of_the_policy(file: Path) -> None:
    found = shown(file, "--set", "batching={deferred: {drop: simple}}")
    assert found["batching"] == ("deferred", "--set")
    assert found["batching.deferred.drop"] == ("simple", "--set")
    assert found["batching.deferred.pick"][1] == "default"


def test_a_total_rate_keeps_the_proportions(file: Path) -> None:
    found = shown(file, "--rate", "40", "--rate", "a=3")
    assert (found["models[0].rate_rps"], found["models[1].rate_rps"]) == ((3.0, "--rate"), (30.0, "--rate"))


@pytest.mark.parametrize("rate", [{}, {"rate_rps": 100}, {"rate_rps": 0}, {"rate_rps": [[0, 5], [9, 50]]}])
def test_of_one_model_the_total_is_its_rate(tmp_path: Path, rate: dict[str, Any]) -> None:
    path = tmp_path / "c.json"
    profile = {"alpha_ms": 1, "beta_ms": 5}
    document = {"models": [{"name": "a", "slo_ms": 25, "profile": profile, **rate}], "cluster": {"gpus": 1}}
    path.write_text(json.dumps(document), encoding="utf-8")
    assert shown(path, "--rate", "40")["models[0].rate_rps"] == (40.0, "--rate")


def test_a_total_that_nothing_shares_out_is_refused_with_what_to_say_instead(tmp_path: Path) -> None:
    path = tmp_path / "c.json"
    models = [{key: one[key] for key in ("name", "slo_ms", "profile")} for one in DOCUMENT["models"]]
    path.write_text(json.dumps({**DOCUMENT, "models": models}), encoding="utf-8")
    with pytest.raises(ConfigError, match=r"no model has a rate or a weight .*: --rate MODEL=RPS"):
        run("simulate", path, "--rate", "40")


def test_the_environment_alone_says_where_run_files_are(
    file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TENUTO_RUN_DIR", str(tmp_path / "run"))
    assert shown(file)["--run-dir"] == (str(tmp_path / "run"), "$TENUTO_RUN_DIR")


@pytest.mark.parametrize("variable", ["TENUTO_RUN_DIR", "XDG_RUNTIME_DIR"])
@pytest.mark.parametrize("written", ["{}/", "{}/.", "relative"])
def test_so_it_is_however_the_folder_is_written(
    file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, variable: str, written: str
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("TENUTO_RUN_DIR", raising=False)
    (tmp_path / "relative").mkdir(mode=0o700)
    monkeypatch.setenv(variable, written.format(tmp_path / "relative"))
    home = tmp_path / "relative" / ("" if variable == "TENUTO_RUN_DIR" else "tenuto")
    assert shown(file)["--run-dir"] == (str(home), f"${variable}")


def test_a_total_of_applications_weights_alone_is_theirs(tmp_path: Path) -> None:
    applications = [
        {"name": name, "slo_ms": 90, "weight": 1, "stages": {"one": {"model": "a"}}} for name in ("x", "y")
    ]
    models = [{"name": "a", "profile": {"alpha_ms": 1, "beta_ms": 5}}]
    path = tmp_path / "c.json"
    path.write_text(json.dumps({"models": models, "applications": applications, "cluster": {"gpus": 1}}))
    assert shown(path, "--rate", "40")["rate_rps"] == (40.0, "--rate")


def test_simulate_plays_what_the_flags_say(file: Path) -> None:
    usual = ("simulate", file, "--duration", "2", "--warmup", "0", "--json")
    done = json.loads(run(*usual, "--gpus", "3", "--rate", "100", "--slo", "500").stdout)
    assert done["gpus"]["count"] == 3
    assert done["offered_rps"] == pytest.approx(100, rel=0.3)
    assert done["bad_rate"] == 0
    tight = json.loads(run(*usual, "--slo", "6.5").stdout)
    assert tight["bad_rate"] > 0.3


def test_simulate_plays_a_recording_instead_of_the_files_arrivals(file: Path, tmp_path: Path) -> None:
    trace = tmp_path / "trace.csv"
    trace.write_text(
        "at_ms,model\n" + "".join(f"{at_ms},a\n" for at_ms in range(0, 1_000, 100)), encoding="utf-8"
    )
    usual = ("simulate", file, "--duration", "1", "--warmup", "0", "--json")
    done = json.loads(run(*usual, "--arrivals", trace).stdout)
    assert {name: one["offered"] for name, one in done["models"].items()} == {"a": 10, "a.b": 0}


def a_trace(folder: Path, model: str, gap_ms: int) -> Path:
    path = folder / f"{model}-{gap_ms}.csv"
    path.write_text("at_ms,model\n" + "".join(f"{at_ms},{model}\n" for at_ms in range(0, 1_000, gap_ms)))
    return path


@pytest.mark.parametrize("case", ["weights", "popularity", "own traces", "a model that stages alone ask"])
def test_of_whom_a_recording_does_not_name_nothing_comes(tmp_path: Path, case: str) -> None:
    """However their own requests would come, and whatever they would share."""
    a, b = (dict(one) for one in DOCUMENT["models"])
    document: dict[str, Any] = {**DOCUMENT, "models": [a, b]}
    if case in ("weights", "popularity"):
        del a["rate_rps"], b["rate_rps"]
        document["rate_rps"] = 500
        if case == "weights":
            a["weight"], b["weight"] = 1, 4
        else:
            document["popularity"] = {"zipf": 1}
    elif case == "own traces":
        own = {"process": "trace", "path": str(a_trace(tmp_path, "a.b", 10))}
        b["arrival"] = own
        shop = {"name": "shop", "slo_ms": 90, "stages": {"one": {"model": "a"}}}
        arrival = {"process": "trace", "path": str(a_trace(tmp_path, "shop", 10))}
        document["applications"] = [{**shop, "arrival": arrival}]
    else:
        document["models"] = [a, {"name": "a.b", "profile": b["profile"]}]
        document["applications"] = [
            {"name": "shop", "slo_ms": 90, "rate_rps": 70, "stages": {"one": {"model": "a.b"}}}
        ]
    path = tmp_path / "c.json"
    path.write_text(json.dumps(document), encoding="utf-8")
    trace = a_trace(tmp_path, "a", 100)
    done = run("simulate", path, "--duration", "1", "--warmup", "0", "--json", "--arrivals", trace)
    assert done.exit_code == 0, done.output
    told = json.loads(done.stdout)
    assert {name: one["offered"] for name, one in told["models"].items()} == {"a": 10, "a.b": 0}
    assert all(one["offered"] == 0 for one in told["applications"].values())


def test_requests_of_applications_are_in_a_recording_as_their_models(tmp_path: Path) -> None:
    a, b = DOCUMENT["models"]
    application = {"name": "shop", "slo_ms": 90, "rate_rps": 50, "stages": {"one": {"model": "a"}}}
    document = {
        **DOCUMENT,
        "models": [{"name": "a", "profile": a["profile"]}, b],
        "applications": [application],
    }
    path, trace = tmp_path / "c.json", tmp_path / "trace.csv"
    path.write_text(json.dumps(document), encoding="utf-8")
    trace.write_text("at_ms,model\n" + "".join(f"{at_ms},a\n" for at_ms in range(0, 1_000, 100)))
    usual = ("simulate", path, "--duration", "1", "--warmup", "0", "--json", "--arrivals", trace)
    done = json.loads(run(*usual).stdout)
    assert {name: one["offered"] for name, one in done["models"].items()} == {"a": 10, "a.b": 0}
    assert done["applications"]["shop"]["offered"] == 0


@pytest.mark.parametrize("option", [("--slo", "x=1"), ("--slo", "a=x"), ("--rate", "-1"), ("--set", "seed")])
def test_a_flag_that_makes_no_sense_is_refused(file: Path, option: tuple[str, str]) -> None:
    done = CliRunner().invoke(tenuto, ["simulate", str(file), *option])
    assert done.exit_code in (1, 2)
    assert isinstance(done.exception, ConfigError | SystemExit)


def test_an_environment_without_it_changes_nothing(file: Path) -> None:
    assert of_environment({}) == []
    assert config_origins(load_config(file))


@pytest.mark.parametrize("nodes", [3, {"host": "a"}, "a", [[]], None, []])
@pytest.mark.parametrize("rate", [10**400, float("nan"), "a", [1], -1, True])
def test_a_flag_beside_a_file_that_is_wrong_is_no_defect(tmp_path: Path, nodes: Any, rate: Any) -> None:
    document = {
        "models": [{**DOCUMENT["models"][0], "rate_rps": rate}, *DOCUMENT["models"], 3],
        "cluster": {"nodes": nodes},
    }
    path = tmp_path / "c.yaml"
    path.write_text(yaml.safe_dump(document), encoding="utf-8")
    for option in (("--gpus", "2"), ("--rate", "5"), ("--slo", "5"), ("--rate", "a=5")):
        with pytest.raises(ConfigError):
            run("config", "show", path, *option)


@pytest.mark.parametrize(
    ("given", "complaint"),
    [
        (
            Override("models[0].slo_ms", 0, "--slo"),
            "slo_ms: is 0; .* \\(models\\[0\\].slo_ms is from --slo\\)$",
        ),
        (
            Override("models[0].slo", 3, "--set"),
            "did you mean slo_ms\\? \\(models\\[0\\].slo is from --set\\)$",
        ),
        (Override("models[0].rate_rps", 3, "--rate"), "slo_ms: is 'x'; it must be a number$"),
    ],
)
def test_a_wrong_value_is_not_blamed_on_the_file_where_it_is_not_from_there(
    tmp_path: Path, given: Override, complaint: str
) -> None:
    file = tmp_path / "c.yaml"
    slo = "x" if given.origin == "--rate" else 25
    file.write_text(
        f"models: [{{name: a, slo_ms: {slo}, profile: {{alpha_ms: 1, beta_ms: 5}}}}]\ncluster: {{gpus: 1}}\n"
    )
    with pytest.raises(ConfigError, match=complaint):
        load_config(file, lambda _: [given])
