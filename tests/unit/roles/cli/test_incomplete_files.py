"""Files in which a model lacks something: every command that reads one gives a result, or says what is missing."""

from __future__ import annotations

import contextlib
import json
import re
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from fabric.errors import ConfigError, ProfileError
from roles.cli.group import tenuto
from roles.config.read_config import parse_config
from roles.lab.goodput import bound_rps, question_of

LINE = {"alpha_ms": 1, "beta_ms": 5}
LOADER = {"python": "package.module:Class"}
WHOLE: dict[str, Any] = {"name": "a", "slo_ms": 50, "rate_rps": 50, "loader": LOADER, "profile": LINE}


def without(*keys: str, **others: Any) -> dict[str, Any]:
    return {**{key: value for key, value in WHOLE.items() if key not in keys}, **others}


MODELS: dict[str, list[dict[str, Any]]] = {
    "no profile": [without("profile")],
    "no profile of one": [without("profile"), {**WHOLE, "name": "b"}],
    "no profile and no rate": [without("profile", "rate_rps"), {**WHOLE, "name": "b"}],
    "no profile for that type": [without(profile={"by_type": {"v100": LINE}})],
    "no profile of stages": [without(loader={**LOADER, "stages": 2})],
    "no profile of ranks": [without("profile", loader={**LOADER, "ranks": 2})],
    "no rate": [without("rate_rps")],
    "a rate of 0": [without(rate_rps=0)],
    "no loader": [without("loader")],
    "no slo": [without("slo_ms")],
    "neither loader nor profile": [without("loader", "profile")],
    "a name alone": [{"name": "a"}],
    "heads without a profile": [without("profile", "loader", heads=[{"name": "h", "loader": LOADER}])],
}
APPLICATION = [{"name": "q", "slo_ms": 100, "rate_rps": 10, "stages": {"s": {"model": "a"}}}]
COMMANDS = {
    "plan": "plan FILE --why",
    "plan by tenuto": "plan FILE --placement tenuto",
    "compare": "compare FILE --placements symphony,exclusive --duration 1 --warmup 0 --workers 1",
    "goodput": "goodput FILE --duration 1 --warmup 0 --seeds 1 --workers 1",
    "simulate": "simulate FILE --duration 1 --warmup 0",
    "simulate in full": "simulate FILE --duration 1 --warmup 0 --full",
    "simulate replanning": "simulate FILE --duration 1 --warmup 0 --replan",
    "config show": "config show FILE",
    "up": "up FILE --dry-run",
    "deploy plan": "deploy plan FILE",
    "deploy k8s": "deploy k8s FILE",
}
POOLED = ("compare", "goodput")
"""They play in processes of their own, which take a second to start: not with every file."""
PLAYING = ("compare", "goodput", "simulate", "simulate in full", "simulate replanning")


def called(folder: Path, command: str, document: object) -> Result:
    path = folder / "cluster.yaml"
    path.write_text(json.dumps(document), encoding="utf-8")
    words = [str(path) if word == "FILE" else word for word in COMMANDS[command].split()]
    return CliRunner().invoke(tenuto, words)


def document(models: list[dict[str, Any]], device: str = "cpu", **others: Any) -> dict[str, Any]:
    return {
        "models": models,
        "cluster": {"nodes": [{"host": "localhost", "gpus": 2, "device": device}]},
        **others,
    }


@pytest.mark.parametrize("device", ["cpu", "emulated"])
@pytest.mark.parametrize("missing", MODELS)
@pytest.mark.parametrize("command", [name for name in COMMANDS if name not in POOLED])
def test_an_incomplete_model_is_a_result_or_one_clear_error(
    tmp_path: Path, command: str, missing: str, device: str
) -> None:
    for applications in ([], APPLICATION):
        result = called(tmp_path, command, document(MODELS[missing], device, applications=applications))
        assert isinstance(result.exception, ConfigError | ProfileError | SystemExit | None), result.exception
        assert not isinstance(result.exception, SystemExit) or result.exit_code in (1, 2, 3)


@pytest.mark.parametrize("missing", MODELS)
def test_a_search_for_goodput_refuses_an_incomplete_model_before_it_begins(missing: str) -> None:
    for device in ("cpu", "emulated"):
        for applications in ([], APPLICATION):
            with contextlib.suppress(ConfigError, ProfileError):
                config = parse_config(document(MODELS[missing], device, applications=applications), Path())
                question = question_of(config, 0.0, 1.0)
                assert not question.rates_rps or bound_rps(question) > 0


@pytest.mark.parametrize("missing", ["no profile of one", "no profile for that type"])
@pytest.mark.parametrize("command", PLAYING)
def test_what_is_played_without_a_profile_names_the_model_the_type_and_the_cure(
    tmp_path: Path, command: str, missing: str
) -> None:
    result = called(tmp_path, command, document(MODELS[missing]))
    if command == "compare":  # a row for each combination
        assert result.exit_code == 3
        told = result.output
    else:
        assert isinstance(result.exception, ProfileError)
        told = str(result.exception)
    told = " ".join(told.split())
    assert "model a has no profile for GPU type generic: measure one" in told
    assert "tenuto profile a --file FILE --device" in told


def test_a_cut_without_times_of_its_stages_says_how_to_measure_them(tmp_path: Path) -> None:
    result = called(tmp_path, "goodput", document(MODELS["no profile of stages"]))
    assert re.search("a is cut into 2 stages.*tenuto profile a --file FILE --stages 2", str(result.exception))
